"""The launch that chooses the token also makes the next step's inputs.

Before::

    next_token = ArgmaxFinal(best, where); next_position, next_start = Advance(next_token, position, slot)

After::

    next_token, next_position, next_start = ArgmaxFinalAdvance(best, where, position, slot) { ... }

Why: a launch of its own would cost a microsecond to move three integers.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import Advance, Argmax, ArgmaxFinal
from lynnc.passes.patterns import Group, Uses, fuse, ops_of


def fuse_advance(graph: Graph) -> Graph:
    """Fuses every Advance into the launch that writes its token."""
    uses, groups = Uses(graph), []
    for advance in ops_of(graph, Advance):
        choice = uses.writer(advance.token, ArgmaxFinal) or uses.writer(advance.token, Argmax)
        if choice:
            groups.append(Group(f"{choice.kind}Advance", (choice, advance), choice))
    return fuse(graph, groups)
