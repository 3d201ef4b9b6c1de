"""Projections of many rows, for prefill: weights become BF16 in registers and meet tensor cores (family ``gemm``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.columnorder import BLOCK, ColumnOrder
from lynnc.ir import Graph, Op
from lynnc.kernels.constraints import shared_memory_refusal, sums_refusal
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
    next_power_of_two,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import linear_problem
from lynnc.ops import Add, Linear
from lynnc.programs import expected_rows
from lynnc.promptops import PartialLinear
from lynnc.target import Target
from lynnc.tensors import DType, Format

ROW_CLASSES = (16, 64, 512, 2048)
"""Rows of a program as its tiles see them, rounded up; the last is for any larger number too."""
STORE_ELEMENTS = 8
"""Elements of one store, where the output's rows and columns allow it."""
BYTES: Mapping[str, float] = MappingProxyType(
    {Format.NVFP4: 0.5625, Format.NVFP4_FP16: 0.625, Format.FP8: 1.0, Format.BF16: 2.0}
)
"""Bytes of an element with its share of the block scales."""


def row_class(graph: Graph) -> int:
    """The class of the rows of a program."""
    rows = expected_rows(graph.program)
    return next((limit for limit in ROW_CLASSES if rows <= limit), ROW_CLASSES[-1])


def _problem(graph: Graph, op: Op) -> Problem:
    """A projection, how its input stands in memory, and the class of its rows: in each a row's bits may be others."""
    linear = need(op, Linear)
    problem = {**linear_problem(graph, op), "order": graph.tensors[linear.x].order.value, "rows": row_class(graph)}
    if isinstance(linear, PartialLinear):
        problem |= {"n": int(graph.tensors[linear.out].shape[-1]), "parts": linear.parts}
    return problem


def _part_columns(problem: Problem) -> int:
    """Columns that a program goes through: those of its part, if there are parts."""
    return int(problem["k"]) // int(problem.get("parts", 1))


def _default(problem: Problem, target: Target) -> Knobs:
    """Tiles by the class of rows: few rows are bound by the bytes of weights, many by tensor cores."""
    n = int(str(problem["n"]).removeprefix("router-"))
    block_m, block_n, block_k, warps, stages = _tile(int(problem["rows"]), n, target.has_wgmma or target.has_tcgen05)
    columns = _part_columns(problem)
    power = columns & -columns  # the largest that divides them
    block_k = min(block_k, power if power >= 64 else next_power_of_two(columns))
    if problem["order"] == ColumnOrder.LANES:  # 16 rows: half the passes gain a tenth on an H200
        block_k = 2 * BLOCK if block_m <= 16 and columns % (2 * BLOCK) == 0 else BLOCK
    knobs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
    while knobs["num_stages"] > 1 and _fits_shared_memory(problem, knobs, target):
        knobs["num_stages"] -= 1
    return MappingProxyType(knobs)


def _tile(rows: int, n: int, has_large_mma: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps, stages; the best of those that were tried by hand on an H200."""
    if rows <= 64:
        return rows, 64, 128, 4, 4 if rows <= 16 else 3
    if not has_large_mma:
        return 128, 64, 64, 4, 3
    if rows <= 512:
        return (256, 128, 64, 8, 3) if n >= 8192 else (128, 64, 64, 4, 4)
    if n <= 512:
        return 128, 64, 64, 4, 4
    if n < 2048:
        return 128, 128, 128, 8, 3
    return 256, 128, 64, 8, 3


def _fits_shared_memory(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Both tiles of every stage in flight, and the results on their way to the layout of the output."""
    m, n, k = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["BLOCK_K"]
    stages = int(knobs["num_stages"] * k * (2 * m + BYTES[str(problem["formats"])] * n))
    needed = max(stages, 4 * m * n)
    return shared_memory_refusal("tiles", needed, target)


def _sums_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return sums_refusal(knobs["BLOCK_M"], knobs["BLOCK_N"], knobs, target)


def _fits_parts(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A part of the columns is whole blocks: what stands behind it belongs to the next."""
    columns = _part_columns(problem)
    if "parts" not in problem or columns % knobs["BLOCK_K"] == 0:
        return None
    return f"BLOCK_K={knobs['BLOCK_K']} does not divide the {columns} columns of a part"


def fits_lanes(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Columns in the order of lanes come in whole blocks and meet whole matrix instructions of every warp."""
    if problem["order"] != ColumnOrder.LANES:
        return None
    rows = 16 * knobs["num_warps"]
    if knobs["BLOCK_K"] % BLOCK == 0 and knobs["BLOCK_N"] % rows == 0:
        return None
    return f"columns in the order of lanes need BLOCK_K a multiple of {BLOCK} and BLOCK_N of {rows}"


def _bind(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear = need(op, Linear)
    adds = body_of(op, Add)
    out = adds[0].out if adds else linear.out
    weight, place = graph.weights[linear.weight], placed(graph, linear.x)
    width = int(graph.tensors[linear.out].shape[-1])
    parts = linear.parts if isinstance(linear, PartialLinear) else 1
    rows, out_place = graph.tensors[out].shape[0], placed(graph, out)
    is_router = isinstance(linear_problem(graph, op)["n"], str)  # its columns differ from layer to layer
    args = (
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "residual", adds[0].a) if adds else null_arg("residual", "*bf16"),
        tensor_arg(graph, "out", out),
        *weight_args(weight, ("data", "scales", "globals_")),
        value_arg("rows", rows),
        value_arg("first_row", linear.first_row),
        value_arg("n", width),
        value_arg("column", out_place.offset),
        value_arg("out_stride", out_place.stride),
    )
    constants = {
        "K": weight.columns,
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "RESIDUAL": bool(adds),
        "OUT_F32": graph.tensors[out].dtype is DType.F32,
        "FORMAT": FORMAT_CODE[weight.format],
        "PART_ROWS": part_rows(weight),
        "EVEN": not is_router
        and all(size % STORE_ELEMENTS == 0 for size in (width, out_place.offset, out_place.stride)),
        "PARTS": parts,
        "LANES": graph.tensors[linear.x].order is ColumnOrder.LANES,
        "WARPS": knobs["num_warps"],
        **{name: knobs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
    }
    return Binding(args, constants, (ceil_div(rows, knobs["BLOCK_M"]), ceil_div(width, knobs["BLOCK_N"]), parts))


GEMM = Kernel(
    name="gemm",
    patterns=("Linear", "LinearResidual", "PartialLinear"),
    family=Family.PREFILL,
    space=MappingProxyType(
        {
            "BLOCK_M": PowerOfTwo(16, 256),
            "BLOCK_N": PowerOfTwo(16, 256),
            "BLOCK_K": PowerOfTwo(16, 1024),
            "num_warps": PowerOfTwo(1, 16),
            "num_stages": Choice((1, 2, 3, 4, 5, 6)),
        }
    ),
    default=_default,
    problem=_problem,
    bind=_bind,
    constraints=(_fits_shared_memory, _sums_fit_registers, _fits_parts, fits_lanes),
)

KERNELS = (GEMM,)
