"""Projections of at most 8 rows: FMAs on packed words (family ``gemv``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op
from lynnc.kernels.constraints import registers_fit_block, weights_fit_registers
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
from lynnc.ops import Add, Linear, RmsNorm
from lynnc.target import Target
from lynnc.tensors import GROUP, DType, Weight


def norm_facts(op: Op) -> Mapping[str, int | float | bool]:
    """The constants that describe the RMS norm at the head of a launch, or none."""
    norms = body_of(op, RmsNorm)
    if not norms:
        return MappingProxyType({"NORM": False, "SHIFT": 0, "EPS": 0.0})
    return MappingProxyType({"NORM": True, "SHIFT": int(norms[0].shifted), "EPS": norms[0].eps})


def input_args(graph: Graph, op: Op, x: str) -> tuple[Arg, ...]:
    """x and the norm weight of a launch, each as 64-bit words and as BF16; x is the norm's input where there is one."""
    norms = body_of(op, RmsNorm)
    if not norms:
        words = (tensor_arg(graph, "x_words", x, "*i64"), tensor_arg(graph, "x", x))
        return (*words, null_arg("norm_words", "*i64"), null_arg("norm", "*bf16"))
    weight = graph.weights[norms[0].weight]
    data = weight_args(weight, ("norm", "", ""))[0]
    return (
        tensor_arg(graph, "x_words", norms[0].x, "*i64"),
        tensor_arg(graph, "x", norms[0].x),
        Arg("norm_words", "*i64", data.source, data.name),
        data,
    )


def input_of(op: Op, x: str) -> str:
    """The tensor in memory that a launch reads for x: the norm's input if it starts with a norm."""
    norms = body_of(op, RmsNorm)
    return norms[0].x if norms else x


def input_facts(graph: Graph, op: Op, x: str) -> Mapping[str, int]:
    """Columns of x and its place in memory."""
    name = input_of(op, x)
    place = placed(graph, name)
    return MappingProxyType({"K": graph.tensors[name].width, "X_STRIDE": place.stride, "X_OFFSET": place.offset})


def block_columns(weight: Weight, block_k: int) -> int:
    """Columns that a program holds at once: no more than the row, a quarter of it where elements are not packed."""
    limit = block_k if weight.format.is_packed else block_k // 4
    return max(GROUP, min(limit, next_power_of_two(weight.columns)))


def _most_experts(graph: Graph) -> int:
    """Rows of the largest router."""
    return max(weight.rows for weight in graph.weights.values() if weight.tensor_class == "router")


def linear_problem(graph: Graph, op: Op) -> Problem:
    """Formats, columns and rows of the weights, and what is fused around them."""
    linears = body_of(op, Linear)
    weights = [graph.weights[linear.weight] for linear in linears]
    # The router's rows differ from layer to layer with the experts: its launches share one kernel and one choice.
    # Those of models with unlike numbers of experts do not.
    is_router = weights[0].tensor_class == "router"
    rows = f"router-{_most_experts(graph)}" if is_router else sum(graph.tensors[op.out].width for op in linears)
    return {
        "formats": "+".join(weight.format for weight in weights),
        "k": weights[0].columns,
        "n": rows,
        "norm": int(bool(body_of(op, RmsNorm))),
        "residual": int(bool(body_of(op, Add))),
    }


def _default(problem: Problem, target: Target) -> Knobs:
    """What was fastest on an H200; a row held in registers wants as many warps as it has thousands of columns."""
    knobs = {"num_stages": 1, "maxnreg": 0}
    warps = 8 if int(problem["k"]) > 2048 else 4
    if not str(problem["formats"]).startswith("nvfp4"):
        return {**knobs, "BLOCK_N": 4, "BLOCK_K": 8192, "PROGRAMS": 0, "num_warps": 8}
    programs = (396 if warps == 4 else 264) if problem["norm"] else 0
    return {**knobs, "BLOCK_N": 8, "BLOCK_K": 512 * warps, "PROGRAMS": programs, "num_warps": warps}


def _bind(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linears = body_of(op, Linear)
    adds = body_of(op, Add)
    norms = body_of(op, RmsNorm)
    x, out = linears[0].x, adds[0].out if adds else linears[0].out
    stored = [norm.out for norm in norms if norm.out in op.writes]
    first, second = graph.weights[linears[0].weight], graph.weights[linears[-1].weight]
    columns = [0 if adds else placed(graph, linear.out).offset for linear in linears]
    widths = [graph.tensors[linear.out].width for linear in linears]
    has_second = len(linears) > 1
    programs = [programs_for(width, knobs) for width in (widths[0], widths[-1])]
    args = (
        *input_args(graph, op, x),
        tensor_arg(graph, "residual", adds[0].a) if adds else null_arg("residual", "*bf16"),
        tensor_arg(graph, "normed", stored[0]) if stored else null_arg("normed", "*bf16"),
        tensor_arg(graph, "out", out),
        *weight_args(first, ("data", "scales", "globals_")),
        value_arg("first_row", linears[0].first_row),
        value_arg("n", widths[0]),
        *weight_args(second, ("data2", "scales2", "globals2")),
        value_arg("first_row2", linears[-1].first_row),
        value_arg("n2", widths[-1]),
        value_arg("column", columns[0]),
        value_arg("column2", columns[-1]),
        value_arg("out_stride", placed(graph, out).stride),
        value_arg("count", graph.tensors[out].shape[0]),
        value_arg("programs", programs[0]),
        value_arg("programs2", programs[1] if has_second else 0),
    )
    constants = {
        **input_facts(graph, op, x),
        **norm_facts(op),
        **_weight_constants(first, second if has_second else None, knobs),
        "STORE_NORMED": bool(stored),
        "RESIDUAL": bool(adds),
        "OUT_F32": graph.tensors[out].dtype is DType.F32,
    }
    return Binding(args, MappingProxyType(constants), (sum(programs[: len(linears)]) + bool(stored), 1, 1))


def _weight_constants(first: Weight, second: Weight | None, knobs: Knobs) -> Mapping[str, int]:
    """Formats and blocks of a launch's one or two weights."""
    other = second or first
    return {
        "FORMAT": FORMAT_CODE[first.format],
        "PART_ROWS": part_rows(first),
        "FORMAT2": FORMAT_CODE[second.format] if second else -1,
        "PART_ROWS2": part_rows(other),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(first, knobs["BLOCK_K"]),
        "BLOCK_K2": block_columns(other, knobs["BLOCK_K"]),
        "BLOCK_ROW": next_power_of_two(first.columns),
    }


def programs_for(width: int, knobs: Knobs) -> int:
    """Programs for a weight: one for each tile of rows, or no more than PROGRAMS that take several in turn."""
    tiles = int(ceil_div(width, knobs["BLOCK_N"]))
    return min(tiles, knobs["PROGRAMS"]) if knobs["PROGRAMS"] else tiles


PERSISTENT_SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_N": PowerOfTwo(1, 256),
        "BLOCK_K": PowerOfTwo(512, 16384),
        "PROGRAMS": Choice((0, 48, 96, 132, 192, 264, 396, 528, 660, 792, 1056)),
        "num_warps": PowerOfTwo(1, 16),
        "num_stages": Choice((1, 2, 3)),
        "maxnreg": Choice((0, 64, 80, 96, 128, 168)),
    }
)
"""Of kernels whose programs take several tiles in turn; ``maxnreg`` is the most registers of a thread, 0 for any."""

LINEAR = Kernel(
    name="linear",
    patterns=("Linear", "Projections", "NormLinear", "NormProjections", "LinearResidual"),
    family=Family.DECODE,
    space=PERSISTENT_SPACE,
    default=_default,
    problem=linear_problem,
    bind=_bind,
    constraints=(registers_fit_block, weights_fit_registers),
)

KERNELS = (LINEAR,)
