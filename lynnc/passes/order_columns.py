"""In programs for prompts, the columns that meet packed weights stand in the order in which lanes unpack those.

Before::

    x = RmsNorm(h); logits = Linear(x, router); a = GroupedUp(x, ...); y = GroupedDown(a, ...)

After::

    x, x_lanes = RmsNormTwice(h) { x = RmsNorm(h); x_lanes = RmsNorm(h) }
    logits = Linear(x, router); a = GroupedUp(x_lanes, ...); y = GroupedDown(a, ...)   # x_lanes and a so ordered

Why: a lane's words hold other columns than its operands of a matrix instruction. With x in the words' order (see
``lynnc.columnorder``) the weight goes from words to operands inside a lane; otherwise it changes lanes through shared
memory, as does every tile of x in each program that reads it. Writing x in another order costs its writer nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lynnc.columnorder import BLOCK, ColumnOrder
from lynnc.ir import Fused, GatedNorm, Graph, Linear, Op, OutputGate, RmsNorm, SiluMul, primitive_ops
from lynnc.passes.patterns import Uses, replace_ops
from lynnc.programs import is_prefill
from lynnc.promptops import GroupedLinear

Writer = RmsNorm | GatedNorm | OutputGate | SiluMul
WRITERS: Mapping[str, type[Writer]] = {
    "RmsNorm": RmsNorm,
    "SumPartsNorm": RmsNorm,
    "GatedNorm": GatedNorm,
    "AttentionGate": OutputGate,
    "GroupedUp": SiluMul,
}
"""Launches whose kernel can write in either order, by what in them writes the tensor."""


def order_columns(graph: Graph) -> Graph:
    """Orders every tensor that only packed projections read; of a norm with other readers too, a second copy."""
    if not is_prefill(graph.program):
        return graph
    uses = Uses(graph)
    for op in graph.ops:
        for name in op.writes:
            readers = uses.readers[name]
            takers = [reader for reader in readers if _takes_lanes(graph, reader, name)]
            if not takers or name in graph.outputs or not _can_order(graph, op, name):
                continue
            if takers == readers:
                lanes = replace(graph.tensors[name], order=ColumnOrder.LANES)
                graph = graph.with_ops(graph.ops, lanes)
            elif WRITERS[op.kind] is RmsNorm:
                graph = _with_copy(graph, op, name, takers)
    return graph


def _takes_lanes(graph: Graph, op: Op, name: str) -> bool:
    """Whether an op multiplies the tensor with packed weights, and does nothing else with it."""
    inner = [part for part in primitive_ops(op) if name in part.reads]
    return all(
        isinstance(part, (Linear, GroupedLinear)) and graph.weights[part.weight].format.is_packed for part in inner
    )


def _can_order(graph: Graph, op: Op, name: str) -> bool:
    """Whether the tensor's writer can, and its columns are whole blocks that lie by themselves."""
    tensor = graph.tensors[name]
    is_whole = int(tensor.shape[-1]) % BLOCK == 0 and tensor.base is None and tensor.shape[0] == graph.rows
    has_views = any(other.base == name for other in graph.tensors.values())
    writer = next(part for part in primitive_ops(op) if name in part.writes)
    kind = WRITERS.get(op.kind)
    if kind is None or not isinstance(writer, kind) or has_views or not is_whole:
        return False
    return int(graph.tensors[writer.x].shape[-1]) % BLOCK == 0  # of heads, each by itself


def _with_copy(graph: Graph, op: Op, name: str, takers: list[Op]) -> Graph:
    """The norm in a launch writes a second tensor, in the order of lanes, for those that take it."""
    lanes = replace(graph.tensors[name], name=f"{name}_lanes", order=ColumnOrder.LANES)
    norm = next(part for part in primitive_ops(op) if isinstance(part, RmsNorm) and part.out == name)
    copy = replace(norm, name=f"{norm.name}_lanes", out=lanes.name)
    both = Fused(
        name=op.name,
        pattern=op.kind if isinstance(op, Fused) else "RmsNormTwice",
        body=(*primitive_ops(op), copy),
        inputs=op.reads,
        used_weights=(norm.weight,),
        used_states=(),
        outputs=(*op.writes, lanes.name),
    )
    changed = {taker.name: (_reading(taker, name, lanes.name),) for taker in takers}
    return replace_ops(graph, {op.name: (both,), **changed}, (lanes,))


def _reading(op: Op, old: str, new: str) -> Op:
    """The op with one of the tensors that it reads replaced."""
    if isinstance(op, Fused):
        body = tuple(_reading(part, old, new) for part in op.body)
        return replace(op, body=body, inputs=tuple(new if name == old else name for name in op.inputs))
    return replace(op, x=new) if isinstance(op, (Linear, GroupedLinear)) and op.x == old else op
