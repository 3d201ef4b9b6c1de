"""The file that says which experts are kept, and how it meets a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc import hfconfig
from lynnc.errors import ModelError
from lynnc.runtime.experts.expertspec import ExpertSpec, expert_spec_text, read_expert_spec

# The file

IDS = ((0, 1, 2, 3, 4, 5), (0, 2, 5), (1, 3, 4, 5))
SPEC = ExpertSpec((6, 3, 4), IDS, (6, 6, 6), {"budget": 13, "statistics": ["aa"]})


def test_file_round_trip(tmp_path: Path) -> None:
    for spec in (SPEC, replace(SPEC, kept=None), replace(SPEC, original=None), ExpertSpec((6, 3, 4))):
        (tmp_path / "spec.json").write_text(expert_spec_text(spec))
        found = read_expert_spec(tmp_path / "spec.json")
        assert found == spec and found.file == str(tmp_path / "spec.json")


def test_file_is_a_superset_of_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(expert_spec_text(SPEC))
    assert json.loads((tmp_path / "spec.json").read_text()) == {
        "schema": "lynnc-experts-1",
        "original_experts_by_layer": {"0": 6, "1": 6, "2": 6},
        "remaining_experts_by_layer": {"0": 6, "1": 3, "2": 4},
        "kept_experts_by_layer": {"0": [0, 1, 2, 3, 4, 5], "1": [0, 2, 5], "2": [1, 3, 4, 5]},
        "source": {"budget": 13, "statistics": ["aa"]},
    }
    assert hfconfig.read_expert_spec(tmp_path / "spec.json") == {"0": 6, "1": 3, "2": 4}


def test_published_file_may_say_more_than_is_known_here(tmp_path: Path) -> None:
    layers = {str(layer): 256 - layer for layer in reversed(range(12))}
    published = {"hf_vanilla_compatible": False, "remaining_experts_by_layer": layers, "source": "x", "version": 2}
    (tmp_path / "spec.json").write_text(json.dumps(published))
    assert read_expert_spec(tmp_path / "spec.json") == ExpertSpec(tuple(256 - layer for layer in range(12)))


def test_a_file_without_schema_may_say_which_experts_there_were(tmp_path: Path) -> None:
    values = {name: value for name, value in json.loads(expert_spec_text(SPEC)).items() if name.endswith("_by_layer")}
    (tmp_path / "spec.json").write_text(json.dumps(values))
    assert read_expert_spec(tmp_path / "spec.json") == replace(SPEC, source={})


@dataclass(frozen=True)
class BadFile:
    name: str
    change: Callable[[dict[str, Any]], object]
    words: tuple[str, ...]


def counts_of(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["remaining_experts_by_layer"]
    return found


def kept_of(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["kept_experts_by_layer"]
    return found


def original_of(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["original_experts_by_layer"]
    return found


COUNT, KEEP, WAS = "remaining_experts_by_layer", "kept_experts_by_layer", "original_experts_by_layer"
BAD_FILES = (
    BadFile("schema", lambda v: v.update(schema="lynnc-experts-2"), ("schema is the text 'lynnc-experts-2'",)),
    BadFile("misspelt", lambda v: v.update(kept_expert_by_layer={}), ("kept_expert_by_layer is no known", KEEP)),
    BadFile("no counts", lambda v: v.pop(COUNT), (f"{COUNT} is missing",)),
    BadFile("list", lambda v: v.update({COUNT: [6, 3, 4]}), (f"{COUNT} is a list, not an object",)),
    BadFile("empty", lambda v: v.update({COUNT: {}}), (f"{COUNT} is empty",)),
    BadFile("count missing", lambda v: counts_of(v).pop("1"), (f"{COUNT}.1 is missing", "0 to 2")),
    BadFile("first missing", lambda v: counts_of(v).pop("0"), (f"{COUNT}.0 is missing",)),
    BadFile("count extra", lambda v: counts_of(v).update({"3": 6}), (f"{KEEP} lists 3 layers but {COUNT} lists 4",)),
    BadFile("far", lambda v: counts_of(v).update({"999999999": 6}), (f"{COUNT}.3 is missing",)),
    BadFile("number", lambda v: counts_of(v).update({"02": 6}), (f"{COUNT}.02 is no layer number",)),
    BadFile("word", lambda v: counts_of(v).update({"two": 6}), (f"{COUNT}.two is no layer number",)),
    BadFile("long", lambda v: counts_of(v).update({"9" * 5000: 6}), ("is no layer number",)),
    BadFile("zero", lambda v: counts_of(v).update({"1": 0}), (f"{COUNT}.1 is 0",)),
    BadFile("flag", lambda v: counts_of(v).update({"1": True}), (f"{COUNT}.1 is true",)),
    BadFile("kept missing", lambda v: kept_of(v).pop("2"), (f"{KEEP} lists 2 layers but {COUNT} lists 3",)),
    BadFile("kept hole", lambda v: kept_of(v).pop("1"), (f"{KEEP}.1 is missing",)),
    BadFile("kept extra", lambda v: kept_of(v).update({"3": [0]}), (f"{KEEP} lists 4 layers but {COUNT} lists 3",)),
    BadFile("was missing", lambda v: original_of(v).pop("2"), (f"{WAS} lists 2 layers but {COUNT} lists 3",)),
    BadFile("none", lambda v: kept_of(v).update({"1": []}), (f"{KEEP}.1 is an empty list",)),
    BadFile("again", lambda v: kept_of(v).update({"1": [0, 2, 2]}), (f"{KEEP}.1[2] is 2 once more",)),
    BadFile("unsorted", lambda v: kept_of(v).update({"1": [0, 5, 2]}), (f"{KEEP}.1[2] is 2, after 5", "ascending")),
    BadFile("negative", lambda v: kept_of(v).update({"1": [-1, 2, 5]}), (f"{KEEP}.1[0] is -1",)),
    BadFile("half", lambda v: kept_of(v).update({"1": [0.5, 2, 5]}), (f"{KEEP}.1[0] is 0.5",)),
    BadFile("fewer", lambda v: kept_of(v).update({"1": [0, 2]}), (f"{KEEP}.1 lists 2 experts but {COUNT}.1 is 3",)),
    BadFile("beyond", lambda v: kept_of(v).update({"1": [0, 2, 6]}), (f"{KEEP}.1 keeps expert 6 but {WAS}.1 is 6",)),
    BadFile("more", lambda v: original_of(v).update({"0": 5}), (f"{COUNT}.0 is 6 but {WAS}.0 is 5",)),
    BadFile("source", lambda v: v.update(source="me"), ("source is the text 'me', not an object",)),
)


@pytest.mark.parametrize("case", BAD_FILES, ids=lambda case: case.name)
def test_bad_files_are_refused_with_file_and_field(case: BadFile, tmp_path: Path) -> None:
    values = json.loads(expert_spec_text(SPEC))
    case.change(values)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        read_expert_spec(path)
    assert str(caught.value).startswith(f"{path}: "), caught.value
    assert all(words in str(caught.value) for words in case.words), caught.value


def test_a_layer_given_twice(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text('{"remaining_experts_by_layer": {"0": 6, "0": 5}}')
    with pytest.raises(ModelError, match=r"0 is given twice"):
        read_expert_spec(tmp_path / "spec.json")


# The file and a checkpoint


@dataclass(frozen=True)
class Resolved:
    name: str
    spec: ExpertSpec
    held: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    keep_first: bool = False


COUNTS_ALONE = ExpertSpec((6, 3, 4))
RESOLVED = (
    Resolved("unpruned", SPEC, (6, 6, 6), IDS),
    Resolved("compacted", SPEC, (6, 3, 4), (tuple(range(6)), (0, 1, 2), (0, 1, 2, 3))),
    Resolved("without original", replace(SPEC, original=None), (6, 6, 6), IDS),
    Resolved("counts, compacted", COUNTS_ALONE, (6, 3, 4), (tuple(range(6)), (0, 1, 2), (0, 1, 2, 3))),
    Resolved("counts, first", COUNTS_ALONE, (6, 6, 6), (tuple(range(6)), (0, 1, 2), (0, 1, 2, 3)), keep_first=True),
    Resolved("ids over first", SPEC, (6, 6, 6), IDS, keep_first=True),
    Resolved("nothing cut", ExpertSpec((6, 6)), (6, 6), (tuple(range(6)), tuple(range(6)))),
)


@pytest.mark.parametrize("case", RESOLVED, ids=lambda case: case.name)
def test_experts_to_take_from_a_checkpoint(case: Resolved) -> None:
    assert case.spec.resolve(case.held, top_k=3, keep_first=case.keep_first) == case.kept


@dataclass(frozen=True)
class Unresolved:
    name: str
    spec: ExpertSpec
    held: tuple[int, ...]
    words: tuple[str, ...]
    keep_first: bool = False
    top_k: int = 3


NO_ORIGINAL = replace(SPEC, original=None)
UNRESOLVED = (
    Unresolved("fewer layers", SPEC, (6, 6), (f"{COUNT} lists 3 layers but the checkpoint has 2",)),
    Unresolved("more layers", SPEC, (6, 6, 6, 6), (f"{COUNT} lists 3 layers but the checkpoint has 4",)),
    Unresolved("top_k", SPEC, (6, 6, 6), (f"{COUNT}.1 is 3, fewer than the 4", "keep at least 4"), top_k=4),
    Unresolved("top_k, compacted", SPEC, (6, 3, 4), (f"{COUNT}.1 is 3, fewer than the 4",), top_k=4),
    Unresolved("too few", SPEC, (5, 6, 6), (f"{COUNT}.0 is 6 but the checkpoint's layer 0 has 5",)),
    Unresolved("other model", SPEC, (8, 8, 8), (f"{WAS}.0 is 6 but the checkpoint's layer 0 has 8", "unpruned")),
    Unresolved("half compacted", SPEC, (6, 3, 6), (f"{WAS}.1 is 6 but the checkpoint's layer 1 has 3",)),
    Unresolved(
        "half, by ids", NO_ORIGINAL, (6, 3, 6), (f"{KEEP}.1 keeps expert 5 but the checkpoint's layer 1 has 3",)
    ),
    Unresolved("counts", COUNTS_ALONE, (6, 6, 6), (f"{COUNT}.1 is 3 of the checkpoint's 6", KEEP, "--keep-first")),
    Unresolved("counts, other", replace(SPEC, kept=None), (7, 7, 7), (f"{WAS}.0 is 6",), keep_first=True),
)


@pytest.mark.parametrize("case", UNRESOLVED, ids=lambda case: case.name)
def test_checkpoints_that_do_not_fit(case: Unresolved) -> None:
    with pytest.raises(ModelError) as caught:
        replace(case.spec, file="s.json").resolve(case.held, case.top_k, case.keep_first)
    assert str(caught.value).startswith("s.json: "), caught.value
    assert all(words in str(caught.value) for words in case.words), caught.value


@settings(deadline=None)
@given(
    st.lists(
        st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))),
        min_size=1,
        max_size=5,
    )
)
def test_any_choice_survives_the_file_and_meets_both_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, layers: list[tuple[int, set[int]]]
) -> None:
    kept, original = tuple(tuple(sorted(ids)) for _, ids in layers), tuple(size for size, _ in layers)
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text(expert_spec_text(ExpertSpec(tuple(map(len, kept)), kept, original)))
    spec = read_expert_spec(path)
    assert spec.resolve(original, top_k=1) == kept
    assert spec.resolve(spec.counts, top_k=1) == tuple(tuple(range(len(ids))) for ids in kept)
