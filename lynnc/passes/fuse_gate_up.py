"""Gate and up projection and activation of a dense block become one launch.

Before::

    gu = Linear(x); a = SiluMul(gu)

After::

    a = GateUp(x) { ... }

Why: a program that computes the same rows of gate and up multiplies them in registers.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import Linear, SiluMul
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_gate_up(graph: Graph) -> Graph:
    """Fuses every SiluMul with the Linear that feeds only it."""
    uses, groups = Uses(graph), []
    for act in ops_of(graph, SiluMul):
        linear = uses.writer(act.x, Linear)
        if linear and uses.only_reader(linear.out, SiluMul):
            groups.append(Group("GateUp", (linear, act), linear))
    return fuse(graph, groups)
