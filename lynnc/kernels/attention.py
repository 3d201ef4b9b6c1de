"""Attention in decode: the fused step over runs of the row's own context, and what joins the runs' results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op
from lynnc.kernels import attention_ops, attention_prefill
from lynnc.kernels.attention_ops import (
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
    Knob,
    Knobs,
    PowerOfTwo,
    Problem,
    body_of,
    ceil_div,
    need,
    next_power_of_two,
    place_constants,
    tensor_arg,
    value_arg,
    vector_arg,
)
from lynnc.mixerops import AttentionCombine, AttentionPartial, CacheAppend, HeadNormRope, OutputGate
from lynnc.target import Target
from lynnc.tensors import S

LEAST_GROUP = 8
"""Columns of a tensor-core product: heads that share keys are filled up to as many."""


def _partial_problem(graph: Graph, op: Op) -> Problem:
    partial = need(op, AttentionPartial)
    return {
        "heads": partial.heads,
        "kv_heads": partial.kv_heads,
        "head_dim": partial.head_dim,
        "splits": partial.splits,
        "tile": partial.tile,
    }


def _step_problem(graph: Graph, op: Op) -> Problem:
    return {**_partial_problem(graph, op), "rotary_dim": need(op, HeadNormRope).rotary_dim}


def _combine_problem(graph: Graph, op: Op) -> Problem:
    combine = need(op, AttentionCombine)
    return {"heads": combine.heads, "head_dim": combine.head_dim, "splits": combine.splits}


def _partial_default(problem: Problem, target: Target) -> Knobs:
    return {"num_warps": 4 if int(problem["head_dim"]) > 64 else 2, "num_stages": 1}


def _step_default(problem: Problem, target: Target) -> Knobs:
    """Four warps: two such programs share a multiprocessor. Eight where a wide head would spill."""
    is_wide = int(problem["head_dim"]) > 128 and not target.has_pdl
    return {"BLOCK_T": 32, "STAGES": 3, "num_warps": 8 if is_wide else 4, "num_stages": 1}


def _combine_default(problem: Problem, target: Target) -> Knobs:
    return {"BLOCK_D": 16, "BLOCK_SPLITS": 64, "num_warps": 1, "num_stages": 1}


def _tile_is_power_of_two(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    tile = int(problem["tile"])
    if tile >= 16 and tile == next_power_of_two(tile):
        return None
    return f"a tile of {tile} positions is no power of two of at least 16"


def _partial_constants(op: AttentionPartial) -> Mapping[str, int | float]:
    group = op.heads // op.kv_heads
    return {
        "KV_HEADS": op.kv_heads,
        "GROUP": group,
        "HEAD_DIM": op.head_dim,
        "SCALE": op.scale,
        "SPLITS": op.splits,
        "TILE": op.tile,
        "BLOCK_GROUP": max(LEAST_GROUP, next_power_of_two(group)),
        "BLOCK_D": next_power_of_two(op.head_dim),
    }


def _partial_args(graph: Graph, op: AttentionPartial) -> tuple[Arg, ...]:
    return (
        *row_args(graph, op.position, op.slot),
        *cache_args(graph, op.k_cache, op.v_cache),
        tensor_arg(graph, "partial", op.partial),
        value_arg("context", S),
    )


def _bind_partial(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    partial = need(op, AttentionPartial)
    args = (tensor_arg(graph, "q", partial.q), *_partial_args(graph, partial))
    constants = {**place_constants(graph, partial.q, "Q"), **_partial_constants(partial)}
    grid = (graph.tensors[partial.partial].shape[0], partial.kv_heads, partial.splits)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_step(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    q, k = need(op, HeadNormRope), body_of(op, HeadNormRope)[-1]
    append, partial = need(op, CacheAppend), need(op, AttentionPartial)
    if q.out != partial.q:
        q, k = k, q
    args = (
        tensor_arg(graph, "q", q.x),
        tensor_arg(graph, "k", k.x),
        tensor_arg(graph, "v", append.v),
        vector_arg(graph, "q_norm", q.weight),
        vector_arg(graph, "k_norm", k.weight),
        *_partial_args(graph, partial),
    )
    constants = {
        **place_constants(graph, q.x, "Q"),
        "Q_HEAD": q.head_stride,
        **place_constants(graph, k.x, "K"),
        "K_HEAD": k.head_stride,
        **place_constants(graph, append.v, "V"),
        **rope_constants(q),
        **_partial_constants(partial),
    }
    constants |= {"BLOCK_T": knobs["BLOCK_T"], "STAGES": knobs["STAGES"]}
    grid = (graph.tensors[partial.partial].shape[0], partial.kv_heads, partial.splits)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_combine(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    combine = need(op, AttentionCombine)
    args = (tensor_arg(graph, "partial", combine.partial), tensor_arg(graph, "position", combine.position))
    out = tensor_arg(graph, "out", combine.out)
    constants = _combine_constants(graph, combine, combine.out, knobs)
    return Binding((*args, out), MappingProxyType(constants), _combine_grid(graph, combine, constants["BLOCK_D"]))


def _bind_combine_gate(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    combine, gate = need(op, AttentionCombine), need(op, OutputGate)
    args = (
        tensor_arg(graph, "partial", combine.partial),
        tensor_arg(graph, "position", combine.position),
        tensor_arg(graph, "gate", gate.gate),
        tensor_arg(graph, "out", gate.out),
    )
    shared = _combine_constants(graph, combine, gate.out, knobs)
    constants = {**shared, **gate_constants(graph, gate)}
    return Binding(args, MappingProxyType(constants), _combine_grid(graph, combine, shared["BLOCK_D"]))


def _combine_constants(graph: Graph, combine: AttentionCombine, out: str, knobs: Knobs) -> Mapping[str, int]:
    return {
        "HEADS": combine.heads,
        "HEAD_DIM": combine.head_dim,
        "SPLITS": combine.splits,
        "TILE": combine.tile,
        **place_constants(graph, out, "OUT"),
        "BLOCK_SPLITS": min(knobs["BLOCK_SPLITS"], next_power_of_two(combine.splits)),
        "BLOCK_D": min(knobs["BLOCK_D"], next_power_of_two(combine.head_dim)),
    }


def _combine_grid(graph: Graph, combine: AttentionCombine, block: int) -> tuple[int, int, int]:
    rows = int(graph.tensors[combine.partial].shape[0])
    return rows, combine.heads, int(ceil_div(combine.head_dim, block))


PARTIAL_SPACE: Mapping[str, Knob] = MappingProxyType({"num_warps": PowerOfTwo(2, 8), "num_stages": Choice((1, 2, 3))})
# STAGES and not ``num_stages``: it is for the loop over blocks alone.
STEP_SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_T": PowerOfTwo(16, 128),
        "STAGES": Choice((1, 2, 3, 4, 5, 6)),
        "num_warps": PowerOfTwo(2, 8),
        "num_stages": Choice((1,)),
    }
)
COMBINE_SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_D": PowerOfTwo(16, 256),
        "BLOCK_SPLITS": PowerOfTwo(8, 256),
        "num_warps": PowerOfTwo(1, 8),
        "num_stages": Choice((1,)),
    }
)

ATTENTION_PARTIAL = Kernel(
    name="attention_partial",
    patterns=("AttentionPartial",),
    family=Family.DECODE,
    space=PARTIAL_SPACE,
    default=_partial_default,
    problem=_partial_problem,
    bind=_bind_partial,
    constraints=(heads_divide, dot_fits, _tile_is_power_of_two),
)

ATTENTION_STEP = Kernel(
    name="attention_step",
    patterns=("AttentionStep",),
    family=Family.DECODE,
    space=STEP_SPACE,
    default=_step_default,
    problem=_step_problem,
    bind=_bind_step,
    constraints=(heads_divide, rotates_pairs, dot_fits, _tile_is_power_of_two),
)

ATTENTION_COMBINE = Kernel(
    name="attention_combine",
    patterns=("AttentionCombine",),
    family=Family.ANY,
    space=COMBINE_SPACE,
    default=_combine_default,
    problem=_combine_problem,
    bind=_bind_combine,
)

COMBINE_GATE = Kernel(
    name="combine_gate",
    patterns=("CombineGate",),
    family=Family.ANY,
    space=COMBINE_SPACE,
    default=_combine_default,
    problem=_combine_problem,
    bind=_bind_combine_gate,
)

KERNELS = (
    *attention_ops.KERNELS,
    *attention_prefill.KERNELS,
    ATTENTION_PARTIAL,
    ATTENTION_STEP,
    ATTENTION_COMBINE,
    COMBINE_GATE,
)
