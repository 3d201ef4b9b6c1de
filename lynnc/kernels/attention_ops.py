"""Attention's single ops beside attention itself: norm and rotation of heads, cache append, output gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op
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
    need,
    next_power_of_two,
    place_constants,
    placed,
    state_arg,
    tensor_arg,
    value_arg,
    vector_arg,
)
from lynnc.mixerops import CacheAppend, HeadNormRope, OutputGate
from lynnc.target import Target
from lynnc.tensors import S

LEAST_DOT = 16
"""Lines that a tensor-core product has at least."""


def row_args(graph: Graph, position: str, slot: str) -> tuple[Arg, Arg]:
    """Pointers to each row's position and slot."""
    return tensor_arg(graph, "position", position), tensor_arg(graph, "slot", slot)


def cache_args(graph: Graph, k_cache: str, v_cache: str) -> tuple[Arg, Arg]:
    """Pointers to the key and value cache, [slot, kv_heads, S, head_dim]."""
    return state_arg(graph, "k_cache", k_cache), state_arg(graph, "v_cache", v_cache)


def rope_constants(op: HeadNormRope) -> Mapping[str, int | float]:
    """Constants of a head's norm and rotation."""
    return {
        "HEAD_DIM": op.head_dim,
        "HALF": op.rotary_dim // 2,
        "THETA": op.theta,
        "EPS": op.eps,
        "SHIFT": int(op.shifted),
        "BLOCK_D": next_power_of_two(op.head_dim),
    }


def rotates_pairs(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Why the rotated part of a head is none."""
    rotary, head_dim = int(problem["rotary_dim"]), int(problem["head_dim"])
    if rotary % 2 == 0 and 0 < rotary <= head_dim:
        return None
    return f"{rotary} rotated dimensions are not pairs among the {head_dim} of a head"


def heads_divide(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Why query heads cannot share key/value heads."""
    if int(problem["heads"]) % int(problem["kv_heads"]) == 0:
        return None
    return f"{problem['heads']} query heads are no multiple of {problem['kv_heads']} key/value heads"


def dot_fits(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Why a head is too short for a tensor-core product."""
    if int(problem["head_dim"]) >= LEAST_DOT:
        return None
    return f"heads of {problem['head_dim']} dimensions are shorter than the {LEAST_DOT} of a tensor-core product"


def _rope_problem(graph: Graph, op: Op) -> Problem:
    rope = need(op, HeadNormRope)
    return {"heads": rope.heads, "head_dim": rope.head_dim, "rotary_dim": rope.rotary_dim}


def _append_problem(graph: Graph, op: Op) -> Problem:
    append = need(op, CacheAppend)
    return {"kv_heads": append.kv_heads, "head_dim": append.head_dim}


def _gate_problem(graph: Graph, op: Op) -> Problem:
    gate = need(op, OutputGate)
    return {"heads": gate.heads, "head_dim": gate.head_dim}


def _one_warp(problem: Problem, target: Target) -> Knobs:
    return {"num_warps": 1, "num_stages": 1}


def _bind_rope(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    rope = need(op, HeadNormRope)
    args = (
        tensor_arg(graph, "x", rope.x),
        vector_arg(graph, "norm", rope.weight),
        tensor_arg(graph, "position", rope.position),
        tensor_arg(graph, "out", rope.out),
    )
    constants = {
        **place_constants(graph, rope.x, "X"),
        "HEAD_STRIDE": rope.head_stride,
        **place_constants(graph, rope.out, "OUT"),
        **rope_constants(rope),
        "BLOCK_HALF": next_power_of_two(rope.rotary_dim // 2),
    }
    return Binding(args, MappingProxyType(constants), (graph.tensors[rope.out].shape[0], rope.heads, 1))


def _bind_append(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    append = need(op, CacheAppend)
    args = (
        tensor_arg(graph, "k", append.k),
        tensor_arg(graph, "v", append.v),
        *row_args(graph, append.position, append.slot),
        *cache_args(graph, append.k_cache, append.v_cache),
        value_arg("context", S),
    )
    constants = {
        **place_constants(graph, append.k, "K"),
        **place_constants(graph, append.v, "V"),
        "KV_HEADS": append.kv_heads,
        "HEAD_DIM": append.head_dim,
        "BLOCK_D": next_power_of_two(append.head_dim),
    }
    return Binding(args, MappingProxyType(constants), (graph.tensors[append.k].shape[0], append.kv_heads, 1))


def _bind_gate(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    gate = need(op, OutputGate)
    args = (
        tensor_arg(graph, "x", gate.x),
        tensor_arg(graph, "gate", gate.gate),
        tensor_arg(graph, "out", gate.out),
    )
    constants = {
        **place_constants(graph, gate.x, "X"),
        **gate_constants(graph, gate),
        **place_constants(graph, gate.out, "OUT"),
        "HEAD_DIM": gate.head_dim,
        "BLOCK_D": next_power_of_two(gate.head_dim),
    }
    return Binding(args, MappingProxyType(constants), (graph.tensors[gate.out].shape[0], gate.heads, 1))


def gate_constants(graph: Graph, gate: OutputGate) -> Mapping[str, int]:
    """Where the gate of the first head stands, and how far apart the heads' gates are."""
    place = placed(graph, gate.gate)
    return {"GATE_STRIDE": place.stride, "GATE_OFFSET": place.offset + gate.offset, "GATE_HEAD": gate.stride}


SIMPLE_SPACE: Mapping[str, Knob] = MappingProxyType({"num_warps": PowerOfTwo(1, 8), "num_stages": Choice((1,))})

HEAD_NORM_ROPE = Kernel(
    name="head_norm_rope",
    patterns=("HeadNormRope",),
    family=Family.ANY,
    space=SIMPLE_SPACE,
    default=_one_warp,
    problem=_rope_problem,
    bind=_bind_rope,
    constraints=(rotates_pairs,),
)

CACHE_APPEND = Kernel(
    name="cache_append",
    patterns=("CacheAppend",),
    family=Family.ANY,
    space=SIMPLE_SPACE,
    default=_one_warp,
    problem=_append_problem,
    bind=_bind_append,
)

OUTPUT_GATE = Kernel(
    name="output_gate",
    patterns=("OutputGate",),
    family=Family.ANY,
    space=SIMPLE_SPACE,
    default=_one_warp,
    problem=_gate_problem,
    bind=_bind_gate,
)

KERNELS = (HEAD_NORM_ROPE, CACHE_APPEND, OUTPUT_GATE)
