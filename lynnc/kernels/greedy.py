"""Kernels of the greedy choice and of what a decode step leaves for the next one."""

from __future__ import annotations

from lynnc.ir import Graph, Op
from lynnc.kernels.kernel import (
    Arg,
    Binding,
    Kernel,
    Knobs,
    Problem,
    find,
    need,
    next_power_of_two,
    null_arg,
    state_arg,
    tensor_arg,
    value_arg,
)
from lynnc.kernels.simple import rows_of, simple_kernel, width_of
from lynnc.ops import Advance, Argmax, ArgmaxFinal, ArgmaxPartial
from lynnc.tensors import S


def _advance_args(graph: Graph, advance: Advance | None) -> tuple[Arg, ...]:
    """Inputs of the step that follows, or nulls where a launch does not make them."""
    if advance is None:
        names = ("position", "slot", "history", "following", "following_start")
        return (*(null_arg(name, "*i32") for name in names), value_arg("context", 0))
    return (
        tensor_arg(graph, "position", advance.position),
        tensor_arg(graph, "slot", advance.slot),
        state_arg(graph, "history", advance.history),
        tensor_arg(graph, "following", advance.following),
        tensor_arg(graph, "following_start", advance.following_start),
        value_arg("context", S),
    )


def _bind_argmax(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    argmax, advance = need(op, Argmax), find(op, Advance)
    width = graph.tensors[argmax.logits].width
    args = (tensor_arg(graph, "logits", argmax.logits), tensor_arg(graph, "out", argmax.out))
    block = min(knobs["BLOCK"], next_power_of_two(width))
    constants = {"V": width, "BLOCK": block, "ADVANCE": advance is not None}
    return Binding((*args, *_advance_args(graph, advance)), constants, (rows_of(graph, argmax.out), 1, 1))


def _bind_argmax_partial(graph: Graph, op: ArgmaxPartial, knobs: Knobs) -> Binding:
    args = (
        tensor_arg(graph, "logits", op.logits),
        tensor_arg(graph, "values", op.values),
        tensor_arg(graph, "indices", op.indices),
    )
    constants = {"V": graph.tensors[op.logits].width, "BLOCK": op.block}
    return Binding(args, constants, (rows_of(graph, op.values), graph.tensors[op.values].width, 1))


def _bind_argmax_final(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    final, advance = need(op, ArgmaxFinal), find(op, Advance)
    blocks = graph.tensors[final.values].width
    args = (
        tensor_arg(graph, "values", final.values),
        tensor_arg(graph, "indices", final.indices),
        tensor_arg(graph, "out", final.out),
        *_advance_args(graph, advance),
    )
    constants = {"BLOCKS": blocks, "BLOCK": next_power_of_two(blocks), "ADVANCE": advance is not None}
    return Binding(args, constants, (rows_of(graph, final.out), 1, 1))


def _bind_advance(graph: Graph, op: Advance, knobs: Knobs) -> Binding:
    args = (tensor_arg(graph, "token", op.token), *_advance_args(graph, op))
    return Binding(args, {}, (rows_of(graph, op.following), 1, 1))


def _argmax_problem(graph: Graph, op: Op) -> Problem:
    return {"width": graph.tensors[need(op, Argmax).logits].width}


def _final_problem(graph: Graph, op: Op) -> Problem:
    return {"width": graph.tensors[need(op, ArgmaxFinal).values].width}


KERNELS: tuple[Kernel, ...] = (
    simple_kernel("argmax", ("Argmax", "ArgmaxAdvance"), _bind_argmax, _argmax_problem, {"BLOCK": 2048}),
    simple_kernel("argmax_partial", ("ArgmaxPartial",), _bind_argmax_partial, width_of("logits"), {}),
    simple_kernel("argmax_final", ("ArgmaxFinal", "ArgmaxFinalAdvance"), _bind_argmax_final, _final_problem, {}),
    simple_kernel("advance", ("Advance",), _bind_advance, width_of("following"), {}),
)
