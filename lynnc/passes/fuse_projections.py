"""Linears that read the same input become one launch.

Before::

    q = Linear(x, w, first_row=0); k = Linear(x, w, first_row=8192); a = Linear(x, w2, first_row=0)

After::

    joint = [q | k | a]
    Projections { joint[:, 0:8704] = Linear(x, w, first_row=0); joint[:, 8704:] = Linear(x, w2, first_row=0) }

Why: a launch costs about a microsecond, as much as reading 4 MB on a fast GPU. Neighbours in one weight become a
single Linear; a second weight, of another format, becomes a second segment of the same launch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from lynnc.ir import Fused, Graph, Op
from lynnc.ops import Linear
from lynnc.passes.patterns import replace_ops
from lynnc.tensors import T, Tensor

MOST_SEGMENTS = 2
"""Weights of different formats that one launch of a few rows reads; prefill's tiles read one."""


def fuse_projections(graph: Graph) -> Graph:
    """Joins neighbouring Linears of one input and output type."""
    replacements: dict[str, tuple[Op, ...]] = {}
    tensors: list[Tensor] = []
    most_segments = 1 if graph.rows == T else MOST_SEGMENTS
    for _, group in groupby(
        graph.ops, lambda op: (op.x, graph.tensors[op.out].dtype) if isinstance(op, Linear) else op
    ):
        linears = [op for op in group if isinstance(op, Linear)]
        if len(linears) > 1 and len({op.weight for op in linears}) <= most_segments:
            joined, new_tensors = _join(graph, linears)
            replacements.update({op.name: () for op in linears} | {linears[0].name: (joined,)})
            tensors.extend(new_tensors)
    return replace_ops(graph, replacements, tensors)


def _join(graph: Graph, linears: list[Linear]) -> tuple[Op, list[Tensor]]:
    """One op for all, and the tensors that replace or join those the Linears wrote."""
    outs = [graph.tensors[op.out] for op in linears]
    prefix = linears[0].name.rpartition(".")[0]
    name = f"{prefix}.{'_'.join(out.name.rpartition('.')[2] for out in outs)}"
    joint = Tensor(name, outs[0].dtype, (graph.rows, sum(out.width for out in outs)))
    offsets = [sum(out.width for out in outs[:index]) for index in range(len(outs))]
    views = [replace(out, base=name, offset=offset) for out, offset in zip(outs, offsets, strict=True)]
    segments, parts = _segments(linears, views, joint)
    if len(segments) == 1:
        return segments[0], [joint, *views]
    fused = Fused(
        name=f"{name}_proj",
        pattern="Projections",
        body=segments,
        inputs=(linears[0].x,),
        used_weights=tuple(segment.weight for segment in segments),
        used_states=(),
        outputs=tuple(segment.out for segment in segments),
    )
    return fused, [joint, *views, *parts]


def _segments(linears: list[Linear], views: list[Tensor], joint: Tensor) -> tuple[tuple[Linear, ...], list[Tensor]]:
    """One Linear for each weight, and the tensors they write: the joint tensor or views of it."""
    segments, tensors = [], []
    for weight, group in groupby(zip(linears, views, strict=True), lambda pair: pair[0].weight):
        members = list(group)
        first = members[0]
        width = sum(view.width for _, view in members)
        if width == joint.width:
            segments.append(replace(first[0], name=f"{joint.name}_proj", out=joint.name))
            continue
        shape = (joint.shape[0], width)
        part = Tensor(f"{joint.name}.{len(segments)}", joint.dtype, shape, joint.name, first[1].offset)
        segments.append(Linear(f"{part.name}_proj", first[0].x, weight, part.name, first[0].first_row))
        tensors.append(part)
    return tuple(segments), tensors
