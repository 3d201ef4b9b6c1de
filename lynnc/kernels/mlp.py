"""Feed-forward blocks without routing: gate and up projections with their activation, and the activation alone."""

from __future__ import annotations

from types import MappingProxyType

from lynnc.columnorder import ColumnOrder
from lynnc.ir import Graph, Op
from lynnc.kernels.constraints import registers_fit_block, weights_fit_registers
from lynnc.kernels.kernel import (
    FORMAT_CODE,
    Binding,
    Family,
    Kernel,
    Knobs,
    Problem,
    ceil_div,
    find,
    need,
    next_power_of_two,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import PERSISTENT_SPACE, block_columns, input_args, input_facts, norm_facts, programs_for
from lynnc.kernels.moe import ELEMENTWISE_SPACE, elementwise_default
from lynnc.ops import Linear, RmsNorm, SiluMul
from lynnc.target import Target


def _bind_silu_mul(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    act = need(op, SiluMul)
    out, place = graph.tensors[act.out], placed(graph, act.x)
    size = int(out.shape[-1])
    slots = out.width // size
    args = (tensor_arg(graph, "x", act.x), tensor_arg(graph, "out", act.out))
    constants = {
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "I": size,
        "SLOTS": slots,
        "LANES": out.order is ColumnOrder.LANES,
        "BLOCK": knobs["BLOCK"],
    }
    grid = (out.shape[0] * slots, ceil_div(size, knobs["BLOCK"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


def _silu_mul_problem(graph: Graph, op: Op) -> Problem:
    return {"n": int(graph.tensors[need(op, SiluMul).out].shape[-1])}


def _gate_up_problem(graph: Graph, op: Op) -> Problem:
    weight = graph.weights[need(op, Linear).weight]
    width = graph.tensors[need(op, Linear).out].width
    return {"formats": weight.format.value, "k": weight.columns, "n": width, "norm": int(find(op, RmsNorm) is not None)}


def _bind_gate_up(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, act, norm = need(op, Linear), need(op, SiluMul), find(op, RmsNorm)
    weight = graph.weights[linear.weight]
    is_stored = norm is not None and norm.out in op.writes
    size = graph.tensors[act.out].width
    programs = programs_for(size, knobs)
    args = (
        *input_args(graph, op, linear.x),
        tensor_arg(graph, "normed", norm.out) if norm and is_stored else null_arg("normed", "*bf16"),
        tensor_arg(graph, "act", act.out),
        *weight_args(weight, ("data", "scales", "globals_")),
        value_arg("first_row", linear.first_row),
        value_arg("n", size),
        value_arg("count", graph.tensors[act.out].shape[0]),
        value_arg("programs", programs),
    )
    constants = {
        **input_facts(graph, op, linear.x),
        **norm_facts(op),
        "STORE_NORMED": is_stored,
        "FORMAT": FORMAT_CODE[weight.format],
        "PART_ROWS": part_rows(weight),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(weight, knobs["BLOCK_K"]),
        "BLOCK_ROW": next_power_of_two(weight.columns),
    }
    return Binding(args, MappingProxyType(constants), (programs + is_stored, 1, 1))


def _gate_up_default(problem: Problem, target: Target) -> Knobs:
    """As a projection with a norm, with rows of gate and of up in each tile."""
    wide = int(problem["k"]) > 2048
    sizes = {"BLOCK_N": 4, "BLOCK_K": 4096, "num_warps": 8} if wide else {"BLOCK_N": 4, "BLOCK_K": 2048, "num_warps": 4}
    programs = (264 if wide else 396) if str(problem["formats"]).startswith("nvfp4") else 0
    return {**sizes, "PROGRAMS": programs, "maxnreg": 0, "num_stages": 1}


SILU_MUL = Kernel(
    name="silu_mul",
    patterns=("SiluMul",),
    family=Family.ANY,
    space=ELEMENTWISE_SPACE,
    default=elementwise_default,
    problem=_silu_mul_problem,
    bind=_bind_silu_mul,
)
GATE_UP = Kernel(
    name="gate_up",
    patterns=("GateUp", "NormGateUp"),
    family=Family.DECODE,
    space=PERSISTENT_SPACE,
    default=_gate_up_default,
    problem=_gate_up_problem,
    bind=_bind_gate_up,
    constraints=(registers_fit_block, weights_fit_registers),
)

KERNELS: tuple[Kernel, ...] = (SILU_MUL, GATE_UP)
