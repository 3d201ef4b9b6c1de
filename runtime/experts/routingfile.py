"""How the tokens of a text chose experts: counts and gate mass of every expert, in a JSON file.

In: a file of schema ``lynnc-routing-1``, which ``lynnc routing`` writes. Out: a checked ``Routing``, or a
``ModelError`` that names file and field. Needs no torch. The file::

    {"schema": "lynnc-routing-1", "model": "tiny",
     "text": {"name": "sample.txt", "tokens": 3, "digest": "..."},
     "top_k": 2,
     "layers": [{"layer": 0, "experts": 4, "counts": [3, 2, 0, 1], "gate_mass": [1.9, 0.8, 0.0, 0.3]}]}

``counts`` says how many tokens chose an expert: they sum to tokens x top_k. ``gate_mass`` is the sum, over those
tokens, of the weight that its output had in the layer's result: they sum to the tokens if the model normalises weights.

Example::

    routing = merge_routing([read_routing(path) for path in paths])
    routing.layers[0].counts
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

from lynnc.artifact import digest
from lynnc.fields import Field, Place, Section, count, describe, list_of, one_of, text, whole
from lynnc.hfconfig import read_json

SCHEMA = "lynnc-routing-1"
MOST_TOKENS = 2**53
"""Beyond this a count is no longer exact as a JSON number."""
ROUNDING = 1e-5
"""Relative error of a sum of FP32 weights."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text that was counted: its name, its tokens, and a digest of their ids."""

    name: str
    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Of each expert of a layer, how many tokens chose it, and the sum of the weights they gave it."""

    counts: tuple[int, ...]
    gate_mass: tuple[float, ...]

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class Routing:
    """What one text, or several merged ones, showed of a model; ``file`` is for messages."""

    model: str
    text: TextFacts
    top_k: int
    layers: tuple[LayerRouting, ...]
    file: str = field(default="the routing statistics", compare=False)

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of each layer."""
        return tuple(layer.experts for layer in self.layers)


def text_facts(name: str, tokens: Sequence[int]) -> TextFacts:
    """Facts of token ids; the digest is SHA-256 of the ids in decimal with a comma between."""
    return TextFacts(name, len(tokens), digest(",".join(map(str, tokens)).encode()))


def _mass(value: object, place: Place) -> float:
    """A finite number from zero up."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.fail(f"is {describe(value)}, not a number", "write a number from zero up")
    if not 0 <= value <= sys.float_info.max:
        place.fail(f"is {describe(value)}", "write a finite number from zero up")
    return float(value)


_COUNT = whole(0, most=MOST_TOKENS)
_LAYER = Section(
    {
        "layer": Field(whole(0)),
        "experts": Field(count),
        "counts": Field(list_of(_COUNT)),
        "gate_mass": Field(list_of(_mass)),
    }
)
SHAPE = Section(
    {
        "schema": Field(one_of(SCHEMA)),
        "model": Field(text),
        "text": Section({"name": Field(text), "tokens": Field(whole(1, most=MOST_TOKENS)), "digest": Field(text)}),
        "top_k": Field(count),
        "layers": Field(list_of(_LAYER.read)),
    }
)
"""Every field of the file."""


def read_routing(path: Path) -> Routing:
    """The checked statistics in a file; raises ``ModelError``."""
    place = Place(str(path))
    values = SHAPE.read(read_json(path), place)
    facts = TextFacts(**values["text"])
    layers = [
        _checked_layer(layer, values["top_k"], facts.tokens, place.field(f"layers[{index}]"), index)
        for index, layer in enumerate(values["layers"])
    ]
    return Routing(values["model"], facts, values["top_k"], tuple(layers), str(path))


def _checked_layer(values: Mapping[str, Any], top_k: int, tokens: int, place: Place, index: int) -> LayerRouting:
    if values["layer"] != index:
        place.field("layer").fail(f"is {values['layer']}, not {index}", "list every layer once, in order")
    layer = LayerRouting(values["counts"], values["gate_mass"])
    for name in ("counts", "gate_mass"):
        if len(values[name]) != values["experts"]:
            problem = f"lists {len(values[name])} experts but experts is {values['experts']}"
            place.field(name).fail(problem, "count the text again")
    if layer.experts < top_k:
        place.field("experts").fail(f"is {layer.experts}, fewer than top_k, {top_k}", "count the text again")
    if sum(layer.counts) != tokens * top_k:
        problem = f"sum to {sum(layer.counts):,} but {tokens:,} tokens choose {top_k} experts each"
        place.field("counts").fail(problem, "count the text again")
    _check_experts(layer, tokens, place)
    return layer


def _check_experts(layer: LayerRouting, tokens: int, place: Place) -> None:
    """A token chooses an expert at most once, and gives it a weight of at most one."""
    for expert, (chosen, mass) in enumerate(zip(layer.counts, layer.gate_mass, strict=True)):
        if chosen > tokens:
            place.field("counts").item(expert).fail(f"is {chosen:,} of {tokens:,} tokens", "count the text again")
        if mass > chosen * (1 + ROUNDING):
            problem = f"is {mass}, more than the {chosen:,} tokens that chose the expert can give"
            place.field("gate_mass").item(expert).fail(problem, "count the text again")
    if not any(layer.gate_mass):
        place.field("gate_mass").fail("is zero for every expert", "count the text again")


def routing_text(routing: Routing) -> str:
    """The JSON of statistics, a layer to a line; equal statistics give equal text."""
    facts = {"name": routing.text.name, "tokens": routing.text.tokens, "digest": routing.text.digest}
    rows = [
        {"layer": index, "experts": layer.experts, "counts": layer.counts, "gate_mass": layer.gate_mass}
        for index, layer in enumerate(routing.layers)
    ]
    head = {"schema": SCHEMA, "model": routing.model, "text": facts, "top_k": routing.top_k}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines.append(' "layers": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def merge_routing(routings: Sequence[Routing]) -> Routing:
    """The statistics of several texts together; their order changes nothing but the joined name.

    ModelError if they are not of one model, or if a text is there twice.
    """
    if len(routings) == 1:
        return routings[0]
    for index, routing in enumerate(routings[1:], start=1):
        _check_model(routing, routings[0])
        _check_text(routing, routings[:index])
    facts = TextFacts(
        name=" + ".join(routing.text.name for routing in routings),
        tokens=sum(routing.text.tokens for routing in routings),
        digest=digest(",".join(sorted(routing.text.digest for routing in routings)).encode()),
    )
    layers = zip(*(routing.layers for routing in routings), strict=True)
    return Routing(routings[0].model, facts, routings[0].top_k, tuple(map(_merge_layers, layers)))


def _merge_layers(layers: Sequence[LayerRouting]) -> LayerRouting:
    counts = zip(*(layer.counts for layer in layers), strict=True)
    masses = zip(*(layer.gate_mass for layer in layers), strict=True)
    return LayerRouting(tuple(map(sum, counts)), tuple(map(fsum, masses)))


def _check_model(routing: Routing, first: Routing) -> None:
    facts: list[tuple[str, object, object]] = [
        ("model", routing.model, first.model),
        ("top_k", routing.top_k, first.top_k),
        ("the number of layers", len(routing.layers), len(first.layers)),
    ]
    pairs = zip(routing.experts, first.experts, strict=False)
    facts += [(f"layers[{layer}].experts", ours, theirs) for layer, (ours, theirs) in enumerate(pairs)]
    for name, ours, theirs in facts:
        if ours != theirs:
            Place(routing.file, name).fail(f"is {ours} but {theirs} in {first.file}", "merge files of one model only")


def _check_text(routing: Routing, others: Sequence[Routing]) -> None:
    for other in others:
        if routing.text.digest == other.text.digest:
            problem = f"is that of {other.file}: both count the text {routing.text.name}"
            Place(routing.file, "text.digest").fail(problem, "leave one of them out")
