"""An RMS norm joins the first projection that reads it.

Before::

    x = RmsNorm(h); q = Linear(x)

After::

    q = NormLinear(h) { ... }

Why: every program of the projection reads the whole row anyway, so it can also sum its squares; a launch of its own
would cost more than those sums. Other readers of x, such as the experts, get it from the same launch.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import RmsNorm
from lynnc.passes.patterns import Group, Uses, fuse, ops_of

NORMED = {"Linear": "NormLinear", "Projections": "NormProjections", "GateUp": "NormGateUp"}
"""Patterns whose kernel can norm its input, and what they are called then."""


def fuse_norm(graph: Graph) -> Graph:
    """Fuses every RmsNorm into its first reader that can take it."""
    uses, groups = Uses(graph), []
    for norm in ops_of(graph, RmsNorm):
        reader = next((op for op in uses.readers[norm.out] if op.kind in NORMED), None)
        if reader:
            groups.append(Group(NORMED[reader.kind], (norm, reader), reader))
    return fuse(graph, groups)
