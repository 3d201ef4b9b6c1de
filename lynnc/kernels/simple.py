"""Kernels of ops that move or compare values: embedding, norm, addition, argmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lynnc.ir import Add, Argmax, ArgmaxFinal, ArgmaxPartial, Dim, Embed, Graph, LastRow, Op, RmsNorm
from lynnc.kernels.kernel import (
    FORMAT_CODE,
    Binding,
    Choice,
    Family,
    Kernel,
    Knob,
    Knobs,
    PowerOfTwo,
    Problem,
    ceil_div,
    next_power_of_two,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.target import Target

Bind = Callable[[Graph, Any, Knobs], Binding]


def _kernel(
    name: str, op: type[Op], bind: Bind, problem: Callable[[Graph, Any], Problem], block: Mapping[str, int]
) -> Kernel:
    """A kernel of one op whose knobs are a block size (name and default in ``block``) and warps."""
    defaults = {**block, "num_warps": 4, "num_stages": 1}

    def default(problem: Problem, target: Target) -> Knobs:
        return defaults

    space: dict[str, Knob] = {
        **{knob: PowerOfTwo(64, 16384) for knob in block},
        "num_warps": PowerOfTwo(1, 16),
        "num_stages": Choice((1,)),
    }
    return Kernel(
        name=name,
        patterns=(op.__name__,),
        family=Family.ANY,
        space=MappingProxyType(space),
        default=default,
        problem=problem,
        bind=bind,
    )


def _rows(graph: Graph, tensor: str) -> Dim:
    return graph.tensors[tensor].shape[0]


def _bind_embed(graph: Graph, op: Embed, knobs: Knobs) -> Binding:
    table = graph.weights[op.table]
    args = (
        tensor_arg(graph, "token", op.token),
        *weight_args(table, ("data", "scales", "globals_")),
        tensor_arg(graph, "out", op.out),
        value_arg("token_stride", placed(graph, op.token).stride),
    )
    block = min(knobs["BLOCK_D"], next_power_of_two(table.columns))
    constants = {
        "D": table.columns,
        "FORMAT": FORMAT_CODE[table.format],
        "PART_ROWS": part_rows(table),
        "BLOCK_D": block,
    }
    return Binding(args, constants, (_rows(graph, op.out), ceil_div(table.columns, block), 1))


def _embed_problem(graph: Graph, op: Embed) -> Problem:
    table = graph.weights[op.table]
    return {"d": table.columns, "format": table.format}


def _bind_rms_norm(graph: Graph, op: RmsNorm, knobs: Knobs) -> Binding:
    place, width = placed(graph, op.x), graph.tensors[op.x].width
    args = (
        tensor_arg(graph, "x", op.x),
        weight_args(graph.weights[op.weight], ("weight", "", ""))[0],
        tensor_arg(graph, "out", op.out),
        value_arg("x_stride", place.stride),
    )
    constants = {"D": width, "EPS": op.eps, "SHIFT": int(op.shifted), "BLOCK_D": next_power_of_two(width)}
    return Binding(args, constants, (_rows(graph, op.out), 1, 1))


def _bind_add(graph: Graph, op: Add, knobs: Knobs) -> Binding:
    total = _rows(graph, op.out) * graph.tensors[op.out].width
    args = (
        tensor_arg(graph, "a", op.a),
        tensor_arg(graph, "b", op.b),
        tensor_arg(graph, "out", op.out),
        value_arg("total", total),
    )
    return Binding(args, {"BLOCK": knobs["BLOCK"]}, (ceil_div(total, knobs["BLOCK"]), 1, 1))


def _bind_argmax(graph: Graph, op: Argmax, knobs: Knobs) -> Binding:
    width = graph.tensors[op.logits].width
    args = (tensor_arg(graph, "logits", op.logits), tensor_arg(graph, "out", op.out))
    block = min(knobs["BLOCK"], next_power_of_two(width))
    return Binding(args, {"V": width, "BLOCK": block}, (_rows(graph, op.out), 1, 1))


def _bind_argmax_partial(graph: Graph, op: ArgmaxPartial, knobs: Knobs) -> Binding:
    args = (
        tensor_arg(graph, "logits", op.logits),
        tensor_arg(graph, "values", op.values),
        tensor_arg(graph, "indices", op.indices),
    )
    constants = {"V": graph.tensors[op.logits].width, "BLOCK": op.block}
    return Binding(args, constants, (_rows(graph, op.values), graph.tensors[op.values].width, 1))


def _bind_argmax_final(graph: Graph, op: ArgmaxFinal, knobs: Knobs) -> Binding:
    blocks = graph.tensors[op.values].width
    args = (
        tensor_arg(graph, "values", op.values),
        tensor_arg(graph, "indices", op.indices),
        tensor_arg(graph, "out", op.out),
    )
    return Binding(args, {"BLOCKS": blocks, "BLOCK": next_power_of_two(blocks)}, (_rows(graph, op.out), 1, 1))


def _bind_last_row(graph: Graph, op: LastRow, knobs: Knobs) -> Binding:
    width = graph.tensors[op.x].width
    args = (
        tensor_arg(graph, "x", op.x),
        tensor_arg(graph, "out", op.out),
        value_arg("rows", _rows(graph, op.x)),
    )
    return Binding(args, {"D": width, "BLOCK": knobs["BLOCK"]}, (ceil_div(width, knobs["BLOCK"]), 1, 1))


def _width_of(field: str) -> Callable[[Graph, Op], Problem]:
    """The problem of a kernel that only the width of one tensor decides."""

    def problem(graph: Graph, op: Op) -> Problem:
        return {"width": graph.tensors[getattr(op, field)].width}

    return problem


KERNELS: tuple[Kernel, ...] = (
    _kernel("embed", Embed, _bind_embed, _embed_problem, {"BLOCK_D": 512}),
    _kernel("rms_norm", RmsNorm, _bind_rms_norm, _width_of("x"), {}),
    _kernel("add", Add, _bind_add, _width_of("out"), {"BLOCK": 1024}),
    _kernel("argmax", Argmax, _bind_argmax, _width_of("logits"), {"BLOCK": 2048}),
    _kernel("argmax_partial", ArgmaxPartial, _bind_argmax_partial, _width_of("logits"), {}),
    _kernel("argmax_final", ArgmaxFinal, _bind_argmax_final, _width_of("values"), {}),
    _kernel("last_row", LastRow, _bind_last_row, _width_of("x"), {"BLOCK": 1024}),
)
