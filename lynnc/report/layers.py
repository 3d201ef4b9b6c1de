"""A model as its layers: what mixes tokens in each, how many experts it has, and what its weights take.

In: a plan. Out: a ``LayerRow`` for each layer.

Example::

    [(row.mixer, row.experts) for row in layer_rows(plan)]          # [("gdn", 256), ...]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lynnc.compiler import model_of
from lynnc.plan import Plan
from lynnc.summary import mixers


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer; ``experts`` is 0 for a dense one."""

    number: int
    mixer: str
    experts: int
    weight_bytes: int


def layer_rows(plan: Plan) -> tuple[LayerRow, ...]:
    """Every layer from the first."""
    moe = model_of(plan).moe
    names = mixers(plan)
    experts: Sequence[int] = moe.experts if moe else [0] * len(names)
    sizes: Counter[int] = Counter()
    for weight in plan.weights.values():
        found = re.match(r"layers\.(\d+)\.", weight.name)
        if found:
            sizes[int(found.group(1))] += sum(array.bytes for array in weight.arrays)
    return tuple(
        LayerRow(number, mixer, count, sizes[number])
        for number, (mixer, count) in enumerate(zip(names, experts, strict=True))
    )
