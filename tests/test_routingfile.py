"""Routing statistics in their file, and the merging of several."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.errors import ModelError
from lynnc.runtime.experts.routingfile import (
    LayerRouting,
    Routing,
    TextFacts,
    merge_routing,
    read_routing,
    routing_text,
    text_facts,
)

# The file


def routing_of(layers: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...], tokens: int, **changes: Any) -> Routing:
    facts = changes.pop("text", TextFacts("a.txt", tokens, "aa"))
    counted = tuple(LayerRouting(*layer) for layer in layers)
    return replace(Routing("tiny", facts, 2, counted), **changes)


SMALL = routing_of((((3, 2, 0, 1), (1.75, 0.75, 0.0, 0.5)), ((3, 3), (2.25, 0.75))), tokens=3)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    path.write_text(routing_text(SMALL))
    assert read_routing(path) == SMALL
    assert read_routing(path).file == str(path) and read_routing(path).experts == (4, 2)
    assert json.loads(path.read_text()) == {
        "schema": "lynnc-routing-1",
        "model": "tiny",
        "text": {"name": "a.txt", "tokens": 3, "digest": "aa"},
        "top_k": 2,
        "layers": [
            {"layer": 0, "experts": 4, "counts": [3, 2, 0, 1], "gate_mass": [1.75, 0.75, 0.0, 0.5]},
            {"layer": 1, "experts": 2, "counts": [3, 3], "gate_mass": [2.25, 0.75]},
        ],
    }


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(any))
def test_gate_mass_survives_the_file_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, mass: list[float]) -> None:
    path = tmp_path_factory.mktemp("r") / "routing.json"
    routing = routing_of((((1, 1, 1), tuple(mass)),), 1, top_k=3)
    path.write_text(routing_text(routing))
    assert read_routing(path) == routing


def test_text_digest_depends_on_every_id_and_their_order() -> None:
    """Ids that run together would give 1,23 and 12,3 one digest."""
    texts = ([1, 23], [12, 3], [123], [23, 1], [1, 23, 0])
    assert len({text_facts("t", ids).digest for ids in texts}) == len(texts)
    assert text_facts("a", [5]).digest == text_facts("b", [5]).digest


@dataclass(frozen=True)
class BadFile:
    name: str
    change: Callable[[dict[str, Any]], object]
    words: tuple[str, ...]


BAD_FILES = (
    BadFile("schema", lambda v: v.update(schema="lynnc-routing-2"), ("schema is the text 'lynnc-routing-2'",)),
    BadFile("no schema", lambda v: v.pop("schema"), ("schema is missing",)),
    BadFile("unknown", lambda v: v.update(topk=2), ("topk is no known field", "top_k")),
    BadFile("no text", lambda v: v["text"].update(tokens=0), ("text.tokens is 0",)),
    BadFile("no digest", lambda v: v["text"].pop("digest"), ("text.digest is missing",)),
    BadFile("no layers", lambda v: v.update(layers=[]), ("layers is an empty list",)),
    BadFile("order", lambda v: v["layers"].reverse(), ("layers[0].layer is 1, not 0", "in order")),
    BadFile("twice", lambda v: v["layers"].append(v["layers"][0]), ("layers[2].layer is 0, not 2",)),
    BadFile("fewer", lambda v: v["layers"][0].update(experts=5), ("layers[0].counts lists 4 experts but", "is 5")),
    BadFile("masses", lambda v: v["layers"][1]["gate_mass"].pop(), ("layers[1].gate_mass lists 1 experts", "is 2")),
    BadFile("sum", lambda v: v["layers"][0]["counts"].__setitem__(1, 3), ("layers[0].counts sum to 7", "3 tokens")),
    BadFile("half", lambda v: v["layers"][0]["counts"].__setitem__(1, 2.5), ("layers[0].counts[1] is 2.5",)),
    BadFile("minus", lambda v: v["layers"][0]["counts"].__setitem__(1, -2), ("layers[0].counts[1] is -2",)),
    BadFile("often", lambda v: v["layers"][1].update(counts=[4, 2]), ("layers[1].counts[0] is 4 of 3 tokens",)),
    BadFile("nan", lambda v: v["layers"][0]["gate_mass"].__setitem__(1, float("nan")), ("gate_mass[1] is nan",)),
    BadFile("infinite", lambda v: v["layers"][0]["gate_mass"].__setitem__(1, 1e999), ("gate_mass[1] is inf",)),
    BadFile("negative", lambda v: v["layers"][0]["gate_mass"].__setitem__(1, -0.1), ("gate_mass[1] is -0.1",)),
    BadFile("no number", lambda v: v["layers"][0]["gate_mass"].__setitem__(1, True), ("gate_mass[1] is true",)),
    BadFile("unchosen", lambda v: v["layers"][0]["gate_mass"].__setitem__(2, 0.1), ("gate_mass[2] is 0.1, more",)),
    BadFile("no mass", lambda v: v["layers"][1].update(gate_mass=[0, 0]), ("layers[1].gate_mass is zero",)),
    BadFile("top_k", lambda v: v.update(top_k=3), ("layers[0].counts sum to 6",)),
    BadFile("few", lambda v: v["layers"][1].update(experts=1, counts=[6], gate_mass=[3]), ("experts is 1, fewer",)),
)


@pytest.mark.parametrize("case", BAD_FILES, ids=lambda case: case.name)
def test_bad_files_are_refused_with_file_and_field(case: BadFile, tmp_path: Path) -> None:
    values = json.loads(routing_text(SMALL))
    case.change(values)
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        read_routing(path)
    assert str(caught.value).startswith(f"{path}: "), caught.value
    assert all(words in str(caught.value) for words in case.words), caught.value


# Merging

OTHER = replace(
    SMALL,
    text=TextFacts("b.txt", 2, "bb"),
    layers=(LayerRouting((0, 0, 2, 2), (0.0, 0.0, 1.5, 0.5)), LayerRouting((2, 2), (0.1, 1.9))),
    file="b.json",
)


def test_merging_adds_up() -> None:
    merged = merge_routing([SMALL, OTHER])
    assert merged.layers[0] == LayerRouting((3, 2, 2, 3), (1.75, 0.75, 1.5, 1.0))
    assert merged.layers[1].counts == (5, 5) and merged.layers[1].gate_mass == pytest.approx((2.35, 2.65))
    assert merged.text.name == "a.txt + b.txt" and merged.text.tokens == 5 and merged.top_k == 2
    assert merged.text.digest not in (SMALL.text.digest, OTHER.text.digest)
    assert merge_routing([SMALL]) == SMALL


@given(st.permutations([0.1, 0.2, 0.3, 0.7, 1e-17]))
def test_merging_does_not_depend_on_the_order(masses: list[float]) -> None:
    def one(mass: float) -> Routing:
        return routing_of((((1, 1), (mass, 1.0)),), 1, text=TextFacts("t", 1, str(mass)))

    merged, expected = (merge_routing(list(map(one, order))) for order in (masses, sorted(masses)))
    assert merged.layers == expected.layers and merged.text.digest == expected.text.digest


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(OTHER, model="huge"), ("b.json: model is huge but tiny in a.json", "one model")),
        (replace(OTHER, top_k=1), ("b.json: top_k is 1 but 2 in a.json",)),
        (replace(OTHER, layers=OTHER.layers[:1]), ("the number of layers is 1 but 2",)),
        (
            replace(OTHER, layers=(OTHER.layers[0], LayerRouting((2, 1, 1), (1.0, 0.5, 0.5)))),
            ("layers[1].experts is 3 but 2",),
        ),
        (replace(OTHER, text=SMALL.text), ("text.digest is that of a.json", "a.txt", "leave one")),
    ],
)
def test_unlike_statistics_do_not_merge(other: Routing, words: tuple[str, ...]) -> None:
    third = replace(SMALL, text=TextFacts("c.txt", 3, "cc"), file="c.json")
    with pytest.raises(ModelError) as caught:
        merge_routing([replace(SMALL, file="a.json"), third, other])
    assert all(word in str(caught.value) for word in words), caught.value
