"""Mixture of experts: routing, the projections of the chosen experts and their weighted sum, fused for decode or alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import (
    Add,
    Combine,
    DType,
    ExpertLinear,
    Format,
    Graph,
    Linear,
    Op,
    SharedAdd,
    SiluMul,
    TopK,
    Weight,
    primitive_ops,
)
from lynnc.kernels.kernel import (
    FORMAT_CODE,
    Arg,
    Binding,
    Choice,
    Family,
    Kernel,
    Knobs,
    PowerOfTwo,
    Problem,
    ceil_div,
    next_power_of_two,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import block_columns, body_of
from lynnc.target import Target

Constants = Mapping[str, int | float | bool]

NO_MATRIX = (null_arg("data2", "*i64"), null_arg("scales2", "*u8"), null_arg("globals2", "*fp32"))
PROJECTION_SPACE = MappingProxyType(
    {
        "BLOCK_N": PowerOfTwo(1, 256),
        "BLOCK_K": PowerOfTwo(512, 8192),
        "num_warps": PowerOfTwo(1, 16),
        "num_stages": Choice((1, 2, 3)),
    }
)
COLUMNS_SPACE = MappingProxyType(
    {"BLOCK": PowerOfTwo(128, 4096), "num_warps": PowerOfTwo(1, 8), "num_stages": Choice((1,))}
)


def largest_experts(graph: Graph, experts: int) -> int:
    """Experts of the layer that has most: a constant of the model, so that layers which differ share one kernel."""
    counts = [weight.experts for weight in graph.weights.values() if weight.tensor_class == "experts"]
    return max([experts, *counts])


def route_constants(graph: Graph, op: TopK) -> Constants:
    """Sizes for ``routing.py.jinja``: groups of GROUP_E experts, of which the SLOTS best are looked into."""
    slots = next_power_of_two(op.k)
    block = max(16, slots, next_power_of_two(largest_experts(graph, op.experts)))
    group = 1
    while (2 * group) ** 2 * slots <= 2 * block:  # groups and members cost their squares: about as many of both
        group *= 2
    return {"TOP_K": op.k, "SLOTS": slots, "BLOCK_E": block, "GROUP_E": group, "NORMALIZE": op.normalize}


def route_args(graph: Graph, op: TopK) -> tuple[Arg, ...]:
    """Number of experts and place of the logits, which lie beside the shared gate: both differ from layer to layer."""
    place = placed(graph, op.logits)
    return (
        value_arg("experts", op.experts),
        value_arg("logits_offset", place.offset),
        value_arg("logits_stride", place.stride),
    )


def matrix_constants(weight: Weight) -> Constants:
    """How one expert of a weight is stored."""
    return {
        "FORMAT": FORMAT_CODE[weight.format],
        "PART_ROWS": part_rows(weight),
        "GLOBALS": weight.rows // weight.part_rows,
    }


def _only(op: Op, kind: type[Op]) -> Op | None:
    found = body_of(op, kind)
    return found[0] if found else None


def _routing_problem(graph: Graph, op: Op) -> Problem:
    top_k = body_of(op, TopK)[0]
    assert isinstance(top_k, TopK)
    return {"experts": largest_experts(graph, top_k.experts), "k": top_k.k}


def _bind_top_k(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    top_k = body_of(op, TopK)[0]
    assert isinstance(top_k, TopK)
    args = (
        tensor_arg(graph, "logits", top_k.logits),
        tensor_arg(graph, "ids", top_k.ids),
        tensor_arg(graph, "scores", top_k.scores),
        *route_args(graph, top_k),
    )
    return Binding(args, route_constants(graph, top_k), (graph.tensors[top_k.ids].shape[0], 1, 1))


def _expert_problem(graph: Graph, op: Op) -> Problem:
    linear = body_of(op, ExpertLinear)[0]
    assert isinstance(linear, ExpertLinear)
    weight = graph.weights[linear.weight]
    shared = body_of(op, Linear)
    formats = [weight.format, *(graph.weights[other.weight].format for other in shared if isinstance(other, Linear))]
    slots = int(graph.tensors[linear.ids].shape[1])
    return {
        "formats": "+".join(formats),
        "k": weight.columns,
        "n": weight.rows,
        "slots": slots,
        "parts": len(weight.parts),
    }


def _bind_expert_linear(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear = body_of(op, ExpertLinear)[0]
    assert isinstance(linear, ExpertLinear)
    weight, x = graph.weights[linear.weight], graph.tensors[linear.x]
    place = placed(graph, linear.x)
    slots = graph.tensors[linear.ids].shape[1]
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
        "SLOTS": int(slots),
        **matrix_constants(weight),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(weight, knobs["BLOCK_K"]),
    }
    grid = (x.shape[0] * slots, ceil_div(weight.rows, knobs["BLOCK_N"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_experts_up(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    top_k, linear, shared = body_of(op, TopK)[0], body_of(op, ExpertLinear)[0], _only(op, Linear)
    assert isinstance(top_k, TopK) and isinstance(linear, ExpertLinear)
    acts = {act.x: act.out for act in body_of(op, SiluMul) if isinstance(act, SiluMul)}
    weight, place = graph.weights[linear.weight], placed(graph, linear.x)
    second = graph.weights[shared.weight] if isinstance(shared, Linear) else None
    shared_act = tensor_arg(graph, "shared_act", acts[shared.out]) if isinstance(shared, Linear) else None
    args = (
        tensor_arg(graph, "x_words", linear.x, "*i64"),
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "logits", top_k.logits),
        tensor_arg(graph, "ids", top_k.ids),
        tensor_arg(graph, "scores", top_k.scores),
        tensor_arg(graph, "act", acts[linear.out]),
        shared_act or null_arg("shared_act", "*bf16"),
        *weight_args(weight, ("data", "scales", "globals_")),
        *(weight_args(second, ("data2", "scales2", "globals2")) if second else NO_MATRIX),
        *route_args(graph, top_k),
    )
    intermediate, shared_size = weight.rows // 2, second.rows // 2 if second else 0
    constants = {
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "K": weight.columns,
        "I": intermediate,
        **route_constants(graph, top_k),
        **matrix_constants(weight),
        **_shared_constants(second, knobs),
        "I2": shared_size,
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(weight, knobs["BLOCK_K"]),
    }
    tiles = ceil_div(max(intermediate, shared_size), knobs["BLOCK_N"])
    rows = int(graph.tensors[linear.x].shape[0])
    return Binding(args, MappingProxyType(constants), (tiles, top_k.k + bool(second), rows))


def _shared_constants(weight: Weight | None, knobs: Knobs) -> Constants:
    if weight is None:
        return {"FORMAT2": FORMAT_CODE[Format.BF16], "PART_ROWS2": 1, "BLOCK_K2": 16}
    return {
        "FORMAT2": FORMAT_CODE[weight.format],
        "PART_ROWS2": part_rows(weight),
        "BLOCK_K2": block_columns(weight, knobs["BLOCK_K"]),
    }


def _bind_experts_down(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, combine, add = (body_of(op, kind)[0] for kind in (ExpertLinear, Combine, Add))
    assert isinstance(linear, ExpertLinear) and isinstance(combine, Combine) and isinstance(add, Add)
    inside = {name for inner in primitive_ops(op) for name in inner.writes}
    residual = add.b if add.a in inside else add.a
    weight = graph.weights[linear.weight]
    slots = int(graph.tensors[linear.ids].shape[1])
    shared_args, second = _shared_down(graph, op)
    args = (
        tensor_arg(graph, "act_words", linear.x, "*i64"),
        tensor_arg(graph, "act", linear.x),
        tensor_arg(graph, "ids", linear.ids),
        tensor_arg(graph, "scores", combine.scores),
        *shared_args[:3],
        tensor_arg(graph, "residual", residual),
        tensor_arg(graph, "out", add.out),
        *weight_args(weight, ("data", "scales", "globals_")),
        *shared_args[3:],
    )
    unit_columns = weight.columns // 16 if weight.format.is_packed else weight.columns
    constants = {
        "D": weight.rows,
        "K": weight.columns,
        "K2": second.columns if second else 0,
        "TOP_K": slots,
        "FORMAT": FORMAT_CODE[weight.format],
        **_shared_constants(second, knobs),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": _slot_columns(weight, slots, knobs["BLOCK_K"]),
        "SAME": unit_columns & -unit_columns,
    }
    grid = (ceil_div(weight.rows, knobs["BLOCK_N"]), int(graph.tensors[add.out].shape[0]), 1)
    return Binding(args, MappingProxyType(constants), grid)
