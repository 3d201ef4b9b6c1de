"""The residual addition joins the projection before it.

Before::

    y = Linear(x); h2 = Add(h, y)

After::

    h2 = LinearResidual(x, h) { ... }

Why: the program that computes a row of the output adds the residual in its epilogue.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import Add, Linear
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_residual(graph: Graph) -> Graph:
    """Fuses every Linear whose output only an Add reads."""
    uses, groups = Uses(graph), []
    for linear in ops_of(graph, Linear):
        add = uses.only_reader(linear.out, Add)
        if add and add.b == linear.out:
            groups.append(Group("LinearResidual", (linear, add), linear))
    return fuse(graph, groups)
