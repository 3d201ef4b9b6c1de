"""The gate must pass what is right: the same values, the same graph fused, weights that are a little different."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import break_op, break_weight, drop_shared_expert, swap_nibbles
from gating import (
    CONTEXT,
    DENSE,
    FULL,
    MOE,
    SHORT,
    check_of,
    engine_of,
    failed,
    gate,
    jittered,
    material,
    random_ids,
    tiny_thresholds,
    usual_base,
)
from reference import Case, make

from lynnc.engines.planned import Planned
from lynnc.errors import OptionError
from lynnc.passes import PIPELINE
from lynnc.plan import Options
from lynnc.quality.bootstrap import Interval
from lynnc.quality.culprit import culprit_of_section, find_culprit
from lynnc.quality.divergence import HeldOut, compare_on_text
from lynnc.quality.document import document_of, plain, speedup_of
from lynnc.quality.drift import cut, first_leaving, trace_drift
from lynnc.quality.gate import run_gate
from lynnc.quality.greedy import Flip, Noise, Outcome, allowance, classify, outcome_of
from lynnc.quality.pair import Pair, Timed, check_alike
from lynnc.quality.sides import Side, SideKind
from lynnc.quality.thresholds import KINDS
from lynnc.quality.verdict import judge

ALL_PASSES = tuple(step.name for step in PIPELINE)
LOOSE = {"agreement": 0.5, "divergent_share": 1.0}


@pytest.mark.parametrize("case", [MOE, FULL, DENSE], ids=str)
def test_the_same_values_are_bit_exact(case: Case) -> None:
    report = gate(engine_of(make(case)), "bit-exact", case=case)
    assert report.passed and report.location is None, failed(report)
    assert all(check.value in (0, 1) for check in report.checks)
    assert all(run.flips == () for run in report.findings.greedy.runs)
    assert [place.section for place in report.findings.drift.places][:2] == ["embed", "layers.0"]


@pytest.mark.parametrize("case", [MOE, FULL, DENSE], ids=str)
def test_a_fused_graph_is_a_fusion(case: Case) -> None:
    """Prompts by the prefill program, tokens by decode/1; then by decode programs alone."""
    spec, values = make(case).spec, make(case).values
    for options in (Options(), Options(programs=("decode/1", "decode/8")), Options(without=ALL_PASSES)):
        candidate = Planned(spec, values, "plan", CONTEXT, options=options)
        report = gate(candidate, tiny_thresholds("fusion", agreement=0.9), case=case)
        assert report.passed, failed(report)


def test_small_noise_passes_and_is_not_bit_exact() -> None:
    candidate = jittered(make(MOE), 1e-3)
    report = gate(candidate, tiny_thresholds("fusion", **LOOSE))
    assert report.passed, failed(report)
    assert 0 < report.findings.greedy.noise.relative < 0.02
    strict = gate(candidate, "bit-exact")
    assert {"noise of logits, relative", "KL, mean", "KL, largest", "hidden state, relative L2"} <= set(failed(strict))
    assert strict.location and strict.location.section == "embed"


def test_a_gap_below_the_resolution_of_bf16_is_explained_even_in_silence() -> None:
    """A change of the order of sums leaves most positions alone, and its noise is small on the whole."""
    quiet = Noise(rms=1e-4, largest=0.1, scale=2.0, positions=9000, damaged=0)
    assert classify(Flip(3, 1, 2, 0.009, 0.009), allowance(quiet, KINDS["fusion"])) is Outcome.EXPLAINED
    assert classify(Flip(3, 1, 2, 0.011, 0.011), allowance(quiet, KINDS["fusion"])) is Outcome.WRONG
    assert allowance(quiet, KINDS["bit-exact"]) == 0.0


def test_a_prompts_own_noise_explains_its_gaps_up_to_the_limit() -> None:
    """A near tie of a router moves the rest of one prompt, which is little over all prompts."""
    quiet = Noise(rms=1e-4, largest=0.1, scale=2.0, positions=9000, damaged=0)
    limit = KINDS["fusion"].noise
    for relative, explained in ((0.5 * limit, 0.5 * limit), (3 * limit, limit)):
        own = Noise(rms=relative * 2.0, largest=1.0, scale=2.0, positions=100, damaged=0)
        assert allowance(quiet, KINDS["fusion"], own) == pytest.approx(6 * explained * 2.0)
    nothing = Noise(rms=0.0, largest=0.0, scale=0.0, positions=0, damaged=64)
    assert allowance(quiet, KINDS["fusion"], nothing) == allowance(quiet, KINDS["fusion"])


def test_large_noise_does_not_excuse_itself() -> None:
    """All differences lie within six times the noise; but the noise is a multiple of what its limit excuses."""
    report = gate(jittered(make(MOE), 0.4), tiny_thresholds("fusion", divergent_share=1.0))
    noise, runs = report.findings.greedy.noise, report.findings.greedy.runs
    gaps = [flip.gap for run in runs for flip in run.flips]
    assert max(gaps) < 6 * noise.rms
    limit = KINDS["fusion"].noise
    assert [report.widest(run) for run in runs] == pytest.approx([6 * limit * noise.scale] * len(runs))
    assert Outcome.WRONG in {outcome_of(run, report.widest(run)) for run in runs}
    assert {"prompts that are wrong", "noise of logits, relative"} <= set(failed(report))


def test_both_sides_read_the_bases_choices() -> None:
    """So a candidate that has gone astray is still judged on what the base would have done."""
    reference = make(MOE)
    report = gate(jittered(reference, 0.4))
    base = engine_of(reference)
    for run in report.findings.greedy.runs:
        base.reset()
        logits = base.append(run.prompt.ids)[-1]
        for index, token in enumerate(run.ids):
            assert token == int(logits.argmax())
            flips = [flip for flip in run.flips if flip.position == index]
            assert all(flip.base == token != flip.candidate for flip in flips)
            top = logits.double().sort(descending=True).values
            assert all(flip.margin == pytest.approx(float(top[0] - top[1]), abs=1e-6) for flip in flips)
            logits = base.append([token])[-1]


def test_a_fault_that_stays_within_every_band_is_found_by_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_thresholds("quantisation", op_l2=0.3, **LOOSE)
    candidate = engine_of(make(MOE))
    break_op(monkeypatch, candidate, "layers.1.shared_add", drop_shared_expert)
    report = gate(candidate, replace(wide, mean_kl=1e-4, bits_per_byte=1.0))
    assert first_leaving(report.findings.drift, wide) is None
    assert failed(report) == ["KL, mean"]
    assert report.location and report.location.culprit and report.location.culprit.op == "layers.1.shared_add"


def test_a_difference_everywhere_blames_no_op() -> None:
    report = gate(jittered(make(MOE), 1e-3), tiny_thresholds("fusion", mean_kl=0.0, agreement=0.5))
    assert failed(report) == ["KL, mean"] and report.location is None


def test_the_layer_that_leaves_the_band_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though ops of the layers before it differ by more than ``op_l2``, too."""
    candidate = jittered(make(MOE), 5e-3)
    break_op(monkeypatch, candidate, "layers.2.shared_add", drop_shared_expert)
    wide = tiny_thresholds("fusion", layer_l2=0.08, most_l2=0.12, op_l2=0.02)
    report = gate(candidate, wide)
    assert report.location and report.location.culprit and report.location.section == "layers.2"
    pair, drift = Pair(Timed(usual_base(MOE)), Timed(candidate)), report.findings.drift
    assert culprit_of_section(pair, drift, "layers.2", wide) == report.location.culprit
    finer = replace(wide, op_l2=0.001)
    assert culprit_of_section(pair, drift, "layers.0", finer), "so the order matters"
    found = find_culprit(pair, drift, drift.places[3], finer)
    assert found and found.section == "layers.2"


def test_an_error_that_leaves_the_band_later_is_found_where_it_arose(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = engine_of(make(MOE))
    break_op(monkeypatch, candidate, "layers.1.shared_add", drop_shared_expert)
    pair = Pair(Timed(usual_base(MOE)), Timed(candidate))
    drift = trace_drift(pair, random_ids(20, 4), 16)
    assert drift.places[4].section == "layers.3"
    found = find_culprit(pair, drift, drift.places[4], KINDS["fusion"])
    assert found and found.op == "layers.1.shared_add" and found.section == "layers.1"


def test_held_out_text_predicts_each_token_from_those_before_it_in_its_sequence() -> None:
    """By hand, in one pass a sequence; tokens stand for unlike numbers of bytes."""
    ids, sizes, sequence = random_ids(100, 8), tuple(1 + index % 4 for index in range(100)), 40
    pair = Pair(Timed(usual_base(MOE)), Timed(jittered(make(MOE), 0.05)))
    found = compare_on_text(pair, HeldOut("text", ids, sizes), sequence)
    bits, kls, same, count = [0.0, 0.0], [], 0, 0
    for first in range(0, 99, sequence):
        tokens = ids[first : min(first + sequence, 99)]
        following = torch.tensor(ids[first + 1 : first + 1 + len(tokens)])
        logits = []
        for side in (pair.base.engine, pair.candidate.engine):
            side.reset()
            logits.append(side.append(tokens).double().log_softmax(-1))
        for index, values in enumerate(logits):
            bits[index] -= float(values.gather(1, following[:, None]).sum()) / math.log(2)
        kls += (logits[0].exp() * (logits[0] - logits[1])).sum(-1).tolist()
        same += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        count += len(tokens)
    assert (found.tokens, found.bytes) == (count, sum(sizes[1:])) == (99, found.bytes)
    assert found.base_bits.mean == pytest.approx(bits[0] / found.bytes)
    assert found.candidate_bits.mean == pytest.approx(bits[1] / found.bytes)
    assert found.increase.mean == pytest.approx((bits[1] - bits[0]) / found.bytes)
    assert found.kl.mean == pytest.approx(sum(kls) / 99) and found.max_kl == pytest.approx(max(kls))
    assert kls.index(max(kls)) == found.worst and found.agreement.mean == pytest.approx(same / 99)


def test_the_worse_end_of_an_interval_counts() -> None:
    report = gate(engine_of(make(MOE)))
    text = replace(
        report.findings.text,
        kl=Interval(0.001, 0.0005, 0.003),
        agreement=Interval(0.99, 0.97, 1.0),
        increase=Interval(0.001, -0.001, 0.003),
    )
    checks = judge(replace(report.findings, text=text), KINDS["fusion"])
    assert [check.name for check in checks if not check.is_ok] == [
        "KL, mean",
        "agreement of top-1",
        "bits per byte, increase",
    ]


def test_noise_of_one_prompt_is_not_lost_among_the_others() -> None:
    report = gate(engine_of(make(MOE)))
    greedy = report.findings.greedy
    noisy = replace(greedy.runs[1], noise=replace(greedy.noise, rms=0.1 * greedy.noise.scale))
    changed = replace(greedy, runs=(greedy.runs[0], noisy, greedy.runs[2]))
    checks = judge(replace(report.findings, greedy=changed), KINDS["fusion"])
    wrong = [check for check in checks if not check.is_ok]
    assert [(check.name, check.where) for check in wrong] == [("noise of logits, relative", "prompt-1")]


def test_a_place_lies_in_the_band_by_error_and_cosine() -> None:
    place = gate(engine_of(make(MOE))).findings.drift.places[2]
    kind = KINDS["fusion"]
    assert place.is_within(kind)
    for change in ({"l2": math.nan}, {"cosine": math.nan}, {"l2": 0.03}, {"cosine": 0.999}, {"l2": math.inf}):
        assert not replace(place, **change).is_within(kind), change


def test_drift_of_a_long_sequence_follows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_ids(60, 3)
    pair = Pair(Timed(usual_base(MOE)), Timed(jittered(make(MOE), 0.05)))
    whole = trace_drift(pair, tokens, 50)
    monkeypatch.setattr("lynnc.quality.drift.MOST_FOLLOWED", 20)
    end = trace_drift(pair, tokens, 50)
    assert (whole.skipped, end.skipped, end.tokens, end.prompt) == (0, 40, tokens[40:], 10)
    assert torch.allclose(whole.hidden[:, 40:], end.hidden, atol=1e-5)
    assert end.places[-1].l2 > 0


def test_tokens_are_cut_into_a_prompt_and_steps() -> None:
    assert cut((1, 2, 3, 4), 2) == [(1, 2), [3], [4]] and cut((1, 2), 2) == [(1, 2)]


def test_engines_that_show_no_ops_still_name_the_layer() -> None:
    class Closed:
        """What a plan on a GPU may be: an engine and no more."""

        def __init__(self, engine: object) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> object:
            if name in ("trace_ops", "memory_bytes"):
                raise AttributeError(name)
            return getattr(self._engine, name)

    broken = break_weight(make(MOE), "layers.1.out_weight", swap_nibbles)
    pair = Pair(Timed(usual_base(MOE)), Timed(Closed(broken)))  # type: ignore[arg-type]
    report = run_gate(pair, material(), SHORT, KINDS["fusion"])
    assert report.location and report.location.section == "layers.1" and report.location.culprit is None
    assert report.candidate.memory_bytes is None


def test_models_that_do_not_correspond_are_refused() -> None:
    spec = MOE.spec
    for other, words in (
        (replace(spec, vocabulary=400), "vocabulary of 384 and the candidate tiny-moe 400"),
        (replace(spec, hidden=256), "hidden size of 128"),
        (replace(spec, layers=spec.layers[:2]), "the layers gdn, gdn, gdn, full"),
    ):
        with pytest.raises(OptionError, match=words):
            check_alike(spec, other)
    assert spec.moe is not None
    check_alike(spec, replace(spec, moe=replace(spec.moe, experts=(3, 3, 3, 3))))


def side(gpu: bool) -> Side:
    return Side(Path("a"), SideKind.PLAN, MOE.spec, Path("w"), gpu)


def test_speed_is_claimed_only_for_kernels_that_pass() -> None:
    report = gate(engine_of(make(MOE)))
    quick = replace(report, base=replace(report.base, step_seconds=3.0), candidate=replace(report.base, step_seconds=2))
    assert speedup_of(quick, side(True), side(True)) == 1.5
    assert speedup_of(quick, side(True), side(False)) is None
    failing = replace(quick, checks=(*quick.checks, replace(quick.checks[0], value=1.0)))
    assert not failing.passed and speedup_of(failing, side(True), side(True)) is None
    assert document_of(failing, side(True), side(True))["speedup"] is None


def test_costs_are_those_of_the_run() -> None:
    report = gate(engine_of(make(MOE)))
    steps = len(material().prompts) * (SHORT.tokens - 1)
    for costs in (report.base, report.candidate):
        assert costs.steps == steps and costs.step_seconds > 0 and costs.prompt_rate > 0
        assert costs.memory_bytes and costs.memory_bytes > costs.weight_bytes > 0


def test_what_is_no_number_becomes_text() -> None:
    assert plain({"a": (float("nan"), float("-inf"), 1.5)}) == {"a": ["nan", "-inf", 1.5]}
    check = check_of(gate(engine_of(make(MOE))), "KL, mean")
    assert plain(check) == {"name": "KL, mean", "value": 0.0, "limit": 0.002, "where": "80 tokens", "is_least": False}


def test_progress_ends_where_it_should() -> None:
    seen: list[tuple[int, int, str]] = []
    pair = Pair(Timed(usual_base(MOE)), Timed(engine_of(make(MOE))))
    run_gate(pair, material(), SHORT, KINDS["fusion"], lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(len(seen))) and seen[-1][1] == len(seen)
    assert seen[-1][2] == "layer by layer"
