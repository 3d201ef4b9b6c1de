"""Prefill's projections of 4-bit weights get 4-bit activations where the model declares them.

Before::

    q = Linear(x, w); a = Linear(x, w2)
    act = GroupedUp(y, order, tiles) { ... }; out = GroupedDown(act, order, tiles) { ... }

After::

    x.codes, x.scales, x.row_scale = QuantiseActivations(x)
    q = QuantisedLinear(x.codes, x.scales, x.row_scale, w); a = ...(the same, w2)
    y.codes, ... = QuantiseActivations(y); act = QuantisedGroupedUp(y.codes, ..., order, tiles) { ... }
    act.codes, ... = QuantiseActivations(act); out = QuantisedGroupedDown(act.codes, ..., order, tiles) { ... }

Why: FP4 tensor cores do four times the work of BF16 ones, and prompts are bound by arithmetic. One launch quantises a
row for all its readers, not once for every tile of columns: a token's row for all its experts, what an expert's gate
and up make of it for each pair. Every program for prompts does it, whatever its rows, so that the pieces of a prompt do
not change its result; decode is bound by memory and stays with BF16 activations, which are more exact. The vocabulary
meets a single row and stays so too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lynnc.ir import Fused, Graph, Op
from lynnc.ops import Linear
from lynnc.passes.patterns import replace_ops
from lynnc.programs import is_prefill
from lynnc.promptops import (
    CODES_IN_WORD,
    SCALES_IN_WORD,
    GroupedLinear,
    QuantiseActivations,
    QuantisedGroupedLinear,
    QuantisedLinear,
)
from lynnc.tensors import GROUP, DType, Tensor

FUSED = ("LinearResidual", "GroupedUp", "GroupedDown")
"""Launches with a kernel for quantised input; their patterns get the prefix ``Quantised``."""


def quantise_activations(graph: Graph) -> Graph:
    """Quantises the input of every launch of projections whose weights are declared to meet 4-bit activations."""
    if not is_prefill(graph.program):
        return graph
    made: dict[str, QuantiseActivations] = {}
    replacements: dict[str, tuple[Op, ...]] = {}
    tensors: list[Tensor] = []
    for op in graph.ops:
        linears = _linears_of(op)
        if not linears or not all(_is_declared(graph, linear) for linear in linears):
            continue
        first: list[Op] = []
        for linear in linears:
            if linear.x not in made:
                made[linear.x], new = _quantise(graph, linear)
                first.append(made[linear.x])
                tensors += new
        replacements[op.name] = (*first, _quantised(op, made))
    return replace_ops(graph, replacements, tensors) if replacements else graph


def _linears_of(op: Op) -> tuple[Linear | GroupedLinear, ...]:
    """The projections of a launch that could have quantised input."""
    body = op.body if isinstance(op, Fused) and op.pattern in FUSED else (op,)
    return tuple(inner for inner in body if isinstance(inner, (Linear, GroupedLinear)))


def _is_declared(graph: Graph, linear: Linear | GroupedLinear) -> bool:
    weight = graph.weights[linear.weight]
    return weight.activations == "nvfp4" and weight.tensor_class != "lm_head"


def _quantise(graph: Graph, linear: Linear | GroupedLinear) -> tuple[QuantiseActivations, tuple[Tensor, ...]]:
    """The op, and the tensors that it writes: a row of the linear's input is what meets one row of its weight."""
    x, width = linear.x, graph.weights[linear.weight].columns
    rows = graph.tensors[x].shape[:-1] if isinstance(linear, GroupedLinear) else graph.tensors[x].shape[:1]
    codes = Tensor(f"{x}.codes", DType.I32, (*rows, width // CODES_IN_WORD))
    scales = Tensor(f"{x}.scales", DType.I32, (*rows, -(-width // (GROUP * SCALES_IN_WORD))))
    row_scale = Tensor(f"{x}.row_scale", DType.F32, (*rows, 1))
    op = QuantiseActivations(f"{x}.quantise", x, codes.name, scales.name, row_scale.name)
    return op, (codes, scales, row_scale)


def _quantised(op: Op, made: Mapping[str, QuantiseActivations]) -> Op:
    """The same launch with quantised input."""
    if isinstance(op, (Linear, GroupedLinear)):
        rows = made[op.x]
        inputs = (rows.codes, rows.scales, rows.row_scale)
        if isinstance(op, GroupedLinear):
            return QuantisedGroupedLinear(op.name, *inputs, op.order, op.tiles, op.weight, op.out)
        return QuantisedLinear(op.name, *inputs, op.weight, op.out, op.first_row)
    if not isinstance(op, Fused):
        return op
    body = tuple(_quantised(inner, made) for inner in op.body)
    reads = {name for inner in body for name in inner.reads}
    candidates = (new for name in op.inputs for new in (*(made[name].writes if name in made else ()), name))
    kept = tuple(name for name in candidates if name in reads)
    return replace(op, pattern=f"Quantised{op.pattern}", body=body, inputs=kept)
