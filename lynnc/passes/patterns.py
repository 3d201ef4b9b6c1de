"""What fusion passes share: who reads and writes a tensor, and fused ops in the place of groups of ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lynnc.ir import Fused, Graph, Op, primitive_ops
from lynnc.tensors import Tensor

OpKind = TypeVar("OpKind", bound=Op)


@dataclass(frozen=True, slots=True)
class Group:
    """Ops that become one launch of ``pattern``, named like the op ``anchor`` among them."""

    pattern: str
    parts: tuple[Op, ...]
    anchor: Op


class Uses:
    """Readers and writers of every tensor of a graph, found once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: Mapping[str, list[Op]] = defaultdict(list)
        self.writers: dict[str, Op] = {}
        for op in graph.ops:
            for tensor in dict.fromkeys(op.reads):
                self.readers[tensor].append(op)
            self.writers.update(dict.fromkeys(op.writes, op))

    def only_reader(self, tensor: str, kind: type[OpKind]) -> OpKind | None:
        """The op that reads ``tensor`` if it is the only one, of ``kind``, and the graph does not return the tensor."""
        readers = self.readers[tensor]
        if len(readers) == 1 and isinstance(readers[0], kind) and tensor not in self.graph.outputs:
            return readers[0]
        return None

    def writer(self, tensor: str, kind: type[OpKind]) -> OpKind | None:
        """The op that writes ``tensor`` if it is of ``kind``."""
        op = self.writers.get(tensor)
        return op if isinstance(op, kind) else None


def ops_of(graph: Graph, kind: type[OpKind]) -> tuple[OpKind, ...]:
    """Top-level ops of one kind, in order."""
    return tuple(op for op in graph.ops if isinstance(op, kind))


def replace_ops(graph: Graph, replacements: Mapping[str, tuple[Op, ...]], tensors: Iterable[Tensor] = ()) -> Graph:
    """The graph with each op named in ``replacements`` replaced by others, and more tensors."""
    ops = (new for op in graph.ops for new in replacements.get(op.name, (op,)))
    return graph.with_ops(tuple(ops), *tensors)


def fuse(graph: Graph, groups: Iterable[Group]) -> Graph:
    """One fused op for each group, where the last of its parts stood; bodies of fused parts are joined."""
    replacements: dict[str, tuple[Op, ...]] = {}
    readers = _reading_ops(graph)
    order = {op.name: index for index, op in enumerate(graph.ops)}
    for group in groups:
        parts = sorted(group.parts, key=lambda op: order[op.name])
        replacements.update({part.name: () for part in parts})
        replacements[parts[-1].name] = (_fused(graph, group, parts, readers),)
    return replace_ops(graph, replacements) if replacements else graph


def _reading_ops(graph: Graph) -> Mapping[str, set[str]]:
    """Names of the ops that read each tensor or a view of it; the graph itself reads its outputs as ``<graph>``."""
    readers: defaultdict[str, set[str]] = defaultdict(set)
    for op in graph.ops:
        for tensor in op.reads:
            readers[tensor].add(op.name)
            readers[graph.tensors[tensor].base or tensor].add(op.name)
    for tensor in graph.outputs:
        readers[tensor].add("<graph>")
    return readers


def _fused(graph: Graph, group: Group, parts: list[Op], readers: Mapping[str, set[str]]) -> Fused:
    body = tuple(inner for part in parts for inner in primitive_ops(part))
    inside = {part.name for part in parts}
    written = dict.fromkeys(tensor for op in body for tensor in op.writes)
    reads = dict.fromkeys(tensor for op in body for tensor in op.reads)
    return Fused(
        name=group.anchor.name,
        pattern=group.pattern,
        body=body,
        inputs=tuple(t for t in reads if t not in written and (graph.tensors[t].base or t) not in written),
        used_weights=tuple(dict.fromkeys(w for op in body for w in op.names("weight"))),
        used_states=tuple(dict.fromkeys(s for op in body for s in op.names("state"))),
        outputs=tuple(t for t in written if readers[graph.tensors[t].base or t] - inside),
    )
