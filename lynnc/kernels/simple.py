"""Kernels of ops that move or add values: embedding, norm, addition, last row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lynnc.columnorder import ColumnOrder
from lynnc.ir import Graph, Op
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
    body_of,
    ceil_div,
    next_power_of_two,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.ops import Add, Embed, LastRow, RmsNorm
from lynnc.target import Target
from lynnc.tensors import Dim

Bind = Callable[[Graph, Any, Knobs], Binding]


def simple_kernel(
    name: str, patterns: tuple[str, ...], bind: Bind, problem: Callable[[Graph, Any], Problem], block: Mapping[str, int]
) -> Kernel:
    """A kernel for any program whose knobs are a block size (name and default in ``block``) and warps."""
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
        patterns=patterns,
        family=Family.ANY,
        space=MappingProxyType(space),
        default=default,
        problem=problem,
        bind=bind,
    )


def rows_of(graph: Graph, tensor: str) -> Dim:
    """Rows of a tensor: one program each, for most of these kernels."""
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
    return Binding(args, constants, (rows_of(graph, op.out), ceil_div(table.columns, block), 1))


def _embed_problem(graph: Graph, op: Embed) -> Problem:
    table = graph.weights[op.table]
    return {"d": table.columns, "format": table.format}


def norm_outs(graph: Graph, norms: Sequence[RmsNorm], parameter: str) -> tuple[tuple[Arg, ...], Mapping[str, bool]]:
    """Where norms of one input write: in natural order to ``parameter``, in that of lanes to ``lanes``, null pointers
    where none does; and the constants that say which."""
    outs = {graph.tensors[norm.out].order: norm.out for norm in norms}
    names = {ColumnOrder.NATURAL: parameter, ColumnOrder.LANES: "lanes"}
    args = (
        tensor_arg(graph, name, outs[order]) if order in outs else null_arg(name, "*bf16")
        for order, name in names.items()
    )
    return tuple(args), {order.name: order in outs for order in names}


def _bind_rms_norm(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    norms = body_of(op, RmsNorm)
    norm = norms[0]
    place, width = placed(graph, norm.x), graph.tensors[norm.x].width
    outs, orders = norm_outs(graph, norms, "out")
    args = (
        tensor_arg(graph, "x", norm.x),
        weight_args(graph.weights[norm.weight], ("weight", "", ""))[0],
        *outs,
        value_arg("x_stride", place.stride),
    )
    constants = {
        "D": width,
        "EPS": norm.eps,
        "SHIFT": int(norm.shifted),
        **orders,
        "BLOCK_D": next_power_of_two(width),
    }
    return Binding(args, constants, (rows_of(graph, norms[0].out), 1, 1))


def _norm_problem(graph: Graph, op: Op) -> Problem:
    return {"width": graph.tensors[body_of(op, RmsNorm)[0].x].width}


def _bind_add(graph: Graph, op: Add, knobs: Knobs) -> Binding:
    total = rows_of(graph, op.out) * graph.tensors[op.out].width
    args = (
        tensor_arg(graph, "a", op.a),
        tensor_arg(graph, "b", op.b),
        tensor_arg(graph, "out", op.out),
        value_arg("total", total),
    )
    return Binding(args, {"BLOCK": knobs["BLOCK"]}, (ceil_div(total, knobs["BLOCK"]), 1, 1))


def _bind_last_row(graph: Graph, op: LastRow, knobs: Knobs) -> Binding:
    width = graph.tensors[op.x].width
    args = (
        tensor_arg(graph, "x", op.x),
        tensor_arg(graph, "out", op.out),
        value_arg("rows", rows_of(graph, op.x)),
    )
    return Binding(args, {"D": width, "BLOCK": knobs["BLOCK"]}, (ceil_div(width, knobs["BLOCK"]), 1, 1))


def width_of(field: str) -> Callable[[Graph, Op], Problem]:
    """The problem of a kernel that only the width of one tensor decides."""

    def problem(graph: Graph, op: Op) -> Problem:
        return {"width": graph.tensors[getattr(op, field)].width}

    return problem


KERNELS: tuple[Kernel, ...] = (
    simple_kernel("embed", ("Embed",), _bind_embed, _embed_problem, {"BLOCK_D": 512}),
    simple_kernel("rms_norm", ("RmsNorm", "RmsNormTwice"), _bind_rms_norm, _norm_problem, {}),
    simple_kernel("add", ("Add",), _bind_add, width_of("out"), {"BLOCK": 1024}),
    simple_kernel("last_row", ("LastRow",), _bind_last_row, width_of("x"), {"BLOCK": 1024}),
)
