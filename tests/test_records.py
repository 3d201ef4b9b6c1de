"""Which record serves a problem."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import DEFAULT, H100, H200, HERE, LINEAR, PROBLEM, SPARK, at, made, served

from lynnc.deviceidentity import identity_of
from lynnc.kernels.kernel import Problem
from lynnc.record import RecordOrigin, merge_records
from lynnc.recordfiles import is_current
from lynnc.records import FARTHEST, Known, Records, best_record, distance, legal_records
from lynnc.render import environment, template_digest


def test_exact_then_nearest_then_nothing() -> None:
    exact, near, nearer = made(knobs={"BLOCK_N": 4}), at(5600, knobs={"BLOCK_N": 8}), at(9000, knobs={"BLOCK_N": 16})
    assert served(near, exact, nearer) == ("record h200", 4)
    assert served(near, nearer) == ("nearest record h200", 16)
    assert served(near) == ("nearest record h200", 8)
    assert served(at(8192 * 2), at(8192 // 2)) is None
    assert served() is None
    assert best_record(Records(), LINEAR, PROBLEM, H200.target) is None


def test_the_range_ends_where_it_is_said_to() -> None:
    assert served(at(int(8192 * FARTHEST))) and not served(at(int(8192 * FARTHEST) + 1))
    both = {**PROBLEM, "n": 8192 * 5 // 4, "k": 2048 * 5 // 4}
    assert distance(PROBLEM, both) == pytest.approx(1.5625) and not served(made(problem=both))


def test_words_and_flags_must_be_equal() -> None:
    for change in ({"formats": "bf16"}, {"norm": 0}, {"residual": 1}, {"n": "router-257"}):
        assert not served(made(problem={**PROBLEM, **change}))
    assert not served(made(problem={name: value for name, value in PROBLEM.items() if name != "norm"}))
    assert not served(made(problem={**PROBLEM, "more": 1}))


def test_another_device_of_the_architecture_is_near_by_its_multiprocessors() -> None:
    half = replace(HERE, name="h200-half", sm_count=66)
    smaller = replace(HERE, name="h200-120", sm_count=120)
    assert served(made(identity_of(H100))) == ("nearest record h100", DEFAULT["BLOCK_N"])
    assert served(made(half)) is None
    assert served(made(smaller, {"BLOCK_N": 4}), made(identity_of(H100), {"BLOCK_N": 16})) == (
        "nearest record h100",
        16,
    )
    assert served(made(replace(HERE, l2_bytes=1)), device=HERE) == ("nearest record h200", DEFAULT["BLOCK_N"])
    assert served(made(identity_of(SPARK))) is None
    assert served(made(replace(HERE, arch="sm_100a"))) is None, (
        "an exact problem on an equal GPU of another architecture"
    )


def test_knobs_that_are_not_legal_here_leave_it_to_the_next() -> None:
    wrong = [
        made(knobs={"BLOCK_N": 3}),
        made(knobs={"UNKNOWN": 1}),
        replace(made(), knobs={}),
        made(knobs={"num_warps": 0}),
    ]
    assert served(*wrong) is None
    assert served(*wrong, at(9000, knobs={"BLOCK_N": 16})) == ("nearest record h200", 16)


def test_an_outdated_record_is_a_miss() -> None:
    old = made(template="00" * 32)
    assert served(old) is None and not is_current(old) and is_current(made())
    items = Records(HERE, (Known(old), Known(at(8200)), Known(made(knobs={"BLOCK_N": 3}))))
    found = list(legal_records(items, LINEAR, PROBLEM, H200.target))
    assert [match.record for match in found] == [old, at(8200)], "a tuner may try it again"
    assert not is_current(made(kernel="gone"))


def test_the_users_come_first_and_simulated_ones_last() -> None:
    shipped = made(knobs={"BLOCK_N": 4}, seconds=1e-6)
    users = Known(made(knobs={"BLOCK_N": 8}, seconds=2e-6), is_user=True)
    guess = Known(made(knobs={"BLOCK_N": 16}, seconds=1e-9, origin=RecordOrigin.SIMULATED), is_user=True)
    old = made(knobs={"BLOCK_N": 2}, origin=RecordOrigin.CARRIED_OVER)
    assert served(shipped, guess, users, old) == ("user record h200", 8)
    assert served(guess, shipped, old) == ("record h200", 4)
    assert served(guess, old) == ("record h200", 2)
    assert served(replace(old, seconds=1e-9), shipped) == ("record h200", 4)
    assert served(replace(shipped, seconds=2e-6, knobs=DEFAULT), shipped) == ("record h200", 4)
    assert served(guess, at(8200)) == ("user simulated record h200", 16)
    assert served(at(8200, origin=RecordOrigin.SIMULATED)) is None, "a guess for another problem is none"
    near = Known(at(8200, knobs={"BLOCK_N": 16}), is_user=True)
    assert served(near, shipped) == ("record h200", 4)


def test_records_of_the_triton_that_compiles_come_before_faster_ones_of_another() -> None:
    """On an H200 a decode step compiled by 3.9 took 1.02 ms with the best knobs of 3.6 and 0.98 with its own."""
    own = made(knobs={"BLOCK_N": 4}, seconds=2e-6, triton="3.9.1")
    other = made(knobs={"BLOCK_N": 16}, seconds=1e-6, triton="3.6.0")
    assert len(merge_records([own, other, replace(own, seconds=3e-6)])) == 2, "they are no rivals"
    for triton, expected in {
        "3.9.0": ("record h200", 4),
        "3.6.1": ("record h200", 16),
        "": ("record h200", 16),
        "3.10.0": ("record h200 of Triton 3.6", 16),
    }.items():
        known = Records(HERE, (Known(own), Known(other)), triton)
        match = best_record(known, LINEAR, PROBLEM, H200.target)
        assert match and (match.text, match.record.knobs["BLOCK_N"]) == expected
        found = known.known_as(match.text)
        assert found and found.text == "record h200"
    users = Known(replace(other, seconds=3e-6), is_user=True)
    match = best_record(Records(HERE, (Known(own), users), "3.9.0"), LINEAR, PROBLEM, H200.target)
    assert match and match.text == "record h200", "the user has another Triton by now"
    near = Known(at(8000, knobs={"BLOCK_N": 8}, triton="3.9.0"))
    match = best_record(Records(HERE, (near, Known(other)), "3.9.0"), LINEAR, PROBLEM, H200.target)
    assert match and match.text == "record h200 of Triton 3.6", "exact ones come first all the same"


NUMBERS = st.integers(0, 1 << 20)
PROBLEMS = st.fixed_dictionaries({"a": NUMBERS, "b": NUMBERS, "c": st.sampled_from(["x", "y"])})


@given(PROBLEMS, PROBLEMS)
def test_distance_is_symmetric_and_1_for_equals(first: Problem, second: Problem) -> None:
    far = distance(first, second)
    assert far >= 1 and (far == 1) == (first == second)
    assert far == pytest.approx(distance(second, first))


def test_a_number_of_any_length_is_far_away() -> None:
    assert distance({"n": 1}, {"n": 10**400}) == distance({"n": 10**400}, {"n": 1}) == math.inf
    longest = made(replace(HERE, name="odd", sm_count=10**400))
    assert served(longest, at(10**400)) is None


@given(st.lists(st.integers(1, 40_000), max_size=8), st.randoms())
def test_nearest_is_the_nearest_of_all_in_any_order(sizes: list[int], random) -> None:
    records = [at(n, knobs={"PROGRAMS": 0}) for n in sizes]
    random.shuffle(records)
    match = best_record(Records(HERE, tuple(map(Known, records))), LINEAR, PROBLEM, H200.target)
    ratios = [max(n / 8192, 8192 / n) for n in sizes]
    least = min(ratios, default=math.inf)
    assert (match is None) == (least > FARTHEST)
    if match:
        n = int(match.record.problem["n"])
        assert max(n / 8192, 8192 / n) == least and match.is_exact == (n == 8192)


def test_digests_of_templates_follow_what_they_include(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = environment().loader
    changed: dict[str, str] = {}
    assert loader is not None
    get_source = loader.get_source

    def texts(env, name) -> tuple[str, None, None]:
        return changed.get(name) or get_source(env, name)[0], None, None

    monkeypatch.setattr(loader, "get_source", texts)
    digest_of = template_digest.__wrapped__
    before = digest_of("linear.py.jinja")
    assert before == template_digest("linear.py.jinja") != template_digest("add.py.jinja")
    prelude = get_source(environment(), "prelude.py.jinja")[0]
    for text, is_same in (
        (prelude + "\n\n# a comment\n", True),
        (prelude + "\nx = 1\n", False),
        ("\n" + prelude, True),
    ):
        changed["prelude.py.jinja"] = text
        assert (digest_of("linear.py.jinja") == before) is is_same
    changed["prelude.py.jinja"] = prelude.replace("    pass", "        pass", 1)
    assert digest_of("linear.py.jinja") != before, "indentation is meaning"
