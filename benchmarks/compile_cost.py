"""What compiling costs: time with an empty and a full store, memory, kernels, and the start of the command line.

In: a model and a target. Out: a table, and a JSON list of records (metric, value, unit, spread and what it was measured
with). Everything runs through the command line, in processes of its own, with a store and a home that start empty.

Example::

    python benchmarks/compile_cost.py --model lynn-27b-a3b --target sm_121 --output benchmarks/results/compile_cost.json
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from lynnc.planfile import read_plan

ROOT = Path(__file__).resolve().parent.parent
WARM_RUNS, HELP_RUNS = 5, 10
SAMPLE_SECONDS = 0.1
PACKAGES = ("lynnc", "triton", "sympy", "jinja2", "click")


@dataclass(frozen=True, slots=True)
class Usage:
    """One run. ``largest_kib`` is the peak of its largest process, ``tree_kib`` the sampled peak of all of them."""

    seconds: float
    largest_kib: int
    tree_kib: int


@dataclass(frozen=True, slots=True)
class Record:
    """One metric. ``spread`` is (least, greatest) of the runs, ``value`` their median."""

    metric: str
    value: float
    unit: str
    spread: tuple[float, float]
    runs: int
    params: Mapping[str, str]
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    commit: str
    date: str
    command: str


class Bench:
    """A folder for store, plans and home of the runs, and what all records share."""

    def __init__(self, folder: Path, model: str, target: str) -> None:
        self.folder, self.model, self.target = folder, model, target
        self.environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self._shared = {
            "params": {"model": Path(model).name, "target": target},
            "machine": machine(),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def compile(self, plan: str) -> Usage:
        """One compilation into the common store."""
        return self.run("compile", self.model, "--target", self.target, "--output", str(self.folder / plan))

    def run(self, *arguments: str) -> Usage:
        """One run of the command line; its output is discarded unless it fails."""
        started = time.perf_counter()
        with tempfile.TemporaryFile() as said:
            command = [sys.executable, "-m", "lynnc.cli", *arguments]
            process = subprocess.Popen(command, stdout=said, stderr=said, cwd=self.folder, env=self.environment)
            sampler = TreeMemory(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
            tree = sampler.stop()
            if process.returncode != 0:
                said.seek(0)
                raise click.ClickException(f"{' '.join(command)}: {said.read().decode(errors='replace').strip()}")
        return Usage(seconds, usage.ru_maxrss, tree)

    def record(self, metric: str, values: Sequence[float], unit: str, command: str) -> Record:
        """The median of some runs."""
        spread = (min(values), max(values))
        return Record(metric, statistics.median(values), unit, spread, len(values), command=command, **self._shared)  # type: ignore[arg-type]


class TreeMemory:
    """Samples the memory of a process and all its descendants, each shared page counted once."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, sum(proportional_kib(pid) for pid in descendants(self._pid)))

    def stop(self) -> int:
        """The peak in KiB."""
        self._ended.set()
        self._thread.join()
        return self._peak


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it started, directly or not."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from descendants(int(child))


def proportional_kib(pid: int) -> int:
    """Memory of a process, shared pages divided among their users; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def machine() -> dict[str, str | int]:
    """Processor, cores and memory; nothing that names the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": names[0] if names else platform.machine(), "cores": cores, "memory_gib": round(memory / 2**30)}


def commit() -> str:
    """The commit of the checkout, with ``+`` if files differ from it; empty outside of one."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def measure(bench: Bench) -> list[Record]:
    """Every metric, the empty store first."""
    compiling = f"python -m lynnc.cli compile {bench.model} --target {bench.target}"
    cold = bench.compile("cold.plan")
    warm = [bench.compile(f"warm{run}.plan") for run in range(WARM_RUNS)]
    start = [bench.run("--help") for _ in range(HELP_RUNS)]
    kernels = len(read_plan(bench.folder / "cold.plan").kernels)
    return [
        bench.record("compile, empty store", [cold.seconds], "s", compiling),
        bench.record("compile, full store", [run.seconds for run in warm], "s", compiling),
        bench.record("peak memory of all processes, empty store", [cold.tree_kib / 1024], "MiB", compiling),
        bench.record("peak memory of the largest process, empty store", [cold.largest_kib / 1024], "MiB", compiling),
        bench.record("peak memory of all processes, full store", [r.tree_kib / 1024 for r in warm], "MiB", compiling),
        bench.record("start of the command line", [run.seconds for run in start], "s", "python -m lynnc.cli --help"),
        bench.record("kernels", [kernels], "kernels", compiling),
    ]


@click.command()
@click.option("--model", default="lynn-27b-a3b", show_default=True, help="A shipped model, or a model file.")
@click.option("--target", default="sm_121", show_default=True, help="Architecture to compile for.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(model: str, target: str, output: Path | None) -> None:
    """Measure what compiling MODEL costs on this machine; keep it otherwise idle."""
    name = str(Path(model).resolve()) if Path(model).exists() else model
    with tempfile.TemporaryDirectory(prefix="lynnc-bench-") as folder:
        records = measure(Bench(Path(folder), name, target))
    for record in records:
        least, greatest = record.spread
        runs = f"median of {record.runs}, {least:.3f} to {greatest:.3f}" if record.runs > 1 else "one run"
        click.echo(f"{record.metric:50} {record.value:10.3f} {record.unit} ({runs})")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps([asdict(record) for record in records], indent=1) + "\n")
        click.echo(f"written to {output}")


if __name__ == "__main__":
    main()
