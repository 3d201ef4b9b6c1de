"""Experts by tiles of rows, as programs for prompts launch them: against the interpreter and the models' own blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from harness import TARGET, Outcome, assert_close, in_lanes, op_graph, pack_graph, run_both
from moe_graphs import CASES, ROUTED, Case, compare, inputs_of, keep_all, moe_graph, published_block, router_rows
from torch import nn

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.ir import Graph
from lynnc.lower import lower
from lynnc.passes.group_experts import group_experts
from lynnc.promptops import GroupByExpert
from lynnc.records import Records
from lynnc.tensors import DType, Format, T

Knobs = Mapping[str, Mapping[str, int]]
PROJECTIONS = ("grouped_up", "grouped_down")
LEFT: Knobs = {name: {"BLOCK_N": 64, "BLOCK_K": 64, "SWAP": 1} for name in PROJECTIONS}
RIGHT: Knobs = {name: {"BLOCK_N": 64, "BLOCK_K": 128, "SWAP": 0} for name in PROJECTIONS}
WIDE: Knobs = {name: {"BLOCK_N": 64, "BLOCK_K": 128, "SWAP": 1, "num_warps": 2} for name in PROJECTIONS}
SEPARATE = CASES[3]
"""A case whose shared expert is no tile of the routed experts' launches."""


def grouped(case: Case, program: str = "prefill/16", layers: tuple[int, ...] = ()) -> Graph:
    """The launches of this file's kernels; what others would have written is an input."""
    graph = keep_all(group_experts(replace(moe_graph(case, None, layers), program=program)))
    others = tuple(op for op in graph.ops if op.kind in ("Linear", "SiluMul"))
    kept = tuple(op for op in graph.ops if op not in others)
    written = tuple(name for op in others for name in op.writes)
    return replace(graph.with_ops(kept), inputs=(*graph.inputs, *written))


def run(graph: Graph, inputs: dict[str, torch.Tensor], knobs: Knobs = WIDE, **options: object) -> Outcome:
    rows = next(iter(inputs.values())).shape[0]
    for name in set(graph.inputs) - set(inputs):
        values = torch.randn(rows, graph.tensors[name].width, generator=torch.Generator().manual_seed(5))
        inputs[name] = values.bfloat16() if graph.tensors[name].dtype is DType.BF16 else values
    return run_both(graph, inputs, knobs=knobs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [*CASES, *ROUTED], ids=str)
def test_grouped_experts_match_the_interpreter(case: Case) -> None:
    graph = grouped(case)
    compare(run(graph, inputs_of(case, 5)), graph.outputs)


@pytest.mark.parametrize("knobs", [LEFT, RIGHT, WIDE], ids=["left", "right", "wide"])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], SEPARATE], ids=str)
def test_every_order_of_operands_matches_the_interpreter(case: Case, knobs: Knobs) -> None:
    case = replace(case, experts=21)
    graph = grouped(case, "prefill/64")
    compare(run(graph, inputs_of(case, 40), knobs), graph.outputs)


TILE_OF_TWO_BLOCKS = {"BLOCK_N": 64, "BLOCK_K": 256, "SWAP": 1, "num_warps": 4, "num_stages": 2}
TWO_BLOCKS: Knobs = {"grouped_up": TILE_OF_TWO_BLOCKS, "grouped_down": TILE_OF_TWO_BLOCKS}
BLOCKS = Case("blocks", hidden=256, size=128, shared=128)
ORDERS = (("y", "act", "shared_act"), ("y",), ("act", "shared_act"))


@pytest.mark.parametrize("fmt", [Format.NVFP4, Format.NVFP4_FP16])
@pytest.mark.parametrize("ordered", ORDERS, ids="-".join)
def test_columns_in_the_order_of_lanes(ordered: tuple[str, ...], fmt: Format) -> None:
    case = replace(BLOCKS, routed_format=fmt, shared_format=fmt)
    graph = in_lanes(grouped(case), *ordered)
    compare(run(graph, inputs_of(case, 9)), graph.outputs)


@pytest.mark.parametrize("program", ["prefill/16", "prefill"])
@pytest.mark.parametrize("knobs", [{}, TWO_BLOCKS], ids=["default", "two-blocks"])
def test_columns_in_the_order_of_lanes_by_default_and_two_blocks_a_pass(program: str, knobs: Knobs) -> None:
    case = replace(BLOCKS, shared=0, size=256)
    graph = in_lanes(grouped(case, program), "y", "act")
    compare(run(graph, inputs_of(case, 13), knobs), graph.outputs)


def test_tiles_that_do_not_fit_lanes_are_refused_with_the_reason() -> None:
    graph = in_lanes(grouped(BLOCKS), "y")
    for knobs, reason in ((LEFT, "BLOCK_K a multiple of 128"), (RIGHT, "need SWAP")):
        with pytest.raises(OptionError, match=reason):
            choose_all(graph, TARGET, Records(), knobs)


def test_the_shared_expert_is_tiles_only_where_its_weights_are_like_the_routed() -> None:
    kinds = {case.name: [op.kind for op in grouped(case).ops] for case in (CASES[0], SEPARATE)}
    assert kinds["shared"] == ["TopK", "GroupByExpert", "GroupedUp", "GroupedDown", "CombineAdd"]
    assert len(kinds[SEPARATE.name]) == len(kinds["shared"])
    first, second = (grouped(case).ops[2].outputs for case in (CASES[0], SEPARATE))  # type: ignore[attr-defined]
    assert (first, second) == (("act", "shared_act"), ("act",))


def grouping(experts: int, k: int, tile: int) -> Graph:
    op = GroupByExpert("group", "ids", "order", "tiles", experts, tile)
    shapes = {
        "ids": (DType.I32, (T, k)),
        "order": (DType.I32, (T, k)),
        "tiles": (DType.I32, (T * k // tile + experts, 3)),
    }
    return op_graph(op, tensors=shapes, rows=T, inputs=("ids",), outputs=("order", "tiles"), program="prefill")


@pytest.mark.parametrize("experts", [1, 3, 7, 96, 100, 192, 205, 255, 256])
def test_pairs_are_sorted_by_expert(experts: int) -> None:
    k, rows, tile = min(experts, 8), 37, 16
    generator = torch.Generator().manual_seed(experts)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)]).int()
    graph = grouping(experts, k, tile)
    found = run_both(graph, {"ids": ids}, knobs={"group": {"BLOCK": 64}}).kernels
    order, tiles = found["order"].flatten().long(), found["tiles"]
    assert order.tolist() == ids.flatten().sort(stable=True).indices.tolist()
    sizes = tiles[:, 2] - tiles[:, 1]
    assert sizes.min() >= 0 and sizes.max() <= tile
    places = [place for _, first, last in tiles.tolist() for place in range(first, last)]
    assert places == list(range(rows * k))
    assert all((ids.flatten()[order[first:last]] == expert).all() for expert, first, last in tiles.tolist())


def routings(rows: int, experts: int) -> dict[str, torch.Tensor]:
    """Logits that send rows where a grouping may break."""
    spread = torch.full((rows, experts), -9.0)
    spread[torch.arange(rows), torch.arange(rows) % experts] = 9.0
    same = torch.randn(rows, experts, generator=torch.Generator().manual_seed(2))
    same[:, -1] += 50
    rising = torch.arange(experts).float().expand(rows, experts)
    return {"one-row-each": spread, "one-takes-all": same, "most-have-none": rising}


@pytest.mark.parametrize("which", ["one-row-each", "one-takes-all", "most-have-none"])
@pytest.mark.parametrize("k", [1, 3])
def test_extreme_routing(which: str, k: int) -> None:
    case = replace(CASES[0], experts=50, k=k)
    inputs = inputs_of(case, 50)
    inputs["router"][:, :50] = routings(50, 50)[which]
    graph = grouped(case, "prefill/64")
    found = run(graph, inputs)
    compare(found, graph.outputs)
    if which == "one-takes-all":
        assert (found.kernels["ids"] == 49).any(1).all()


@pytest.mark.parametrize("program, tile", [("prefill/8", 16), ("prefill/64", 64), ("prefill", 64)])
def test_tiles_follow_the_rows_of_an_expert(program: str, tile: int) -> None:
    graph = grouped(CASES[0], program)
    assert next(op.tile for op in graph.ops if isinstance(op, GroupByExpert)) == tile
    compare(run(graph, inputs_of(CASES[0], 8 if tile == 16 else 61)), graph.outputs)


def test_padded_rows_and_odd_logits_disturb_nobody() -> None:
    case = replace(CASES[0], experts=7, k=3)
    rows = torch.stack(list(router_rows(7).values()))
    inputs = inputs_of(case, len(rows))
    inputs["router"][:, :7] = rows
    inputs["y"][3] = math.nan  # a padded row's garbage
    graph = grouped(case)
    found = run(graph, inputs)
    others = torch.arange(len(rows)) != 3
    assert found.kernels["ids"].sort().values.diff().min() > 0
    for name in ("ids", "ids_order", "ids_tiles"):
        assert torch.equal(found.kernels[name], found.reference[name])
    assert_close(found.kernels["out"][others], found.reference["out"][others], 8e-3)


def test_a_row_has_the_same_bits_among_others() -> None:
    graph, inputs = grouped(CASES[0]), inputs_of(CASES[0], 16)
    weights = pack_graph(graph)
    together = run(graph, dict(inputs), weights=weights).kernels
    for row in (0, 7, 15):
        alone = run(graph, {name: x[row : row + 1] for name, x in inputs.items()}, weights=weights).kernels
        assert torch.equal(together["out"][row], alone["out"][0])


def test_layers_of_unlike_experts_share_their_kernels() -> None:
    graph = grouped(CASES[0], layers=(6, 5))
    launches = lower(graph, choose_all(graph, TARGET, Records(), WIDE), TARGET).program.launches
    first, second = launches[:5], launches[5:]
    assert [launch.kernel for launch in first] == [launch.kernel for launch in second]
    inputs = {}
    for prefix, experts in (("l0.", 6), ("l1.", 5)):
        inputs |= {prefix + n: x for n, x in inputs_of(replace(CASES[0], experts=experts), 9, seed=experts).items()}
    compare(run(graph, inputs), graph.outputs)


@pytest.mark.parametrize("which", ["random", "one-row-each", "one-takes-all", "most-have-none"])
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
def test_grouped_experts_match_the_published_block(case: Case, which: str) -> None:
    rows = 18 if which == "random" else 40
    if which != "random":
        case = replace(case, experts=rows, k=1 if which == "one-row-each" else 2)
    graph = grouped(case, "prefill/64")
    weights, inputs = pack_graph(graph), inputs_of(case, rows)
    block = published_block(case, weights[1])
    y = inputs["y"].float()
    with torch.no_grad():
        if which != "random":  # there are fewer rows than columns, so a router can give them any logits
            block.gate.weight.copy_((torch.linalg.pinv(y) @ routings(rows, case.experts)[which]).T)
        expected = block(y[None])[0]
        router = nn.functional.linear(y, block.gate.weight)
        gate = block.shared_expert_gate(y) if case.shared else torch.zeros(rows, 1)
    inputs["router"], inputs["h"] = torch.cat([router, gate], dim=1), torch.zeros_like(inputs["h"])
    found = run(graph, inputs, weights=weights).kernels
    assert_close(found["out"], expected, 1e-2)
    of_expert = found["ids"].flatten().bincount(minlength=case.experts).tolist()
    match which:
        case "one-row-each":
            assert of_expert == [1] * rows
        case "one-takes-all":
            tile = next(op.tile for op in graph.ops if isinstance(op, GroupByExpert))
            assert of_expert[-1] == rows > tile
        case "most-have-none":
            assert of_expert == [0] * (rows - 2) + [rows] * 2
