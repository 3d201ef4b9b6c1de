"""Mixture of experts, op by op: routing, projections of the chosen experts, weighted sum. ``experts.py`` fuses them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op
from lynnc.kernels.constraints import weights_fit_registers
from lynnc.kernels.kernel import (
    FORMAT_CODE,
    Arg,
    Binding,
    Choice,
    Family,
    Kernel,
    Knob,
    Knobs,
    PowerOfTwo,
    Problem,
    ceil_div,
    find,
    need,
    next_power_of_two,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import block_columns
from lynnc.ops import Combine, ExpertLinear, Linear, SharedAdd, TopK
from lynnc.target import Target
from lynnc.tensors import DType, Weight

Constants = Mapping[str, int | float | bool]

PROJECTION_SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_N": PowerOfTwo(1, 256),
        "BLOCK_K": PowerOfTwo(512, 8192),
        "num_warps": PowerOfTwo(1, 16),
        "num_stages": Choice((1, 2, 3)),
    }
)
ELEMENTWISE_SPACE: Mapping[str, Knob] = MappingProxyType(
    {"BLOCK": PowerOfTwo(128, 4096), "num_warps": PowerOfTwo(1, 8), "num_stages": Choice((1,))}
)
TOP_K_SPACE: Mapping[str, Knob] = MappingProxyType({"num_warps": PowerOfTwo(1, 8), "num_stages": Choice((1,))})


def largest_experts(graph: Graph, experts: int) -> int:
    """Experts of the layer that has most: a constant of the model, so that layers which differ share one kernel."""
    counts = (weight.experts for weight in graph.weights.values() if weight.tensor_class == "experts")
    return max([experts, *counts])


def route_constants(graph: Graph, op: TopK) -> Constants:
    """Sizes for ``routing.py.jinja``: slots and experts, and the powers of two that hold them."""
    slots = next_power_of_two(op.k)
    block = max(16, slots, next_power_of_two(largest_experts(graph, op.experts)))
    sizes = {"TOP_K": op.k, "SLOTS": slots, "BLOCK_E": block, "NORMALIZE": op.normalize}
    return MappingProxyType(sizes)


def route_args(graph: Graph, op: TopK) -> tuple[Arg, ...]:
    """Number of experts and place of the logits, which lie beside the shared gate: both differ from layer to layer."""
    place = placed(graph, op.logits)
    return (
        value_arg("experts", op.experts),
        value_arg("logits_offset", place.offset),
        value_arg("logits_stride", place.stride),
    )


def matrix_constants(weight: Weight) -> Constants:
    """How the experts of a weight are stored: format, rows that share a global scale and global scales an expert."""
    facts = {
        "FORMAT": FORMAT_CODE[weight.format],
        "PART_ROWS": part_rows(weight),
        "GLOBALS": weight.rows // weight.part_rows,
    }
    return MappingProxyType(facts)


def projection_problem(graph: Graph, op: Op) -> Problem:
    """Formats and sizes of the projections of a launch, the routed one first; never how many experts a layer has."""
    linear, shared = need(op, ExpertLinear), find(op, Linear)
    weight = graph.weights[linear.weight]
    weights = [weight, graph.weights[shared.weight]] if shared else [weight]
    return {
        "formats": "+".join(weight.format for weight in weights),
        "k": weight.columns,
        "n": weight.rows,
        "parts": len(weight.parts),
        "slots": int(graph.tensors[linear.ids].shape[1]),
    }


def _top_k_problem(graph: Graph, op: Op) -> Problem:
    top_k = need(op, TopK)
    return {"experts": largest_experts(graph, top_k.experts), "k": top_k.k}


def _bind_top_k(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    top_k = need(op, TopK)
    args = (
        tensor_arg(graph, "logits", top_k.logits),
        tensor_arg(graph, "ids", top_k.ids),
        tensor_arg(graph, "scores", top_k.scores),
        *route_args(graph, top_k),
    )
    return Binding(args, route_constants(graph, top_k), (graph.tensors[top_k.ids].shape[0], 1, 1))


def _bind_expert_linear(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear = need(op, ExpertLinear)
    weight, x, place = graph.weights[linear.weight], graph.tensors[linear.x], placed(graph, linear.x)
    slots = int(graph.tensors[linear.ids].shape[1])
    args = (
        tensor_arg(graph, "x_words", linear.x, "*i64"),
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "ids", linear.ids),
        tensor_arg(graph, "out", linear.out),
        *weight_args(weight, ("data", "scales", "globals_")),
    )
    constants = {
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "X_SLOT": weight.columns if len(x.shape) == 3 else 0,
        "OUT_F32": graph.tensors[linear.out].dtype is DType.F32,
        "N": weight.rows,
        "K": weight.columns,
        "SLOTS": slots,
        **matrix_constants(weight),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(weight, knobs["BLOCK_K"]),
    }
    grid = (x.shape[0] * slots, ceil_div(weight.rows, knobs["BLOCK_N"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_combine(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    combine = need(op, Combine)
    slots, width = (int(dim) for dim in graph.tensors[combine.x].shape[1:])
    args = (
        tensor_arg(graph, "x", combine.x),
        tensor_arg(graph, "scores", combine.scores),
        tensor_arg(graph, "out", combine.out),
    )
    constants = {"D": width, "TOP_K": slots, "BLOCK": knobs["BLOCK"]}
    grid = (graph.tensors[combine.out].shape[0], ceil_div(width, knobs["BLOCK"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


def gate_args(graph: Graph, op: SharedAdd) -> tuple[Arg, Arg]:
    """Place of the shared gate, which lies beside the logits: it differs from layer to layer."""
    place = placed(graph, op.gate)
    return value_arg("gate_offset", place.offset), value_arg("gate_stride", place.stride)


def _bind_shared_add(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    add = need(op, SharedAdd)
    width = graph.tensors[add.out].width
    args = (
        tensor_arg(graph, "experts_sum", add.experts),
        tensor_arg(graph, "shared", add.shared),
        tensor_arg(graph, "gate", add.gate),
        tensor_arg(graph, "out", add.out),
        *gate_args(graph, add),
    )
    grid = (graph.tensors[add.out].shape[0], ceil_div(width, knobs["BLOCK"]), 1)
    return Binding(args, MappingProxyType({"D": width, "BLOCK": knobs["BLOCK"]}), grid)


def _width_problem(graph: Graph, op: Op) -> Problem:
    return {"n": graph.tensors[op.writes[0]].width}


def elementwise_default(problem: Problem, target: Target) -> Knobs:
    """Small blocks: a row or two must still fill a GPU."""
    return {"BLOCK": 256, "num_warps": 2, "num_stages": 1}


def _top_k_default(problem: Problem, target: Target) -> Knobs:
    return {"num_warps": 4, "num_stages": 1}


def _expert_linear_default(problem: Problem, target: Target) -> Knobs:
    return {"BLOCK_N": 16, "BLOCK_K": 2048, "num_warps": 4, "num_stages": 1}


TOP_K = Kernel("top_k", ("TopK",), Family.ANY, TOP_K_SPACE, _top_k_default, _top_k_problem, _bind_top_k)
EXPERT_LINEAR = Kernel(
    name="expert_linear",
    patterns=("ExpertLinear",),
    family=Family.ANY,
    space=PROJECTION_SPACE,
    default=_expert_linear_default,
    problem=projection_problem,
    bind=_bind_expert_linear,
    constraints=(weights_fit_registers,),
)
COMBINE = Kernel(
    name="combine",
    patterns=("Combine",),
    family=Family.ANY,
    space=ELEMENTWISE_SPACE,
    default=elementwise_default,
    problem=_width_problem,
    bind=_bind_combine,
)
SHARED_ADD = Kernel(
    name="shared_add",
    patterns=("SharedAdd",),
    family=Family.ANY,
    space=ELEMENTWISE_SPACE,
    default=elementwise_default,
    problem=_width_problem,
    bind=_bind_shared_add,
)

KERNELS: tuple[Kernel, ...] = (TOP_K, EXPERT_LINEAR, COMBINE, SHARED_ADD)
