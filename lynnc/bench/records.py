"""Results of a benchmark as records that another can repeat: what was measured, on what, with which command.

In: timings and counts. Out: a JSON list; a record has ``metric``, ``value``, ``unit``, ``spread``, ``runs``,
``params``, ``device``, ``versions``, ``commit``, ``date`` and ``command``.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import lynnc
from lynnc.bench.timing import Timing
from lynnc.outputfile import write_file
from lynnc.plan import Plan
from lynnc.runtime.device import DeviceFacts
from lynnc.version import VERSION

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Record:
    """One metric; ``spread`` is (least, greatest) of the runs, ``value`` their median, or a peer's mean."""

    metric: str
    value: float
    unit: str
    spread: tuple[float, float]
    runs: int
    params: Mapping[str, Value]
    device: Mapping[str, Value]
    versions: Mapping[str, str]
    commit: str
    date: str
    command: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all records of a run share."""

    params: Mapping[str, Value]
    device: Mapping[str, Value]
    versions: Mapping[str, str]
    commit: str
    date: str
    command: str

    def time(self, metric: str, timing: Timing, **params: Value) -> Record:
        """A time in microseconds."""
        spread = timing.least * 1e6, timing.greatest * 1e6
        return self._record(metric, timing.median * 1e6, "us", spread, timing.runs, params)

    def rate(self, metric: str, timing: Timing, amount: float, unit: str, **params: Value) -> Record:
        """An amount over a time."""
        spread = amount / timing.greatest, amount / timing.least
        return self._record(metric, amount / timing.median, unit, spread, timing.runs, params)

    def count(self, metric: str, value: float, unit: str, **params: Value) -> Record:
        """Something counted once."""
        return self._record(metric, value, unit, (value, value), 1, params)

    def mean(self, metric: str, value: float, samples: Sequence[float], unit: str, **params: Value) -> Record:
        """A mean that another program gave, with its runs as far as it tells them."""
        runs = samples or (value,)
        return self._record(metric, value, unit, (min(runs), max(runs)), len(runs), params)

    def _record(
        self, metric: str, value: float, unit: str, spread: tuple[float, float], runs: int, params: Mapping[str, Value]
    ) -> Record:
        return Record(
            metric=metric,
            value=_rounded(value),
            unit=unit,
            spread=(_rounded(spread[0]), _rounded(spread[1])),
            runs=runs,
            params={**self.params, **params},
            device=self.device,
            versions=self.versions,
            commit=self.commit,
            date=self.date,
            command=self.command,
        )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def setting_of(plan: Plan, facts: DeviceFacts, params: Mapping[str, Value], command: str) -> Setting:
    """What the records of one run share: the plan's identity, the GPU with its clocks, and versions."""
    shared = {"model": plan.model_name, "plan": plan.name, "plan_digest": plan.digest, **params}
    return replace(setting_on(facts, plan.tools, command), params=shared)


def setting_on(facts: DeviceFacts, tools: Mapping[str, str], command: str) -> Setting:
    """The same for what no plan is part of."""
    device: dict[str, Value] = {**asdict(facts), **clocks()}
    versions = {"lynnc": VERSION, "python": platform.python_version(), **_installed(), **tools}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Setting({}, device, versions, commit(), date, command)


def _installed() -> Mapping[str, str]:
    try:
        return {"cuda-bindings": metadata.version("cuda-bindings")}
    except metadata.PackageNotFoundError:
        return {}


def clocks() -> Mapping[str, Value]:
    """Clocks in MHz and the driver's version as ``nvidia-smi`` says them now; empty without it."""
    question = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(question, capture_output=True, text=True, timeout=20, check=True)
        sm, memory, driver = said.stdout.splitlines()[0].split(", ")
        return {"sm_clock_mhz": int(sm), "memory_clock_mhz": int(memory), "driver_version": driver}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def commit() -> str:
    """The commit of the checkout that runs, with ``+`` if files differ from it; empty outside of one."""
    folder = Path(lynnc.__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def records_text(records: Sequence[Record]) -> str:
    """The JSON list."""
    return json.dumps([asdict(record) for record in records], indent=1) + "\n"


def write_records(path: Path, records: Sequence[Record], force: bool) -> None:
    """Writes the list; OutputError if the file exists and ``force`` is off, or it cannot be written."""
    write_file(path, records_text(records), force)
