"""The launches of a mixture of experts in prefill: pairs by expert, two projections by tiles, and the weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.columnorder import ColumnOrder
from lynnc.ir import Graph, Op, primitive_ops
from lynnc.kernels.constraints import shared_memory_refusal, sums_refusal
from lynnc.kernels.gemm import fits_lanes
from lynnc.kernels.kernel import (
    DATA_POINTER,
    Arg,
    Binding,
    Choice,
    Family,
    Kernel,
    Knob,
    Knobs,
    PowerOfTwo,
    Problem,
    ceil_div,
    find,
    need,
    next_power_of_two,
    null_arg,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.moe import ELEMENTWISE_SPACE, elementwise_default, gate_args, matrix_constants
from lynnc.ops import Add, Combine, Linear, SharedAdd, SiluMul
from lynnc.promptops import GroupByExpert, GroupedLinear, QuantisedLinear
from lynnc.target import Target
from lynnc.tensors import Dim, Tensor, Weight

TILES_SPACE: Mapping[str, Knob] = MappingProxyType(
    {
        "BLOCK_N": PowerOfTwo(16, 256),
        "BLOCK_K": PowerOfTwo(64, 512),
        "SWAP": Choice((0, 1)),
        "num_warps": PowerOfTwo(1, 8),
        "num_stages": Choice((1, 2, 3, 4, 5)),
    }
)
"""``SWAP`` puts the weight on the left of the matrix instruction, whose narrow side then are the rows of a tile."""
GROUP_SPACE: Mapping[str, Knob] = MappingProxyType(
    {"BLOCK": PowerOfTwo(16, 4096), "num_warps": PowerOfTwo(1, 16), "num_stages": Choice((1,))}
)
WIDE_TILE = 64
"""Rows of a tile from which on arithmetic binds, not bytes."""
SECOND_NAMES = ("data2", "scales2", "globals2")


def tile_of(graph: Graph, tiles: str) -> tuple[int, Tensor]:
    """Rows of a tile, and the tensor of tiles."""
    group = next(op for op in graph.ops if isinstance(op, GroupByExpert) and op.tiles == tiles)
    return group.tile, graph.tensors[tiles]


def _group_problem(graph: Graph, op: Op) -> Problem:
    group = need(op, GroupByExpert)
    return {"slots": graph.tensors[group.ids].width, "tile": group.tile}


def _bind_group(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    group = need(op, GroupByExpert)
    ids = graph.tensors[group.ids]
    args = (
        tensor_arg(graph, "ids", group.ids),
        tensor_arg(graph, "order", group.order),
        tensor_arg(graph, "tiles", group.tiles),
        value_arg("pairs", ids.shape[0] * ids.width),
    )
    constants = {"TILE": group.tile, "BLOCK": knobs["BLOCK"]}
    return Binding(args, MappingProxyType(constants), (group.experts, 1, 1))


def _group_default(problem: Problem, target: Target) -> Knobs:
    """All pairs of a short step at once; of a long one as many as a program's threads hold in registers."""
    if int(problem["tile"]) < WIDE_TILE:
        return {"BLOCK": 512, "num_warps": 4, "num_stages": 1}
    return {"BLOCK": 2048, "num_warps": 8, "num_stages": 1}


def shared_args(graph: Graph, shared: Linear | QuantisedLinear | None, weight: Weight) -> tuple[Arg, ...]:
    """The shared expert's weight, which has the format of the routed ones."""
    if shared is None:
        kinds = (DATA_POINTER[weight.format], weight_args(weight, SECOND_NAMES)[1].type, "*fp32")
        return tuple(null_arg(name, kind) for name, kind in zip(SECOND_NAMES, kinds, strict=True))
    return weight_args(graph.weights[shared.weight], SECOND_NAMES)


def tile_columns(columns: int, wanted: int) -> int:
    """Columns of a block: not far more than the weight has."""
    return max(64, min(wanted, next_power_of_two(columns)))


def _tiles_problem(graph: Graph, op: Op) -> Problem:
    linear, shared = need(op, GroupedLinear), find(op, Linear)
    weight = graph.weights[linear.weight]
    return {
        "format": weight.format.value,
        "k": weight.columns,
        "n": weight.rows,
        "order": graph.tensors[linear.x].order.value,
        "shared": int(shared is not None),
        "slots": int(graph.tensors[linear.order].shape[1]),
        "tile": tile_of(graph, linear.tiles)[0],
    }


def tiles_grid(graph: Graph, tiles: str, columns: int, shared: bool) -> tuple[Dim, Dim, Dim]:
    """Programs: blocks of columns first, so that those of a tile, and tiles of an expert, run beside each other."""
    tile, tensor = tile_of(graph, tiles)
    return columns, tensor.shape[0] + (ceil_div(graph.rows, tile) if shared else 0), 1


def _constants(graph: Graph, op: Op, knobs: Knobs) -> Mapping[str, int | float | bool]:
    linear = need(op, GroupedLinear)
    weight = graph.weights[linear.weight]
    return {
        "K": weight.columns,
        **matrix_constants(weight),
        "SHARED": find(op, Linear) is not None,
        "TILE": tile_of(graph, linear.tiles)[0],
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": tile_columns(weight.columns, knobs["BLOCK_K"]),
        "SWAP": bool(knobs["SWAP"]),
        "LANES": graph.tensors[linear.x].order is ColumnOrder.LANES,
        "WARPS": knobs["num_warps"],
    }


def _bind_up(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, shared = need(op, GroupedLinear), find(op, Linear)
    weight, place = graph.weights[linear.weight], placed(graph, linear.x)
    acts = {act.x: act.out for act in primitive_ops(op) if isinstance(act, SiluMul)}
    args = (
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "order", linear.order),
        tensor_arg(graph, "tiles", linear.tiles),
        tensor_arg(graph, "act", acts[linear.out]),
        tensor_arg(graph, "shared_act", acts[shared.out]) if shared else null_arg("shared_act", "*bf16"),
        *weight_args(weight, ("data", "scales", "globals_")),
        *shared_args(graph, shared, weight),
        value_arg("rows", graph.rows),
    )
    size = weight.rows // 2
    constants = {
        **_constants(graph, op, knobs),
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "I": size,
        "TOP_K": int(graph.tensors[linear.order].shape[1]),
        "ACT_LANES": graph.tensors[acts[linear.out]].order is ColumnOrder.LANES,
    }
    grid = tiles_grid(graph, linear.tiles, -(-size // knobs["BLOCK_N"]), shared is not None)
    return Binding(args, MappingProxyType(constants), grid)


def _bind_down(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, shared = need(op, GroupedLinear), find(op, Linear)
    weight = graph.weights[linear.weight]
    args = (
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "shared_x", shared.x) if shared else null_arg("shared_x", "*bf16"),
        tensor_arg(graph, "order", linear.order),
        tensor_arg(graph, "tiles", linear.tiles),
        tensor_arg(graph, "out", linear.out),
        tensor_arg(graph, "shared_out", shared.out) if shared else null_arg("shared_out", "*bf16"),
        *weight_args(weight, ("data", "scales", "globals_")),
        *shared_args(graph, shared, weight),
        value_arg("rows", graph.rows),
    )
    constants = {**_constants(graph, op, knobs), "N": weight.rows}
    grid = tiles_grid(graph, linear.tiles, -(-weight.rows // knobs["BLOCK_N"]), shared is not None)
    return Binding(args, MappingProxyType(constants), grid)


def _up_default(problem: Problem, target: Target) -> Knobs:
    """Measured on an H200, as those below."""
    stages = 4 if int(problem["tile"]) < WIDE_TILE else 3
    return {"BLOCK_N": 64, "BLOCK_K": 128, "SWAP": 1, "num_warps": 4, "num_stages": stages}


def _down_default(problem: Problem, target: Target) -> Knobs:
    if int(problem["tile"]) < WIDE_TILE or problem["order"] == ColumnOrder.LANES:
        return {"BLOCK_N": 128, "BLOCK_K": 128, "SWAP": 1, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 128, "BLOCK_K": 64, "SWAP": 0, "num_warps": 4, "num_stages": 3}


def _fits_lanes(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Columns in the order of lanes meet whole matrix instructions of every warp, with the weight on their left."""
    if problem["order"] != ColumnOrder.LANES or knobs["SWAP"]:
        return fits_lanes(problem, knobs, target)
    return "columns in the order of lanes need SWAP"


def both_halves(knobs: Knobs) -> Knobs:
    """The tile of a program that multiplies with BLOCK_N rows of gate and as many of up at once."""
    return {**knobs, "BLOCK_N": 2 * knobs["BLOCK_N"]}


def _halves_fit_lanes(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return _fits_lanes(problem, both_halves(knobs), target)


def _fits_shared_memory(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """The rows of a tile for every stage in flight; weights may pass from memory to registers."""
    columns = tile_columns(int(problem["k"]), knobs["BLOCK_K"])
    return shared_memory_refusal("tiles", 2 * knobs["num_stages"] * int(problem["tile"]) * columns, target)


def _sums_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return sums_refusal(int(problem["tile"]), knobs["BLOCK_N"], knobs, target)


def _both_sums_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return _sums_fit_registers(problem, both_halves(knobs), target)


def has_two_halves(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """Whether the weight's rows are gate and up."""
    return None if int(problem["n"]) % 2 == 0 else f"the weight has {problem['n']} rows, not gate and up of one size"


def _combine_problem(graph: Graph, op: Op) -> Problem:
    return {"n": graph.tensors[need(op, Add).out].width, "slots": int(graph.tensors[need(op, Combine).x].shape[1])}


def _bind_combine_add(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    combine, add, shared_add = need(op, Combine), need(op, Add), find(op, SharedAdd)
    slots, width = (int(dim) for dim in graph.tensors[combine.x].shape[1:])
    change = shared_add.out if shared_add else combine.out
    args = (
        tensor_arg(graph, "x", combine.x),
        tensor_arg(graph, "scores", combine.scores),
        tensor_arg(graph, "shared", shared_add.shared) if shared_add else null_arg("shared", "*bf16"),
        tensor_arg(graph, "gate", shared_add.gate) if shared_add else null_arg("gate", "*fp32"),
        tensor_arg(graph, "residual", add.a if add.b == change else add.b),
        tensor_arg(graph, "out", add.out),
        *(gate_args(graph, shared_add) if shared_add else (value_arg("gate_offset", 0), value_arg("gate_stride", 0))),
    )
    constants = {"D": width, "TOP_K": slots, "SHARED": shared_add is not None, "BLOCK": knobs["BLOCK"]}
    grid = (graph.tensors[add.out].shape[0], ceil_div(width, knobs["BLOCK"]), 1)
    return Binding(args, MappingProxyType(constants), grid)


GROUP_BY_EXPERT = Kernel(
    name="group",
    patterns=("GroupByExpert",),
    family=Family.PREFILL,
    space=GROUP_SPACE,
    default=_group_default,
    problem=_group_problem,
    bind=_bind_group,
)
GROUPED_UP = Kernel(
    name="grouped_up",
    patterns=("GroupedUp",),
    family=Family.PREFILL,
    space=TILES_SPACE,
    default=_up_default,
    problem=_tiles_problem,
    bind=_bind_up,
    constraints=(has_two_halves, _halves_fit_lanes, _fits_shared_memory, _both_sums_fit_registers),
)
GROUPED_DOWN = Kernel(
    name="grouped_down",
    patterns=("GroupedDown",),
    family=Family.PREFILL,
    space=TILES_SPACE,
    default=_down_default,
    problem=_tiles_problem,
    bind=_bind_down,
    constraints=(_fits_lanes, _fits_shared_memory, _sums_fit_registers),
)
COMBINE_ADD = Kernel(
    name="combine_add",
    patterns=("CombineAdd",),
    family=Family.PREFILL,
    space=ELEMENTWISE_SPACE,
    default=elementwise_default,
    problem=_combine_problem,
    bind=_bind_combine_add,
)

KERNELS: tuple[Kernel, ...] = (GROUP_BY_EXPERT, GROUPED_UP, GROUPED_DOWN, COMBINE_ADD)
