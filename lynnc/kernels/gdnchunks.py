"""The gated delta rule of many rows by chunks: what needs no state for all chunks at once, then the scan over them."""

from __future__ import annotations

from types import MappingProxyType

from lynnc.ir import DeltaGates, Graph, Op
from lynnc.kernels.kernel import (
    Binding,
    Choice,
    Family,
    Kernel,
    Knobs,
    PowerOfTwo,
    Problem,
    ceil_div,
    need,
    next_power_of_two,
    place_constants,
    state_arg,
    tensor_arg,
    value_arg,
    vector_arg,
)
from lynnc.promptops import DeltaChunk, DeltaScan
from lynnc.target import Target

LEAST_DIM = 16
"""Lines and columns that a tensor core product has at least."""


def _prepare_problem(graph: Graph, op: Op) -> Problem:
    chunk = need(op, DeltaChunk)
    heads = {"key_heads": chunk.key_heads, "value_heads": chunk.value_heads}
    return {**heads, "key_dim": chunk.key_dim, "chunk": chunk.chunk}


def _scan_problem(graph: Graph, op: Op) -> Problem:
    scan = need(op, DeltaScan)
    heads = {"key_heads": scan.key_heads, "value_heads": scan.value_heads}
    return {**heads, "key_dim": scan.key_dim, "value_dim": scan.value_dim, "chunk": scan.chunk}


def _block_k(key_dim: int) -> int:
    return max(next_power_of_two(key_dim), LEAST_DIM)


def _heads_divide(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    if int(problem["value_heads"]) % int(problem["key_heads"]) == 0:
        return None
    return f"{problem['value_heads']} value heads are no multiple of {problem['key_heads']} key heads"


def _default_scan(problem: Problem, target: Target) -> Knobs:
    """Blocks as narrow as give a large GPU a program for each multiprocessor: 32 heads of 4."""
    block_v = min(max(next_power_of_two(int(problem["value_dim"])), LEAST_DIM), 32)
    return {"BLOCK_V": block_v, "TURNED": 0, "LOW_PARTS": 0, "num_warps": 4, "num_stages": 3}


def _bind_prepare(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    gates, chunk = need(op, DeltaGates), need(op, DeltaChunk)
    rows = graph.tensors[chunk.scales].shape[0]
    args = (
        tensor_arg(graph, "qkv", chunk.qkv),
        tensor_arg(graph, "b", gates.b),
        tensor_arg(graph, "a", gates.a),
        vector_arg(graph, "a_log", gates.a_log),
        vector_arg(graph, "dt_bias", gates.dt_bias),
        *(tensor_arg(graph, name, getattr(chunk, name)) for name in ("position", "slot")),
        *(tensor_arg(graph, name, getattr(chunk, name)) for name in ("inverse", "inverse_rest", "scores", "scales")),
        value_arg("rows", rows),
    )
    constants = {
        **place_constants(graph, chunk.qkv, "QKV"),
        **place_constants(graph, gates.b, "B"),
        **place_constants(graph, gates.a, "A"),
        "KEY_HEADS": chunk.key_heads,
        "VALUE_HEADS": chunk.value_heads,
        "KEY_DIM": chunk.key_dim,
        "LEAST_DECAY": chunk.least_decay,
        "CHUNK": chunk.chunk,
        "BLOCK_K": _block_k(chunk.key_dim),
        "SMALL": knobs["SMALL"],
    }
    return Binding(args, MappingProxyType(constants), (chunk.value_heads, ceil_div(rows, chunk.chunk), 1))


def _bind_scan(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    scan = need(op, DeltaScan)
    args = (
        tensor_arg(graph, "qkv", scan.qkv),
        *(tensor_arg(graph, name, getattr(scan, name)) for name in ("inverse", "inverse_rest", "scores", "scales")),
        *(tensor_arg(graph, name, getattr(scan, name)) for name in ("position", "slot")),
        state_arg(graph, "state", scan.state),
        tensor_arg(graph, "out", scan.out),
        value_arg("rows", graph.tensors[scan.out].shape[0]),
    )
    constants = {
        **place_constants(graph, scan.qkv, "QKV"),
        "KEY_HEADS": scan.key_heads,
        "VALUE_HEADS": scan.value_heads,
        "KEY_DIM": scan.key_dim,
        "VALUE_DIM": scan.value_dim,
        "CHUNK": scan.chunk,
        "BLOCK_K": _block_k(scan.key_dim),
        "BLOCK_V": knobs["BLOCK_V"],
        "TURNED": bool(knobs["TURNED"]),
        "LOW_PARTS": bool(knobs["LOW_PARTS"]),
    }
    blocks = ceil_div(scan.value_dim, knobs["BLOCK_V"])
    return Binding(args, MappingProxyType(constants), (scan.value_heads, blocks, 1))


DELTA_PREPARE = Kernel(
    name="delta_prepare",
    patterns=("DeltaPrepare",),
    family=Family.PREFILL,
    space=MappingProxyType({"SMALL": PowerOfTwo(4, 16), "num_warps": PowerOfTwo(4, 8), "num_stages": Choice((1,))}),
    default=lambda problem, target: {"SMALL": 16, "num_warps": 4, "num_stages": 1},
    problem=_prepare_problem,
    bind=_bind_prepare,
    constraints=(_heads_divide,),
)
DELTA_SCAN = Kernel(
    name="delta_scan",
    patterns=("DeltaScan",),
    family=Family.PREFILL,
    space=MappingProxyType(
        {
            "BLOCK_V": PowerOfTwo(16, 128),
            "TURNED": Choice((0, 1)),
            "LOW_PARTS": Choice((0, 1)),
            "num_warps": PowerOfTwo(2, 8),
            "num_stages": Choice((1, 2, 3)),
        }
    ),
    default=_default_scan,
    problem=_scan_problem,
    bind=_bind_scan,
    constraints=(_heads_divide,),
)

KERNELS: tuple[Kernel, ...] = (DELTA_PREPARE, DELTA_SCAN)
