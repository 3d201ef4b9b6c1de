"""``lynnc gate``: folders in, verdict, tables, report and exit code out."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors
from click.testing import CliRunner, Result
from gating import byte_tokenizer
from packing import packed_to, written
from test_gate_engines import save_uncompiled

import lynnc.quality.sides
from lynnc.cli.gate import INTERPRETED_CONTEXT
from lynnc.cli.main import cli
from lynnc.modelfile import load_model
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.tools import Gpu

PROMPTS = [
    {"name": "code", "kind": "code", "text": "def add(a, b):"},
    {"name": "prose", "kind": "prose", "text": "Rivers bend because"},
    {"name": "long", "kind": "long-context", "share": 0.6},
]
EXPERT = "model.layers.2.mlp.experts.{}.gate_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; packed as it is, with searched scales, and with one expert in the place of another; a plan."""
    root = tmp_path_factory.mktemp("gate")
    written(root)
    byte_tokenizer(root / "checkpoint" / "tokenizer.json")
    packed_to(root)
    pack(PackRequest(root / "checkpoint", root / "searched", search=True))
    shutil.copytree(root / "checkpoint", root / "wrong" / "checkpoint")
    edit_tensors(root / "wrong" / "checkpoint", exchange_experts)
    packed_to(root / "wrong")
    save_uncompiled(load_model(root / "packed" / "model.yaml"), root / "mine.plan", ("decode/1", "prefill"))
    (root / "prompts.json").write_text(json.dumps(PROMPTS))
    (root / "text.txt").write_text("A short text about nothing much, long enough to be cut in blocks. " * 2)
    loose = {"agreement": 0.4, "bits_per_byte": 0.2}
    (root / "limits.json").write_text(json.dumps({"quantisation": loose, "fusion": {"agreement": 0.8}}))
    return root


def exchange_experts(tensors: dict[str, torch.Tensor]) -> None:
    first, second = EXPERT.format(0), EXPERT.format(1)
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


def run_gate_command(root: Path, *arguments: object) -> Result:
    usual = ("--prompts", root / "prompts.json", "--text", root / "text.txt", "--tokens", 4, "--context", 64)
    limits = ("--thresholds", root / "limits.json", "--device", "cpu")
    return CliRunner().invoke(cli, [str(item) for item in ("gate", *arguments, *usual, *limits)])


def complaint(result: Result) -> str:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if "fewer than" not in line and "are so few" not in line]
    assert len(lines) == 1 and lines[0].startswith("lynnc: ") and result.stdout == ""
    return lines[0]


def test_a_folder_against_itself_passes(folder: Path) -> None:
    result = run_gate_command(folder, folder / "packed", folder / "packed", "--kind", "bit-exact")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "PASS: every check for bit-exact holds"
    for words in ("exact", "long-context", "bits per byte, candidate", "layers.3", "the model's graph in torch", "ok"):
        assert words in result.stdout
    assert "3 prompts are fewer than the 40" in result.stderr and "times as fast" not in result.stdout


def test_a_plan_against_its_packed_folder(folder: Path) -> None:
    arguments = (folder / "packed", folder / "mine.plan", "--weights", folder / "packed", "--json")
    result = run_gate_command(folder, *arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "PASS" and document["kind"] == "fusion" and document["location"] is None
    assert document["candidate"]["how"] == "the plan's graph in torch"
    assert document["candidate"]["kind"] == "plan" and document["candidate"]["weights"] == str(folder / "packed")
    assert document["speedup"] is None


def test_quantisation_against_the_reference(folder: Path) -> None:
    """With and without the search for scales; the table shows what the bytes cost."""
    results = {}
    for name in ("packed", "searched"):
        arguments = (folder / "checkpoint", folder / name, "--kind", "quantisation", "--json")
        result = run_gate_command(folder, *arguments)
        assert result.exit_code == 0, result.output
        results[name] = json.loads(result.stdout)
        sizes = [results[name][side]["weight_bytes"] for side in ("base", "candidate")]
        assert sizes[1] < 0.4 * sizes[0]
        assert results[name]["text"]["kl"]["mean"] > 1e-3
    strict = run_gate_command(folder, folder / "checkpoint", folder / "packed", "--kind", "tuning")
    assert strict.exit_code == 1 and "FAIL: " in strict.stdout


def test_a_wrong_expert_fails_with_layer_and_op(folder: Path, tmp_path: Path) -> None:
    arguments = (folder / "packed", folder / "wrong" / "packed", "-o", tmp_path / "report.json")
    result = run_gate_command(folder, *arguments)
    assert result.exit_code == 1, result.output
    last = result.stdout.splitlines()[-1]
    assert last.startswith(
        "first in layers.2, in the op layers.2.experts_up (ExpertLinear) at layers.2.experts_gate_up"
    )
    assert "leaves the band" in result.stdout and "FAIL: " in result.stdout
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["verdict"] == "FAIL" and document["speedup"] is None
    assert document["location"]["section"] == "layers.2" and document["location"]["op"]["kind"] == "ExpertLinear"
    assert {check["name"] for check in document["checks"] if not check["is_ok"]} >= {"hidden state, relative L2"}
    assert [prompt["name"] for prompt in document["greedy"]["prompts"]] == ["code", "prose", "long"]
    assert all(len(prompt["ids"]) == 4 for prompt in document["greedy"]["prompts"])
    assert document["greedy"]["prompts"][2]["tokens"] == int(0.6 * 60)
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_a_report_is_not_replaced_unasked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("mine")
    arguments = (folder / "packed", folder / "packed", "-o", tmp_path / "report.json")
    assert "--force" in complaint(run_gate_command(folder, *arguments))
    assert (tmp_path / "report.json").read_text() == "mine"
    assert run_gate_command(folder, *arguments, "--force").exit_code == 0
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == 1


@dataclass(frozen=True)
class Bad:
    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


BAD = (
    Bad("nothing there", ("packed", "nothing"), ("nothing is neither a plan", "lynnc pack")),
    Bad("plan without weights", ("packed", "mine.plan"), ("mine.plan is a plan", "--weights")),
    Bad("kind", ("packed", "packed", "--kind", "quantization"), ("quantization", "quantisation")),
    Bad("context", ("packed", "packed", "--context", "9999"), ("--context 9999", "512")),
    Bad("no room", ("packed", "packed", "--tokens", "600"), ("no room for a prompt", "--tokens 600")),
    Bad("device", ("packed", "packed", "--device", "tpu"), ("--device tpu",)),
    Bad("no tokenizer", ("bare", "bare"), ("tokenizer.json", "--tokenizer")),
    Bad("vocabulary", ("packed", "larger"), ("vocabulary of 384 and the candidate", "400")),
    Bad("prompts", ("packed", "packed", "--prompts", "text.txt"), ("text.txt", "are not JSON")),
    Bad("text", ("packed", "packed", "--text", "nothing.txt"), ("nothing.txt", "no such file")),
)


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_gives_one_line_and_2(case: Bad, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("packed", "mine.plan"):
        (tmp_path / name).symlink_to(folder / name)
    shutil.copytree(folder / "packed", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    shutil.copytree(folder / "checkpoint", tmp_path / "larger")
    edit_json(tmp_path / "larger" / "config.json", lambda config: config.update(vocab_size=400))
    shutil.copy(folder / "text.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["gate", *case.arguments])
    line = complaint(result)
    assert all(words in line for words in case.words), line


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer.json")
    edit_json(tmp_path / "tokenizer.json", lambda found: found["model"]["vocab"].update({"e": 384}))
    result = run_gate_command(folder, folder / "packed", folder / "packed", "--tokenizer", tmp_path / "tokenizer.json")
    assert "the token 384, outside the vocabulary of 384" in complaint(result)


def test_different_tokenizers_are_warned_of(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "packed", tmp_path / "other")
    edit_json(tmp_path / "other" / "tokenizer.json", lambda found: found.update(truncation=None, padding=None, x=1))
    result = run_gate_command(folder, folder / "packed", tmp_path / "other", "--kind", "bit-exact")
    assert result.exit_code == 0 and "different tokenizers" in result.stderr


def test_a_plan_on_a_gpu_is_opened_as_it_was_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the engine of the GPU, and for the GPU."""
    gpu = Gpu("NVIDIA H100", 90, 132, 80 << 30, 50 << 20, "13.0", 1)
    monkeypatch.setattr(lynnc.quality.sides, "detect_gpu", lambda: gpu)
    opened: list[tuple[object, ...]] = []

    class Compiled:
        @staticmethod
        def open_compiled(plan: Path, weights: Path, context: int) -> object:
            opened.append((plan, weights, context))
            return lynnc.quality.sides.open_planned(plan, weights, context)

    monkeypatch.setattr(lynnc.quality.sides, "import_module", lambda name: Compiled)
    plan, weights = folder / "mine.plan", folder / "packed"
    usual = ("--prompts", folder / "prompts.json", "--text", folder / "text.txt", "--tokens", 2)
    arguments = ("gate", plan, plan, "--weights", weights, *usual, "--kind", "bit-exact")
    result = CliRunner().invoke(cli, [str(item) for item in arguments])
    assert result.exit_code == 0, result.output
    assert opened == [(plan, weights, 512)] * 2, "the model's own context, since nothing is interpreted"
    assert "compiled, on the GPU" in result.stdout and "times as fast as the base's" in result.stdout
    opened.clear()
    assert run_gate_command(folder, plan, plan, "--weights", weights).exit_code == 0
    assert opened == [], "--device cpu interprets"


def test_a_gpu_without_its_bindings_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA H100", 90, 132, 80 << 30, 50 << 20, "13.0", 1)
    monkeypatch.setattr(lynnc.quality.sides, "detect_gpu", lambda: gpu)

    def refuse(name: str) -> object:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    monkeypatch.setattr(lynnc.quality.sides, "import_module", refuse)
    arguments = ("gate", folder / "mine.plan", folder / "packed", "--weights", folder / "packed")
    result = CliRunner().invoke(cli, [str(item) for item in arguments])
    assert result.exit_code == 1 and "needs the Python module cuda" in result.stderr and "--device cpu" in result.stderr


def test_interpreted_contexts_are_bounded() -> None:
    assert load_model("lynn-27b-a3b").max_context > INTERPRETED_CONTEXT
