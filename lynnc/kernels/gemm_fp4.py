"""Projections of many rows with 4-bit activations: block-scaled FP4 tensor cores (family ``gemm_fp4``).

Only the pass ``quantise_activations`` makes these ops, and only where the model declares 4-bit activations and the
target has FP4 MMA; nothing here asks again. Weights are read in the packed layout and become plain pairs of codes in
registers: 12 integer instructions for 8 codes. A group's codes keep the order of its word, which is the order that the
rows are quantised in: a sum over columns does not depend on it. Experts' projections are in ``grouped_fp4.py``.
"""

from __future__ import annotations

from types import MappingProxyType

from lynnc.ir import Graph, Op
from lynnc.kernels.constraints import shared_memory_refusal, sums_refusal
from lynnc.kernels.kernel import (
    Arg,
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
from lynnc.ops import Add
from lynnc.programs import most_rows
from lynnc.promptops import CODES_IN_WORD, SCALES_IN_WORD, QuantiseActivations, QuantisedGroupedLinear, QuantisedLinear
from lynnc.target import Target
from lynnc.tensors import GROUP, DType

TCGEN05_ROWS = 128
"""Rows of a block-scaled tcgen05 product; smaller tiles would become BF16 ones."""


def _problem(graph: Graph, op: Op) -> Problem:
    """Columns and rows of the weight, the most rows of x where the program bounds them, and what is fused."""
    linear = need(op, QuantisedLinear)
    return {
        "formats": graph.weights[linear.weight].format.value,
        "activations": "nvfp4",
        "k": graph.weights[linear.weight].columns,
        "n": graph.tensors[linear.out].width,
        "most_rows": most_rows(graph.program) or 0,
        "residual": int(bool(body_of(op, Add))),
    }


def _default(problem: Problem, target: Target) -> Knobs:
    """Tiles as the instructions like them; not measured, as no target with FP4 MMA was at hand."""
    if target.has_tcgen05:
        return {"BLOCK_M": TCGEN05_ROWS, "BLOCK_N": 128, "BLOCK_K": 256, "num_warps": 8, "num_stages": 3}
    rows = int(problem["most_rows"]) or 128
    return {
        "BLOCK_M": max(16, min(128, next_power_of_two(rows))),
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "num_warps": 8 if rows > 64 else 4,
        "num_stages": 3,
    }


def codes_refusal(rows: int, columns: int, problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Why codes and scales of both tiles, ``rows`` together, do not fit; the last of the stages is in registers."""
    waiting = knobs["num_stages"] - 1 if columns < int(problem["k"]) else 0
    return shared_memory_refusal("tiles", waiting * rows * columns * 9 // GROUP, target)


def instruction_refusal(left_rows: int, knobs: Knobs, target: Target) -> str | None:
    """Why Triton would make BF16 products of a tile, in silence, and not block-scaled ones."""
    if target.has_tcgen05 and (left_rows != TCGEN05_ROWS or knobs["num_warps"] not in (4, 8)):
        return f"tcgen05 takes tiles of {TCGEN05_ROWS} rows by 4 or 8 warps"
    return None


def _fits_shared_memory(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return codes_refusal(knobs["BLOCK_M"] + knobs["BLOCK_N"], knobs["BLOCK_K"], problem, knobs, target)


def _sums_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return sums_refusal(knobs["BLOCK_M"], knobs["BLOCK_N"], knobs, target)


def _fits_instruction(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return instruction_refusal(knobs["BLOCK_M"], knobs, target)


def rows_args(graph: Graph, linear: QuantisedLinear | QuantisedGroupedLinear, prefix: str = "") -> tuple[Arg, ...]:
    """The quantised rows that a launch reads."""
    return (
        tensor_arg(graph, f"{prefix}codes", linear.codes, "*u8"),
        tensor_arg(graph, f"{prefix}code_scales", linear.scales, "*u8"),
        tensor_arg(graph, f"{prefix}row_scale", linear.row_scale),
    )


def _bind(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear = need(op, QuantisedLinear)
    adds = body_of(op, Add)
    out = adds[0].out if adds else linear.out
    weight, width = graph.weights[linear.weight], graph.tensors[linear.out].width
    rows = graph.tensors[out].shape[0]
    args = (
        *rows_args(graph, linear),
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
        "SCALE_STRIDE": SCALES_IN_WORD * graph.tensors[linear.scales].width,
        "RESIDUAL": bool(adds),
        "OUT_F32": graph.tensors[out].dtype is DType.F32,
        "PART_ROWS": part_rows(weight),
        **{name: knobs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
    }
    return Binding(args, constants, (ceil_div(rows, knobs["BLOCK_M"]), ceil_div(width, knobs["BLOCK_N"]), 1))


GEMM_FP4 = Kernel(
    name="gemm_fp4",
    patterns=("QuantisedLinear", "QuantisedLinearResidual"),
    family=Family.PREFILL,
    space=MappingProxyType(
        {
            "BLOCK_M": PowerOfTwo(16, 256),
            "BLOCK_N": PowerOfTwo(16, 256),
            "BLOCK_K": PowerOfTwo(64, 512),
            "num_warps": PowerOfTwo(1, 8),
            "num_stages": Choice((1, 2, 3, 4)),
        }
    ),
    default=_default,
    problem=_problem,
    bind=_bind,
    constraints=(_fits_instruction, _fits_shared_memory, _sums_fit_registers),
)


def _quantise_problem(graph: Graph, op: Op) -> Problem:
    return {"k": _quantised_columns(graph, need(op, QuantiseActivations))}


def _quantised_columns(graph: Graph, quantise: QuantiseActivations) -> int:
    """Columns of what is quantised as a row: a row of x, or one of its pairs."""
    return CODES_IN_WORD * int(graph.tensors[quantise.codes].shape[-1])


def _quantise_default(problem: Problem, target: Target) -> Knobs:
    return {"num_warps": 8 if int(problem["k"]) > 2048 else 4, "num_stages": 1}


def _bind_quantise(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    quantise = need(op, QuantiseActivations)
    x, place, columns = graph.tensors[quantise.x], placed(graph, quantise.x), _quantised_columns(graph, quantise)
    pairs = x.width // columns  # of a row; where there are several, x is a tensor of its own
    args = (
        tensor_arg(graph, "x", quantise.x),
        tensor_arg(graph, "codes", quantise.codes),
        tensor_arg(graph, "scales", quantise.scales, "*u8"),
        tensor_arg(graph, "row_scale", quantise.row_scale),
    )
    constants = {
        "K": columns,
        "X_STRIDE": place.stride // pairs,
        "X_OFFSET": place.offset,
        "SCALE_STRIDE": SCALES_IN_WORD * int(graph.tensors[quantise.scales].shape[-1]),
        "BLOCK_G": max(4, next_power_of_two(columns // GROUP)),
    }
    return Binding(args, constants, (x.shape[0] * pairs, 1, 1))


QUANTISE = Kernel(
    name="quantise_activations",
    patterns=("QuantiseActivations",),
    family=Family.PREFILL,
    space=MappingProxyType({"num_warps": PowerOfTwo(1, 16), "num_stages": Choice((1,))}),
    default=_quantise_default,
    problem=_quantise_problem,
    bind=_bind_quantise,
)

KERNELS = (GEMM_FP4, QUANTISE)
