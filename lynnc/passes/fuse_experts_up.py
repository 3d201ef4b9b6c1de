"""Top-k, gate and up projections and activation of routed and shared experts become one launch.

Before::

    ids, scores = TopK(logits); gu = ExpertLinear(x, ids); a = SiluMul(gu); sgu = Linear(x); sa = SiluMul(sgu)

After::

    ids, scores, a, sa = ExpertsUp(logits, x) { ... }

Why: every program ranks 256 logits faster than a launch of its own could tell it the result, and the shared expert is
one more slot beside the routed ones.
"""

from __future__ import annotations

from lynnc.ir import Graph, Op
from lynnc.ops import ExpertLinear, Linear, SiluMul, TopK
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_experts_up(graph: Graph) -> Graph:
    """Fuses every TopK with the expert projection that follows it, and the shared expert's where there is one."""
    uses, groups = Uses(graph), []
    for top_k in ops_of(graph, TopK):
        up = next((op for op in uses.readers[top_k.ids] if isinstance(op, ExpertLinear)), None)
        act = uses.only_reader(up.out, SiluMul) if up else None
        if up and act:
            groups.append(Group("ExpertsUp", (top_k, up, act, *_shared(uses, up.x)), up))
    return fuse(graph, groups)


def _shared(uses: Uses, x: str) -> tuple[Op, ...]:
    """The shared expert's projection of the same input and its activation."""
    for op in uses.readers[x]:
        act = uses.only_reader(op.out, SiluMul) if isinstance(op, Linear) else None
        if act:
            return op, act
    return ()
