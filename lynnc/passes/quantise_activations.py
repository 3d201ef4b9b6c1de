"""Prefill's projections of 4-bit weights get 4-bit activations where the model declares them.

Before::

    q = Linear(x, w); a = Linear(x, w2)

After::

    x.codes, x.scales, x.row_scale = QuantiseActivations(x)
    q = QuantisedLinear(x.codes, x.scales, x.row_scale, w); a = ...(the same, w2)

Why: FP4 tensor cores do four times the work of BF16 ones, and prompts are bound by arithmetic. One launch quantises a
row for all its readers, not once for every tile of columns. Every program for prompts does it, whatever its rows, so
that the pieces of a prompt do not change its result; decode is bound by memory and stays with BF16 activations, which
are more exact. The vocabulary meets a single row and stays so too. Experts' projections are W4A16 for now.
"""

from __future__ import annotations

from dataclasses import replace

from lynnc.ir import Fused, Graph, Op
from lynnc.ops import Add, Linear
from lynnc.passes.patterns import replace_ops
from lynnc.programs import is_prefill
from lynnc.promptops import QuantiseActivations, QuantisedLinear
from lynnc.tensors import GROUP, DType, Tensor

CODES_IN_WORD, SCALES_IN_WORD = 8, 4


def quantise_activations(graph: Graph) -> Graph:
    """Quantises the input of every Linear and LinearResidual whose weight is declared to meet 4-bit activations."""
    if not is_prefill(graph.program):
        return graph
    made: dict[str, QuantiseActivations] = {}
    replacements: dict[str, tuple[Op, ...]] = {}
    tensors: list[Tensor] = []
    for op in graph.ops:
        linear = _linear_of(op)
        if linear is None or not _is_declared(graph, linear):
            continue
        first = linear.x not in made
        if first:
            made[linear.x], new = _quantise(graph, linear.x)
            tensors += new
        quantised = _quantised(op, linear, made[linear.x])
        replacements[op.name] = (made[linear.x], quantised) if first else (quantised,)
    return replace_ops(graph, replacements, tensors) if replacements else graph


def _linear_of(op: Op) -> Linear | None:
    if isinstance(op, Linear):
        return op
    if isinstance(op, Fused) and op.pattern == "LinearResidual":
        return next(inner for inner in op.body if isinstance(inner, Linear))
    return None


def _is_declared(graph: Graph, linear: Linear) -> bool:
    weight = graph.weights[linear.weight]
    return weight.activations == "nvfp4" and weight.tensor_class != "lm_head"


def _quantise(graph: Graph, x: str) -> tuple[QuantiseActivations, tuple[Tensor, ...]]:
    """The op, and the tensors that it writes."""
    rows, width = graph.tensors[x].shape[0], graph.tensors[x].width
    codes = Tensor(f"{x}.codes", DType.I32, (rows, width // CODES_IN_WORD))
    scales = Tensor(f"{x}.scales", DType.I32, (rows, -(-width // (GROUP * SCALES_IN_WORD))))
    row_scale = Tensor(f"{x}.row_scale", DType.F32, (rows, 1))
    op = QuantiseActivations(f"{x}.quantise", x, codes.name, scales.name, row_scale.name)
    return op, (codes, scales, row_scale)


def _quantised(op: Op, linear: Linear, made: QuantiseActivations) -> Op:
    """The same launch with quantised input."""
    inputs = (made.codes, made.scales, made.row_scale)
    inner = QuantisedLinear(linear.name, *inputs, linear.weight, linear.out, linear.first_row)
    if not isinstance(op, Fused):
        return inner
    add = next(part for part in op.body if isinstance(part, Add))
    return replace(op, pattern="QuantisedLinearResidual", body=(inner, add), inputs=(*inputs, add.a))
