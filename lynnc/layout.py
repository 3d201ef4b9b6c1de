"""The packed weight layout: its name, and how a weight of the graph is listed in plans and packed folders.

In: a ``Weight`` of the intermediate representation. Out: a ``WeightEntry`` with dtype and shape of each array that
stores it. ``docs/layout.md`` describes the contents.

Example::

    weight_entry(graph.weights["layers.0.out_weight"]).arrays        # data, scale, global
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lynnc.plan import WeightArray, WeightEntry, WeightPart
from lynnc.tensors import GROUP, Format, Weight

LAYOUT = "nvfp4-w64-1"
"""Name of the packed weight layout; weights packed for another layout do not fit a plan."""

_DTYPES: Mapping[Format, str] = {
    Format.NVFP4: "i64",
    Format.NVFP4_FP16: "i64",
    Format.FP8: "u8",
    Format.BF16: "bf16",
    Format.F32: "f32",
}


def weight_entries(weights: Iterable[Weight]) -> dict[str, WeightEntry]:
    """Weights by name, as plans and packed folders list them."""
    return {weight.name: weight_entry(weight) for weight in weights}


def weight_entry(weight: Weight) -> WeightEntry:
    """A weight as the plan lists it, with dtype and shape of each array that stores it."""
    lead = (weight.shape[0],) if len(weight.shape) == 3 else ()
    matrix = weight.shape[len(lead) :]
    words = (*matrix[:-1], matrix[-1] // GROUP)
    shapes = {
        "data": (_DTYPES[weight.format], (*lead, *(words if weight.format.is_packed else matrix))),
        "scale": ("u8" if weight.format is Format.NVFP4 else "f16", (*lead, *words)),
        "global": ("f32", (*lead, weight.rows // weight.part_rows)),
    }
    arrays = [WeightArray(a, *shapes[a], bytes=size) for a, size in weight.bytes_by_array().items()]
    return WeightEntry(
        name=weight.name,
        format=weight.format.value,
        tensor_class=weight.tensor_class,
        shape=weight.shape,
        part_rows=weight.part_rows,
        parts=tuple(WeightPart(part.source, part.rows) for part in weight.parts),
        arrays=tuple(arrays),
    )
