"""What a folder of weights holds, as records: what ``lynnc inspect`` prints.

In: figures counted from metadata. Out: an ``Inspection``, made by ``inspectcheckpoint`` or ``inspectpacked``.

Example::

    ClassRow("experts", "nvfp4", "nvfp4", count=30720, elements=32_212_254_720, bytes=18_119_393_280).bits      # 4.5
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

from lynnc.model import TENSOR_CLASSES, ModelSpec

VECTOR, OTHER, ANY = "vector", "other", "any"
"""Rows that are no tensor class of a model file: norms and their like, unknown matrices, and all tensors together."""
SHOWN = 3
"""Names that a remark lists before it says how many more there are."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A tensor class in one format: how many, their elements, and the bytes of data and scales.

    Of a checkpoint, tensors are counted, one for its data and scales together, and ``packed`` is empty. Of a packed
    folder, matrices are counted, and ``stored`` says how the checkpoint held them.
    """

    tensor_class: str
    stored: str
    packed: str
    count: int
    elements: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits of an element, its share of the scales included."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class ShardSize:
    """A file of weights and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """Tensors that packing leaves out, or left out, for one reason; ``bytes`` is None where they are not there."""

    reason: str
    tensors: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a folder is and holds. ``kind`` is ``checkpoint`` or ``packed``; ``model`` is None where the configuration
    is not understood; ``experts`` has a number for each layer, none for a dense model; ``odd`` is what deserves a look;
    ``refused`` says why a checkpoint cannot be packed."""

    kind: str
    detail: str
    model: ModelSpec | None
    activations: str
    rows: tuple[ClassRow, ...]
    experts: tuple[int, ...]
    shards: tuple[ShardSize, ...]
    skipped: tuple[SkippedRow, ...]
    odd: tuple[str, ...] = ()
    refused: str | None = None
    facts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Counted:
    """The values of one checkpoint tensor, or of one part of a packed weight (for all experts), to be added up."""

    name: str
    tensor_class: str
    stored: str
    packed: str
    elements: int
    bytes: int
    count: int = 1


def add_up(counted: Iterable[Counted]) -> tuple[ClassRow, ...]:
    """A row for each class and format, in the order of the classes of a model file."""
    groups: dict[tuple[str, str, str], list[Counted]] = {}
    for item in counted:
        groups.setdefault((item.tensor_class, item.stored, item.packed), []).append(item)
    order = {name: place for place, name in enumerate((*TENSOR_CLASSES, VECTOR, OTHER, ANY))}
    return tuple(
        ClassRow(
            *key,
            count=sum(item.count for item in items),
            elements=sum(item.elements for item in items),
            bytes=sum(item.bytes for item in items),
        )
        for key, items in sorted(groups.items(), key=lambda pair: (order[pair[0][0]], pair[0]))
    )


def mixed_classes(counted: Iterable[Counted]) -> Iterator[str]:
    """A remark on each tensor class whose layers are stored in several formats."""
    by_class: dict[str, dict[str, list[str]]] = {}
    for item in counted:
        if item.tensor_class in TENSOR_CLASSES:
            by_class.setdefault(item.tensor_class, {}).setdefault(item.stored, []).append(item.name)
    for tensor_class, formats in by_class.items():
        if len(formats) > 1:
            told = ", ".join(f"{stored}{_where(names)}" for stored, names in sorted(formats.items()))
            yield f"the class {tensor_class} is stored in several formats: {told}"


def _where(names: list[str]) -> str:
    layers = sorted({int(found[1]) for found in map(_LAYER.search, names) if found})
    return f" in layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else ""


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with neighbours joined: ``0-3, 7``."""
    found = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        found.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ", ".join(found)


def some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}"


def compact_experts(experts: tuple[int, ...]) -> str:
    """Experts of each layer in a line: ``256 x 40``, or by ranges of layers where they differ."""
    if len(set(experts)) == 1:
        return f"{experts[0]} x {len(experts)}"
    found, first = [], 0
    for count, group in groupby(experts):
        last = first + len(list(group)) - 1
        found.append(f"{count} in layer{'s' if last > first else ''} {ranges(range(first, last + 1))}")
        first = last + 1
    return ", ".join(found)
