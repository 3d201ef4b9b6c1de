"""Attention of many rows: its two launches against the interpreter and against ``transformers``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_graphs import LINE, Shape, Step, check, graph_of, library_config, new_caches
from harness import assert_close, pack_graph, run_both
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeAttention, Qwen3_5MoeTextRotaryEmbedding

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.records import Records
from lynnc.target import find_target
from lynnc.tensors import T


def small_blocks(shape: Shape) -> dict[str, dict[str, int]]:
    """Several blocks of rows, and tiles without a mask, in short steps."""
    return {"attention": {"BLOCK_ROWS": max(8, 16 * shape.kv_heads // shape.heads), "TILE": 16}}


SMALL_BLOCKS = small_blocks(LINE)


def prompt_graph(shape: Shape, fused: bool = True):
    return graph_of(shape, T, split=False, fused=fused)


STEPS = (
    *(Step(f"length-{length}", tuple(range(length))) for length in (1, 15, 16, 17, 33)),
    Step("continued", tuple(range(28, 49))),
    Step("continued-within-a-tile", tuple(range(37, 40))),
    Step("two-slots", (*range(3), *range(30, 44)), (*[1] * 3, *[0] * 14)),
    Step("slots-in-one-block", (9, 10, 0, 40, 41, 42, 17), (2, 2, 0, 1, 1, 1, 3)),
    Step("padded-end", (*range(40, 45), -1, -1)),
    Step("padded-slots", (*range(40, 45), *range(6), -1, -1), (*[1] * 5, *[2] * 6, 0, 0)),
    Step("padding-between", (20, 21, -1, 7, 8), (1, 1, 0, 0, 0)),
    Step("padding-first", (-1, 33, 34)),
    Step("no-gate-full-rope", tuple(range(21)), shape=replace(LINE, gate=False, rotary_dim=64, shifted=False)),
    Step("odd-sizes", tuple(range(20, 43)), shape=replace(LINE, heads=3, head_dim=48, rotary_dim=12)),
    Step("two-key-heads", tuple(range(20, 37)), shape=Shape(heads=4, kv_heads=2)),
    Step("one-query-head-each", tuple(range(20, 37)), shape=Shape(heads=2, kv_heads=2)),
    Step("many-heads", tuple(range(20, 25)), shape=Shape(heads=20, kv_heads=2, head_dim=32, rotary_dim=8)),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_two_launches(step: Step) -> None:
    graph = prompt_graph(step.shape)
    assert [op.kind for op in graph.ops] == ["RotateAppend", "AttentionGate" if step.shape.gate else "Attention"]
    check(step, graph, context=64, knobs=small_blocks(step.shape))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_single_ops(step: Step) -> None:
    check(step, prompt_graph(step.shape, fused=False), context=64, knobs=small_blocks(step.shape))


@pytest.mark.parametrize("length", [255, 256, 257])
def test_lengths_around_a_block_with_default_knobs(length: int) -> None:
    check(Step(str(length), tuple(range(length))), prompt_graph(LINE), context=257)


def test_the_real_shape_far_into_a_context() -> None:
    shape = Shape(heads=16, kv_heads=2, head_dim=256, rotary_dim=64)
    check(Step("real", tuple(range(181, 200)), shape=shape), prompt_graph(shape), context=200)


KNOBS = (
    {"BLOCK_ROWS": 16, "TILE": 16},
    {"BLOCK_ROWS": 8, "TILE": 64},
    {"BLOCK_ROWS": 64, "TILE": 32},
    {"PART_HEADS": 1, "BLOCK_HEADS": 1},
    {"PART_HEADS": 2, "BLOCK_HEADS": 4},
    {"PART_HEADS": 8, "BLOCK_HEADS": 2},
)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_other_knobs(knobs: dict[str, int]) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=32, rotary_dim=8)
    kernel = "attention" if "TILE" in knobs else "rotate_append"
    step = Step("knobs", (*range(50, 73), *range(9)), (*[0] * 23, *[1] * 9), shape)
    check(step, prompt_graph(shape), context=80, knobs={kernel: knobs})


@pytest.mark.parametrize("cuts", [(70,), (1, 69), (16, 17, 37), (31, 1, 1, 37)], ids=str)
def test_pieces_cut_anywhere_leave_the_same_bits(cuts: tuple[int, ...]) -> None:
    """A row's tiles begin where they always begin, whatever stands beside it."""
    graph, start = prompt_graph(LINE), new_caches(LINE, 1, 70)
    whole = run_both(graph, Step("whole", tuple(range(70))).inputs(), states=start, context=70, knobs=SMALL_BLOCKS)
    states, rows, first = start, [], 0
    for count in cuts:
        step = Step("piece", tuple(range(first, first + count)))
        piece = run_both(graph, step.inputs(), states=states, context=70, knobs=SMALL_BLOCKS)
        states, first = piece.kernel_states, first + count
        rows.append(piece.kernels["gated"])
    assert torch.equal(torch.cat(rows), whole.kernels["gated"])
    assert all(torch.equal(state, whole.kernel_states[name]) for name, state in states.items())


@pytest.mark.parametrize("cuts", [(23,), (7, 16), (1, 15, 7)], ids=str)
def test_prompts_match_transformers(cuts: tuple[int, ...]) -> None:
    """A prompt in pieces, and whole through the library's attention in FP32 (outputs before o_proj)."""
    shape, count = replace(LINE, heads=4, kv_heads=2), sum(cuts)
    config, graph = library_config(shape), prompt_graph(shape)
    attention = Qwen3_5MoeAttention(config, 0).float()
    packed, values = pack_graph(graph, gain=0.5)
    hidden = torch.randn(1, count, config.hidden_size, generator=torch.Generator().manual_seed(5))
    attention.q_norm.weight.data.copy_(values["q_norm"])
    attention.k_norm.weight.data.copy_(values["k_norm"])
    attention.o_proj.weight.data.copy_(torch.eye(shape.heads * shape.head_dim))
    with torch.no_grad():
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection(hidden) for projection in projections], -1)[0].bfloat16()
        embedding = Qwen3_5MoeTextRotaryEmbedding(config)(torch.zeros(1), torch.arange(count).expand(3, 1, -1))
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        theirs = attention(hidden, embedding, mask)[0][0]
    states, rows, first = new_caches(shape, 1, 32), [], 0
    for piece in cuts:
        columns = Step("piece", tuple(range(first, first + piece)), shape=shape).inputs()
        inputs = {**columns, "qkv": qkv[first : first + piece]}
        found = run_both(graph, inputs, states=states, context=32, weights=(packed, values), knobs=SMALL_BLOCKS)
        states, first = found.kernel_states, first + piece
        rows.append(found.kernels["gated"])
    assert_close(torch.cat(rows).flatten(1).float(), theirs, 8e-3)


REFUSALS = (
    ({"BLOCK_ROWS": 4}, "fewer than 16"),
    ({"BLOCK_ROWS": 128, "num_warps": 4}, "sums need"),
    ({"BLOCK_ROWS": 64, "TILE": 128, "num_stages": 4}, "shared memory"),
)


@pytest.mark.parametrize(("knobs", "reason"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_name_the_reason(knobs: dict[str, int], reason: str) -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=256, rotary_dim=64)
    with pytest.raises(OptionError, match=reason):
        choose_all(prompt_graph(shape), find_target("sm_90"), Records(), {"attention": {"num_warps": 16, **knobs}})
