"""What the benchmarks share: runs of the command line with time and peak memory, and records of results.

In: arguments of the command line. Out: ``Usage`` of a run, and records (metric, value, unit, spread and what it was
measured with) that are printed and written as a JSON list.
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

from lynnc.bench.records import commit

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Usage:
    """One run. ``largest_kib`` is the peak of its largest process, ``tree_kib`` the sampled peak of all of them;
    ``output`` is what it printed."""

    seconds: float
    largest_kib: int
    tree_kib: int
    output: str


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
    """A folder for what the runs write and for their home, and what all records share."""

    def __init__(self, folder: Path, params: Mapping[str, str], packages: Sequence[str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        self._shared = {
            "params": params,
            "machine": machine(),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def run(self, *arguments: str) -> Usage:
        """One run of the command line; what it complains of is discarded unless it fails."""
        started = time.perf_counter()
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
            command = [sys.executable, "-m", "lynnc.cli", *arguments]
            process = subprocess.Popen(command, stdout=said, stderr=complained, cwd=self.folder, env=self.environment)
            sampler = TreeMemory(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
            tree = sampler.stop()
            for file in (said, complained):
                file.seek(0)
            if process.returncode != 0:
                raise click.ClickException(f"{' '.join(command)}: {complained.read().decode(errors='replace').strip()}")
            return Usage(seconds, usage.ru_maxrss, tree, said.read().decode(errors="replace"))

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


def records_text(records: Sequence[Record]) -> str:
    """The JSON list."""
    return json.dumps([asdict(record) for record in records], indent=1) + "\n"


def report(records: Sequence[Record], output: Path | None) -> None:
    """Prints the records, and writes them if there is a file to write."""
    for record in records:
        least, greatest = record.spread
        runs = f"median of {record.runs}, {least:.3f} to {greatest:.3f}" if record.runs > 1 else "one run"
        click.echo(f"{record.metric:50} {record.value:10.3f} {record.unit} ({runs})")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(records_text(records))
        click.echo(f"written to {output}")
