"""Memory that a plan takes, by class: its weights by tensor class, states, workspace, inputs and outputs.

In: a plan and a context. Out: ``MemoryRow`` values, the largest first within weights and beside them.

Example::

    sum(row.bytes for row in memory_rows(plan, context=4096) if not row.is_host)
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.plan import Plan
from lynnc.runtime.budget import Room, budget_of
from lynnc.summary import precision_rows


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A class of memory; ``detail`` are the formats of weights, or what the size depends on."""

    what: str
    detail: str
    bytes: int
    is_host: bool = False
    is_weight: bool = False


def memory_rows(plan: Plan, context: int) -> tuple[MemoryRow, ...]:
    """Every class for one sequence of at most ``context`` positions; OptionError for a context that cannot be."""
    needs = budget_of(plan, plan.programs, Room(context=context), weight_bytes=0).needs
    weights = [
        MemoryRow(row.tensor_class, ", ".join(row.formats), row.bytes, is_weight=True) for row in precision_rows(plan)
    ]
    details = {
        "key/value caches": f"one sequence of {context:,}",
        "recurrent states": "one sequence",
        "token history": "host memory",
    }
    others = [MemoryRow(need.what, details.get(need.what, ""), need.bytes, need.is_host) for need in needs]
    return tuple(sorted(weights, key=_size, reverse=True) + sorted(others, key=_size, reverse=True))


def _size(row: MemoryRow) -> int:
    return row.bytes
