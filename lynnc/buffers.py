"""Places the tensors of a fused graph in one workspace, by how long each is needed.

In: a fused graph and the most rows a step may have. Out: a ``TensorPlace`` for each root tensor and the bytes of the
workspace. Two tensors share memory only if no op needs both, so a launch never overwrites what a neighbour still reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lynnc.ir import Graph
from lynnc.plan import TensorPlace, aligned
from lynnc.tensors import Dim, T


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor and the first and last op that touch it."""

    name: str
    bytes: int
    first: int
    last: int


def place_tensors(graph: Graph, max_rows: int) -> tuple[tuple[TensorPlace, ...], int]:
    """Places in order of name, and the workspace's bytes. Inputs and outputs get memory of their own."""
    spans = _spans(graph, max_rows)
    own = {*graph.inputs, *graph.outputs}
    offsets = _pack([span for span in spans if span.name not in own])
    places = [_place(graph, span, offsets.get(span.name)) for span in spans]
    size = max((offsets[span.name] + span.bytes for span in spans if span.name in offsets), default=0)
    return tuple(sorted(places, key=lambda place: place.name)), aligned(size)


def _spans(graph: Graph, max_rows: int) -> list[_Span]:
    touched: dict[str, list[int]] = {name: [0] for name in graph.inputs}
    for index, op in enumerate(graph.ops):
        for name in (*op.reads, *op.writes):
            touched.setdefault(graph.tensors[name].base or name, []).append(index)
    return [_Span(name, _bytes(graph, name, max_rows), min(at), max(at)) for name, at in touched.items()]


def _bytes(graph: Graph, name: str, max_rows: int) -> int:
    tensor = graph.tensors[name]
    rows = tensor.shape[0]
    rows = rows if isinstance(rows, int) else int(rows.subs(T, max_rows))
    return aligned(rows * tensor.width * tensor.dtype.bytes)


def _pack(spans: list[_Span]) -> dict[str, int]:
    """Largest first, each at the lowest offset that no overlapping span uses."""
    placed: list[tuple[_Span, int]] = []
    for span in sorted(spans, key=lambda s: (-s.bytes, s.first, s.name)):
        offset = 0
        overlapping = [(at, other) for other, at in placed if other.first <= span.last and span.first <= other.last]
        for at, other in sorted(overlapping, key=lambda pair: pair[0]):
            if offset + span.bytes <= at:
                break
            offset = max(offset, at + other.bytes)
        placed.append((span, offset))
    return {span.name: offset for span, offset in placed}


def _place(graph: Graph, span: _Span, offset: int | None) -> TensorPlace:
    tensor = graph.tensors[span.name]
    return TensorPlace(span.name, tensor.dtype.value, tuple(dim_text(d) for d in tensor.shape), span.bytes, offset)


@cache
def dim_text(dim: Dim) -> int | str:
    """A size as a number, or as text where it depends on T or S."""
    return int(dim) if isinstance(dim, int) or dim.is_number else str(dim)
