"""How well a model predicts a text: against ``transformers``' cross-entropy, by hand, and ``lynnc eval``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from reference import Case, make
from runners import unrounded
from running import Made, make_packed, on_simulated_gpu

import lynnc.build
from lynnc.cli import engines
from lynnc.cli.main import cli
from lynnc.engines.engine import Trace
from lynnc.engines.interpreted import Interpreted
from lynnc.errors import OptionError
from lynnc.quality.score import PIECE, Score, Windows, score_text

V = 16


@dataclass
class Fake:
    """An engine of 16 tokens whose ``logits`` do not depend on them; notes the sequences that it was given."""

    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(V))
    sequences: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.sequences[-1])

    def reset(self) -> None:
        self.sequences.append([])

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        self.sequences[-1] += tokens
        return self.logits.expand(len(tokens), -1)

    def trace(self, tokens: Sequence[int]) -> Trace:
        raise NotImplementedError


def test_uniform_logits_give_the_logarithm_of_the_vocabulary() -> None:
    score = score_text(Fake(), list(range(10)), 9, Windows(4, 2))
    assert (score.tokens, score.bytes) == (9, 9)
    assert score.mean_nll == pytest.approx(math.log(V), rel=1e-12)
    assert score.perplexity == pytest.approx(V, rel=1e-12)
    assert score.bits_per_byte == pytest.approx(4.0, rel=1e-12)
    assert score_text(Fake(), list(range(10)), 18, Windows(4, 2)).bits_per_byte == pytest.approx(2.0, rel=1e-12)


def test_every_token_counts_once_by_its_own_probability() -> None:
    """Token t has the share 2^t, so its surprise is log(2^16 - 1) - t log 2, in whatever window it is scored."""
    ids = [3, 0, 15, 1, 1, 7, 2, 9, 4, 12, 5]
    expected = sum(math.log(2**V - 1) - token * math.log(2) for token in ids[1:])
    engine = torch.arange(V) * math.log(2)
    for windows in (Windows(2, 1), Windows(4, 1), Windows(4, 3), Windows(5, 2), Windows(11, 4), Windows(99, 98)):
        assert score_text(Fake(engine), ids, 10, windows).nll == pytest.approx(expected, rel=1e-6), windows


def test_windows_by_hand() -> None:
    """Begin, end, and the first token that is scored: two tokens of context at least."""
    assert list(Windows(4, 2).over(10)) == [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]
    assert list(Windows(4, 2).over(9)) == [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 9, 8)]
    assert list(Windows(4, 3).over(6)) == [(0, 4, 1), (3, 6, 4)]
    assert list(Windows(8, 1).over(3)) == [(0, 3, 1)]
    engine = Fake()
    score_text(engine, list(range(7)), 6, Windows(4, 2))
    assert engine.sequences == [[0, 1, 2], [2, 3, 4], [4, 5]]


def test_progress_ends_at_all() -> None:
    seen: list[tuple[int, int]] = []
    score_text(Fake(), [1] * (2 * PIECE + 9), 10, Windows(PIECE + 5, 7), lambda done, total: seen.append((done, total)))
    dones = [done for done, _ in seen]
    assert dones == sorted(dones) and seen[-1] == (2 * PIECE + 8, 2 * PIECE + 8)


@pytest.mark.parametrize("context, stride", [(4, 0), (4, 4), (4, 9), (1, 1)])
def test_windows_that_cannot_be(context: int, stride: int) -> None:
    with pytest.raises(OptionError, match=f"Windows of {context} tokens cannot go on by {stride}"):
        Windows(context, stride)


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_text_of_one_token_has_none_to_predict(ids: list[int]) -> None:
    with pytest.raises(OptionError, match="none to predict"):
        score_text(Fake(), ids, 1, Windows(4, 2))


# Against transformers


def judged_nll(model: torch.nn.Module, ids: Sequence[int], context: int, stride: int) -> float:
    """The documented recipe of ``transformers`` for texts longer than the model: labels of -100 are not scored."""
    total, done, begin = 0.0, 1, 0
    while done < len(ids):
        end = min(begin + context, len(ids))
        labels = torch.tensor([ids[begin:end]])
        labels[:, : done - begin] = -100
        with torch.no_grad():
            loss = model(torch.tensor([ids[begin:end]]), labels=labels, use_cache=False).loss
        total, done, begin = total + float(loss) * (end - done), end, begin + stride
    return total / (len(ids) - 1)


@pytest.mark.parametrize("case", (Case("tiny-moe"), Case("tiny-full")), ids=str)
@pytest.mark.parametrize("context, stride", [(200, 100), (32, 16), (40, 7)])
def test_the_cross_entropy_of_transformers(case: Case, context: int, stride: int, monkeypatch) -> None:
    """Without the rounding of the contract, so that nothing but the meaning can differ."""
    monkeypatch.setattr("lynnc.interpret.bf16", lambda x: x)
    monkeypatch.setattr(
        "lynnc.engines.interpreted.build_graph", lambda spec, rows: unrounded(lynnc.build.build_graph(spec, rows))
    )
    ids = torch.randint(384, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = Interpreted(case.spec, make(case).values, "exact", context)
    score = score_text(engine, ids, 149, Windows(context, stride))
    assert score.mean_nll == pytest.approx(judged_nll(make(case).model, ids, context, stride), abs=1e-3)


# The command

TEXT = "Der Maulwurf gräbt; 鼹鼠挖洞。 The mole digs. " * 3


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return make_packed(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(engines, "detect_gpu", lambda: None)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return tmp_path / "text.txt"


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


def document(*arguments: object) -> dict:
    result = evaluate(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_command_scores_as_transformers_does(made: Made, text: Path) -> None:
    ids = list(TEXT.encode())
    found = document(made.folder, "--text", text, "--context", 64)
    expected = judged_nll(made.written.model, ids, 64, 32)
    assert found["mean_nll"] == pytest.approx(expected, rel=3e-3)
    assert found["tokens"] == found["bytes"] == len(ids) - 1
    assert found["bits_per_byte"] == pytest.approx(found["mean_nll"] / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(found["mean_nll"]))
    assert (found["context"], found["stride"], found["engine"]) == (64, 32, "checkpoint, interpreted")
    result = evaluate(made.folder, "--text", text, "--context", 64)
    assert f"text.txt: {found['bits_per_byte']:.4f} bits per byte, perplexity" in result.stdout
    assert f"{len(ids) - 1} tokens, {len(ids) - 1} bytes, windows of 64 by 32" in result.stdout


def test_the_beginning_of_a_text(made: Made, text: Path) -> None:
    found = document(made.folder, "--text", text, "--tokens", 12, "--stride", 100)
    assert (found["tokens"], found["context"], found["stride"]) == (11, 512, 100)
    assert found["bytes"] == 11
    assert found["mean_nll"] == pytest.approx(
        judged_nll(made.written.model, list(TEXT.encode())[:12], 64, 32), rel=1e-2
    )


def test_bytes_are_those_of_the_scored_tokens(made: Made, tmp_path: Path) -> None:
    """The special token stands for the five characters of its name."""
    (tmp_path / "ends.txt").write_text("<end>é<end>xyz")
    found = document(made.folder, "--text", tmp_path / "ends.txt")
    assert (found["tokens"], found["bytes"]) == (6, 10)
    found = document(made.folder, "--text", tmp_path / "ends.txt", "--tokens", 4)
    assert (found["tokens"], found["bytes"]) == (3, 7)


def test_a_plan_scores_as_the_interpreter_does(made: Made, text: Path, tmp_path: Path, monkeypatch) -> None:
    expected = document(made.folder, "--text", text, "--context", 64)
    with on_simulated_gpu(tmp_path / "tiny.plan", made.folder, monkeypatch) as opened:
        found = document(made.folder, "--text", text, "--context", 64, "--plan", tmp_path / "tiny.plan")
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-4)
    assert "compiled for sm_90" in found["engine"] and len(opened) == 1


@dataclass(frozen=True)
class Refused:
    arguments: tuple[str, ...]
    says: str


REFUSED = (
    Refused(("--text", "nope.txt"), "nope.txt: there is no such file"),
    Refused(("--text", "short.txt"), "short.txt has 1 tokens, too few to predict one: give a longer text."),
    Refused(("--text", "empty.txt"), "empty.txt has 0 tokens, too few to predict one: give a longer text."),
    Refused(("--text", "short.txt", "--context", "513"), "--context 513: checkpoint has 512 positions"),
    Refused(("--text", "short.txt", "--context", "8", "--stride", "8"), "Windows of 8 tokens cannot go on by 8"),
    Refused(("--text", "short.txt", "--stride", "0"), "0 is not in the range x>=1. Run `lynnc eval --help`."),
    Refused((), "Missing option '--text'"),
)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.says[:20])
def test_what_is_wrong_is_one_sentence(case: Refused, made: Made, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    result = evaluate(made.folder, *case.arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("lynnc: ") and case.says in line


def test_a_score_without_chance() -> None:
    assert Score(tokens=4, bytes=8, nll=4 * math.log(32)).bits_per_byte == pytest.approx(2.5)
