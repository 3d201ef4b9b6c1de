"""The output gate joins the launch that attends, or that combines partial attention.

Before::

    o = AttentionCombine(partial); y = OutputGate(o, gate)
    o = Attention(q); y = OutputGate(o, gate)

After::

    y = CombineGate(partial, gate) { ... }
    y = AttentionGate(q, gate) { ... }

Why: the gate is one multiplication a value that the launch before holds anyway.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.mixerops import Attention, AttentionCombine, OutputGate
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_output_gate(graph: Graph) -> Graph:
    """Fuses every Attention and AttentionCombine with the OutputGate that alone reads it."""
    uses, groups = Uses(graph), []
    pairs: list[tuple[str, Attention | AttentionCombine]] = [
        *(("AttentionGate", attention) for attention in ops_of(graph, Attention)),
        *(("CombineGate", combine) for combine in ops_of(graph, AttentionCombine)),
    ]
    for pattern, op in pairs:
        gate = uses.only_reader(op.out, OutputGate)
        if gate:
            groups.append(Group(pattern, (op, gate), op))
    return fuse(graph, groups)
