"""Attention of many rows: norm, rotation and append in one launch, attention and the output gate in another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from lynnc.columnorder import ColumnOrder
from lynnc.ir import Graph, Op
from lynnc.kernels.attention_ops import (
    LEAST_DOT,
    cache_args,
    dot_fits,
    gate_constants,
    heads_divide,
    rope_constants,
    rotates_pairs,
    row_args,
)
from lynnc.kernels.kernel import (
    Arg,
    Binding,
    Choice,
    Family,
    Kernel,
    Knobs,
    PowerOfTwo,
    Problem,
    body_of,
    ceil_div,
    find,
    need,
    next_power_of_two,
    null_arg,
    place_constants,
    tensor_arg,
    value_arg,
    vector_arg,
)
from lynnc.mixerops import Attention, CacheAppend, HeadNormRope, OutputGate
from lynnc.target import Target
from lynnc.tensors import S

MOST_SUM_REGISTERS = 128
"""Registers of a thread, of 255, that its sums may fill."""


def _group(problem: Problem) -> int:
    """Lines of one row: the query heads that share a key/value head, filled up to a power of two."""
    return next_power_of_two(int(problem["heads"]) // int(problem["kv_heads"]))


def _lines_fit(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    lines = knobs["BLOCK_ROWS"] * _group(problem)
    if lines < LEAST_DOT:
        return f"{lines} lines (rows times heads of a group) are fewer than {LEAST_DOT}: choose more rows"
    registers = lines * next_power_of_two(int(problem["head_dim"])) // (32 * knobs["num_warps"])
    if registers > MOST_SUM_REGISTERS:
        return f"sums need {registers} registers a thread, more than {MOST_SUM_REGISTERS}: fewer rows or more warps"
    return None


def _tiles_fit(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """The queries, and the keys and values of every stage in flight."""
    tiles = knobs["BLOCK_ROWS"] * _group(problem) + 2 * knobs["num_stages"] * knobs["TILE"]
    needed = 2 * next_power_of_two(int(problem["head_dim"])) * tiles
    if needed > target.shared_memory_limit:
        return f"tiles of {needed:,} bytes exceed the {target.shared_memory_limit:,} of shared memory"
    return None


def _attention_problem(graph: Graph, op: Op) -> Problem:
    attention = need(op, Attention)
    return {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim}


def _attention_default(problem: Problem, target: Target) -> Knobs:
    group, width = _group(problem), next_power_of_two(int(problem["head_dim"]))
    if target.has_wgmma:
        # Two groups of four warps take turns at the tensor cores: one multiplies while the other exponentiates.
        tile = max(LEAST_DOT, min(128, 16384 // width))
        return {"BLOCK_ROWS": max(1, min(128 // group, 64)), "TILE": tile, "num_warps": 8, "num_stages": 2}
    # Four warps issue the products of data-centre Blackwell; elsewhere more share the sums, or they spill.
    lines = 64 if target.has_tcgen05 else max(LEAST_DOT, 16384 // width)
    warps = 4 if target.has_tcgen05 else 8
    return {"BLOCK_ROWS": max(1, min(lines // group, 64)), "TILE": 32, "num_warps": warps, "num_stages": 1}


def _gate_args(graph: Graph, gate: OutputGate | None) -> tuple[Arg, Mapping[str, int]]:
    """The gate, or a null pointer, and its constants."""
    if gate is None:
        return null_arg("gate", "*bf16"), {"GATED": 0, "GATE_STRIDE": 0, "GATE_OFFSET": 0, "GATE_HEAD": 0}
    return tensor_arg(graph, "gate", gate.gate), {"GATED": 1, **gate_constants(graph, gate)}


def _bind_attention(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    attention, gate = need(op, Attention), find(op, OutputGate)
    out = gate.out if gate else attention.out
    rows, group = graph.tensors[out].shape[0], attention.heads // attention.kv_heads
    gate_arg, gating = _gate_args(graph, gate)
    args = (
        tensor_arg(graph, "q", attention.q),
        *row_args(graph, attention.position, attention.slot),
        *cache_args(graph, attention.k_cache, attention.v_cache),
        gate_arg,
        tensor_arg(graph, "out", out),
        value_arg("rows", rows),
        value_arg("context", S),
    )
    constants = {
        **place_constants(graph, attention.q, "Q"),
        **gating,
        "LANES": graph.tensors[out].order is ColumnOrder.LANES,
        **place_constants(graph, out, "OUT"),
        "KV_HEADS": attention.kv_heads,
        "GROUP": group,
        "HEAD_DIM": attention.head_dim,
        "SCALE": attention.scale * math.log2(math.e),
        "BLOCK_ROWS": knobs["BLOCK_ROWS"],
        "BLOCK_GROUP": next_power_of_two(group),
        "BLOCK_D": next_power_of_two(attention.head_dim),
        "TILE": knobs["TILE"],
    }
    grid = (ceil_div(rows, knobs["BLOCK_ROWS"]) * attention.kv_heads, 1, 1)
    return Binding(args, MappingProxyType(constants), grid)


def _append_problem(graph: Graph, op: Op) -> Problem:
    append, q = need(op, CacheAppend), need(op, HeadNormRope)
    return {"kv_heads": append.kv_heads, "head_dim": append.head_dim, "rotary_dim": q.rotary_dim}


def _append_default(problem: Problem, target: Target) -> Knobs:
    block = max(1, min(16, 1024 // next_power_of_two(int(problem["head_dim"]))))
    return {"PART_HEADS": 16, "BLOCK_HEADS": block, "num_warps": 1, "num_stages": 1}


def _bind_append(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    append = need(op, CacheAppend)
    q, k = body_of(op, HeadNormRope)
    if k.out != append.k:
        q, k = k, q
    args = (
        tensor_arg(graph, "q", q.x),
        tensor_arg(graph, "k", k.x),
        tensor_arg(graph, "v", append.v),
        vector_arg(graph, "q_norm", q.weight),
        vector_arg(graph, "k_norm", k.weight),
        *row_args(graph, append.position, append.slot),
        *cache_args(graph, append.k_cache, append.v_cache),
        tensor_arg(graph, "out", q.out),
        value_arg("context", S),
    )
    constants = {
        **place_constants(graph, q.x, "Q"),
        "Q_HEAD": q.head_stride,
        **place_constants(graph, k.x, "K"),
        "K_HEAD": k.head_stride,
        **place_constants(graph, append.v, "V"),
        **place_constants(graph, q.out, "OUT"),
        "HEADS": q.heads,
        "KV_HEADS": k.heads,
        **rope_constants(q),
        "BLOCK_HALF": next_power_of_two(q.rotary_dim // 2),
        "PART_HEADS": knobs["PART_HEADS"],
        "BLOCK_HEADS": knobs["BLOCK_HEADS"],
    }
    parts = int(ceil_div(q.heads, knobs["PART_HEADS"])) + 1
    return Binding(args, MappingProxyType(constants), (graph.tensors[q.out].shape[0], parts, 1))


ROTATE_APPEND = Kernel(
    name="rotate_append",
    patterns=("RotateAppend",),
    family=Family.ANY,
    space=MappingProxyType(
        {
            "PART_HEADS": PowerOfTwo(1, 64),
            "BLOCK_HEADS": PowerOfTwo(1, 16),
            "num_warps": PowerOfTwo(1, 8),
            "num_stages": Choice((1,)),
        }
    ),
    default=_append_default,
    problem=_append_problem,
    bind=_bind_append,
    constraints=(rotates_pairs,),
)

ATTENTION = Kernel(
    name="attention",
    patterns=("Attention", "AttentionGate"),
    family=Family.ANY,
    space=MappingProxyType(
        {
            "BLOCK_ROWS": PowerOfTwo(1, 128),
            "TILE": PowerOfTwo(16, 128),
            "num_warps": PowerOfTwo(2, 16),
            "num_stages": Choice((1, 2, 3, 4)),
        }
    ),
    default=_attention_default,
    problem=_attention_problem,
    bind=_bind_attention,
    constraints=(heads_divide, dot_fits, _lines_fit, _tiles_fit),
)

KERNELS = (ROTATE_APPEND, ATTENTION)
