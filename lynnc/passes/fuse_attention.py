"""Query/key norm, rotation, cache append and partial attention become one launch.

Before::

    q2 = HeadNormRope(q); k2 = HeadNormRope(k); CacheAppend(k2, v); partial = AttentionPartial(q2)

After::

    partial = AttentionStep(q, k, v) { ... }

Why: norm and rotation of a few heads cost less to repeat in every program than to launch; the program whose run holds
the new position also stores it.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.mixerops import AttentionPartial, CacheAppend, HeadNormRope
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_attention(graph: Graph) -> Graph:
    """Fuses every complete chain that ends in an AttentionPartial."""
    uses, groups = Uses(graph), []
    appends = {op.k_cache: op for op in ops_of(graph, CacheAppend)}
    for partial in ops_of(graph, AttentionPartial):
        append = appends[partial.k_cache]
        q, k = uses.writer(partial.q, HeadNormRope), uses.writer(append.k, HeadNormRope)
        private = uses.only_reader(partial.q, AttentionPartial) and uses.only_reader(append.k, CacheAppend)
        if q and k and private:
            groups.append(Group("AttentionStep", (q, k, append, partial), partial))
    return fuse(graph, groups)
