"""Convolution, gates, state step and gated norm of a GDN layer become one launch.

Before::

    c = CausalConv(qkv); beta, g = DeltaGates(b, a); o = GatedDelta(c, beta, g); n = GatedNorm(o, z)

After::

    n = GdnStep(qkv, b, a, z) { ... }

Why: a value head's convolution, gates and norm touch a few hundred values beside its 64 KiB of state; as launches of
their own they would each cost as long as the state step.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.mixerops import CausalConv, DeltaGates, GatedDelta, GatedNorm
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_gdn(graph: Graph) -> Graph:
    """Fuses every complete chain around a GatedDelta."""
    uses, groups = Uses(graph), []
    for delta in ops_of(graph, GatedDelta):
        conv = uses.writer(delta.qkv, CausalConv)
        gates = uses.writer(delta.beta, DeltaGates)
        norm = uses.only_reader(delta.out, GatedNorm)
        if conv and gates and norm and gates is uses.writer(delta.g, DeltaGates):
            groups.append(Group("GdnStep", (conv, gates, delta, norm), delta))
    return fuse(graph, groups)
