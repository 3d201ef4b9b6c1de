"""Experts' projections of prompts with 4-bit activations: two launches by tiles, on block-scaled FP4 tensor cores.

They stand to ``grouped.py`` as ``gemm_fp4`` to ``gemm``: tiles, pairs and the shared expert are found as there. Rows
are quantised once for all their experts, and what gate and up make of a row once for each of its pairs. The weight is
always on the left of the matrix instruction: tiles have no more rows than an expert is expected to meet, and tcgen05
wants 128 on the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op, primitive_ops
from lynnc.kernels.constraints import sums_refusal
from lynnc.kernels.gemm_fp4 import TCGEN05_ROWS, codes_refusal, instruction_refusal, rows_args
from lynnc.kernels.grouped import WIDE_TILE, both_halves, has_two_halves, shared_args, tile_columns, tile_of, tiles_grid
from lynnc.kernels.kernel import (
    Arg,
    Binding,
    Choice,
    Family,
    Kernel,
    Knob,
    Knobs,
    PowerOfTwo,
    Problem,
    find,
    need,
    null_arg,
    part_rows,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.ops import SiluMul
from lynnc.promptops import SCALES_IN_WORD, QuantisedGroupedLinear, QuantisedLinear
from lynnc.target import Target

SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_N": PowerOfTwo(16, 256),
        "BLOCK_K": PowerOfTwo(64, 512),
        "num_warps": PowerOfTwo(1, 8),
        "num_stages": Choice((1, 2, 3, 4)),
    }
)


def _problem(graph: Graph, op: Op) -> Problem:
    linear = need(op, QuantisedGroupedLinear)
    weight = graph.weights[linear.weight]
    return {
        "format": weight.format.value,
        "activations": "nvfp4",
        "k": weight.columns,
        "n": weight.rows,
        "shared": int(find(op, QuantisedLinear) is not None),
        "slots": int(graph.tensors[linear.order].shape[1]),
        "tile": tile_of(graph, linear.tiles)[0],
    }


def _default(problem: Problem, target: Target) -> Knobs:
    """Tiles as the instructions and registers like them; not measured, as no target with FP4 MMA was at hand."""
    columns = 256 if target.has_tcgen05 else 128
    warps = 8 if target.has_tcgen05 or int(problem["tile"]) >= WIDE_TILE else 4
    return {"BLOCK_N": TCGEN05_ROWS, "BLOCK_K": columns, "num_warps": warps, "num_stages": 3}


def _up_default(problem: Problem, target: Target) -> Knobs:
    return {**_default(problem, target), "BLOCK_N": TCGEN05_ROWS // 2}


def _fits_instruction(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return instruction_refusal(knobs["BLOCK_N"], knobs, target)


def _fits_shared_memory(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    columns = tile_columns(int(problem["k"]), knobs["BLOCK_K"])
    return codes_refusal(int(problem["tile"]) + knobs["BLOCK_N"], columns, problem, knobs, target)


def _sums_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return sums_refusal(int(problem["tile"]), knobs["BLOCK_N"], knobs, target)


def _both_fit(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """The same for gate and up together."""
    return next((why for check in _CONSTRAINTS if (why := check(problem, both_halves(knobs), target))), None)


_CONSTRAINTS = (_fits_instruction, _fits_shared_memory, _sums_fit_registers)


def _weights_args(graph: Graph, op: Op) -> tuple[Arg, ...]:
    weight = graph.weights[need(op, QuantisedGroupedLinear).weight]
    own = weight_args(weight, ("data", "scales", "globals_"))
    return (*own, *shared_args(graph, find(op, QuantisedLinear), weight), value_arg("rows", graph.rows))


def _constants(graph: Graph, op: Op, knobs: Knobs) -> Mapping[str, int | float | bool]:
    linear = need(op, QuantisedGroupedLinear)
    weight = graph.weights[linear.weight]
    return {
        "K": weight.columns,
        "SCALE_STRIDE": SCALES_IN_WORD * int(graph.tensors[linear.scales].shape[-1]),
        "PART_ROWS": part_rows(weight),
        "GLOBALS": weight.rows // weight.part_rows,
        "SHARED": find(op, QuantisedLinear) is not None,
        "TILE": tile_of(graph, linear.tiles)[0],
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": tile_columns(weight.columns, knobs["BLOCK_K"]),
    }


def _bind_up(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, shared = need(op, QuantisedGroupedLinear), find(op, QuantisedLinear)
    acts = {act.x: act.out for act in primitive_ops(op) if isinstance(act, SiluMul)}
    size, order = graph.weights[linear.weight].rows // 2, graph.tensors[linear.order]
    args = (
        *rows_args(graph, linear),
        tensor_arg(graph, "order", linear.order),
        tensor_arg(graph, "tiles", linear.tiles),
        tensor_arg(graph, "act", acts[linear.out]),
        tensor_arg(graph, "shared_act", acts[shared.out]) if shared else null_arg("shared_act", "*bf16"),
        *_weights_args(graph, op),
    )
    constants = {**_constants(graph, op, knobs), "I": size, "TOP_K": int(order.shape[1])}
    grid = tiles_grid(graph, linear.tiles, -(-size // knobs["BLOCK_N"]), shared is not None)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_down(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, shared = need(op, QuantisedGroupedLinear), find(op, QuantisedLinear)
    rows = graph.weights[linear.weight].rows
    nothing = (
        null_arg("shared_codes", "*u8"),
        null_arg("shared_code_scales", "*u8"),
        null_arg("shared_row_scale", "*fp32"),
    )
    args = (
        *rows_args(graph, linear),
        *(rows_args(graph, shared, "shared_") if shared else nothing),
        tensor_arg(graph, "order", linear.order),
        tensor_arg(graph, "tiles", linear.tiles),
        tensor_arg(graph, "out", linear.out),
        tensor_arg(graph, "shared_out", shared.out) if shared else null_arg("shared_out", "*bf16"),
        *_weights_args(graph, op),
    )
    grid = tiles_grid(graph, linear.tiles, -(-rows // knobs["BLOCK_N"]), shared is not None)
    return Binding(args, MappingProxyType({**_constants(graph, op, knobs), "N": rows}), grid)


GROUPED_UP_FP4 = Kernel(
    name="grouped_up_fp4",
    patterns=("QuantisedGroupedUp",),
    family=Family.PREFILL,
    space=SPACE,
    default=_up_default,
    problem=_problem,
    bind=_bind_up,
    constraints=(has_two_halves, _both_fit),
)
GROUPED_DOWN_FP4 = Kernel(
    name="grouped_down_fp4",
    patterns=("QuantisedGroupedDown",),
    family=Family.PREFILL,
    space=SPACE,
    default=_default,
    problem=_problem,
    bind=_bind_down,
    constraints=_CONSTRAINTS,
)

KERNELS: tuple[Kernel, ...] = (GROUPED_UP_FP4, GROUPED_DOWN_FP4)
