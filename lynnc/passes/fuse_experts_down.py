"""Down projections, weighted sum, shared expert and residual become one launch.

Before::

    y = ExpertLinear(a, ids); s = Combine(y, scores); sy = Linear(sa); m = SharedAdd(s, sy, gate); h2 = Add(h, m)

After::

    h2 = ExpertsDown(a, ids, scores, sa, gate, h) { ... }

Why: a program that owns rows of the output adds all slots in their fixed order in registers; separate launches would
write and read (top_k + 1) x hidden FP32 values and atomics would lose the order.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import Add, Combine, ExpertLinear, Linear, SharedAdd
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_experts_down(graph: Graph) -> Graph:
    """Fuses every Combine with its expert projection and what follows up to the residual addition."""
    uses, groups = Uses(graph), []
    for combine in ops_of(graph, Combine):
        down = uses.writer(combine.x, ExpertLinear)
        shared = _shared(uses, combine.out)
        add = uses.only_reader(shared[-1].out if shared else combine.out, Add)
        if down and add:
            groups.append(Group("ExpertsDown", (down, combine, *shared, add), down))
    return fuse(graph, groups)


def _shared(uses: Uses, experts_sum: str) -> tuple[Linear, SharedAdd] | tuple[()]:
    """The shared expert's down projection and the op that adds it to the routed sum."""
    shared_add = uses.only_reader(experts_sum, SharedAdd)
    linear = uses.writer(shared_add.shared, Linear) if shared_add else None
    return (linear, shared_add) if linear and shared_add else ()
