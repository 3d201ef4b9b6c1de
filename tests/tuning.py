"""A tuner on a made-up device, for tests: tasks of small models, studies in a temporary place, time that is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optuna.storages import InMemoryStorage

from lynnc.autotune.budget import Budget
from lynnc.autotune.problems import Task, Wanted, tasks_of
from lynnc.autotune.search import Setting
from lynnc.autotune.storages import open_storage
from lynnc.autotune.studies import Run
from lynnc.autotune.sweep import Finding, Sweep
from lynnc.autotune.synthetic import SyntheticBench, Traits
from lynnc.autotune.trial import Bench
from lynnc.autotune.tuner import About, Tuner
from lynnc.autotune.worker import Worker
from lynnc.deviceidentity import identity_of
from lynnc.modelfile import load_model
from lynnc.records import Records
from lynnc.target import find_device

DEVICE = find_device("h200")
IDENTITY = identity_of(DEVICE)
MODEL = "tiny-moe"


def tasks(*kernels: str, model: str = MODEL, programs: tuple[str, ...] = ("decode/1",)) -> tuple[Task, ...]:
    """Tasks of some kernels; of all if none is named."""
    return tasks_of(load_model(model), Wanted(DEVICE, programs, kernels))


@dataclass
class FakeClock:
    """Seconds that pass only when somebody waits."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Rig:
    """All that a run needs, in memory unless a storage is named."""

    tasks: Sequence[Task]
    traits: Traits = field(default_factory=Traits)
    storage: str = ""
    name: str = "run"
    seed: int = 0
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self._memory = InMemoryStorage()
        self.bench = SyntheticBench(self.tasks, DEVICE, self.traits, self.clock.wait)

    def tuner(self, bench: Bench | None = None, worker: Worker | None = None, ahead: int = 4) -> Tuner:
        run = Run(
            open_storage(self.storage) if self.storage else self._memory, self.name, worker or Worker.here(self.seed)
        )
        setting = Setting(DEVICE, 1024, self.seed, ahead)
        return Tuner(self.tasks, run, bench or self.bench, setting, IDENTITY)

    def budget(self, seconds: float | None = None, trials: int | None = None) -> Budget:
        return Budget(seconds, trials, self.clock)

    def sweep(self, trials: int, records: Records | None = None) -> Sweep:
        """Search and conclusion."""
        tuner, budget = self.tuner(), self.budget(trials=trials)
        records = records or Records()
        tuner.search(budget, records)
        return tuner.conclude(budget, About(MODEL, IDENTITY), records)

    def optimum_seconds(self, task: Task) -> float:
        return self.bench.seconds(task, self.bench.optimum(task))


def finding(sweep: Sweep, task: Task) -> Finding:
    """What was found for a task."""
    (found,) = (one for one in sweep.findings if one.kernel == task.kernel.name and one.problem == dict(task.problem))
    return found
