"""Reads checkpoint and packed folder again, and compares what every tensor stands for.

In: both folders. Out: a ``Verification``: per tensor class, what was compared bit for bit and, for what was quantised
while packing, how far it is from the checkpoint's values. WeightError names the first tensor that is not as it should
be: values that came quantised or plain must be equal bit for bit, and what was quantised must be what quantising the
checkpoint gives now.

Example::

    verify(Path("checkpoint"), Path("packed")).classes[0]      # ClassErrors("experts", cosine=0.9955, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.source import Source, open_source
from lynnc.runtime.experts.expertspec import Kept
from lynnc.runtime.weights.arrays import convert, part_arrays, part_matrix
from lynnc.runtime.weights.assign import AssignedPart, Assignment, PartReader, assign, largest_first
from lynnc.runtime.weights.comparison import Sums, bits, compare
from lynnc.runtime.weights.digests import matrix_digest, source_digest, weight_digest
from lynnc.runtime.weights.matrix import Matrix, PlainMatrix
from lynnc.runtime.weights.pack import FEW_BYTES
from lynnc.runtime.weights.packedfile import Packed, open_packed
from lynnc.runtime.weights.packedindex import DIVISOR
from lynnc.runtime.weights.parallel import spread, worker_count

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ClassErrors:
    """A tensor class in one format: tensors and values that are equal bit for bit, and those that were quantised or
    rounded, with cosine, relative L2 error (norm of the difference over that of the checkpoint), worst tensor."""

    tensor_class: str
    format: str
    exact_tensors: int
    exact_elements: int
    rounded_tensors: int
    rounded_elements: int
    cosine: float
    relative_l2: float
    worst: str
    worst_relative_l2: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, by tensor class, and the bytes of the checkpoint that were read."""

    classes: tuple[ClassErrors, ...]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class _Compared:
    """One part: whether its values are equal, the sums over them, and the digest of what the checkpoint holds."""

    name: str
    is_exact: bool
    sums: Sums
    digest: bytes


@dataclass(slots=True)
class _Tally:
    exact_tensors: int = 0
    exact_elements: int = 0
    rounded_tensors: int = 0
    sums: Sums = field(default_factory=Sums)
    worst: str = ""
    worst_relative_l2: float = 0.0

    def add(self, part: _Compared) -> None:
        if part.is_exact:
            self.exact_tensors += 1
            self.exact_elements += part.sums.elements
            return
        self.rounded_tensors += 1
        self.sums.join(part.sums)
        if part.sums.relative_l2 > self.worst_relative_l2:
            self.worst, self.worst_relative_l2 = part.name, part.sums.relative_l2


@dataclass(slots=True)
class _Found:
    """Tallies by tensor class and format, and digests of what was read by weight."""

    tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def verify(checkpoint: Path, folder: Path, on_progress: Progress | None = None) -> Verification:
    """Compares every tensor; raises WeightError for the first one that is wrong."""
    packed = open_packed(folder)
    with closing(open_source(checkpoint, packed.spec)) as source:
        assignment = assign(source, packed.spec, kept_experts(packed))
        found = _compare_all(source, packed, assignment, on_progress)
    if source_digest(found.digests) != packed.index.source.digest:
        raise WeightError(f"{folder} was packed from another checkpoint than {checkpoint}: name that one.")
    classes = tuple(_summary(*key, tally) for key, tally in found.tallies.items())
    return Verification(classes, assignment.source_bytes)


def _compare_all(source: Source, packed: Packed, assignment: Assignment, on_progress: Progress | None) -> _Found:
    found, done = _Found(), 0
    parts = [part for item in largest_first(assignment.weights) for part in item.each_part()]
    compared: list[_Compared | None] = [None] * len(parts)
    workers = worker_count() if assignment.source_bytes > FEW_BYTES else 1
    with closing(spread(_PartComparer(source, packed), parts, workers)) as results:
        for index, result in results:
            compared[index] = result
            done += parts[index].located.bytes
            if on_progress:
                on_progress(done, assignment.source_bytes, parts[index].weight.name)
    digests: dict[str, list[bytes]] = {}
    for part, outcome in zip(parts, compared, strict=True):
        assert outcome is not None, "every part was compared"
        key = (part.weight.tensor_class, str(part.weight.format))
        found.tallies.setdefault(key, _Tally()).add(outcome)
        digests.setdefault(part.weight.name, []).append(outcome.digest)
    found.digests.update({name: weight_digest(values) for name, values in digests.items()})
    return found


def kept_experts(packed: Packed) -> Kept:
    """The checkpoint's numbers of the experts in each layer."""
    moe = packed.spec.moe
    if moe is None:
        return ()
    named: Mapping[str, tuple[int, ...]] = packed.index.experts
    return tuple(named.get(str(layer), tuple(range(count))) for layer, count in enumerate(moe.experts))


class _PartComparer:
    """Compares a part: its arrays with what they should be, and the values on both sides; runs in worker processes."""

    def __init__(self, source: Source, packed: Packed) -> None:
        self._reader, self._packed = PartReader(source), packed

    def __call__(self, part: AssignedPart) -> _Compared:
        weight, located = part.weight, part.located
        name = located.tensors[0] if located.name in located.tensors[0] else f"{located.name} ({located.tensors[0]})"
        matrix = self._reader.read(part)
        arrays = self._packed.arrays(weight.name, part.expert if len(weight.shape) == 3 else None)
        _compare_arrays(part, convert(matrix, weight.format, name, self._packed.index.scale_search), arrays, name)
        is_exact, sums = compare(matrix, part_matrix(weight, arrays, part.first_row, part.row_count))
        if not is_exact and not isinstance(matrix, PlainMatrix):
            raise WeightError(f"{name} stands for other values than the packed arrays do: pack the checkpoint again.")
        return _Compared(name, is_exact, sums, matrix_digest(matrix))


def _compare_arrays(part: AssignedPart, expected: Matrix, arrays: Mapping[str, torch.Tensor], name: str) -> None:
    weight = part.weight
    for array, values in part_arrays(weight, expected).items():
        if array == DIVISOR and array not in arrays:
            continue
        step = weight.part_rows if array in ("global", DIVISOR) else 1
        found = arrays[array].reshape(-1, *values.shape[1:])
        found = found[part.first_row // step : (part.first_row + part.row_count) // step]
        if found.dtype is not values.dtype or not torch.equal(bits(found), bits(values)):
            raise WeightError(
                f"{name} is not what the array {weight.name}.{array} holds: pack the checkpoint again, and if this "
                "comes back, report it."
            )


def _summary(tensor_class: str, fmt: str, tally: _Tally) -> ClassErrors:
    return ClassErrors(
        tensor_class=tensor_class,
        format=fmt,
        exact_tensors=tally.exact_tensors,
        exact_elements=tally.exact_elements,
        rounded_tensors=tally.rounded_tensors,
        rounded_elements=tally.sums.elements,
        cosine=tally.sums.cosine,
        relative_l2=tally.sums.relative_l2,
        worst=tally.worst,
        worst_relative_l2=tally.worst_relative_l2,
    )
