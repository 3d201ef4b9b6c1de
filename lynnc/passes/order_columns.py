"""In programs for prompts, the columns that meet packed weights stand in the order in which lanes unpack those.

Before::

    x = RmsNorm(h); logits = Linear(x, router); a = GroupedUp(x, ...); y = GroupedDown(a, ...)

After::

    x, x_lanes = RmsNormTwice(h) { x = RmsNorm(h); x_lanes = RmsNorm(h) }
    logits = Linear(x, router); a = GroupedUp(x_lanes, ...); y = GroupedDown(a, ...)    # x_lanes and a: order of lanes

Why: a lane's words hold other columns than its operands of a matrix instruction. With x in the words' order (see
``lynnc.columnorder``) the weight goes from words to operands inside a lane; otherwise it changes lanes through shared
memory, as does every tile of x in each program that reads it. Writing x in another order costs its writer nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lynnc.columnorder import BLOCK, ColumnOrder
from lynnc.ir import Fused, Graph, Op, primitive_ops
from lynnc.mixerops import Attention, GatedNorm, OutputGate
from lynnc.ops import Linear, RmsNorm, SiluMul
from lynnc.passes.patterns import Uses, replace_ops
from lynnc.programs import is_prefill
from lynnc.promptops import GroupedLinear
from lynnc.tensors import Tensor

WRITERS: Mapping[str, type[Op]] = MappingProxyType(
    {
        "RmsNorm": RmsNorm,
        "SumPartsNorm": RmsNorm,
        "GatedNorm": GatedNorm,
        "Attention": Attention,
        "AttentionGate": OutputGate,
        "GroupedUp": SiluMul,
        "SiluMul": SiluMul,
    }
)
"""Launches whose kernel can write in either order, and what in them writes the tensor."""


def order_columns(graph: Graph) -> Graph:
    """Orders every tensor that only packed projections read; of a norm with other readers too, a second copy."""
    if not is_prefill(graph.program):
        return graph
    uses = Uses(graph)
    kept = {*graph.outputs, *(tensor.base for tensor in graph.tensors.values())}
    changed: dict[str, Op] = {}
    ordered: list[Tensor] = []
    for op in graph.ops:
        for name in op.writes:
            readers = uses.readers[name]
            takers = [reader for reader in readers if _takes_lanes(graph, reader, name)]
            if not takers or name in kept or not _can_order(graph, op, name):
                continue
            lanes = replace(graph.tensors[name], order=ColumnOrder.LANES)
            if takers != readers:
                if WRITERS[op.kind] is not RmsNorm:
                    continue
                lanes = replace(lanes, name=f"{name}_lanes")
                changed[op.name] = _writing_both(op, name, lanes.name)
                changed.update(
                    {taker.name: _reading(changed.get(taker.name, taker), name, lanes.name) for taker in takers}
                )
            ordered.append(lanes)
    return replace_ops(graph, {name: (op,) for name, op in changed.items()}, ordered)


def _takes_lanes(graph: Graph, op: Op, name: str) -> bool:
    """Whether an op multiplies the tensor with packed weights, and does nothing else with it."""
    inner = [part for part in primitive_ops(op) if name in part.reads]
    return all(
        isinstance(part, (Linear, GroupedLinear)) and graph.weights[part.weight].format.is_packed for part in inner
    )


def _can_order(graph: Graph, op: Op, name: str) -> bool:
    """Whether the tensor's writer can, and the columns of each head or slot are whole blocks of a tensor of its own."""
    tensor, kind = graph.tensors[name], WRITERS.get(op.kind)
    writer = next(part for part in primitive_ops(op) if name in part.writes)
    if kind is None or not isinstance(writer, kind) or tensor.shape[0] != graph.rows or tensor.base is not None:
        return False
    # What a GatedNorm writes has no axis of heads, but its kernel takes each by itself.
    width = graph.tensors[writer.x].shape[-1] if isinstance(writer, GatedNorm) else tensor.shape[-1]
    return int(width) % BLOCK == 0


def _writing_both(op: Op, name: str, lanes: str) -> Fused:
    """The launch of a norm that writes ``lanes`` too, in the order of lanes."""
    norm = next(part for part in primitive_ops(op) if isinstance(part, RmsNorm) and part.out == name)
    return Fused(
        name=op.name,
        pattern=op.kind if isinstance(op, Fused) else "RmsNormTwice",
        body=(*primitive_ops(op), replace(norm, name=f"{norm.name}_lanes", out=lanes)),
        inputs=op.reads,
        used_weights=(norm.weight,),
        used_states=(),
        outputs=(*op.writes, lanes),
    )


def _reading(op: Op, old: str, new: str) -> Op:
    """The op with one of the tensors that it reads replaced."""
    if isinstance(op, Fused):
        body = tuple(_reading(part, old, new) for part in op.body)
        return replace(op, body=body, inputs=tuple(new if name == old else name for name in op.inputs))
    return replace(op, x=new) if isinstance(op, (Linear, GroupedLinear)) and op.x == old else op
