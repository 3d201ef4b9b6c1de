"""Routing statistics: counted as the outside judge routes, and ``lynnc routing``."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from reference import PROMPT, STEPS, VARIANTS, Case, judge, make
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lynnc.build import build_graph
from lynnc.cli.main import cli
from lynnc.cli.tokens import read_token_ids, tokenize
from lynnc.errors import LynncError, ModelError, OptionError, WeightError
from lynnc.modelfile import load_model
from lynnc.runtime.experts.routing import RunSettings, Step, Tokens, collect_routing, cut_steps, split_layers
from lynnc.runtime.experts.routingfile import merge_routing, read_routing, routing_text, text_facts

LENGTH = PROMPT + STEPS
MASS_LIMIT = 0.02
"""Relative error of an expert's gate mass: the judge computes in FP32 what the model rounds to BF16."""

# Against the judge


@dataclass(frozen=True)
class Counted:
    case: Case
    seeds: tuple[int, ...]
    chunk: int

    def __str__(self) -> str:
        return f"{self.case}-{len(self.seeds)}x{LENGTH}-by-{self.chunk}"


MOE, FULL, UNNORMALIZED = Case("tiny-moe"), Case("tiny-full"), VARIANTS[-1]
COUNTED = (
    Counted(MOE, (0,), 1),
    Counted(MOE, (0,), 8),
    Counted(MOE, (0, 1), 13),
    Counted(FULL, (0,), 512),
    Counted(FULL, (0, 1), 9),
    Counted(UNNORMALIZED, (0,), 16),
)


def judged_routing(case: Case, seeds: tuple[int, ...]) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Tokens of several runs one after the other, and of each layer the judge's counts and gate mass over all."""
    runs = [judge(make(case), seed) for seed in seeds]
    moe = case.spec.moe
    assert moe is not None
    counts, masses = [], []
    for layer, experts in enumerate(moe.experts):
        shares = torch.cat([run.routers[layer] for run in runs]).double().softmax(-1)
        chosen = shares.topk(moe.top_k, dim=-1)
        weights = chosen.values / chosen.values.sum(-1, keepdim=True) if moe.normalize_top_k else chosen.values
        one_hot = torch.nn.functional.one_hot(chosen.indices, experts)
        counts.append(one_hot.sum((0, 1)))
        masses.append((one_hot * weights[..., None]).sum((0, 1)))
    return [token for run in runs for token in run.tokens], counts, masses


@pytest.mark.parametrize("counted", COUNTED, ids=str)
def test_counts_and_gate_mass_are_the_judges(counted: Counted) -> None:
    case = counted.case
    ids, counts, masses = judged_routing(case, counted.seeds)
    settings = RunSettings(counted.chunk, LENGTH)
    routing = collect_routing(case.spec, make(case).values, Tokens("text", ids), settings)
    assert [list(layer.counts) for layer in routing.layers] == [layer.tolist() for layer in counts]
    for layer, expected in zip(routing.layers, masses, strict=True):
        assert torch.tensor(layer.gate_mass) == pytest.approx(expected, rel=MASS_LIMIT)
    assert routing.model == case.model and routing.text == text_facts("text", ids)
    assert routing.top_k == case.spec.moe.top_k


def test_a_sequence_starts_with_an_empty_context() -> None:
    """The same tokens twice, as one sequence and as two: only as two do both halves count alike."""
    ids = list(judge(make(MOE)).tokens)
    once = collect_routing(MOE.spec, make(MOE).values, Tokens("t", ids), RunSettings())
    for sequence, is_double in ((LENGTH, True), (2 * LENGTH, False)):
        twice = collect_routing(MOE.spec, make(MOE).values, Tokens("t", ids * 2), RunSettings(11, sequence))
        doubled = [[2 * count for count in layer.counts] for layer in once.layers]
        assert ([list(layer.counts) for layer in twice.layers] == doubled) is is_double


def test_a_sequence_is_no_longer_than_the_models_context() -> None:
    spec, values, tokens = FULL.spec, make(FULL).values, Tokens("t", list(range(30)))
    short = collect_routing(replace(spec, max_context=10), values, tokens, RunSettings(7))
    assert short == collect_routing(spec, values, tokens, RunSettings(7, 10))
    assert short != collect_routing(spec, values, tokens, RunSettings(7))


class Watched(Mapping[str, torch.Tensor]):
    """Makes a weight's values when asked, and notes the order and what was alive then."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values_by_name = values
        self.asked: list[str] = []
        self.alive: dict[str, weakref.ref[torch.Tensor]] = {}
        self.crowd: set[tuple[str, str]] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        layer = name.split(".")[:2]
        self.crowd.update((name, other) for other, ref in self.alive.items() if ref() is not None)
        self.crowd -= {(name, other) for other in self.alive if other.split(".")[:2] == layer}
        value = self.values_by_name[name].clone()
        self.asked.append(name)
        self.alive[name] = weakref.ref(value)
        return value

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all weights at once")

    def __len__(self) -> int:
        raise AssertionError("all weights at once")


def test_weights_are_asked_for_once_and_one_layer_at_a_time() -> None:
    watched = Watched(make(MOE).values)
    collect_routing(MOE.spec, watched, Tokens("t", list(range(20))), RunSettings(6))
    assert watched.crowd == set()
    assert len(watched.asked) == len(set(watched.asked))
    layers = [name.split(".")[1] for name in watched.asked[1:]]
    assert watched.asked[0] == "embed" and layers == sorted(layers)
    after = {
        name for name in make(MOE).values if name.startswith(("layers.3.experts", "layers.3.shared_", "lm_", "fi"))
    }
    assert len(after) >= 5 and set(watched.asked) == set(make(MOE).values) - after


def test_layers_make_up_the_graph() -> None:
    graph = build_graph(MOE.spec)
    parts = split_layers(graph, 4)
    ops = [op for part in parts for op in part.ops]
    assert tuple(ops) == graph.ops[: len(ops)]
    assert [op.kind for op in graph.ops if op.kind == "TopK"] == [op.kind for op in ops if op.kind == "TopK"]
    assert ops[-1].kind == "TopK"
    for before, after in pairwise(parts):
        assert after.inputs == (*graph.inputs, *before.outputs)


def test_progress_ends_at_its_total() -> None:
    told: list[tuple[int, int]] = []
    tokens = Tokens("t", list(range(10)))
    collect_routing(FULL.spec, make(FULL).values, tokens, RunSettings(4), lambda *step: told.append(step))
    assert told == [(4, 30), (8, 30), (10, 30), (14, 30), (18, 30), (20, 30), (24, 30), (28, 30), (30, 30)]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_steps_cover_the_text_once(count: int, chunk: int, sequence: int) -> None:
    steps = cut_steps(count, RunSettings(chunk, sequence))
    covered = [token for step in steps for token in range(step.first, step.end)]
    assert covered == list(range(count))
    for step in steps:
        assert 0 < step.end - step.first <= chunk
        assert step.start == step.first % sequence
        assert step.start + step.end - step.first <= sequence


def test_steps_of_a_text() -> None:
    assert cut_steps(7, RunSettings(3, 5)) == (Step(0, 3, 0), Step(3, 5, 3), Step(5, 7, 0))


USUAL = RunSettings()


@dataclass(frozen=True)
class Refused:
    name: str
    error: type[LynncError]
    words: tuple[str, ...]
    model: str = "tiny-full"
    ids: tuple[int, ...] = (1, 2, 3)
    settings: RunSettings = USUAL


REFUSED = (
    Refused("dense", ModelError, ("tiny-dense has no experts",), model="tiny-dense"),
    Refused("no tokens", OptionError, ("t.txt has no tokens", "longer"), ids=()),
    Refused("too large", OptionError, ("t.txt: token 1 has the id 384", "vocabulary of 384"), ids=(383, 384)),
    Refused("negative", OptionError, ("token 0 has the id -1",), ids=(-1,)),
    Refused("no sequence", OptionError, ("Sequences of 0", "at least 1"), settings=RunSettings(sequence=0)),
    Refused("no step", OptionError, ("Steps of 0", "at least 1"), settings=RunSettings(chunk=0)),
)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_run_is_refused_before_any_weight_is_read(case: Refused) -> None:
    with pytest.raises(case.error) as caught:
        collect_routing(load_model(case.model), {}, Tokens("t.txt", case.ids), case.settings)
    assert all(words in str(caught.value) for words in case.words), caught.value


def test_logits_that_are_not_finite_are_refused_with_layer_and_token() -> None:
    values = dict(make(FULL).values)
    table = values["embed"].clone()
    table[77] = float("nan")
    with pytest.raises(WeightError) as caught:
        collect_routing(FULL.spec, values | {"embed": table}, Tokens("t", [1, 2, 3, 4, 77, 5]), RunSettings(3))
    assert "layers.0: the router's logits for token 4" in str(caught.value)


# With the file


def test_collected_statistics_can_be_read(tmp_path: Path) -> None:
    routing = collect_routing(MOE.spec, make(MOE).values, Tokens("t", list(range(40))), RunSettings(7, 16))
    (tmp_path / "r.json").write_text(routing_text(routing))
    assert read_routing(tmp_path / "r.json") == routing


def test_merging_is_like_counting_one_text(tmp_path: Path) -> None:
    ids, settings = list(range(30)), RunSettings(4, 10)
    parts = (Tokens("a", ids[:10]), Tokens("b", ids[10:]))
    merged = merge_routing([collect_routing(FULL.spec, make(FULL).values, part, settings) for part in parts])
    whole = collect_routing(FULL.spec, make(FULL).values, Tokens("c", ids), settings)
    for ours, expected in zip(merged.layers, whole.layers, strict=True):
        assert ours.counts == expected.counts
        assert ours.gate_mass == pytest.approx(expected.gate_mass)


# Tokens


def make_tokenizer(path: Path) -> None:
    """Words to ids, with special tokens that a model puts around a text."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 5, "mole": 17, "digs": 300, "[CLS]": 383}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 383)])
    tokenizer.save(str(path))


def test_text_is_tokenized_without_special_tokens(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the mole digs\nthe end")
    assert tokenize(tmp_path / "a.txt", tmp_path / "tokenizer.json") == (5, 17, 300, 5, 0)


@pytest.mark.parametrize("content", ["[1, 20, 3]", " \n[1,20,3]\n", "1\n20\n3\n", "1\r\n20\r\n3", "1\n\n 20 \n3"])
def test_token_ids_of_a_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(content.encode())
    assert read_token_ids(tmp_path / "ids") == (1, 20, 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, -2]", "ids: [1] is -2"),
        ('[1, "2"]', "ids: [1] is the text '2'"),
        ("[1, true]", "ids: [1] is true"),
        ("[]", "is an empty list"),
        ("[1, 2", "not JSON"),
        ("[1" + "0" * 5000 + "]", "not JSON"),
        ("1\n2.5\n", "ids: line 2 is the text '2.5'"),
        ("1 2 3", "ids: line 1 is the text '1 2 3'"),
        ("1\n" + "9" * 5000, "ids: line 2"),
    ],
)
def test_bad_token_ids_are_refused_with_their_place(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(content)
    with pytest.raises(ModelError) as caught:
        read_token_ids(tmp_path / "ids")
    assert words in str(caught.value)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the mole")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ModelError, match=r"tokenizer.json: model has no vocabulary"):
        tokenize(tmp_path / "a.txt", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 5}}')
    with pytest.raises(ModelError, match=r"tokenizer.json: the tokenizers library cannot use the file \(.+\); name a"):
        tokenize(tmp_path / "a.txt", tmp_path / "tokenizer.json")


# The command


@dataclass(frozen=True)
class StubPacked:
    """What ``lynnc routing`` asks of a packed folder."""

    folder: Path

    @property
    def spec(self) -> Any:
        return FULL.spec

    @property
    def weights(self) -> Mapping[str, Any]:
        return build_graph(FULL.spec, 1).weights

    def values(self, name: str, device: str) -> torch.Tensor:
        assert device == "cpu"
        return make(FULL).values[name]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lynnc.cli.routing.open_packed", StubPacked)
    folder = tmp_path / "packed"
    folder.mkdir()
    make_tokenizer(folder / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the mole digs " * 4)
    (tmp_path / "ids.json").write_text(json.dumps([5, 17, 300] * 4))
    return folder


def lynnc_routing(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["routing", *map(str, arguments)])


def test_command_writes_what_the_library_counts(packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    result = lynnc_routing(packed, "--text", tmp_path / "a.txt", "--tokens", 10, "--chunk", 3, "-o", output)
    assert result.exit_code == 0, result.output
    expected = collect_routing(
        FULL.spec, make(FULL).values, Tokens("a.txt", ([5, 17, 300] * 4)[:10]), RunSettings(3, 512)
    )
    assert read_routing(output) == expected
    assert "tiny-full on a.txt" in result.stdout and "10 tokens through 3 layers" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "ids.json", "packed", "r.json"]


def test_command_reads_ids_and_prints_json(packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = (packed, "--token-ids", tmp_path / "ids.json", "--sequence", 6, "--tokens", 50, "-o", output, "--json")
    result = lynnc_routing(*arguments)
    assert result.exit_code == 0 and "12 tokens, fewer than --tokens 50" in result.stderr
    document = json.loads(result.stdout)
    routing = read_routing(output)
    assert document["text"] == {"name": "ids.json", "tokens": 12, "digest": routing.text.digest}
    for row, layer in zip(document["layers"], routing.layers, strict=True):
        assert row["experts"] == 7 and row["never_chosen"] == layer.counts.count(0)
        assert row["busiest"] == max(layer.counts) / 12
        largest = sorted(layer.gate_mass)[-row["half_mass"] :]
        assert sum(largest) >= 6 > sum(largest[1:])


def test_command_takes_another_tokenizer(packed: Path, tmp_path: Path) -> None:
    (packed / "tokenizer.json").rename(tmp_path / "mine.json")
    arguments = (packed, "--text", tmp_path / "a.txt", "-o", tmp_path / "r.json")
    line = lynnc_routing(*arguments).stderr
    assert "holds no tokenizer.json" in line and "--tokenizer" in line
    assert lynnc_routing(*arguments, "--tokenizer", tmp_path / "mine.json").exit_code == 0


@dataclass(frozen=True)
class BadCall:
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]


BAD_CALLS = (
    BadCall("nothing", ("-o", "r.json"), ("--text or --token-ids",)),
    BadCall("both", ("--text", "a.txt", "--token-ids", "ids.json", "-o", "r.json"), ("--text or --token-ids",)),
    BadCall("idle", ("--token-ids", "ids.json", "--tokenizer", "t.json", "-o", "r.json"), ("--tokenizer has no",)),
    BadCall("no text", ("--text", "b.txt", "-o", "r.json"), ("b.txt: there is no such file",)),
    BadCall("exists", ("--text", "a.txt", "-o", "ids.json"), ("ids.json exists already", "--force")),
    BadCall("folder", ("--text", "a.txt", "-o", "packed"), ("packed is a folder",)),
    BadCall("nowhere", ("--text", "a.txt", "-o", "no/r.json"), ("no/r.json cannot be written",)),
    BadCall("device", ("--text", "a.txt", "-o", "r.json", "--device", "tpu9"), ("--device tpu9",)),
    BadCall("sequence", ("--text", "a.txt", "-o", "r.json", "--sequence", "0"), ("--sequence",)),
    BadCall("tokens", ("--text", "a.txt", "-o", "r.json", "--tokens", "0"), ("--tokens",)),
    BadCall("output", ("--text", "a.txt"), ("--output",)),
)


@pytest.mark.parametrize("case", BAD_CALLS, ids=lambda case: case.name)
def test_bad_calls_give_one_line_and_2(
    case: BadCall, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = lynnc_routing(packed, *case.arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert len(result.stderr.splitlines()) == 1 and all(words in result.stderr for words in case.words), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_id_outside_the_vocabulary(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 384]")
    result = lynnc_routing(packed, "--token-ids", tmp_path / "ids.json", "-o", tmp_path / "r.json")
    assert result.exit_code == 2 and "ids.json: token 2 has the id 384" in result.stderr
    assert not (tmp_path / "r.json").exists()


def test_force_replaces_the_file(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("old")
    arguments = (packed, "--token-ids", tmp_path / "ids.json", "-o", tmp_path / "r.json", "--force")
    assert lynnc_routing(*arguments).exit_code == 0
    assert read_routing(tmp_path / "r.json").text.tokens == 12
