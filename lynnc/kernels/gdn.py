"""Gated DeltaNet: each of its ops alone, for prefill and unfused decode, and the fused step of at most 8 rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.columnorder import ColumnOrder
from lynnc.ir import Graph, Op
from lynnc.kernels.kernel import (
    Arg,
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
from lynnc.mixerops import CausalConv, DeltaGates, GatedDelta, GatedNorm
from lynnc.target import Target

MOST_ROWS = 8
"""Rows of the largest decode program."""
MOST_STATE_REGISTERS = 128
"""Registers of a thread, of 255, that the state may fill."""
STATE_REGISTERS = 64
"""Those that it fills by default: fewer mean more threads that do what each does once, such as addresses and gates."""


def _row_args(graph: Graph, op: CausalConv) -> tuple[Arg, ...]:
    return tuple(tensor_arg(graph, name, getattr(op, name)) for name in ("position", "slot", "start"))


def _head_constants(op: GatedDelta) -> Mapping[str, int]:
    return {
        "KEY_HEADS": op.key_heads,
        "VALUE_HEADS": op.value_heads,
        "KEY_DIM": op.key_dim,
        "VALUE_DIM": op.value_dim,
        "BLOCK_K": next_power_of_two(op.key_dim),
    }


def _state_fits(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A program keeps the state of its value columns, all of a head's in the fused step, in registers."""
    columns = knobs.get("BLOCK_V", next_power_of_two(int(problem["value_dim"])))
    registers = next_power_of_two(int(problem["key_dim"])) * columns // (32 * knobs["num_warps"])
    if registers <= MOST_STATE_REGISTERS:
        return None
    size = f"{problem['key_dim']} x {columns}"
    return f"a state of {size} takes {registers} registers a thread, more than {MOST_STATE_REGISTERS}: use more warps"


def _ring_outlasts_step(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A program reads old inputs while another stores new ones: they must never share an entry of the ring."""
    needed = MOST_ROWS + int(problem["width"]) - 1
    if int(problem["ring"]) >= needed:
        return None
    return f"a ring of {problem['ring']} positions is shorter than the {needed} that a step of {MOST_ROWS} rows touches"


def _ring_holds_inputs(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    if int(problem["ring"]) >= int(problem["width"]) >= 2:
        return None
    return f"a convolution of width {problem['width']} needs a ring that long, not {problem['ring']}, and a width of 2"


def _heads_divide(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    if int(problem["value_heads"]) % int(problem["key_heads"]) == 0:
        return None
    return f"{problem['value_heads']} value heads are no multiple of {problem['key_heads']} key heads"


def _default_delta(problem: Problem, target: Target) -> Knobs:
    block_v = min(32, next_power_of_two(int(problem["value_dim"])))
    return {"BLOCK_V": max(block_v, 8), "num_warps": 4, "num_stages": 1}


def _default_step(problem: Problem, target: Target) -> Knobs:
    """As many warps as hold the state in ``STATE_REGISTERS`` of each thread."""
    state = next_power_of_two(int(problem["key_dim"])) * next_power_of_two(int(problem["value_dim"]))
    return {"STATE_FIRST": 0, "num_warps": min(max(state // (32 * STATE_REGISTERS), 4), 16), "num_stages": 1}


def _conv_problem(graph: Graph, op: Op) -> Problem:
    conv = need(op, CausalConv)
    return {"channels": graph.tensors[conv.x].width, "width": conv.width, "ring": conv.ring}


def _gates_problem(graph: Graph, op: Op) -> Problem:
    return {"value_heads": graph.tensors[need(op, DeltaGates).beta].width}


def _delta_problem(graph: Graph, op: Op) -> Problem:
    delta = need(op, GatedDelta)
    return {
        "key_heads": delta.key_heads,
        "value_heads": delta.value_heads,
        "key_dim": delta.key_dim,
        "value_dim": delta.value_dim,
    }


def _norm_problem(graph: Graph, op: Op) -> Problem:
    heads, head_dim = graph.tensors[need(op, GatedNorm).x].shape[1:]
    return {"heads": int(heads), "head_dim": int(head_dim)}


def _step_problem(graph: Graph, op: Op) -> Problem:
    return {**_conv_problem(graph, op), **_delta_problem(graph, op)}


def _bind_conv(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    conv = need(op, CausalConv)
    rows, channels = graph.tensors[conv.out].shape[0], graph.tensors[conv.out].width
    args = (
        tensor_arg(graph, "x", conv.x),
        *_row_args(graph, conv),
        vector_arg(graph, "weight", conv.weight),
        state_arg(graph, "state", conv.state),
        tensor_arg(graph, "out", conv.out),
        value_arg("rows", rows),
    )
    constants = {
        "CHANNELS": channels,
        **place_constants(graph, conv.x, "X"),
        "WIDTH": conv.width,
        "RING": conv.ring,
        "BLOCK_ROWS": knobs["BLOCK_ROWS"],
        "BLOCK_C": knobs["BLOCK_C"],
        "BLOCK_RING": next_power_of_two(conv.ring),
        "BLOCK_BACK": next_power_of_two(conv.width - 1),
    }
    grid = (ceil_div(rows, knobs["BLOCK_ROWS"]), ceil_div(channels, knobs["BLOCK_C"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_gates(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    gates = need(op, DeltaGates)
    rows, heads = graph.tensors[gates.beta].shape[0], graph.tensors[gates.beta].width
    args = (
        tensor_arg(graph, "b", gates.b),
        tensor_arg(graph, "a", gates.a),
        vector_arg(graph, "a_log", gates.a_log),
        vector_arg(graph, "dt_bias", gates.dt_bias),
        tensor_arg(graph, "beta", gates.beta),
        tensor_arg(graph, "g", gates.g),
    )
    constants = {
        "HEADS": heads,
        **place_constants(graph, gates.b, "B"),
        **place_constants(graph, gates.a, "A"),
        "BLOCK_HEADS": next_power_of_two(heads),
    }
    return Binding(args, MappingProxyType(constants), (rows, 1, 1))


def _bind_delta(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    delta = need(op, GatedDelta)
    args = (
        tensor_arg(graph, "qkv", delta.qkv),
        tensor_arg(graph, "beta", delta.beta),
        tensor_arg(graph, "g", delta.g),
        tensor_arg(graph, "position", delta.position),
        tensor_arg(graph, "slot", delta.slot),
        state_arg(graph, "state", delta.state),
        tensor_arg(graph, "out", delta.out),
        value_arg("rows", graph.tensors[delta.out].shape[0]),
    )
    constants = {**place_constants(graph, delta.qkv, "QKV"), **_head_constants(delta), "BLOCK_V": knobs["BLOCK_V"]}
    blocks = ceil_div(delta.value_dim, knobs["BLOCK_V"])
    return Binding(args, MappingProxyType(constants), (delta.value_heads, blocks, 1))


def _bind_norm(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    norm = need(op, GatedNorm)
    rows, heads, head_dim = graph.tensors[norm.x].shape
    args = (
        tensor_arg(graph, "x", norm.x),
        tensor_arg(graph, "z", norm.z),
        vector_arg(graph, "weight", norm.weight),
        tensor_arg(graph, "out", norm.out),
    )
    constants = {
        "HEADS": int(heads),
        "HEAD_DIM": int(head_dim),
        **place_constants(graph, norm.x, "X"),
        **place_constants(graph, norm.z, "Z"),
        "EPS": norm.eps,
        "LANES": graph.tensors[norm.out].order is ColumnOrder.LANES,
        "BLOCK_HEADS": knobs["BLOCK_HEADS"],
        "BLOCK_D": next_power_of_two(int(head_dim)),
    }
    return Binding(args, MappingProxyType(constants), (rows, ceil_div(heads, knobs["BLOCK_HEADS"]), 1))


def _bind_step(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    conv, gates = need(op, CausalConv), need(op, DeltaGates)
    delta, norm = need(op, GatedDelta), need(op, GatedNorm)
    block_v = next_power_of_two(delta.value_dim)
    args = (
        tensor_arg(graph, "qkv", conv.x),
        *_row_args(graph, conv),
        vector_arg(graph, "conv_weight", conv.weight),
        state_arg(graph, "conv_state", conv.state),
        tensor_arg(graph, "b", gates.b),
        tensor_arg(graph, "a", gates.a),
        vector_arg(graph, "a_log", gates.a_log),
        vector_arg(graph, "dt_bias", gates.dt_bias),
        tensor_arg(graph, "z", norm.z),
        vector_arg(graph, "norm", norm.weight),
        state_arg(graph, "state", delta.state),
        tensor_arg(graph, "out", norm.out),
        value_arg("rows", graph.tensors[norm.out].shape[0]),
    )
    constants = {
        **place_constants(graph, conv.x, "QKV"),
        **place_constants(graph, gates.b, "B"),
        **place_constants(graph, gates.a, "A"),
        **place_constants(graph, norm.z, "Z"),
        "WIDTH": conv.width,
        "RING": conv.ring,
        "EPS": norm.eps,
        **_head_constants(delta),
        "BLOCK_V": block_v,
        "LINES": max(4 * 32 * knobs["num_warps"] // block_v, 1),
        "STATE_FIRST": bool(knobs["STATE_FIRST"]),
    }
    return Binding(args, MappingProxyType(constants), (delta.value_heads, 1, 1))


ONE_STAGE = Choice((1,))
"""Loops over rows carry the state from row to row: there is nothing to pipeline."""

CAUSAL_CONV = Kernel(
    name="causal_conv",
    patterns=("CausalConv",),
    family=Family.ANY,
    space=MappingProxyType(
        {
            "BLOCK_ROWS": PowerOfTwo(1, 64),
            "BLOCK_C": PowerOfTwo(64, 2048),
            "num_warps": PowerOfTwo(1, 8),
            "num_stages": ONE_STAGE,
        }
    ),
    default=lambda problem, target: {"BLOCK_ROWS": 4, "BLOCK_C": 256, "num_warps": 4, "num_stages": 1},
    problem=_conv_problem,
    bind=_bind_conv,
    constraints=(_ring_holds_inputs,),
)
DELTA_GATES = Kernel(
    name="delta_gates",
    patterns=("DeltaGates",),
    family=Family.ANY,
    space=MappingProxyType({"num_warps": PowerOfTwo(1, 4), "num_stages": ONE_STAGE}),
    default=lambda problem, target: {"num_warps": 1, "num_stages": 1},
    problem=_gates_problem,
    bind=_bind_gates,
)
GATED_DELTA = Kernel(
    name="gated_delta",
    patterns=("GatedDelta",),
    family=Family.ANY,
    space=MappingProxyType({"BLOCK_V": PowerOfTwo(8, 256), "num_warps": PowerOfTwo(1, 16), "num_stages": ONE_STAGE}),
    default=_default_delta,
    problem=_delta_problem,
    bind=_bind_delta,
    constraints=(_heads_divide, _state_fits),
)
GATED_NORM = Kernel(
    name="gated_norm",
    patterns=("GatedNorm",),
    family=Family.ANY,
    space=MappingProxyType({"BLOCK_HEADS": PowerOfTwo(1, 64), "num_warps": PowerOfTwo(1, 8), "num_stages": ONE_STAGE}),
    default=lambda problem, target: {"BLOCK_HEADS": 8, "num_warps": 4, "num_stages": 1},
    problem=_norm_problem,
    bind=_bind_norm,
)
GDN_STEP = Kernel(
    name="gdn_step",
    patterns=("GdnStep",),
    family=Family.DECODE,
    space=MappingProxyType({"STATE_FIRST": Choice((0, 1)), "num_warps": PowerOfTwo(1, 16), "num_stages": ONE_STAGE}),
    default=_default_step,
    problem=_step_problem,
    bind=_bind_step,
    constraints=(_heads_divide, _ring_outlasts_step, _state_fits),
)

KERNELS: tuple[Kernel, ...] = (CAUSAL_CONV, DELTA_GATES, GATED_DELTA, GATED_NORM, GDN_STEP)
