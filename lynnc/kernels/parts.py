"""The sum of a projection's parts, added to the residual stream, and the norm that follows."""

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
    body_of,
    find,
    need,
    next_power_of_two,
    null_arg,
    placed,
    tensor_arg,
    value_arg,
    vector_arg,
)
from lynnc.kernels.simple import norm_outs
from lynnc.ops import Add, RmsNorm
from lynnc.promptops import SumParts
from lynnc.target import Target


def _problem(graph: Graph, op: Op) -> Problem:
    _, parts, width = graph.tensors[need(op, SumParts).x].shape
    return {"norm": int(find(op, RmsNorm) is not None), "parts": int(parts), "width": int(width)}


def _default(problem: Problem, target: Target) -> Knobs:
    return {"num_warps": 8 if int(problem["width"]) > 1024 else 4, "num_stages": 1}


def _bind(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    total, add, norms = need(op, SumParts), need(op, Add), body_of(op, RmsNorm)
    rows, parts, width = graph.tensors[total.x].shape
    outs, orders = norm_outs(graph, norms, "normed")
    args = (
        tensor_arg(graph, "parts", total.x),
        tensor_arg(graph, "residual", add.a),
        tensor_arg(graph, "out", add.out),
        vector_arg(graph, "weight", norms[0].weight) if norms else null_arg("weight", "*bf16"),
        *outs,
        value_arg("residual_stride", placed(graph, add.a).stride),
    )
    constants = {
        "D": int(width),
        "PARTS": int(parts),
        "EPS": norms[0].eps if norms else 0.0,
        "SHIFT": int(norms[0].shifted) if norms else 0,
        **orders,
        "BLOCK_D": next_power_of_two(int(width)),
    }
    return Binding(args, MappingProxyType(constants), (rows, 1, 1))


SUM_PARTS = Kernel(
    name="sum_parts",
    patterns=("SumPartsAdd", "SumPartsNorm"),
    family=Family.PREFILL,
    space=MappingProxyType({"num_warps": PowerOfTwo(1, 16), "num_stages": Choice((1,))}),
    default=_default,
    problem=_problem,
    bind=_bind,
)

KERNELS = (SUM_PARTS,)
