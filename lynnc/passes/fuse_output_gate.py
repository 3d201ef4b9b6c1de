"""The output gate joins the launch that combines partial attention.

Before::

    o = AttentionCombine(partial); y = OutputGate(o, gate)

After::

    y = CombineGate(partial, gate) { ... }

Why: the gate is one multiplication a value that the combining launch holds anyway.
"""

from __future__ import annotations

from lynnc.ir import AttentionCombine, Graph, OutputGate
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_output_gate(graph: Graph) -> Graph:
    """Fuses every AttentionCombine with the OutputGate that alone reads it."""
    uses, groups = Uses(graph), []
    for combine in ops_of(graph, AttentionCombine):
        gate = uses.only_reader(combine.out, OutputGate)
        if gate:
            groups.append(Group("CombineGate", (combine, gate), combine))
    return fuse(graph, groups)
