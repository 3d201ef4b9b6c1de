"""The gated delta rule of many rows by chunks: what needs no state for all chunks at once, then the scan over them."""

from __future__ import annotations

from types import MappingProxyType

from lynnc.ir import Graph, Op
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
from lynnc.mixerops import DeltaGates
from lynnc.promptops import DeltaChunk, DeltaScan
from lynnc.target import Target

LEAST_DIM = 16
"""Lines and columns that a tensor core product has at least."""
WGMMA_WARPS, WGMMA_ROWS = 4, 64
"""Warps that issue a Hopper product together; fewer use the older products."""


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


def _scan_fits(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """The chunks in flight, and the state in two BF16 parts.

    A chunk has tiles of q and k [CHUNK, BLOCK_K], three squares [CHUNK, CHUNK] and, if it is fetched ahead, values
    [CHUNK, BLOCK_V] and two scales a row. Where products read them from shared memory, each stage holds its tiles;
    elsewhere they pass to registers and one chunk fewer is held. Triton 3.9 takes exactly this on sm_90 with four
    warps and keys of 64 or more, and on others this or up to 32 KiB less (1 KiB more with keys of 16).
    """
    chunk, block_k, block_v = int(problem["chunk"]), _block_k(int(problem["key_dim"])), knobs["BLOCK_V"]
    ahead = knobs["num_stages"] - 1
    reads_shared = target.has_tcgen05 or (target.has_wgmma and knobs["num_warps"] >= WGMMA_WARPS)
    held = ahead + 1 if reads_shared else max(ahead, 1)
    tiles = 2 * chunk * (held * (2 * block_k + 3 * chunk) + ahead * block_v) + ahead * 8 * chunk
    needed = tiles + 4 * block_k * block_v
    if needed > target.shared_memory_limit:
        return f"chunks in flight of {needed:,} bytes exceed the {target.shared_memory_limit:,} of shared memory"
    return None


def _fetches_ahead_of_wgmma(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Chunks of 64 rows that are not fetched ahead are wrong on an H200 with four warps and read illegal addresses with
    eight, compiled by Triton 3.6; chunks of 16 rows, which wgmma does not take, are right."""
    is_group = target.has_wgmma and knobs["num_warps"] >= WGMMA_WARPS and int(problem["chunk"]) >= WGMMA_ROWS
    if is_group and knobs["num_stages"] == 1:
        return f"wgmma needs chunks of {problem['chunk']} rows fetched ahead: two stages or more"
    return None


SCAN_RULES = (_fetches_ahead_of_wgmma, _scan_fits)


def _default_scan(problem: Problem, target: Target) -> Knobs:
    """Blocks as narrow as give a large GPU a program for each multiprocessor, 32 heads of 4; the most stages that fit.

    On an H200, 2,048 rows of these heads take 97 us.
    """
    widest = min(max(next_power_of_two(int(problem["value_dim"])), LEAST_DIM), 32)
    choices = [
        {"BLOCK_V": block_v, "num_warps": 4, "num_stages": stages}
        for block_v in (widest, LEAST_DIM)
        for stages in (3, 2, 1)
    ]
    return next(
        (knobs for knobs in choices if not any(rule(problem, knobs, target) for rule in SCAN_RULES)), choices[-1]
    )


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
            "num_warps": PowerOfTwo(2, 8),
            "num_stages": Choice((1, 2, 3)),
        }
    ),
    default=_default_scan,
    problem=_scan_problem,
    bind=_bind_scan,
    constraints=(_heads_divide, *SCAN_RULES),
)

KERNELS: tuple[Kernel, ...] = (DELTA_PREPARE, DELTA_SCAN)
