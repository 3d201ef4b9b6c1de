"""``lynnc run`` from the command line: text, stop tokens, sampling, Ctrl-C, and one sentence for what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from executing import meaning_device, plan_of
from running import END, make_packed, on_simulated_gpu

from lynnc.cli import engines
from lynnc.cli.main import cli
from lynnc.engines.interpreted import open_interpreted
from lynnc.errors import DeviceError
from lynnc.runtime.budget import Room

PROMPT = "def é(n):20"
"""Behind it, the likeliest two tokens are never near each other: rounding cannot change the choice."""
IDS = list(PROMPT.encode())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Never changed by a test."""
    return make_packed(tmp_path_factory.mktemp("made")).folder


@pytest.fixture
def packed(made: Path, tmp_path: Path) -> Path:
    """The folder again, of links, to which a test may add files."""
    folder = tmp_path / "packed"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(engines, "detect_gpu", lambda: None)


def run(*arguments: object, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *map(str, arguments)], input=text)


def document(*arguments: object) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """By the whole text for each token, in one step without a sequence that goes on."""
    engine, ids = open_interpreted(folder), list(prompt)
    for _ in range(count):
        engine.reset()
        ids.append(int(engine.append(ids)[-1].argmax()))
    return ids[len(prompt) :]


def text_of(ids: Sequence[int]) -> str:
    """Tokens behind the bytes stand for nothing."""
    return bytes(token for token in ids if token < END).decode(errors="replace")


def test_the_likeliest_tokens_as_text_and_as_json(made: Path) -> None:
    expected = greedy(made, IDS, 12)
    text = text_of(expected)
    found = document(made, "--prompt", PROMPT, "--tokens", 12)
    assert found["prompt_ids"] == IDS and found["ids"] == expected and found["stopped"] == "tokens"
    assert found["engine"] == "checkpoint, interpreted" and found["tokens_per_second"] > 0
    assert found["text"] == text
    result = run(made, "--prompt", PROMPT, "--tokens", 12)
    assert result.exit_code == 0 and result.stdout == text + ("" if text.endswith("\n") else "\n")
    first, last = result.stderr.splitlines()
    assert first == "lynnc: no GPU was found here: runs on the CPU, uncompiled."
    assert last.startswith("lynnc: 12 tokens at ") and "tokens/s, the prompt of 12 in " in last


def test_the_prompt_may_come_from_a_file_or_standard_input(made: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, "utf-8")
    expected = run(made, "--prompt", PROMPT, "--tokens", 3).stdout
    assert run(made, "--prompt-file", tmp_path / "prompt.txt", "--tokens", 3).stdout == expected
    assert run(made, "--prompt", "-", "--tokens", 3, text=PROMPT).stdout == expected
    assert document(made, "--prompt", "a<end>", "--tokens", 1)["prompt_ids"] == [97, END]


@dataclass(frozen=True)
class Stops:
    """Files of the folder that name the end token as ``end``, and whether it counts."""

    label: str
    files: dict[str, object]
    counts: bool

    def __str__(self) -> str:
        return self.label


STOPS = (
    Stops("generation", {"generation_config.json": {"eos_token_id": "end"}, "config.json": {"eos_token_id": 1}}, True),
    Stops("list", {"generation_config.json": {"eos_token_id": [3, "end"]}}, True),
    Stops("config", {"generation_config.json": {"do_sample": True}, "config.json": {"eos_token_id": "end"}}, True),
    Stops("text config", {"config.json": {"text_config": {"eos_token_id": "end"}}}, True),
    Stops("another", {"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": "end"}}, False),
)


@pytest.mark.parametrize("case", STOPS, ids=str)
def test_the_end_token_ends_the_text_and_is_not_shown(case: Stops, packed: Path) -> None:
    every = document(packed, "--prompt", PROMPT, "--tokens", 12, "--ignore-eos")["ids"]
    end = every[4]
    assert 3 not in every and 1 not in every
    for name, content in case.files.items():
        (packed / name).unlink(missing_ok=True)
        (packed / name).write_text(json.dumps(content).replace('"end"', str(end)))
    found = document(packed, "--prompt", PROMPT, "--tokens", 12)
    if not case.counts:
        assert found["ids"] == every and found["stopped"] == "tokens"
        return
    assert found["ids"] == every[: every.index(end) + 1] and found["stopped"] == "eos"
    assert found["text"] == text_of(found["ids"][:-1])
    assert document(packed, "--prompt", PROMPT, "--tokens", 12, "--ignore-eos")["ids"] == every


def test_sampling_is_seeded_and_of_one_candidate_the_likeliest(made: Path) -> None:
    def sampled(*arguments: object) -> list[int]:
        return document(made, "--prompt", PROMPT, "--tokens", 12, *arguments)["ids"]

    likeliest = sampled()
    assert sampled("--temperature", 9, "--top-k", 1, "--seed", 5) == likeliest
    assert sampled("--temperature", 9, "--top-p", "1e-9") == likeliest
    one = sampled("--temperature", 9, "--seed", 5)
    assert one == sampled("--temperature", 9, "--seed", 5) != likeliest
    assert one != sampled("--temperature", 9, "--seed", 6)
    assert sampled("--temperature", 0) == likeliest


def test_a_full_context_ends_the_text(made: Path) -> None:
    found = document(made, "--prompt", PROMPT, "--context", 16)
    assert len(found["ids"]) == 4 and found["stopped"] == "context"
    assert "the context is full: 16 tokens." in run(made, "--prompt", PROMPT, "--context", 16).stderr
    assert len(document(made, "--prompt", "x" * 500, "--tokens", 99)["ids"]) == 12


def test_a_plan_gives_the_tokens_of_the_interpreter(made: Path, tmp_path: Path, monkeypatch) -> None:
    expected = greedy(made, IDS, 12)
    with on_simulated_gpu(tmp_path / "tiny.plan", made, monkeypatch) as opened:
        arguments = (made, "--prompt", PROMPT, "--tokens", 12, "--plan", tmp_path / "tiny.plan")
        found = document(*arguments)
        sampled = document(*arguments, "--temperature", 1, "--top-k", 1)
    assert found["ids"] == sampled["ids"] == expected
    assert found["engine"] == "checkpoint, compiled for sm_90, on simulated GPU"
    (fast, slow) = opened
    assert fast.length == len(IDS) + 11 and slow.length == len(IDS) + 11
    assert not fast.executor.device.blocks and not slow.executor.device.blocks, "memory is given back"


def test_a_model_is_compiled_for_the_gpu_that_is_there(made: Path, tmp_path: Path, monkeypatch) -> None:
    asked = []

    @contextmanager
    def compile_here(spec, device, records, programs, store):
        asked.append((spec.name, device.name, records.device.name, programs, store))
        yield tmp_path / "tiny.plan"

    with on_simulated_gpu(tmp_path / "tiny.plan", made, monkeypatch) as opened:
        facts = meaning_device(plan_of(engines.packed_model(made)), Room())
        monkeypatch.setattr(engines, "compile_here", compile_here)
        monkeypatch.setattr(engines, "open_device", lambda number: facts)
        monkeypatch.setattr(engines, "detect_gpu", lambda: facts.facts)
        result = run(made, "--prompt", PROMPT, "--tokens", 2, "--store", tmp_path / "store")
    assert result.exit_code == 0, result.output
    assert "lynnc: runs on this machine's simulated GPU." in result.stderr
    place = tmp_path / "store"
    assert asked == [("checkpoint", "h200", "simulated-gpu", ("decode/1", "prefill"), place)] and len(opened) == 1


def test_interrupted_text_is_kept(made: Path, monkeypatch) -> None:
    count = 0

    def interrupted(self, tokens: Sequence[int]) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return original(self, tokens)

    original = open_interpreted(made).append.__func__
    monkeypatch.setattr("lynnc.engines.interpreted.Interpreted.append", interrupted)
    result = run(made, "--prompt", PROMPT)
    assert result.exit_code == 130
    assert result.stdout == text_of(greedy(made, IDS, 2)) + "\n"
    assert result.stderr.splitlines()[-1] == "lynnc: interrupted." and "lynnc: 2 tokens at" in result.stderr
    count = 0
    result = run(made, "--prompt", PROMPT, "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert found["stopped"] == "interrupted" and len(found["ids"]) == 2


def test_a_real_interrupt(made: Path) -> None:
    """Text comes as it is made, also into a pipe."""
    arguments = ["run", str(made), "--prompt", PROMPT, "--tokens", "500", "--device", "cpu", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lynnc.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    first = process.stdout.read(1)
    time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert first and rest.endswith(b"\n")
    assert [line[:6] for line in stderr.splitlines()] == [b"lynnc:"] * 2 and stderr.endswith(b"lynnc: interrupted.\n")


@dataclass(frozen=True)
class Refused:
    """Arguments behind the folder that are refused, and words of the sentence."""

    label: str
    arguments: tuple[str, ...]
    says: str
    text: bytes | None = None

    def __str__(self) -> str:
        return self.label


REFUSED = (
    Refused("no prompt", (), "give either --prompt or --prompt-file"),
    Refused("two prompts", ("--prompt", "a", "--prompt-file", "b"), "give either --prompt or --prompt-file"),
    Refused("empty", ("--prompt", ""), "The prompt is empty: write some text."),
    Refused("empty input", ("--prompt", "-"), "The prompt is empty: write some text.", b""),
    Refused("bad input", ("--prompt", "-"), "Byte 1 of standard input is not UTF-8 text", b"a\xff"),
    Refused("no file", ("--prompt-file", "nope.txt"), "nope.txt: there is no such file"),
    Refused("too long", ("--prompt", "x" * 40, "--context", "40"), "The prompt has 40 tokens, which leaves no room in"),
    Refused("too long for the model", ("--prompt", "x" * 512), "has 512 tokens, which leaves no room in a context of"),
    Refused("context", ("--prompt", "a", "--context", "513"), "--context 513: checkpoint has 512 positions"),
    Refused("device", ("--prompt", "a", "--device", "tpu"), "--device tpu: there is no such device; write auto, cpu"),
    Refused("plan on a CPU", ("--prompt", "a", "--device", "cpu", "--plan", "p"), "--plan is for a GPU"),
    Refused("no plan", ("--prompt", "a", "--plan", "nope.plan"), "nope.plan is not a plan folder"),
    Refused("idle top-k", ("--prompt", "a", "--top-k", "3"), "--top-k has no effect on the likeliest token"),
    Refused("idle seed", ("--prompt", "a", "--temperature", "0", "--seed", "3"), "--seed has no effect"),
    Refused("no tokens", ("--prompt", "a", "--tokens", "0"), "0 is not in the range x>=1. Run `lynnc run --help`."),
    Refused("top-p 0", ("--prompt", "a", "--temperature", "1", "--top-p", "0"), "0.0 is not in the range 0<x<=1"),
)


def complaint(result: Result, code: int = 2) -> str:
    assert result.exit_code == code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("lynnc: ") and result.stdout == ""
    return line


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_is_wrong_is_one_sentence(case: Refused, made: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert case.says in complaint(run(made, *case.arguments, text=case.text))


def test_folders_that_cannot_run(packed: Path, tmp_path: Path) -> None:
    assert "is not a packed folder (no lynnc-weights.json in it)" in complaint(run(tmp_path, "--prompt", "a"))
    (packed / "tokenizer.json").unlink()
    assert "holds no tokenizer.json: copy the one of the checkpoint into it" in complaint(run(packed, "--prompt", "a"))
    (packed / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: model has no vocabulary" in complaint(run(packed, "--prompt", "a"))


@pytest.mark.parametrize("content, says", [('{"eos_token_id": "x"}', "eos_token_id"), ("[", "is not JSON")])
def test_a_damaged_side_file(content: str, says: str, packed: Path) -> None:
    (packed / "generation_config.json").write_text(content)
    line = complaint(run(packed, "--prompt", "a"))
    assert "generation_config.json: " in line and says in line


def test_a_model_that_the_memory_does_not_hold(made: Path, monkeypatch) -> None:
    monkeypatch.setattr("lynnc.cli.engines.os.sysconf", lambda name: 1000)
    result = run(made, "--prompt", "a", "--device", "cpu")
    assert "on the CPU, as FP32, and this machine has 1.00 MB: run it on a GPU." in complaint(result)


def test_no_driver(made: Path, monkeypatch) -> None:
    def nothing(number: int) -> None:
        raise DeviceError("No CUDA driver was found on this machine: plans run where an NVIDIA GPU is.")

    monkeypatch.setattr(engines, "open_device", nothing)
    assert "No CUDA driver was found" in complaint(run(made, "--prompt", "a", "--device", "cuda:1"), 1)
