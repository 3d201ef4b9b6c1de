"""Experts with 4-bit activations, as programs for prompts launch them: launch by launch, and against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import TARGET, Outcome, assert_close, errors, pack_graph, run_both
from moe_graphs import CASES, Case, inputs_of, keep_all, moe_graph
from test_gemm_fp4 import FP4_TARGETS, rounded_rows
from test_kernels_grouped import SEPARATE, routings

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.interpret import run_op
from lynnc.ir import Graph
from lynnc.passes.group_experts import group_experts
from lynnc.passes.quantise_activations import quantise_activations
from lynnc.promptops import GroupByExpert
from lynnc.records import Records
from lynnc.stepvalues import Run
from lynnc.target import find_target
from lynnc.tensors import Format

SHARED, ALONE = CASES[0], CASES[1]
UNLIKE = replace(SHARED, name="shared-of-another-size", shared=80)
PACKED = (SHARED, ALONE, UNLIKE, *CASES[6:])
"""Cases whose experts are NVFP4; of 48, 144, 240 and 1056 columns too."""
KERNELS = ("grouped_up_fp4", "grouped_down_fp4")
LIMIT = 2e-3
"""Of one launch, for equal codes: FP32 sums in another order may fall to the other side of a BF16 rounding."""


def declared(graph: Graph) -> Graph:
    """The graph with 4-bit activations declared, as the builder does for NVFP4 weights only."""
    weights = {
        name: replace(weight, activations="nvfp4" if weight.format is Format.NVFP4 else "bf16")
        for name, weight in graph.weights.items()
    }
    return replace(graph, weights=weights)


def quantised(case: Case, program: str = "prefill/16", layers: tuple[int, ...] = ()) -> Graph:
    graph = declared(replace(moe_graph(case, None, layers), program=program))
    return keep_all(quantise_activations(group_experts(graph)))


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def check_launches(graph: Graph, inputs: dict[str, torch.Tensor], **options: object) -> Outcome:
    """Runs the kernels; each launch then is interpreted on what the kernels before it wrote: codes must be equal."""
    weights = pack_graph(graph)
    found = run_both(graph, inputs, weights=weights, **options)  # type: ignore[arg-type]
    run = Run(graph, weights[1], {}, rows=next(iter(inputs.values())).shape[0])
    for name, value in inputs.items():
        run.put(name, value)
    for op in graph.ops:
        run_op(run, op)
        for name in op.writes:
            ours, expected = found.kernels[name], run.get(name)
            if "quantise" in op.name or expected.dtype is torch.int32:
                assert torch.equal(ours, expected), name
            else:
                assert_close(ours, expected, LIMIT, name)
            run.put(name, ours)
    return found


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_every_launch_matches_the_interpreter(case: Case) -> None:
    graph = quantised(case)
    assert {"QuantisedGroupedUp", "QuantisedGroupedDown"} <= set(kinds(graph))
    check_launches(graph, inputs_of(case, 5))


@pytest.mark.parametrize(
    "case", [replace(SHARED, k=1), replace(ALONE, k=1), replace(SHARED, k=3)], ids=["1+1", "1", "3+1"]
)
@pytest.mark.parametrize("which", ["one-row-each", "one-takes-all", "most-have-none"])
def test_extreme_routing(which: str, case: Case) -> None:
    case = replace(case, experts=20)
    inputs = inputs_of(case, 20)
    inputs["router"][:, :20] = routings(20, 20)[which]
    found = check_launches(quantised(case, "prefill/64"), inputs)
    counts = torch.bincount(found.kernels["ids"].flatten(), minlength=20)
    if case.k == 1:
        most, used = {"one-row-each": (1, 20), "one-takes-all": (20, 1), "most-have-none": (20, 1)}[which]
        assert (int(counts.max()), int((counts > 0).sum())) == (most, used)


EDGES = (
    *(("prefill/64", 16, 16, rows) for rows in (1, 15, 16, 17, 33)),
    *(("prefill", 3, 64, rows) for rows in (1, 64, 65)),
)


@pytest.mark.parametrize(("program", "experts", "tile", "rows"), EDGES)
def test_rows_of_one_expert_at_the_edges_of_tiles(program: str, experts: int, tile: int, rows: int) -> None:
    case = replace(SHARED, experts=experts, k=1)
    graph, inputs = quantised(case, program), inputs_of(case, rows)
    assert [op.tile for op in graph.ops if isinstance(op, GroupByExpert)] == [tile]
    inputs["router"][:, 1] = 50.0
    check_launches(graph, inputs)


TCGEN05 = {
    "grouped_up_fp4": {"BLOCK_N": 64, "BLOCK_K": 256, "num_stages": 3},
    "grouped_down_fp4": {"BLOCK_N": 128, "BLOCK_K": 256, "num_stages": 3},
}
NARROW = {name: {"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 2, "num_stages": 1} for name in KERNELS}


@pytest.mark.parametrize(("case", "knobs"), [(CASES[6], TCGEN05), (ALONE, NARROW)], ids=["tcgen05", "narrow"])
def test_other_blocks_match_the_interpreter(case: Case, knobs: dict[str, dict[str, int]]) -> None:
    check_launches(quantised(case, "prefill/64"), inputs_of(case, 20), knobs=knobs)


def by_hand(case: Case, weights: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], found: Outcome, fp4: bool):
    """The block in torch, pair by pair, with rows rounded as the formats say or not at all."""
    rounded = rounded_rows if fp4 else torch.Tensor.float

    def expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = (rounded(x) @ up.T).bfloat16().float().chunk(2, dim=-1)
        act = (F.silu(gate).bfloat16().float() * value).bfloat16()
        return (rounded(act) @ down.T).bfloat16().float()

    y, ids, scores = inputs["y"], found.kernels["ids"].long(), found.kernels["scores"]
    total = torch.zeros(y.shape)
    for row in range(len(y)):
        for slot in range(case.k):
            index = ids[row, slot]
            total[row] += scores[row, slot] * expert(y[row : row + 1], weights["up"][index], weights["down"][index])[0]
    if case.shared:
        gate = torch.sigmoid(inputs["router"][:, case.experts :])
        total += gate * expert(y, weights["shared_up"], weights["shared_down"])
    return total.bfloat16().float() + inputs["h"].float()


@pytest.mark.parametrize("case", [SHARED, ALONE, CASES[6]], ids=str)
def test_the_error_is_that_of_rounding_the_rows(case: Case) -> None:
    graph, inputs = quantised(case, "prefill/64"), inputs_of(case, 17)
    inputs["h"] = torch.zeros_like(inputs["h"])
    weights = pack_graph(graph)
    found = run_both(graph, dict(inputs), weights=weights)
    ours = found.kernels["out"].float()
    with_fp4, exact = (by_hand(case, weights[1], inputs, found, fp4) for fp4 in (True, False))
    explained = errors(with_fp4, exact).rms
    assert 0.05 < explained < 0.3
    assert errors(ours, with_fp4).rms < 0.1 * explained
    assert abs(errors(ours, exact).rms / explained - 1) < 0.02


def test_a_row_has_the_same_bits_among_others() -> None:
    graph, inputs = quantised(SHARED), inputs_of(SHARED, 16)
    weights = pack_graph(graph)
    together = run_both(graph, dict(inputs), weights=weights).kernels
    for row in (0, 7, 15):
        alone = run_both(graph, {name: x[row : row + 1] for name, x in inputs.items()}, weights=weights).kernels
        assert torch.equal(together["out"][row], alone["out"][0])


def test_what_is_not_finite_stays_in_its_row() -> None:
    graph, inputs = quantised(SHARED), inputs_of(SHARED, 9)
    weights = pack_graph(graph)
    clean = run_both(graph, dict(inputs), weights=weights).kernels["out"]
    inputs["y"][3, 5] = math.nan
    found = run_both(graph, inputs, weights=weights)
    others = torch.arange(9) != 3
    for out in (found.kernels["out"], found.reference["out"]):
        assert not out[3].isfinite().any() and out[others].isfinite().all()
    assert torch.equal(found.kernels["out"][others], clean[others])


def test_layers_of_unlike_experts_share_their_kernels() -> None:
    graph = quantised(SHARED, layers=(6, 5))
    names = [(choice.kernel.name, str(choice)) for choice in choose_all(graph, TARGET, Records())]
    assert len({text for name, text in names if name in KERNELS}) == len(KERNELS)
    inputs = {}
    for prefix, experts in (("l0.", 6), ("l1.", 5)):
        inputs |= {prefix + n: x for n, x in inputs_of(replace(SHARED, experts=experts), 9, seed=experts).items()}
    check_launches(graph, inputs)


def test_a_row_is_quantised_once_for_all_experts_and_each_pair_for_down() -> None:
    graph = quantised(SHARED)
    assert [op.reads[0] for op in graph.ops if op.kind == "QuantiseActivations"] == ["y", "act", "shared_act"]
    shapes = {name: tuple(map(str, graph.tensors[name].shape)) for name in ("y.codes", "act.codes", "act.scales")}
    assert shapes == {"y.codes": ("T", "8"), "act.codes": ("T", "2", "6"), "act.scales": ("T", "2", "1")}


@pytest.mark.parametrize("case", [SEPARATE, CASES[2], CASES[4], CASES[5]], ids=str)
def test_weights_of_other_formats_meet_bf16_activations(case: Case) -> None:
    found = set(kinds(quantised(case)))
    is_quantised = case.routed_format is Format.NVFP4
    assert ("QuantisedGroupedUp" in found, "GroupedUp" in found) == (is_quantised, not is_quantised)
    assert ("QuantisedGroupedDown" in found, "GroupedDown" in found) == (is_quantised, not is_quantised)
    assert ("QuantisedLinear" in found) == (case.shared_format is Format.NVFP4)


def test_without_the_pass_and_in_decode_the_plan_is_as_before() -> None:
    graph = declared(replace(moe_graph(SHARED, None), program="prefill/16"))
    assert not [kind for kind in kinds(group_experts(graph)) if "Quantis" in kind]
    decode = declared(moe_graph(SHARED, 4))
    assert quantise_activations(decode) is decode


@pytest.mark.parametrize("target", FP4_TARGETS)
def test_tiles_that_would_not_be_fp4_products_are_refused(target: str) -> None:
    graph, found = quantised(replace(SHARED, size=512, hidden=2048)), find_target(target)
    choose_all(graph, found, Records())
    wrong = {"grouped_down_fp4": {"BLOCK_N": 64}, "grouped_up_fp4": {"BLOCK_N": 128}}
    for name, knobs in wrong.items():
        if found.has_tcgen05:
            with pytest.raises(OptionError, match="tiles of 128 rows by 4 or 8 warps"):
                choose_all(graph, found, Records(), {name: knobs})
        else:
            choose_all(graph, found, Records(), {name: knobs})
    large = {"BLOCK_N": 64, "BLOCK_K": 512, "num_stages": 4}
    if not found.has_tcgen05:
        with pytest.raises(OptionError, match="shared memory"):
            choose_all(graph, found, Records(), {"grouped_up_fp4": large})
