"""The interpreter of the ``model`` stage against ``transformers``, for every family.

Twice: with FP32 in the place of every BF16, where nothing but the meaning can differ, and as it is, where the roundings
of the contract come on top and may cost no more than they cost ``transformers`` itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from harness import assert_close, errors
from reference import (
    CLEAR_MARGIN,
    FAMILIES,
    LIMIT,
    PROMPT,
    STEPS,
    VARIANTS,
    Case,
    bf16_logits,
    judge_tokens,
    judged,
    make,
    routing_margin,
)
from runners import Interpreter, check, follow, routing_noise

EXACT = 1e-5
"""RMS error that the order of FP32 sums may cost."""
LENGTHS = (1, 2, 15, 16, 17, 33)

each_case = pytest.mark.parametrize("case", FAMILIES + VARIANTS, ids=str)
each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)


@dataclass(frozen=True)
class Split:
    """Prefill steps of a prompt, and rows of each decode step that follows."""

    prefills: tuple[int, ...]
    rows: int = 1

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.prefills)) or 'none'}-by-{self.rows}"


SPLITS = (
    Split(()),
    Split((PROMPT,)),
    Split((1, 10)),
    Split((3, 1, 13, 16)),
    Split((15, 2), rows=3),
    Split((16, 17), rows=2),
    Split((2, 5), rows=8),
    *(Split((length,), rows=8) for length in LENGTHS),
)


@pytest.fixture
def no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynnc.interpret.bf16", lambda x: x)


@pytest.mark.usefixtures("no_rounding")
@each_case
def test_meaning_without_rounding(case: Case) -> None:
    run = judged(case)
    found = follow(Interpreter(make(case), exact=True), run.tokens, prefills=(PROMPT,))
    check(found, run, EXACT, str(case))


@pytest.mark.usefixtures("no_rounding")
@each_family
def test_long_prompt_without_rounding(case: Case) -> None:
    tokens = torch.randint(384, (258,), generator=torch.Generator().manual_seed(3)).tolist()
    run = judge_tokens(make(case), tokens)
    runner = Interpreter(make(case), context=300, exact=True)
    check(follow(runner, tokens, prefills=(250, 5)), run, 2 * EXACT, str(case))


@each_case
def test_logits_and_choices(case: Case) -> None:
    run = judged(case)
    found = follow(Interpreter(make(case)), run.tokens, prefills=(PROMPT,))
    assert len(found.positions) == 1 + STEPS
    check(found, run, LIMIT, str(case))


@each_family
def test_rounding_costs_no_more_than_in_the_reference(case: Case) -> None:
    run = judged(case)
    found = follow(Interpreter(make(case)), run.tokens, prefills=(PROMPT,))
    expected = run.logits[found.positions]
    own = errors(bf16_logits(make(case), run)[found.positions], expected)
    assert errors(found.logits, expected).rms <= 1.1 * own.rms


@each_case
def test_routing_is_never_nearly_tied(case: Case) -> None:
    margin = routing_margin(make(case), judged(case))
    assert margin >= CLEAR_MARGIN
    assert margin > 2 * routing_noise(make(case), judged(case))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@each_family
def test_prompts_of_any_split(case: Case, split: Split) -> None:
    found = follow(Interpreter(make(case)), judged(case).tokens, split.prefills, split.rows)
    check(found, judged(case), LIMIT, f"{case} {split}")


@pytest.mark.usefixtures("no_rounding")
@pytest.mark.parametrize("split", SPLITS, ids=str)
@each_family
def test_steps_do_not_matter(case: Case, split: Split) -> None:
    runner, other = Interpreter(make(case), exact=True), Interpreter(make(case), exact=True)
    found = follow(runner, judged(case).tokens, split.prefills, split.rows)
    one_by_one = follow(other, judged(case).tokens)
    assert torch.equal(found.chosen, one_by_one.chosen[found.positions])
    assert_close(found.logits, one_by_one.logits[found.positions], EXACT, "logits")
    assert_states_close(runner, other)


def assert_states_close(runner: Interpreter, other: Interpreter) -> None:
    """The history is left out: a prefill keeps no token, so it depends on the split."""
    for name, state in runner.states.items():
        if name != "history":
            assert_close(state, other.states[name], EXACT, name)


@each_family
def test_a_used_slot_starts_afresh(case: Case) -> None:
    run, reference = judged(case), make(case)
    clean, used = Interpreter(reference, slots=2), Interpreter(reference, slots=2)
    states = [state for name, state in used.states.items() if name != "history"]
    for state in states:
        state.fill_(torch.nan)
    for prefills in ((PROMPT,), ()):
        expected = follow(clean, run.tokens[: PROMPT + 3], prefills, slot=1)
        found = follow(used, run.tokens[: PROMPT + 3], prefills, slot=1)
        assert torch.equal(found.logits, expected.logits)
    assert all(state[0].isnan().all() for state in states)


@pytest.mark.usefixtures("no_rounding")
@each_family
def test_sequences_that_share_a_step(case: Case) -> None:
    tokens, starts, slots = judged(case).tokens, [0, 3, 16, 30], [2, 0, 3, 1]
    together, alone = (Interpreter(make(case), slots=4, exact=True) for _ in range(2))
    for start, slot in zip(starts, slots, strict=True):
        for runner in (together, alone) if start else ():
            runner.step(tokens[:start], slot=slot, prefill=True)
    found = together.step([tokens[start] for start in starts], starts, slots)["logits"]
    steps = [alone.step([tokens[start]], start, slot) for start, slot in zip(starts, slots, strict=True)]
    assert_close(found, torch.cat([values["logits"] for values in steps]), EXACT, "logits")
    assert_states_close(together, alone)


@pytest.mark.usefixtures("no_rounding")
@each_family
def test_padded_rows_change_nothing(case: Case) -> None:
    tokens = judged(case).tokens
    padded, plain = (Interpreter(make(case), exact=True) for _ in range(2))
    for runner in (padded, plain):
        runner.step(tokens[:PROMPT], prefill=True)
    found = padded.step([tokens[PROMPT], 0, 0, 0], [PROMPT, -1, -1, -1], [0, 0, 0, 0])["logits"][:1]
    assert_close(found, plain.step([tokens[PROMPT]], PROMPT)["logits"], EXACT, "logits")
    assert_states_close(padded, plain)
