"""Pruning: which experts are kept, and ``lynnc prune``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.cli.main import cli
from lynnc.errors import OptionError
from lynnc.modelfile import dump_model, load_model
from lynnc.runtime.experts.expertspec import read_expert_spec
from lynnc.runtime.experts.prune import Cut, Measure, Rules, choose_experts, cuts, scores, total_cut
from lynnc.runtime.experts.routingfile import LayerRouting, Routing, TextFacts, read_routing, routing_text

# The choice


def routing_of(*layers: tuple[tuple[int, ...], tuple[float, ...]], top_k: int = 1) -> Routing:
    """Statistics of these counts and gate masses; every layer's counts sum to the same."""
    tokens = sum(layers[0][0]) // top_k
    return Routing("tiny", TextFacts("a.txt", tokens, "aa"), top_k, tuple(LayerRouting(*layer) for layer in layers))


@dataclass(frozen=True)
class Problem:
    """Small statistics and rules that can be kept."""

    routing: Routing
    rules: Rules


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to three layers of up to four experts, few distinct values, so that scores are often equal."""
    top_k = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(top_k, 4), min_size=1, max_size=3))
    layers = []
    for size in sizes:
        counts = [1, *draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))]
        mass = [draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))) * count for count in counts]
        layers.append((tuple(counts), (*mass[:-1], mass[-1] or 0.125)))
    minimum = draw(st.integers(top_k, 4))
    protected = draw(st.frozensets(st.integers(0, len(sizes) - 1)))
    least = sum(size if layer in protected else min(size, minimum) for layer, size in enumerate(sizes))
    budget = draw(st.integers(least, sum(sizes)))
    measure = draw(st.sampled_from(list(Measure)))
    return Problem(routing_of(*layers, top_k=top_k), Rules(budget, minimum, protected, measure))


def exact_scores(problem: Problem) -> list[list[Fraction]]:
    return [[Fraction(score) for score in scores(layer, problem.rules.measure)] for layer in problem.routing.layers]


def every_choice(problem: Problem) -> list[tuple[tuple[int, ...], ...]]:
    """All kept sets that the rules allow, by trying all."""
    rules = problem.rules
    options = []
    for layer, size in enumerate(problem.routing.experts):
        least = size if layer in rules.protected else min(size, rules.minimum)
        options.append([ids for count in range(least, size + 1) for ids in combinations(range(size), count)])
    return [kept for kept in product(*options) if sum(map(len, kept)) == rules.budget]


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_choice_is_the_best_of_all(problem: Problem) -> None:
    """And of equally good ones, the one that keeps earlier layers, then lower numbers."""
    worth = exact_scores(problem)
    experts = [(layer, expert) for layer, size in enumerate(problem.routing.experts) for expert in range(size)]
    ranked = sorted(experts, key=lambda place: (worth[place[0]][place[1]], -place[0], -place[1]))

    def value(kept: tuple[tuple[int, ...], ...]) -> Fraction:
        return sum((worth[layer][expert] for layer, ids in enumerate(kept) for expert in ids), Fraction(0))

    def rank(kept: tuple[tuple[int, ...], ...]) -> int:
        """Of two choices, the larger one keeps the better of the best experts that only one of them keeps."""
        return sum(2**place for place, (layer, expert) in enumerate(ranked) if expert in kept[layer])

    choices = every_choice(problem)
    chosen = choose_experts(problem.routing, problem.rules)
    assert value(chosen) == max(map(value, choices))
    assert chosen == max(choices, key=rank)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_choice_keeps_every_rule(problem: Problem) -> None:
    rules, routing = problem.rules, problem.routing
    kept = choose_experts(routing, rules)
    assert sum(map(len, kept)) == rules.budget
    for layer, (ids, size) in enumerate(zip(kept, routing.experts, strict=True)):
        assert list(ids) == sorted(set(ids)) and set(ids) <= set(range(size))
        assert len(ids) >= (size if layer in rules.protected else min(size, rules.minimum))
        worth = scores(routing.layers[layer], rules.measure)
        for gone in set(range(size)) - set(ids):
            assert all((worth[gone], -gone) < (worth[expert], -expert) for expert in ids)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_smaller_budget_keeps_a_part_of_a_larger_ones(problem: Problem) -> None:
    total = sum(problem.routing.experts)
    larger = choose_experts(problem.routing, replace(problem.rules, budget=(problem.rules.budget + total) // 2))
    smaller = choose_experts(problem.routing, problem.rules)
    assert all(set(few) <= set(many) for few, many in zip(smaller, larger, strict=True))


def test_equal_scores_go_from_the_later_layer_and_the_higher_number() -> None:
    even = ((1, 1, 1, 1), (0.5, 0.5, 0.5, 0.5))
    routing = routing_of(even, even)
    assert choose_experts(routing, Rules(7, 1)) == ((0, 1, 2, 3), (0, 1, 2))
    assert choose_experts(routing, Rules(5, 1)) == ((0, 1, 2, 3), (0,))
    assert choose_experts(routing, Rules(4, 1)) == ((0, 1, 2), (0,))
    assert choose_experts(routing, Rules(7, 1, frozenset({1}))) == ((0, 1, 2), (0, 1, 2, 3))


UNLIKE = routing_of(
    # Expert 0 is chosen often with little weight, 2 seldom with much.
    ((6, 2, 2, 2), (0.3, 1.2, 1.9, 0.6)),
    ((3, 3, 3, 3), (0.4, 1.2, 1.2, 1.2)),
)


def test_scores_are_shares_of_the_layer() -> None:
    assert scores(UNLIKE.layers[0], Measure.COUNT) == pytest.approx((0.5, 1 / 6, 1 / 6, 1 / 6))
    assert scores(UNLIKE.layers[0], Measure.GATE_MASS) == pytest.approx((0.075, 0.3, 0.475, 0.15))
    assert scores(UNLIKE.layers[0], Measure.BOTH) == pytest.approx((0.2875, 0.7 / 3, 0.9625 / 3, 0.475 / 3))


@pytest.mark.parametrize(
    ("measure", "first_gone"),
    [(Measure.COUNT, (0, 3)), (Measure.GATE_MASS, (0, 0)), (Measure.BOTH, (0, 3))],
)
def test_measures_differ(measure: Measure, first_gone: tuple[int, int]) -> None:
    kept = choose_experts(UNLIKE, Rules(7, 1, measure=measure))
    gone = [(layer, expert) for layer in range(2) for expert in range(4) if expert not in kept[layer]]
    assert gone == [first_gone]


def test_layers_of_unlike_size_compare_by_share() -> None:
    """Half of two experts is more than the best of four, whatever the counts."""
    routing = routing_of(((40, 30, 20, 10), (4.0, 3.0, 2.0, 1.0)), ((50, 50), (5.0, 5.0)))
    assert choose_experts(routing, Rules(3, 1)) == ((0,), (0, 1))


def test_what_a_cut_costs() -> None:
    kept = ((1, 2), (0, 1, 2, 3))
    assert cuts(UNLIKE, kept)[1] == Cut(4, 4, 1.0, 1.0)
    first, whole = cuts(UNLIKE, kept)[0], total_cut(UNLIKE, kept)
    assert (first.experts, first.kept, whole.experts, whole.kept) == (4, 2, 8, 6)
    assert first.gate_mass == pytest.approx(3.1 / 4) and first.choices == pytest.approx(4 / 12)
    assert whole.gate_mass == pytest.approx(7.1 / 8) and whole.choices == pytest.approx(16 / 24)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (Rules(9, 1), ("budget of 9", "exceeds the 8", "keep at most 8")),
        (
            Rules(1, 1),
            ("budget of 1 ", "0 protected layers keep 0", "2 others at least 2", "(1 in each)", "at least 2"),
        ),
        (Rules(5, 2, frozenset({0})), ("1 protected layers keep 4", "1 others at least 2 (2 in each)", "least 6")),
        (Rules(7, 8), ("2 others at least 8", "(8 in each)")),
        (Rules(7, 0), ("minimum of 0", "selects 1", "at least 1")),
        (Rules(7, 1, frozenset({2})), ("Layer 2 cannot be protected", "layers 0 to 1")),
    ],
)
def test_rules_that_cannot_be_kept(rules: Rules, words: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        choose_experts(UNLIKE, rules)
    assert all(word in str(caught.value) for word in words), caught.value


def test_published_proportions() -> None:
    """1,010 of 10,240 experts in 40 layers of 256 with the front protected, as the published pruned model has it."""
    layers = []
    for layer in range(40):
        counts = [1 + (expert * 37 + layer * 11) % 256 for expert in range(256)]
        layers.append((tuple(counts), tuple(count * 0.5 for count in counts)))
    kept = choose_experts(routing_of(*layers), Rules(9230, 8, frozenset({0, 1})))
    assert sum(map(len, kept)) == 9230 and len(kept[0]) == len(kept[1]) == 256
    # Every layer has the same 256 values in another order: the 38 others lose their 26 lowest, the last ones one more.
    assert [len(ids) for ids in kept[2:]] == [230] * 16 + [229] * 22
    assert all(
        expert not in kept[layer]
        for layer in range(2, 40)
        for expert in range(256)
        if (expert * 37 + layer * 11) % 256 < 26
    )


# The command


def lynnc_prune(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["prune", *map(str, arguments)])


MOE = load_model("tiny-moe")


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    """Statistics of tiny-moe: experts [6, 5, 4, 7], top-2, the higher the number the less an expert is chosen."""
    layers = []
    for experts in (6, 5, 4, 7):
        counts = [0] * experts
        for token in range(40):
            first = token * token % 13 % experts
            for expert in (first, (first + 1) % experts):
                counts[expert] += 1
        layers.append(LayerRouting(tuple(counts), tuple(count * (0.6 - 0.05 * n) for n, count in enumerate(counts))))
    path = tmp_path / "stats.json"
    path.write_text(routing_text(Routing("tiny-moe", TextFacts("a.txt", 40, "aa"), 2, tuple(layers))))
    return path


def test_command_writes_the_choice_with_its_source(stats: Path, tmp_path: Path) -> None:
    output = tmp_path / "spec.json"
    result = lynnc_prune("--stats", stats, "--budget", 17, "--protect", "0", "-o", output)
    assert result.exit_code == 0, result.output
    spec = read_expert_spec(output)
    assert spec.kept == choose_experts(read_routing(stats), Rules(17, 2, frozenset({0})))
    assert sum(spec.counts) == 17 and spec.counts[0] == 6 and spec.original == (6, 5, 4, 7)
    assert spec.source["budget"] == 17 and spec.source["protected_layers"] == [0] and spec.source["by"] == "both"
    assert len(spec.source["statistics"]) == 1 and spec.source["tokens"] == 40  # type: ignore[arg-type]
    assert "17 of 22 experts kept, 5 cut" in result.stdout and "protected" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.json", "stats.json"]


def test_same_input_same_bytes(stats: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert lynnc_prune("--stats", stats, "--cut", 4, "-o", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--budget", 20), 20),
        (("--cut", 2), 20),
        (("--cut", 0), 22),
        (("--keep-share", 0.9), 20),
        (("--keep-share", 0.5), 11),
        (("--keep-share", 1), 22),
        (("--budget", 16, "--protect-first", 2), 16),
        (("--budget", 15, "--protect", "0-1"), 15),
        (("--budget", 20, "--min-experts", 4), 20),
        (("--budget", 20, "--by", "count"), 20),
    ],
)
def test_each_way_to_say_how_many(options: tuple[object, ...], kept: int, stats: Path) -> None:
    result = lynnc_prune("--stats", stats, *options, "--json")
    document = json.loads(result.stdout)
    assert document["kept"] == sum(row["kept"] for row in document["layers"]) == kept
    assert document["experts"] == 22 and document["output"] is None


def test_a_share_is_the_decimal_number_that_was_typed(tmp_path: Path) -> None:
    """0.55 of 100 is 55 although the nearest binary number is a little more."""
    layer = LayerRouting((1,) * 100, (0.5,) * 100)
    (tmp_path / "s.json").write_text(routing_text(Routing("m", TextFacts("t", 100, "a"), 1, (layer,))))
    document = json.loads(lynnc_prune("--stats", tmp_path / "s.json", "--keep-share", "0.55", "--json").stdout)
    assert document["kept"] == 55


def test_layers_are_protected_by_numbers_ranges_and_count(stats: Path) -> None:
    arguments = ("--stats", stats, "--cut", 1, "--protect", "3", "--protect", "0, 2-2", "--protect-first", 1)
    rows = json.loads(lynnc_prune(*arguments, "--json").stdout)["layers"]
    assert [row["protected"] for row in rows] == [True, False, True, True]
    assert [row["experts"] - row["kept"] for row in rows] == [0, 1, 0, 0]


def test_several_statistics_count_together(stats: Path, tmp_path: Path) -> None:
    values = json.loads(stats.read_text())
    values["text"] = {"name": "b.txt", "tokens": 4000, "digest": "bb"}
    for layer in values["layers"]:
        layer["counts"] = [100 * count for count in reversed(layer["counts"])]
        layer["gate_mass"] = [count / 2 for count in layer["counts"]]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    chosen = {}
    for name, files in {"first": (stats,), "both": (stats, other), "turned": (other, stats)}.items():
        options = tuple(chain.from_iterable(("--stats", file) for file in files))
        output = tmp_path / f"{name}.spec"
        assert lynnc_prune(*options, "--budget", 14, "-o", output).exit_code == 0
        chosen[name] = read_expert_spec(output)
    assert chosen["both"].kept == chosen["turned"].kept != chosen["first"].kept
    assert len(chosen["both"].source["statistics"]) == 2  # type: ignore[arg-type]


def test_model_file_with_the_new_counts(stats: Path, tmp_path: Path) -> None:
    """A map that was only representative becomes the true one."""
    output, model, former = tmp_path / "spec.json", tmp_path / "small.yaml", tmp_path / "former.yaml"
    former.write_text(dump_model(replace(MOE, representative=True)))
    arguments = ("--stats", stats, "--budget", 14, "-o", output, "--model", former, "--write-model", model)
    result = lynnc_prune(*arguments)
    assert result.exit_code == 0, result.output
    spec = load_model(model)
    assert spec.moe is not None and MOE.moe is not None
    assert spec.moe.experts == read_expert_spec(output).counts and sum(spec.moe.experts) == 14
    assert spec.name == "small" and "8 of its 22 experts pruned" in spec.description
    same = replace(spec, name=MOE.name, description=MOE.description, moe=replace(spec.moe, experts=MOE.moe.experts))
    assert same == MOE
    assert "exists already" in lynnc_prune(*arguments).stderr
    assert lynnc_prune(*arguments, "--force").exit_code == 0


@dataclass(frozen=True)
class BadCall:
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]


STATS = ("--stats", "stats.json")
WRITE = (*STATS, "--cut", "2", "--model")
BAD_CALLS = (
    BadCall("no stats", ("--budget", "20"), ("--stats",)),
    BadCall("no such stats", ("--stats", "x.json", "--budget", "20"), ("x.json: there is no such file",)),
    BadCall("no number", STATS, ("exactly one of --budget, --cut and --keep-share",)),
    BadCall("two numbers", (*STATS, "--budget", "20", "--cut", "2"), ("exactly one",)),
    BadCall("share", (*STATS, "--keep-share", "1.1"), ("--keep-share",)),
    BadCall("nan share", (*STATS, "--keep-share", "nan"), ("--keep-share nan is no share",)),
    BadCall("endless share", (*STATS, "--keep-share", "inf"), ("--keep-share",)),
    BadCall("no share", (*STATS, "--keep-share", "0"), ("--keep-share",)),
    BadCall("cut all", (*STATS, "--cut", "22"), ("--cut 22 leaves none of the 22",)),
    BadCall("above", (*STATS, "--budget", "23"), ("budget of 23 experts exceeds the 22", "stats.json")),
    BadCall("below", (*STATS, "--budget", "7"), ("budget of 7 experts", "4 others at least 8 (2 in each)")),
    BadCall("protected", (*STATS, "--cut", "1", "--protect", "0-3"), ("4 protected layers keep 22",)),
    BadCall("minimum", (*STATS, "--cut", "1", "--min-experts", "1"), ("minimum of 1 experts", "selects 2")),
    BadCall("word", (*STATS, "--cut", "1", "--protect", "0,front"), ("--protect 'front' names no layers",)),
    BadCall("comma", (*STATS, "--cut", "1", "--protect", "0,"), ("--protect '' names no layers",)),
    BadCall("layer", (*STATS, "--cut", "1", "--protect", "4"), ("--protect 4 is no range of the layers 0 to 3",)),
    BadCall("turned", (*STATS, "--cut", "1", "--protect", "2-1"), ("--protect 2-1 is no range",)),
    BadCall("first", (*STATS, "--cut", "1", "--protect-first", "5"), ("--protect-first 5 exceeds the 4",)),
    BadCall("by", (*STATS, "--cut", "1", "--by", "luck"), ("--by",)),
    BadCall("twice", (*STATS, *STATS, "--cut", "1"), ("stats.json: text.digest is that of stats.json",)),
    BadCall("exists", (*STATS, "--cut", "1", "-o", "stats.json"), ("stats.json exists already", "--force")),
    BadCall("nowhere", (*STATS, "--cut", "1", "-o", "no/s.json"), ("no/s.json cannot be written", "--output")),
    BadCall("model alone", (*WRITE, "tiny-moe"), ("--model and --write-model go together",)),
    BadCall("write alone", (*STATS, "--cut", "2", "--write-model", "m.yaml"), ("go together",)),
    BadCall("ending", (*WRITE, "tiny-moe", "--write-model", "m.json"), ("m.json does not end in .yaml",)),
    BadCall("name", (*WRITE, "tiny-moe", "--write-model", "a b.yaml"), ("the file's name is the text 'a b'",)),
    BadCall("where", (*WRITE, "tiny-moe", "--write-model", "no/m.yaml"), ("another --write-model",)),
    BadCall("no model", (*WRITE, "tiny-mo", "--write-model", "m.yaml"), ("tiny-mo is neither",)),
    BadCall("dense", (*WRITE, "tiny-dense", "--write-model", "m.yaml"), ("tiny-dense has no experts",)),
    BadCall("depth", (*WRITE, "tiny-full", "--write-model", "m.yaml"), ("tiny-full has layers 3", "counts 4")),
    BadCall("experts", (*WRITE, "other.yaml", "--write-model", "m.yaml"), ("experts in layer 1 6", "counts 5")),
)


@pytest.mark.parametrize("case", BAD_CALLS, ids=lambda case: case.name)
def test_bad_calls_give_one_line_and_2(
    case: BadCall, stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOE.moe is not None
    (tmp_path / "other.yaml").write_text(dump_model(replace(MOE, moe=replace(MOE.moe, experts=(6, 6, 4, 7)))))
    monkeypatch.chdir(tmp_path)
    result = lynnc_prune(*case.arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert len(result.stderr.splitlines()) == 1 and all(words in result.stderr for words in case.words), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.yaml", "stats.json"]


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "safetensors", "tokenizers", "torch", "transformers", "triton"):
            raise ImportError(f"{name} must not be needed to prune")

sys.meta_path.insert(0, Refuse())
from lynnc.cli.main import main
main()
"""


def test_prunes_without_torch(stats: Path, tmp_path: Path) -> None:
    arguments = ["--stats", str(stats), "--cut", "3", "-o", str(tmp_path / "s.json")]
    arguments += ["--model", "tiny-moe", "--write-model", str(tmp_path / "m.yaml")]
    command = [sys.executable, "-c", WITHOUT_TORCH, "prune", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert sum(read_expert_spec(tmp_path / "s.json").counts) == 19
