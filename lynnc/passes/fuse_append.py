"""Query/key norm, rotation and cache append of many rows become one launch.

Before::

    q2 = HeadNormRope(q); k2 = HeadNormRope(k); CacheAppend(k2, v)

After::

    q2 = RotateAppend(q, k, v) { ... }

Why: the projection's row is read once, its angles are computed once, and rotated keys go to the cache alone.
"""

from __future__ import annotations

from lynnc.ir import Graph, Op
from lynnc.mixerops import CacheAppend, HeadNormRope
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_append(graph: Graph) -> Graph:
    """Fuses every CacheAppend with the norms and rotations of its keys and of the queries that meet them."""
    uses, groups = Uses(graph), []
    for append in ops_of(graph, CacheAppend):
        k, q = uses.writer(append.k, HeadNormRope), _queries(graph, uses, append)
        if q and k and uses.only_reader(append.k, CacheAppend):
            groups.append(Group("RotateAppend", (q, k, append), append))
    return fuse(graph, groups)


def _queries(graph: Graph, uses: Uses, append: CacheAppend) -> HeadNormRope | None:
    """What norms and rotates the queries of the one op that reads the cache."""
    readers = [op for op in graph.ops if append.k_cache in op.names("state") and op is not append]
    return _rotation(uses, readers[0]) if len(readers) == 1 else None


def _rotation(uses: Uses, attention: Op) -> HeadNormRope | None:
    found = (uses.writer(tensor, HeadNormRope) for tensor in attention.reads)
    return next((op for op in found if op), None)
