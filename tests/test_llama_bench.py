"""The runner of ``llama-bench``, with scripts in its place: what it is asked, what is read, what failures say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lynnc.errors import OptionError, OutputError, PeerError
from lynnc.modelfile import load_model
from lynnc.runtime.peers import llamabench
from lynnc.runtime.peers.llamabench import PeerRun, measure_peer, parse_peer, run_llama_bench

SPEC = load_model("tiny-moe")
RESULT = {
    "build_commit": "c46583b",
    "build_number": 7123,
    "backends": "CUDA",
    "gpu_info": "NVIDIA H200",
    "model_size": 1048576,
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 0,
    "avg_ts": 242.6,
    "stddev_ts": 0.4,
    "samples_ts": [242.2, 243.0],
}
ECHO = """
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
starts = open(asked["-m"], "rb").read(4).decode()
result = json.loads({result!r})
depths = [int(depth) for depth in asked.get("-d", "0").split(",")]
print("ggml_cuda_init: found 1 CUDA devices", file=sys.stderr)
print(json.dumps([{{**result, "n_depth": depth, "gpu_info": starts, "avg_ts": 200.0 - depth}} for depth in depths]))
"""


def script(folder: Path, text: str) -> Path:
    """A program that runs a text as Python."""
    path = folder / "llama-bench"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def needs_gguf() -> None:
    pytest.importorskip("gguf", reason="the extra `bench` is not installed")


@pytest.mark.usefixtures("needs_gguf")
def test_it_is_run_on_a_model_that_is_gone_afterwards(tmp_path: Path, scratch: Path) -> None:
    program = script(tmp_path, ECHO.format(result=json.dumps(RESULT)))
    run = PeerRun(scratch, contexts=(0, 64))
    first, second = measure_peer(program, SPEC, run)
    assert (first.context, first.tokens_per_second, second.context, second.tokens_per_second) == (0, 200, 64, 136)
    assert first.device == "GGUF", "the program was given no such file"
    assert (first.spread, first.samples, first.generated) == (0.4, (242.2, 243.0), 128)
    assert (first.build, first.backends, first.model_bytes) == ("7123 c46583b", "CUDA", 1048576)
    assert list(scratch.iterdir()) == []


def test_what_it_is_asked(tmp_path: Path) -> None:
    program = script(tmp_path, "import sys, json\nprint(json.dumps([{'n_gen': 128, 'avg_ts': 1, 'stddev_ts': 0}]))")
    (speed,) = run_llama_bench(program, Path("model.gguf"), PeerRun(tmp_path))
    assert " ".join(speed.command[1:]) == "-m model.gguf -p 0 -n 128 -r 5 -ngl 99 -fa 1 -o json"
    assert (speed.build, speed.backends, speed.device, speed.samples) == ("", "", "", ())


@dataclass(frozen=True)
class Failure:
    """What a program does instead of measuring, and what the error says."""

    name: str
    text: str
    says: str


def prints(value: object) -> str:
    return f"print({json.dumps(value)!r})"


FAILURES = (
    Failure(
        "fails",
        "import sys; sys.stderr.write('loading\\nmain: error: unknown model architecture\\n\\n'); sys.exit(1)",
        r"failed with exit code 1 and said 'main: error: unknown model architecture': see whether this build knows",
    ),
    Failure("fails on stdout", "import sys; print('no GPU'); sys.exit(3)", r"exit code 3 and said 'no GPU'"),
    Failure("fails in silence", "raise SystemExit(2)", r"exit code 2 and said 'nothing'"),
    Failure("is killed", "import os; os.kill(os.getpid(), 9)", r"exit code -9"),
    Failure("long line", "import sys; sys.exit('x' * 1000)", r"said 'x{300}':"),
    Failure(
        "prints no JSON", "print('| model | size |')", r"printed no result of 128 .*starts with '\| model \| size \|'"
    ),
    Failure(
        "prints nothing", "", r"printed no result of 128 generated tokens that is understood \(it starts with ''\)"
    ),
    Failure("no results", prints([]), "printed no result"),
    Failure("a number", prints(7), "printed no result"),
    Failure("list of numbers", prints([7]), "printed no result"),
    Failure("only a prompt test", prints([RESULT | {"n_gen": 0, "n_prompt": 512}]), "printed no result"),
    Failure(
        "other field names", prints([{"n_gen": 128, "tokens_per_second": 1}]), "fields n_gen, avg_ts and stddev_ts"
    ),
    Failure("speed of zero", prints([RESULT | {"avg_ts": 0}]), "printed no result"),
    Failure("speed of no number", prints([RESULT | {"avg_ts": "fast"}]), "printed no result"),
)


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.name)
def test_failures_are_one_sentence(case: Failure, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=case.says) as caught:
        run_llama_bench(script(tmp_path, case.text), Path("model.gguf"), PeerRun(tmp_path))
    assert "\n" not in str(caught.value) and str(tmp_path / "llama-bench") in str(caught.value)


def test_a_program_for_another_machine_is_said(tmp_path: Path) -> None:
    path = tmp_path / "llama-bench"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    with pytest.raises(PeerError, match=r"cannot be run \(Exec format error\): build llama-bench for this machine"):
        run_llama_bench(path, Path("model.gguf"), PeerRun(tmp_path))


def test_a_run_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamabench, "SECONDS", 0.3)
    with pytest.raises(PeerError, match=r"did not end within 0 minutes: run it by hand"):
        run_llama_bench(script(tmp_path, "import time; time.sleep(60)"), Path("model.gguf"), PeerRun(tmp_path))


@pytest.mark.usefixtures("needs_gguf")
def test_a_failure_leaves_no_model(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(PeerError):
        measure_peer(script(tmp_path, "raise SystemExit(2)"), SPEC, PeerRun(scratch))
    assert list(scratch.iterdir()) == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"gone cannot be used \(No such file.*choose another folder for the peer"):
        measure_peer(tmp_path / "llama-bench", SPEC, PeerRun(tmp_path / "gone"))


INTERRUPTED = """
from pathlib import Path
from lynnc.modelfile import load_model
from lynnc.runtime.peers.llamabench import PeerRun, measure_peer
measure_peer(Path({program!r}), load_model("tiny-moe"), PeerRun(Path({scratch!r})))
"""


@pytest.mark.usefixtures("needs_gguf")
def test_an_interrupt_leaves_neither_model_nor_program(tmp_path: Path, scratch: Path) -> None:
    mark = tmp_path / "started"
    hang = f"import os, time\nopen({str(mark)!r} + '.new', 'w').write(str(os.getpid()))\n"
    program = script(tmp_path, f"{hang}os.rename({str(mark)!r} + '.new', {str(mark)!r})\ntime.sleep(600)")
    text = INTERRUPTED.format(program=str(program), scratch=str(scratch))
    ours = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE)
    try:
        wait_until(mark.exists)
        assert len(list(scratch.glob("*/tiny-moe.gguf"))) == 1
        ours.send_signal(signal.SIGINT)
        _, said = ours.communicate(timeout=30)
    finally:
        ours.kill()
    assert b"KeyboardInterrupt" in said
    assert list(scratch.iterdir()) == []
    wait_until(lambda: not is_running(int(mark.read_text())))


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class Option:
    """What was typed, and what is said of it."""

    text: str
    says: str


OPTIONS = (
    Option("llama-bench", r"--peer llama-bench is not understood: write llama-bench=PATH"),
    Option("llama-bench=", r"is not understood"),
    Option("vllm=/bin/true", r"--peer vllm=/bin/true is not understood"),
    Option("llama-bench=/nowhere", r"there is no file /nowhere: name the llama-bench"),
    Option("llama-bench=/tmp", r"/tmp is a folder: name the llama-bench in it"),
    Option("llama-bench=LICENSE", r"LICENSE is not executable"),
)


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: case.text)
def test_options_are_checked(case: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    with pytest.raises(OptionError, match=case.says):
        parse_peer(case.text)


def test_a_program_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    assert parse_peer("llama-bench=llama-bench") == parse_peer(f"llama-bench={program}") == program
