"""The rules of the intermediate representation, checked after every pass.

In: a graph. Out: nothing, or a ``GraphError`` that names graph, op and rule. Rules are small functions in ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lynnc.errors import GraphError
from lynnc.ir import Fused, Graph, Op, Stage, walk
from lynnc.ops import ExpertLinear, Linear
from lynnc.promptops import CODES_IN_WORD, GroupedLinear, PartialLinear, QuantisedGroupedLinear, QuantisedLinear


def verify(graph: Graph, after: str = "build") -> Graph:
    """The graph itself if it keeps every rule; ``after`` names the pass that made it, for the message."""
    for rule in RULES:
        for complaint in rule(graph):
            raise GraphError(f"{graph.model} {graph.program} after {after}: {complaint}.")
    return graph


def _names_exist(graph: Graph) -> Iterator[str]:
    for op in walk(graph.ops):
        for role, table in (("read", graph.tensors), ("write", graph.tensors), ("weight", graph.weights)):
            for name in op.names(role):
                if name not in table:
                    yield f"{op.name} names the {role} {name!r}, which is not in the graph's table"
        for name in op.names("state"):
            if name not in graph.states:
                yield f"{op.name} names the state {name!r}, which is not in the graph's table"


def _op_names_are_unique(graph: Graph) -> Iterator[str]:
    seen: set[str] = set()
    for op in graph.ops:
        if op.name in seen:
            yield f"two ops are called {op.name}"
        seen.add(op.name)


def _reads_follow_writes(graph: Graph) -> Iterator[str]:
    written = set(graph.inputs)
    for op in graph.ops:
        yield from _check_order(graph, op, written)
    for name in graph.outputs:
        if name not in written:
            yield f"the output {name} is never written"


def _check_order(graph: Graph, op: Op, written: set[str]) -> Iterator[str]:
    body = op.body if isinstance(op, Fused) else (op,)
    new: set[str] = set()
    for inner in body:
        for name in inner.reads:
            if not _is_written(graph, name, written):
                yield f"{op.name} reads {name} before anything writes it"
        for name in inner.writes:
            if name in written and name not in graph.inputs:
                yield f"{op.name} writes {name} a second time"
            if name not in written:
                new.add(name)
            written.add(name)
    if isinstance(op, Fused):
        written -= new.difference(op.outputs)


def _is_written(graph: Graph, name: str, written: set[str]) -> bool:
    """Whether the tensor, its base, or views of its base that cover its columns were written."""
    tensor = graph.tensors[name]
    base = tensor.base or name
    if name in written or base in written:
        return True
    views = (graph.tensors[other] for other in written)
    spans = sorted((view.offset, view.offset + view.width) for view in views if view.base == base)
    covered = tensor.offset
    for first, last in spans:
        covered = max(covered, last) if first <= covered else covered
    return covered >= tensor.offset + tensor.width


def _views_lie_inside_their_base(graph: Graph) -> Iterator[str]:
    for tensor in graph.tensors.values():
        if tensor.base is None:
            continue
        base = graph.tensors[tensor.base]
        if base.base is not None or base.dtype is not tensor.dtype:
            yield f"the view {tensor.name} has a base that is itself a view or of another type"
        elif tensor.offset < 0 or tensor.offset + tensor.width > base.width:
            yield f"the view {tensor.name} reaches outside {base.name}"


def _linears_fit_their_weights(graph: Graph) -> Iterator[str]:
    for op in walk(graph.ops):
        if not isinstance(op, (Linear, QuantisedLinear, ExpertLinear, GroupedLinear, QuantisedGroupedLinear)):
            continue
        x = graph.tensors[op.codes if isinstance(op, (QuantisedLinear, QuantisedGroupedLinear)) else op.x]
        weight, out = graph.weights[op.weight], graph.tensors[op.out]
        columns, rows = x.width, int(out.shape[-1]) if isinstance(op, PartialLinear) else out.width
        first = op.first_row if isinstance(op, (Linear, QuantisedLinear)) else 0
        if isinstance(op, (ExpertLinear, GroupedLinear, QuantisedGroupedLinear)):
            columns, rows = int(x.shape[-1]), int(out.shape[-1])
        if isinstance(op, (QuantisedLinear, QuantisedGroupedLinear)):
            columns *= CODES_IN_WORD
        if columns != weight.columns:
            yield f"{op.name} multiplies {columns} columns of {x.name} with {weight.columns} of {weight.name}"
        if first + rows > weight.rows:
            yield f"{op.name} needs rows {first}..{first + rows} of {weight.name}, which has {weight.rows}"


def _stage_matches_ops(graph: Graph) -> Iterator[str]:
    if graph.stage is Stage.MODEL:
        for op in graph.ops:
            if isinstance(op, Fused):
                yield f"{op.name} is fused in a graph of stage model"


def _fused_outputs_are_written(graph: Graph) -> Iterator[str]:
    for op in graph.ops:
        if isinstance(op, Fused):
            written = {name for inner in op.body for name in inner.writes}
            for name in set(op.outputs) - written:
                yield f"{op.name} promises {name}, which its body does not write"


RULES: tuple[Callable[[Graph], Iterator[str]], ...] = (
    _names_exist,
    _op_names_are_unique,
    _views_lie_inside_their_base,
    _reads_follow_writes,
    _linears_fit_their_weights,
    _fused_outputs_are_written,
    _stage_matches_ops,
)
