"""Projections of many rows, for prefill: weights become BF16 in registers and meet tensor cores (family ``gemm``)."""

from __future__ import annotations

from types import MappingProxyType

from lynnc.ir import Add, DType, Graph, Linear, Op
from lynnc.kernels.kernel import (
    FORMAT_CODE,
    Binding,
    Choice,
    Family,
    Kernel,
    Knobs,
    PowerOfTwo,
    Problem,
    body_of,
    ceil_div,
    need,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import linear_problem
from lynnc.target import Target


def _default(problem: Problem, target: Target) -> Knobs:
    return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}


def _fits_shared_memory(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Both tiles of every stage in flight."""
    needed = 2 * knobs["num_stages"] * knobs["BLOCK_K"] * (knobs["BLOCK_M"] + knobs["BLOCK_N"])
    if needed > target.shared_memory_limit:
        return f"tiles of {needed:,} bytes exceed the {target.shared_memory_limit:,} of shared memory"
    return None


def _bind(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear = need(op, Linear)
    adds = body_of(op, Add)
    out = adds[0].out if adds else linear.out
    weight, place, width = graph.weights[linear.weight], placed(graph, linear.x), graph.tensors[linear.out].width
    rows = graph.tensors[out].shape[0]
    args = (
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "residual", adds[0].a) if adds else null_arg("residual", "*bf16"),
        tensor_arg(graph, "out", out),
        *weight_args(weight, ("data", "scales", "globals_")),
        value_arg("rows", rows),
        value_arg("first_row", linear.first_row),
        value_arg("n", width),
        value_arg("column", placed(graph, out).offset),
        value_arg("out_stride", placed(graph, out).stride),
    )
    constants = {
        "K": weight.columns,
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "RESIDUAL": bool(adds),
        "OUT_F32": graph.tensors[out].dtype is DType.F32,
        "FORMAT": FORMAT_CODE[weight.format],
        "PART_ROWS": part_rows(weight),
        **{name: knobs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
    }
    return Binding(args, constants, (ceil_div(rows, knobs["BLOCK_M"]), ceil_div(width, knobs["BLOCK_N"]), 1))


GEMM = Kernel(
    name="gemm",
    patterns=("Linear", "LinearResidual"),
    family=Family.PREFILL,
    space=MappingProxyType(
        {
            "BLOCK_M": PowerOfTwo(16, 128),
            "BLOCK_N": PowerOfTwo(16, 256),
            "BLOCK_K": PowerOfTwo(16, 128),
            "num_warps": PowerOfTwo(1, 8),
            "num_stages": Choice((1, 2, 3, 4)),
        }
    ),
    default=_default,
    problem=linear_problem,
    bind=_bind,
    constraints=(_fits_shared_memory,),
)

KERNELS = (GEMM,)
