"""Which experts of each layer a pruned model keeps: a JSON file, and how it meets a checkpoint.

In: a file of schema ``lynnc-experts-1``, or the ``lynn_engine_variable_expert_spec.json`` that lies beside a pruned
checkpoint and gives counts alone. Out: an ``ExpertSpec``, or a ``ModelError`` that names file and field. The file is a
superset of the published one::

    {"schema": "lynnc-experts-1",
     "original_experts_by_layer": {"0": 6, "1": 6},             experts before the cut; optional
     "remaining_experts_by_layer": {"0": 6, "1": 3},            experts after it
     "kept_experts_by_layer": {"0": [0, 1, 2, 3, 4, 5],         their numbers before it, ascending; optional
                               "1": [0, 2, 5]},
     "source": {"model": "tiny", "budget": 9}}                  where the choice comes from; optional, free

Example::

    spec = read_expert_spec(Path("kept.json"))
    spec.resolve((6, 6), top_k=2)          # ((0, 1, 2, 3, 4, 5), (0, 2, 5)): what to take from an unpruned checkpoint
    spec.resolve((6, 3), top_k=2)          # ((0, 1, 2, 3, 4, 5), (0, 1, 2)): all of one that was compacted
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from lynnc.fields import Field, Place, Read, Section, count, describe, flag, list_of, one_of, whole
from lynnc.hfconfig import EXPERT_SPEC, read_json

SCHEMA = "lynnc-experts-1"
"""The value of the field ``schema``; published side files have none."""
COUNTS = "remaining_experts_by_layer"
KEPT = "kept_experts_by_layer"
ORIGINAL = "original_experts_by_layer"
SOURCE = "source"
_UNFIT = "use the unpruned checkpoint that the experts were chosen from, or one that was cut to these counts"

_LAYER_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")

Kept: TypeAlias = tuple[tuple[int, ...], ...]
"""Expert numbers of each layer, ascending."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts that each layer keeps. ``kept`` holds their numbers in the unpruned model and ``original`` its counts,
    where they are known; ``file`` is for messages."""

    counts: tuple[int, ...]
    kept: Kept | None = None
    original: tuple[int, ...] | None = None
    source: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    file: str = field(default=EXPERT_SPEC, compare=False)

    def resolve(self, held: Sequence[int], top_k: int, keep_first: bool = False) -> Kept:
        """The experts to take from a checkpoint that has ``held`` experts in its layers, by their numbers there.

        All of them if it was compacted to these counts already. With counts alone it cannot be known which experts of
        an unpruned checkpoint go: that takes ``keep_first``, which keeps the first ones. ModelError for a checkpoint
        that is neither the unpruned nor the compacted one, and for fewer than the ``top_k`` that a token selects.
        """
        self._check_counts(held, top_k)
        first = tuple(tuple(range(kept)) for kept in self.counts)
        if tuple(held) == self.counts:
            return first
        self._check_original(held)
        if self.kept is not None:
            self._check_ids(self.kept, held)
            return self.kept
        if not keep_first:
            self._refuse_counts_alone(held)
        return first

    def _check_counts(self, held: Sequence[int], top_k: int) -> None:
        if len(held) != len(self.counts):
            problem = f"lists {len(self.counts)} layers but the checkpoint has {len(held)}"
            Place(self.file, COUNTS).fail(problem, "use the file that belongs to this checkpoint")
        for layer, (kept, present) in enumerate(zip(self.counts, held, strict=True)):
            if kept < top_k:
                problem = f"is {kept}, fewer than the {top_k} experts that a token selects"
                self._place(COUNTS, layer).fail(problem, f"keep at least {top_k}")
            if kept > present:
                problem = f"is {kept} but the checkpoint's layer {layer} has {present} experts"
                self._place(COUNTS, layer).fail(problem, "use the file that belongs to this checkpoint")

    def _check_original(self, held: Sequence[int]) -> None:
        for layer, original in enumerate(self.original or ()):
            if held[layer] != original:
                problem = f"is {original} but the checkpoint's layer {layer} has {held[layer]} experts"
                self._place(ORIGINAL, layer).fail(problem, _UNFIT)

    def _check_ids(self, kept: Kept, held: Sequence[int]) -> None:
        for layer, ids in enumerate(kept):
            if ids[-1] >= held[layer]:
                problem = f"keeps expert {ids[-1]} but the checkpoint's layer {layer} has {held[layer]} experts"
                self._place(KEPT, layer).fail(problem, _UNFIT)

    def _refuse_counts_alone(self, held: Sequence[int]) -> NoReturn:
        layer = next(layer for layer, kept in enumerate(self.counts) if kept < held[layer])
        self._place(COUNTS, layer).fail(
            f"is {self.counts[layer]} of the checkpoint's {held[layer]} experts, without their numbers",
            f"give {KEPT}, or pass --keep-first to keep the first ones of each layer",
        )

    def _place(self, name: str, layer: int) -> Place:
        return Place(self.file, name).field(layer)


def by_layer(read: Read) -> Read:
    """An object with an entry for each layer from 0 on, each read by ``read``; the result is a tuple in that order."""

    def read_layers(value: object, place: Place) -> tuple[Any, ...]:
        layers = _object(value, place)
        for number in layers:
            if not _LAYER_NUMBER.fullmatch(number):
                place.field(number).fail("is no layer number", "write 0, 1, 2 and so on")
        if not layers:
            place.fail("is empty", "give an entry for each layer")
        last = max(map(int, layers))
        missing = next((number for number in range(last) if str(number) not in layers), None)
        if missing is not None:
            place.field(missing).fail("is missing", f"give every layer from 0 to {last}")
        return tuple(read(layers[str(number)], place.field(number)) for number in range(last + 1))

    return read_layers


def ascending(value: object, place: Place) -> tuple[int, ...]:
    """Distinct expert numbers in order."""
    ids: tuple[int, ...] = list_of(whole(0))(value, place)
    for index, (before, after) in enumerate(pairwise(ids), start=1):
        if after == before:
            place.item(index).fail(f"is {after} once more", "list each expert once")
        if after < before:
            place.item(index).fail(f"is {after}, after {before}", "list the experts in ascending order")
    return ids


def _object(value: object, place: Place) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        place.fail(f"is {describe(value)}, not an object", "write an object of names and values")
    return value


SHAPE = Section(
    {
        "schema": Field(one_of(SCHEMA), None),
        "hf_vanilla_compatible": Field(flag, False),
        ORIGINAL: Field(by_layer(count), None),
        COUNTS: Field(by_layer(count)),
        KEPT: Field(by_layer(ascending), None),
        SOURCE: Field(_object, MappingProxyType({})),
    }
)
"""Every field of a file of our schema."""


def read_expert_spec(path: Path) -> ExpertSpec:
    """The specification in a file of either kind; raises ``ModelError``."""
    content = read_json(path)
    if "schema" not in content:
        # A published file may say more than is needed here; in one of ours, an unknown field is a misspelt one.
        content = {name: value for name, value in content.items() if name in (COUNTS, KEPT, ORIGINAL)}
    values = SHAPE.read(content, Place(str(path)))
    source = MappingProxyType(dict(values[SOURCE]))
    spec = ExpertSpec(values[COUNTS], values[KEPT], values[ORIGINAL], source, str(path))
    _check_agreement(spec)
    return spec


def _check_agreement(spec: ExpertSpec) -> None:
    """The three tables are of the same layers, and of each layer say the same."""
    place = Place(spec.file)
    for name, table in ((KEPT, spec.kept), (ORIGINAL, spec.original)):
        if table is not None and len(table) != len(spec.counts):
            problem = f"lists {len(table)} layers but {COUNTS} lists {len(spec.counts)}"
            place.field(name).fail(problem, "make the two agree")
    for layer, ids in enumerate(spec.kept or ()):
        if len(ids) != spec.counts[layer]:
            problem = f"lists {len(ids)} experts but {COUNTS}.{layer} is {spec.counts[layer]}"
            place.field(KEPT).field(layer).fail(problem, "make the two agree")
    for layer, original in enumerate(spec.original or ()):
        if spec.counts[layer] > original:
            problem = f"is {spec.counts[layer]} but {ORIGINAL}.{layer} is {original}"
            place.field(COUNTS).field(layer).fail(problem, "keep at most as many as there were")
        if spec.kept is not None and spec.kept[layer][-1] >= original:
            problem = f"keeps expert {spec.kept[layer][-1]} but {ORIGINAL}.{layer} is {original}"
            place.field(KEPT).field(layer).fail(problem, f"keep experts from 0 to {original - 1}")


def expert_spec_text(spec: ExpertSpec) -> str:
    """The JSON of a specification, a layer to a line; equal specifications give equal text."""
    lines = [f' "schema": {json.dumps(SCHEMA)}']
    for name, table in ((ORIGINAL, spec.original), (COUNTS, spec.counts), (KEPT, spec.kept)):
        if table is not None:
            rows = ",\n".join(f'  "{layer}": {json.dumps(value)}' for layer, value in enumerate(table))
            lines.append(f' "{name}": {{\n{rows}\n }}')
    lines.append(f' "{SOURCE}": {json.dumps(dict(spec.source), sort_keys=True)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
