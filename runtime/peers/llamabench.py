"""Runs the user's ``llama-bench`` on a random model of the same shape.

In: a ``ModelSpec`` and the program's path. Out: a ``PeerSpeed`` for each context: tokens per second with their spread,
and the build that gave them. The model lies in a folder of its own that is gone afterwards, whatever happened.

Example::

    peer = parse_peer("llama-bench=/opt/llama.cpp/bin/llama-bench")
    measure_peer(peer, load_model("qwen3.6-35b-a3b"), PeerRun(folder=Path("/tmp")))[0].tokens_per_second
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lynnc.errors import OptionError, OutputError, PeerError
from lynnc.model import ModelSpec
from lynnc.runtime.peers.ggufshape import gguf_model

if TYPE_CHECKING:
    from lynnc.runtime.peers.ggufwrite import Progress

NAME = "llama-bench"
SECONDS = 3600.0
"""After which a run counts as hung."""
LONGEST_LINE = 300
"""Characters of the program's last line that an error repeats."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What to run. ``contexts`` are tokens before the measured ones; ``folder`` is where the model lies meanwhile."""

    folder: Path
    contexts: tuple[int, ...] = (0,)
    generated: int = 128
    repeats: int = 5
    seed: int = 1


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """Decode speed at one context: mean, standard deviation and, where the program tells, each repeat; tokens/s.

    ``build`` and ``backends`` are the program's own words, empty where it has none; a build without CUDA says so there.
    """

    context: int
    generated: int
    tokens_per_second: float
    spread: float
    samples: tuple[float, ...]
    build: str
    backends: str
    device: str
    model_bytes: int
    command: tuple[str, ...]


def parse_peer(text: str) -> Path:
    """The program of ``llama-bench=PATH``; OptionError for anything else, or for a path that cannot be run."""
    name, _, path = text.partition("=")
    if name != NAME or not path:
        raise OptionError(f"--peer {text} is not understood: write {NAME}=PATH.")
    program = Path(path).expanduser()
    if program.is_dir():
        raise OptionError(f"--peer: {program} is a folder: name the {NAME} in it.")
    if not program.is_file():
        raise OptionError(f"--peer: there is no file {program}: name the {NAME} that llama.cpp's build made.")
    if not os.access(program, os.X_OK):
        raise OptionError(f"--peer: {program} is not executable: name the {NAME} that llama.cpp's build made.")
    return program.absolute()


def import_writer() -> Any:
    """The module that writes GGUF files; OptionError if a package that it needs is not there."""
    try:
        import_module("gguf")
        return import_module("lynnc.runtime.peers.ggufwrite")
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--peer needs the Python package {error.name}: install lynnc with its extra, as in "
            "`pip install -e '.[bench]'`, or leave --peer out."
        ) from error


def measure_peer(
    program: Path, spec: ModelSpec, run: PeerRun, on_progress: Progress | None = None
) -> tuple[PeerSpeed, ...]:
    """Writes the model, runs the program on it and removes it again, also after an error or Ctrl-C.

    ModelError if llama.cpp has no such model, OutputError if there is no room, PeerError if the program fails.
    """
    model, writer = gguf_model(spec), import_writer()
    try:
        scratch = tempfile.TemporaryDirectory(prefix="lynnc-peer-", dir=run.folder)
    except OSError as error:
        raise OutputError(
            f"{run.folder} cannot be used ({error.strerror}): choose another folder for the peer's model."
        ) from error
    with scratch as folder:
        path = Path(folder) / f"{spec.name}.gguf"
        writer.write_gguf(model, path, run.seed, on_progress)
        return run_llama_bench(program, path, run)


def run_llama_bench(program: Path, model: Path, run: PeerRun) -> tuple[PeerSpeed, ...]:
    """Runs the program on a GGUF file; PeerError if it fails or what it prints is not understood."""
    command = _command(program, model, run)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except OSError as error:
        raise PeerError(f"{program} cannot be run ({error.strerror}): build {NAME} for this machine.") from error
    except subprocess.TimeoutExpired as error:
        raise PeerError(
            f"{program} did not end within {SECONDS / 60:.0f} minutes: run it by hand to see why."
        ) from error
    if done.returncode != 0:
        said = _last_line(done.stderr) or _last_line(done.stdout) or "nothing"
        raise PeerError(
            f"{program} failed with exit code {done.returncode} and said {said!r}: see whether this build knows the "
            "model's architecture and has the memory for it."
        )
    return _parse(program, done.stdout, run, tuple(command))


def _command(program: Path, model: Path, run: PeerRun) -> list[str]:
    """All layers on the GPU, flash attention on, no prompt test."""
    options = {"-m": model, "-p": 0, "-n": run.generated, "-r": run.repeats, "-ngl": 99, "-fa": 1, "-o": "json"}
    command = [str(program), *(str(part) for option in options.items() for part in option)]
    return command if run.contexts == (0,) else [*command, "-d", ",".join(map(str, run.contexts))]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_LINE] if lines else ""


def _parse(program: Path, printed: str, run: PeerRun, command: tuple[str, ...]) -> tuple[PeerSpeed, ...]:
    try:
        results = json.loads(printed)
        found = {int(result.get("n_depth", 0)): result for result in results if result["n_gen"] == run.generated}
        return tuple(_speed(found[context], context, command) for context in run.contexts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PeerError(
            f"{program} printed no result of {run.generated} generated tokens that is understood (it starts with "
            f"{printed.strip()[:60]!r}): use a {NAME} with -o json and its fields n_gen, avg_ts and stddev_ts."
        ) from error


def _speed(result: Mapping[str, Any], context: int, command: tuple[str, ...]) -> PeerSpeed:
    speed = float(result["avg_ts"])
    if not speed > 0:
        raise ValueError("no speed")
    build = (str(result.get(key, "")) for key in ("build_number", "build_commit"))
    return PeerSpeed(
        context=context,
        generated=int(result["n_gen"]),
        tokens_per_second=speed,
        spread=float(result["stddev_ts"]),
        samples=tuple(float(sample) for sample in result.get("samples_ts", ())),
        build=" ".join(part for part in build if part),
        backends=str(result.get("backends", "")),
        device=str(result.get("gpu_info", "")),
        model_bytes=int(result.get("model_size", 0)),
        command=command,
    )
