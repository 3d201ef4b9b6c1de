"""The gate must be able to fail: a candidate broken in one place is refused, and the place is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from faults import (
    Arrays,
    Wrong,
    break_op,
    break_weight,
    drop_shared_expert,
    forget_steps,
    forget_to_normalize,
    invert_global_scale,
    norm_plainly,
    one_position_late,
    share_largest_global_scale,
    spill_nan,
    spoil_one_scale,
    swap_nibbles,
    take_next_expert,
    take_ranks_from_one,
)
from gating import CONTEXT, FULL, MOE, Expected, assert_caught, check_of, engine_of, failed, gate
from reference import Case, make

from lynnc.engines.planned import Planned


@dataclass(frozen=True)
class Damage:
    """A fault of weights."""

    name: str
    weight: str
    change: object
    expected: Expected
    case: Case = MOE

    def __str__(self) -> str:
        return self.name

    def apply(self, arrays: Arrays) -> None:
        assert callable(self.change)
        self.change(arrays)


DAMAGES = (
    Damage("swapped nibbles", "layers.1.out_weight", swap_nibbles, Expected("layers.1", "layers.1.out_proj", "Linear")),
    Damage("swapped nibbles in the head", "lm_head", swap_nibbles, Expected("head", "lm_head", "Linear")),
    Damage(
        "one wrong expert",
        "layers.2.experts_up_weight",
        take_next_expert,
        Expected("layers.2", "layers.2.experts_up", "ExpertLinear"),
    ),
    Damage(
        "wrong global scale direction",
        "layers.1.experts_down_weight",
        invert_global_scale,
        Expected("layers.1", "layers.1.experts_down", "ExpertLinear"),
    ),
    Damage(
        "one NaN scale",
        "layers.2.shared_up_weight",
        spoil_one_scale,
        Expected("layers.2", "layers.2.shared_up", "Linear"),
    ),
    Damage(
        "one global scale for fused parts",
        "layers.0.qkv_z_b_a_weight",
        share_largest_global_scale,
        Expected("layers.0", "layers.0.z_proj", "Linear"),
    ),
    Damage(
        "swapped nibbles in attention",
        "layers.1.out_weight",
        swap_nibbles,
        Expected("layers.1", "layers.1.out_proj", "Linear"),
        FULL,
    ),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_weights_are_caught(damage: Damage) -> None:
    candidate = break_weight(make(damage.case), damage.weight, damage.apply)
    assert_caught(gate(candidate, case=damage.case), damage.expected)


@dataclass(frozen=True)
class Slip:
    """A fault of the runtime."""

    name: str
    op: str
    wrong: Wrong
    inner: str

    def __str__(self) -> str:
        return self.name


SLIPS = (
    Slip("stale GDN state", "layers.1.delta", one_position_late, "GatedDelta"),
    Slip("GDN state not written", "layers.2.delta", forget_steps, "GatedDelta"),
    Slip("rope off by one", "layers.3.q_norm_rope", one_position_late, "HeadNormRope"),
    Slip("cache off by one", "layers.3.append", one_position_late, "CacheAppend"),
    Slip("dropped shared expert", "layers.1.shared_add", drop_shared_expert, "SharedAdd"),
    Slip("top-k off by one", "layers.2.top_k", take_ranks_from_one, "TopK"),
    Slip("scores not normalised", "layers.2.top_k", forget_to_normalize, "TopK"),
    Slip("norm not shifted", "layers.2.input_norm", norm_plainly, "RmsNorm"),
    Slip("NaN in a layer", "layers.0.out_proj", spill_nan, "Linear"),
    Slip("NaN in the embedding", "embed", spill_nan, "Embed"),
)


@pytest.mark.parametrize("slip", SLIPS, ids=str)
def test_runtime_faults_are_caught(slip: Slip, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = engine_of(make(MOE))
    break_op(monkeypatch, candidate, slip.op, slip.wrong)
    section = ".".join(slip.op.split(".")[:2])
    assert_caught(gate(candidate), Expected(section, slip.op, slip.inner))


def test_the_launch_of_a_plan_is_named_with_the_op_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong only in steps of one row, which prompts do not take."""
    reference = make(MOE)
    candidate = Planned(reference.spec, dict(reference.values), "plan", CONTEXT)
    break_op(monkeypatch, candidate, "layers.1.shared_add", drop_shared_expert, rows=1)
    report = gate(candidate)
    assert_caught(report, Expected("layers.1", "layers.1.experts_down", "SharedAdd"))
    assert report.location and report.location.culprit and report.location.culprit.kind == "ExpertsDown"
    assert "layers.1.experts_down (ExpertsDown, in it SharedAdd) at layers.1.mlp_out" in str(report.location)
    assert check_of(report, "KL, mean").is_ok, "held-out text is read in pieces"


def test_a_fault_of_one_sequence_is_followed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong only in steps of 11 rows: those of one prompt, and of nothing else that is read."""
    candidate = engine_of(make(MOE))
    break_op(monkeypatch, candidate, "layers.2.shared_add", drop_shared_expert, rows=11)
    report = gate(candidate)
    assert check_of(report, "hidden state, relative L2").is_ok
    assert_caught(report, Expected("layers.2", "layers.2.shared_add", "SharedAdd"))
    assert report.location and report.location.sequence == "the prompt prompt-1"


def test_not_a_number_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that allow everything else allow no NaN; it may even be on both sides."""
    base, candidate = engine_of(make(MOE)), engine_of(make(MOE))
    for engine in (base, candidate):
        break_op(monkeypatch, engine, "layers.1.out_proj", spill_nan)
    report = gate(candidate, base=base)
    assert not report.passed
    finite = check_of(report, "values that are not finite")
    assert finite.value > 0 and finite.where == "layers.1, base and candidate"
    checked = {check.name for check in report.checks} - {"agreement of top-1", "prompts that differ"}
    assert checked >= {"KL, mean", "hidden state, relative L2"} and {"KL, mean", "KL, largest"} <= set(failed(report))


@pytest.mark.parametrize("damage", [DAMAGES[0], DAMAGES[3], DAMAGES[4]], ids=str)
def test_the_loosest_kind_is_no_excuse(damage: Damage) -> None:
    assert_caught(gate(break_weight(make(MOE), damage.weight, damage.apply), "quantisation"), damage.expected)
