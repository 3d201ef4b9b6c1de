"""The two launches of a mixture of experts in decode: routing with gate and up, then down with the sums."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.ir import Graph, Op, primitive_ops
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
    Problem,
    ceil_div,
    find,
    need,
    next_power_of_two,
    null_arg,
    part_rows,
    placed,
    tensor_arg,
    value_arg,
    weight_args,
)
from lynnc.kernels.linear import block_columns
from lynnc.kernels.moe import (
    PROJECTION_SPACE,
    Constants,
    gate_args,
    largest_experts,
    matrix_constants,
    projection_problem,
    route_args,
    route_constants,
)
from lynnc.ops import Add, Combine, ExpertLinear, Linear, SharedAdd, SiluMul, TopK
from lynnc.target import Target
from lynnc.tensors import GROUP, Format, Weight

FUSED_SPACE: Mapping[str, Knob] = MappingProxyType(
    {**PROJECTION_SPACE, "maxnreg": Choice((0, 80, 96, 112, 128, 144, 168))}
)
"""``maxnreg`` is the most registers of a thread, 0 for as many as ptxas likes: it does not know that the blocks of this
launch and some of the next should be resident at once."""
SECOND_NAMES = ("data2", "scales2", "globals2")


def _shared_weight(graph: Graph, op: Op) -> Weight | None:
    """The shared expert's weight in a launch that has one."""
    linear = find(op, Linear)
    return graph.weights[linear.weight] if linear else None


def _shared_args(weight: Weight | None) -> tuple[Arg, ...]:
    if weight is None:
        return tuple(null_arg(name, kind) for name, kind in zip(SECOND_NAMES, ("*i64", "*u8", "*fp32"), strict=True))
    return weight_args(weight, SECOND_NAMES)


def _shared_constants(weight: Weight | None, knobs: Knobs) -> Constants:
    if weight is None:
        return MappingProxyType({"FORMAT2": FORMAT_CODE[Format.BF16], "PART_ROWS2": 1, "BLOCK_K2": GROUP})
    facts = {
        "FORMAT2": FORMAT_CODE[weight.format],
        "PART_ROWS2": part_rows(weight),
        "BLOCK_K2": block_columns(weight, knobs["BLOCK_K"]),
    }
    return MappingProxyType(facts)


def _is_paired(weight: Weight) -> bool:
    """Whether its rows are loaded two words of 16 codes at a time, which every row has to begin with."""
    return weight.format.is_packed and weight.columns % (2 * GROUP) == 0


def _up_problem(graph: Graph, op: Op) -> Problem:
    experts = largest_experts(graph, need(op, TopK).experts)
    shared = _shared_weight(graph, op)
    return {**projection_problem(graph, op), "experts": experts, "shared": shared.rows if shared else 0}


def _bind_up(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    top_k, linear, shared = need(op, TopK), need(op, ExpertLinear), find(op, Linear)
    weight, second, place = graph.weights[linear.weight], _shared_weight(graph, op), placed(graph, linear.x)
    acts = {act.x: act.out for act in primitive_ops(op) if isinstance(act, SiluMul)}
    args = (
        tensor_arg(graph, "x_words", linear.x, "*i64"),
        tensor_arg(graph, "x", linear.x),
        tensor_arg(graph, "logits", top_k.logits),
        tensor_arg(graph, "ids", top_k.ids),
        tensor_arg(graph, "scores", top_k.scores),
        tensor_arg(graph, "act", acts[linear.out]),
        tensor_arg(graph, "shared_act", acts[shared.out]) if shared else null_arg("shared_act", "*bf16"),
        *weight_args(weight, ("data", "scales", "globals_")),
        *_shared_args(second),
        *route_args(graph, top_k),
    )
    size, shared_size = weight.rows // 2, second.rows // 2 if second else 0
    tiles = -(-max(size, shared_size) // knobs["BLOCK_N"])
    constants = {
        "X_STRIDE": place.stride,
        "X_OFFSET": place.offset,
        "K": weight.columns,
        "I": size,
        "I2": shared_size,
        **route_constants(graph, top_k),
        **matrix_constants(weight),
        **_shared_constants(second, knobs),
        "TILES": tiles,
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": block_columns(weight, knobs["BLOCK_K"]),
        "PAIRED": _is_paired(weight),
        "PAIRED2": second is not None and _is_paired(second),
        "PARTS": next_power_of_two(ceil_div(weight.columns, 64 * GROUP)),
    }
    rows = int(graph.tensors[linear.x].shape[0])
    return Binding(args, MappingProxyType(constants), (1 + tiles * (top_k.k + bool(second)), rows, 1))


def _slot_columns(weight: Weight, slots: int, block_k: int) -> int:
    """Columns of all slots that a program holds at once: no more than there are, a quarter of it if not packed."""
    limit = block_k if weight.format.is_packed else block_k // 4
    return min(limit, next_power_of_two(slots * weight.columns))


def _routes_early(graph: Graph, ids: str) -> bool:
    """Whether the launch that writes the ids lets later ones start only after it has stored them."""
    return any(ids in op.writes and op.kind == "ExpertsUp" for op in graph.ops)


def _down_problem(graph: Graph, op: Op) -> Problem:
    shared = _shared_weight(graph, op)
    return {**projection_problem(graph, op), "shared": shared.columns if shared else 0}


def _bind_down(graph: Graph, op: Op, knobs: Knobs) -> Binding:
    linear, combine, add = need(op, ExpertLinear), need(op, Combine), need(op, Add)
    shared, shared_add = find(op, Linear), find(op, SharedAdd)
    weight, second = graph.weights[linear.weight], _shared_weight(graph, op)
    change = shared_add.out if shared_add else combine.out
    slots = int(graph.tensors[linear.ids].shape[1])
    args = (
        tensor_arg(graph, "act_words", linear.x, "*i64"),
        tensor_arg(graph, "act", linear.x),
        tensor_arg(graph, "ids", linear.ids),
        tensor_arg(graph, "scores", combine.scores),
        tensor_arg(graph, "shared_words", shared.x, "*i64") if shared else null_arg("shared_words", "*i64"),
        tensor_arg(graph, "shared", shared.x) if shared else null_arg("shared", "*bf16"),
        tensor_arg(graph, "gate", shared_add.gate) if shared_add else null_arg("gate", "*fp32"),
        tensor_arg(graph, "residual", add.a if add.b == change else add.b),
        tensor_arg(graph, "out", add.out),
        *weight_args(weight, ("data", "scales", "globals_")),
        *_shared_args(second),
        value_arg("first_row2", shared.first_row if shared else 0),
        *(gate_args(graph, shared_add) if shared_add else (value_arg("gate_offset", 0), value_arg("gate_stride", 0))),
    )
    columns = weight.columns // GROUP if weight.format.is_packed else weight.columns
    constants = {
        "D": weight.rows,
        "K": weight.columns,
        "K2": second.columns if second else 0,
        "TOP_K": slots,
        "FORMAT": FORMAT_CODE[weight.format],
        **_shared_constants(second, knobs),
        "BLOCK_N": knobs["BLOCK_N"],
        "BLOCK_K": _slot_columns(weight, slots, knobs["BLOCK_K"]),
        "SAME": columns & -columns,  # the largest power of two that divides a slot's columns
        "EARLY": bool(knobs["EARLY"]) and _routes_early(graph, linear.ids),
    }
    rows = int(graph.tensors[add.out].shape[0])
    return Binding(args, MappingProxyType(constants), (ceil_div(weight.rows, knobs["BLOCK_N"]), rows, 1))


def _up_default(problem: Problem, target: Target) -> Knobs:
    """Two rows of gate and of up a warp: programs of four warps, of which a multiprocessor holds five at once."""
    return {"BLOCK_N": 8, "BLOCK_K": 2048, "maxnreg": 0, "num_warps": 4, "num_stages": 1}


def _down_default(problem: Problem, target: Target) -> Knobs:
    """Blocks that the columns of all slots fill: 8 slots of 512 are one, of 768 three of 2048, all held at once.

    Few rows a program: many warps hide each other's waits. The fewer registers, the more programs are resident beside
    those of ``experts_up`` and load while that one works.
    """
    whole = int(problem["k"]) * int(problem["slots"]) % 4096 == 0
    shape = {"BLOCK_N": 4, "BLOCK_K": 4096 if whole else 2048, "EARLY": 1}
    return {**shape, "maxnreg": 128 if target.has_pdl else 0, "num_warps": 4, "num_stages": 1}


def _has_two_halves(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    return None if int(problem["n"]) % 2 == 0 else f"the weight has {problem['n']} rows, not gate and up of one size"


def _has_one_part(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    if problem["parts"] == 1:
        return None
    return f"the down projection has {problem['parts']} parts, but its kernel reads one global scale for each expert"


def _slots_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A row of the launch has the columns of all slots."""
    return weights_fit_registers({**problem, "k": int(problem["k"]) * int(problem["slots"])}, knobs, target)


EXPERTS_UP = Kernel(
    name="experts_up",
    patterns=("ExpertsUp",),
    family=Family.DECODE,
    space=FUSED_SPACE,
    default=_up_default,
    problem=_up_problem,
    bind=_bind_up,
    constraints=(_has_two_halves, registers_fit_block, weights_fit_registers),
)
EXPERTS_DOWN = Kernel(
    name="experts_down",
    patterns=("ExpertsDown",),
    family=Family.DECODE,
    space=MappingProxyType({**FUSED_SPACE, "EARLY": Choice((0, 1))}),
    default=_down_default,
    problem=_down_problem,
    bind=_bind_down,
    constraints=(_has_one_part, registers_fit_block, _slots_fit_registers),
)

KERNELS: tuple[Kernel, ...] = (EXPERTS_UP, EXPERTS_DOWN)
