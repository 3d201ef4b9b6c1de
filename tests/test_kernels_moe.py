"""Experts, fused for decode and op by op at any rows: against the interpreter and against the models' own blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness import TARGET, assert_close, pack_graph, run_both
from moe_graphs import (
    CASES,
    KNOBS,
    ROUTED,
    Case,
    compare,
    fused,
    inputs_of,
    keep_all,
    moe_graph,
    published_block,
    router_rows,
)
from torch import nn

from lynnc.choose import choose_all
from lynnc.kernels.table import kernel_for
from lynnc.lower import lower
from lynnc.passes.fuse_experts_down import fuse_experts_down
from lynnc.passes.fuse_experts_up import fuse_experts_up
from lynnc.records import Records
from lynnc.stepvalues import TORCH_DTYPE


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_experts_match_the_interpreter(case: Case) -> None:
    graph = fused(moe_graph(case, 2))
    assert [op.kind for op in graph.ops] == ["ExpertsUp", "ExpertsDown"]
    compare(run_both(graph, inputs_of(case, 2), knobs=KNOBS), graph.outputs)


@pytest.mark.parametrize("case", [CASES[1], CASES[6], *ROUTED], ids=str)
def test_single_ops_match_the_interpreter_at_any_rows(case: Case) -> None:
    graph = moe_graph(case, None)
    named = ("top_k", "expert_linear", "combine", "shared_add", "silu_mul")
    ops = tuple(op for op in graph.ops if kernel_for(graph, op).name in named)
    others = tuple(name for op in graph.ops if op not in ops for name in op.writes)
    graph = keep_all(replace(graph, ops=ops, inputs=(*graph.inputs, *others)))
    generator = torch.Generator().manual_seed(3)
    inputs = inputs_of(case, 3)
    for name in others:  # what kernels of other families would have written
        values = torch.randn(3, graph.tensors[name].width, generator=generator)
        inputs[name] = values.to(TORCH_DTYPE[graph.tensors[name].dtype])
    compare(run_both(graph, inputs, knobs=KNOBS), graph.outputs)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_a_row_has_the_same_bits_among_others(case: Case) -> None:
    four, one = fused(moe_graph(case, 4)), fused(moe_graph(case, 1))
    weights, inputs = pack_graph(four), inputs_of(case, 4)
    together = run_both(four, inputs, knobs=KNOBS, weights=weights).kernels
    for row in range(4):
        alone = run_both(one, {n: x[row : row + 1] for n, x in inputs.items()}, knobs=KNOBS, weights=weights).kernels
        for name in four.outputs:
            assert torch.equal(together[name][row], alone[name][0]), (name, row)


def test_fused_routing_survives_padded_rows() -> None:
    case = replace(CASES[0], experts=7, k=3)
    inputs = inputs_of(case, 3)
    inputs["router"][0] = math.nan
    inputs["router"][1, :7] = 0.25
    graph = fused(moe_graph(case, 3))
    inputs["router"][0, 7] = 0.0  # the gate of the shared expert
    found = run_both(graph, inputs, knobs=KNOBS)
    assert found.kernels["ids"][:2].tolist() == [[0, 1, 2], [0, 1, 2]]
    compare(found, graph.outputs)


@pytest.mark.parametrize("routed, early", [(True, True), (False, False)])
def test_ids_are_read_early_only_where_the_launch_before_promises_them(routed: bool, early: bool) -> None:
    graph = moe_graph(CASES[0], 1)
    graph = fuse_experts_down(fuse_experts_up(graph) if routed else graph)
    lowered = lower(graph, choose_all(graph, TARGET, Records(), {}), TARGET)
    down = next(call.entry for call in lowered.kernels.values() if call.entry.name == "experts_down")
    assert down.constants["EARLY"] is early


@pytest.mark.parametrize("experts", [7, 64, 200])
def test_fused_routing_of_alike_and_infinite_logits(experts: int) -> None:
    case = replace(CASES[0], experts=experts, k=6)
    rows = torch.stack([row for name, row in router_rows(experts).items()])
    inputs = inputs_of(case, len(rows))
    inputs["router"] = torch.cat([rows, torch.zeros(len(rows), 1)], dim=1)
    graph = fused(moe_graph(case, len(rows)))
    compare(run_both(graph, inputs, knobs=KNOBS), ("ids", "scores", "act", "out"))


def test_layers_of_unlike_experts_share_their_kernels() -> None:
    graph = fused(moe_graph(CASES[0], 2, layers=(6, 5)))
    lowered = lower(graph, choose_all(graph, TARGET, Records(), KNOBS), TARGET)
    first, second = lowered.program.launches[:2], lowered.program.launches[2:]
    assert [launch.kernel for launch in first] == [launch.kernel for launch in second]
    inputs = {}
    for prefix, experts in (("l0.", 6), ("l1.", 5)):
        inputs |= {prefix + n: x for n, x in inputs_of(replace(CASES[0], experts=experts), 2, seed=experts).items()}
    compare(run_both(graph, inputs, knobs=KNOBS), graph.outputs)


def test_one_expert_takes_every_row_and_others_none() -> None:
    case = replace(CASES[0], experts=5, k=1)
    inputs = inputs_of(case, 3)
    inputs["router"][:, 4] = 50.0
    graph = fused(moe_graph(case, 3))
    found = run_both(graph, inputs, knobs=KNOBS)
    assert found.kernels["ids"].flatten().tolist() == [4, 4, 4]
    compare(found, graph.outputs)


@pytest.mark.parametrize(
    "case", [CASES[0], CASES[1], replace(CASES[1], name="not-normalised", normalize=False)], ids=str
)
def test_fused_experts_match_the_published_block(case: Case) -> None:
    rows = 3
    graph = fused(moe_graph(case, rows))
    weights, inputs = pack_graph(graph), inputs_of(case, rows)
    block = published_block(case, weights[1])
    y = inputs["y"].float()
    with torch.no_grad():
        expected = block(y[None])[0]
        router = nn.functional.linear(y, block.gate.weight)
        gate = block.shared_expert_gate(y) if case.shared else torch.zeros(rows, 1)
    inputs["router"], inputs["h"] = torch.cat([router, gate], dim=1), torch.zeros_like(inputs["h"])
    assert_close(run_both(graph, inputs, knobs=KNOBS, weights=weights).kernels["out"], expected, 1e-2)
