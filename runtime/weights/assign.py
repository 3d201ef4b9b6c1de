"""Every weight of a model to its checkpoint tensors, and every checkpoint tensor to its fate, before any data is read.

In: an open ``Source``, the model, and the kept experts of each layer. Out: an ``Assignment``, or a ``WeightError`` that
names what is missing, left over, given twice, of another shape, or in a format that the model's rules do not allow.

Example::

    assignment = assign(source, spec, kept)
    assignment.weights[0].parts[0][0].tensors            # ("model.embed_tokens.weight",)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from lynnc.build import build_graph
from lynnc.errors import WeightError
from lynnc.model import ModelSpec
from lynnc.runtime.checkpoints.source import Located, Source
from lynnc.runtime.experts.expertspec import Kept
from lynnc.runtime.weights.matrix import Matrix, select_rows
from lynnc.runtime.weights.packedindex import Origin
from lynnc.tensors import Format, Part, Weight

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts[._])\d+([._])")
_SHOWN = 3
"""Names that a message lists before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class AssignedPart:
    """A part of one expert: where it lies, the first of its rows in the weight, which of its rows to take if not all
    (a router's), and whether the weight has divisors."""

    weight: Weight
    located: Located
    expert: int
    first_row: int
    row_count: int
    rows: tuple[int, ...] | None
    has_divisor: bool

    def start(self, array: str, values: torch.Tensor) -> int:
        """The byte of an array at which this part's ``values`` begin."""
        row = self.expert * self.weight.rows + self.first_row
        row_bytes = values.nbytes // values.shape[0]
        return row * row_bytes if array in ("data", "scale") else row // self.weight.part_rows * row_bytes


@dataclass(frozen=True, slots=True)
class AssignedWeight:
    """A weight with its located parts for each kept expert, and the router rows to keep (None: all)."""

    weight: Weight
    parts: tuple[tuple[Located, ...], ...]
    rows: tuple[int, ...] | None = None

    @property
    def has_divisor(self) -> bool:
        """Whether a part keeps a global scale that the checkpoint divides by."""
        return any(located.divides for parts in self.parts for located in parts)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for the weight."""
        return sum(located.bytes for parts in self.parts for located in parts)

    def each_part(self) -> Iterator[AssignedPart]:
        """Every part in the order of the weight's rows, expert by expert."""
        has_divisor = self.has_divisor
        for expert, located in enumerate(self.parts):
            first = 0
            for part, found in zip(self.weight.parts, located, strict=True):
                rows = self.rows if is_router(part) else None
                yield AssignedPart(self.weight, found, expert, first, part.rows, rows, has_divisor)
                first += part.rows

    def origins(self) -> tuple[Origin, ...]:
        """Where each part comes from; an expert's number is shown as ``{expert}``."""
        pairs = zip(self.weight.parts, self.parts[0], strict=True)
        return tuple(Origin(part.source, tuple(map(_pattern, found.tensors)), found.stored) for part, found in pairs)


def _pattern(tensor: str) -> str:
    return _EXPERT.sub(r"\1{expert}\2", tensor)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What becomes of every tensor: weights in the graph's order, tensors of pruned experts, skipped ones by reason."""

    weights: tuple[AssignedWeight, ...]
    pruned: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    def source_bytes(self) -> int:
        """Bytes that are read in all."""
        return sum(item.source_bytes for item in self.weights)


def assign(source: Source, spec: ModelSpec, kept: Kept) -> Assignment:
    """Locates every part of every weight of the model's graph, and accounts for every tensor of the checkpoint."""
    _refuse_unlisted(source)
    source.check_tied()
    weights = tuple(_assign(source, weight, kept) for weight in build_graph(spec, 1).weights.values())
    used: dict[str, str] = {}
    for item in weights:
        for located in (found for parts in item.parts for found in parts):
            _use(located, item.weight, used, spec.tied_embeddings)
    pruned = {name for item in weights for name in _pruned(source, item, kept)} - _tensors(weights)
    _refuse_unused(source, _tensors(weights) | pruned)
    return Assignment(weights, tuple(sorted(pruned)), source.skipped())


def _tensors(weights: tuple[AssignedWeight, ...]) -> set[str]:
    return {name for item in weights for parts in item.parts for located in parts for name in located.tensors}


def _assign(source: Source, weight: Weight, kept: Kept) -> AssignedWeight:
    experts = kept[_layer(weight)] if len(weight.shape) == 3 else (0,)
    rows = kept[_layer(weight)] if weight.tensor_class == "router" and kept else None
    parts = tuple(tuple(_locate(source, weight, part, expert, rows) for part in weight.parts) for expert in experts)
    is_whole = rows is None or rows == tuple(range(source.experts(_layer(weight))))
    return AssignedWeight(weight, parts, None if is_whole else rows)


def _layer(weight: Weight) -> int:
    found = _LAYER.search(weight.parts[0].source)
    assert found is not None, f"{weight.name} belongs to no layer"
    return int(found[1])


def quantised_notes(assignment: Assignment) -> Iterator[str]:
    """A line for each tensor class of which a quantised checkpoint keeps some tensors plain that are quantised here."""
    plain: dict[str, list[str]] = {}
    for item in assignment.weights:
        if item.weight.format not in (Format.BF16, Format.F32):
            found = [located.key for parts in item.parts for located in parts if located.format is Format.BF16]
            plain.setdefault(item.weight.tensor_class, []).extend(found)
    for tensor_class, names in plain.items():
        if names:
            what = f"{len(names)} tensors that the checkpoint keeps plain are quantised"
            yield f"{tensor_class}: {what}, such as {names[0]}"


def is_router(part: Part) -> bool:
    """Whether a part has a row for each routed expert."""
    return part.source.endswith(".mlp.gate.weight")


def _locate(source: Source, weight: Weight, part: Part, expert: int, kept: tuple[int, ...] | None) -> Located:
    located = source.locate(part.source.format(expert=expert))
    rows = source.experts(_layer(weight)) if kept is not None and is_router(part) else part.rows
    if (located.rows, located.columns) != (rows, weight.columns):
        raise WeightError(
            f"{located.tensors[0]} holds a matrix of {located.rows} x {located.columns} where {weight.name} needs "
            f"{rows} x {weight.columns}: use the model file of this checkpoint (`lynnc import-config` writes one)."
        )
    _check_format(weight, located)
    return located


def _check_format(weight: Weight, located: Located) -> None:
    """Plain values may become any format; what is quantised stays as it is."""
    if located.format in (Format.BF16, weight.format):
        return
    rule = f"write `{weight.tensor_class}: {located.format}` in the model file's precision"
    if weight.tensor_class == "vector":
        rule = "use a checkpoint that keeps it BF16 or FP32"
    raise WeightError(
        f"{located.tensors[0]} is stored as {located.format} and the model asks for {weight.format} in "
        f"{weight.name}, but what is quantised is never converted: {rule}."
    )


def _use(located: Located, weight: Weight, used: dict[str, str], is_tied: bool) -> None:
    for tensor in located.tensors:
        name = f"{tensor} {located.index}"
        if name in used and not (is_tied and {used[name], weight.name} == {"embed", "lm_head"}):
            raise WeightError(f"{tensor} would fill both {used[name]} and {weight.name}: correct the model file.")
        used[name] = weight.name


def _pruned(source: Source, item: AssignedWeight, kept: Kept) -> Iterator[str]:
    if len(item.weight.shape) != 3:
        return
    layer = _layer(item.weight)
    for expert in set(range(source.experts(layer))) - set(kept[layer]):
        for part in item.weight.parts:
            yield from source.locate(part.source.format(expert=expert)).tensors


def _refuse_unlisted(source: Source) -> None:
    for name, shard in source.checkpoint.unlisted.items():
        raise WeightError(
            f"{source.checkpoint.folder / shard} holds {name}, which the index does not list: copy shard and index "
            "again, together."
        )


def _refuse_unused(source: Source, used: set[str]) -> None:
    left = sorted(set(source.checkpoint.tensors) - used - source.skipped().keys())
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise WeightError(
            f"{source.checkpoint.folder} holds tensors that the model has no place for ({', '.join(left[:_SHOWN])}"
            f"{more}): use the model file of this checkpoint, or remove them from it."
        )


class PartReader:
    """Reads parts, most often those of one weight after another."""

    def __init__(self, source: Source) -> None:
        self._source, self._weight = source, ""

    def read(self, part: AssignedPart) -> Matrix:
        """The matrix of a part as stored; of a router, the rows of the kept experts."""
        if part.weight.name != self._weight:
            self._source.close()  # gives back the memory of what was read for the weight before
            self._weight = part.weight.name
        matrix = self._source.read(part.located)
        return matrix if part.rows is None else select_rows(matrix, torch.tensor(part.rows))


def largest_first(weights: Iterable[AssignedWeight]) -> list[AssignedWeight]:
    """Weights by the falling size of their largest part, in their order where equal: no large part is left to the last
    process, and the parts of a weight, which is noted once it is whole, stay together."""
    return sorted(weights, key=lambda item: -max(located.bytes for parts in item.parts for located in parts))
