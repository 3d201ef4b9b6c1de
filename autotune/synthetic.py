"""A device that is no GPU, with a known optimum: the whole tuner runs on it, in tests and in ``--rehearse``.

In: candidates. Out: times by a formula: each knob has a best value, chosen by a seed, and every step away from it costs
a part more; noise is on top, the same for the same measurement. By rule some candidates are wrong, crash, hang or do
not compile. Steps take the sum of their launches, and some kernels disturb their neighbours.

Example::

    bench = SyntheticBench(tasks, Traits(seed=7))
    bench.measure(candidate_of(task, bench.optimum(task)), repeats=5).seconds
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lynnc.artifact import digest
from lynnc.autotune.bounds import identity, lower_bound
from lynnc.autotune.problems import Key, Task, key_of_names
from lynnc.autotune.trial import Candidate, Outcome, Status
from lynnc.kernels.kernel import Knobs
from lynnc.programs import program_rows
from lynnc.target import Device

DRAWS = 300
"""Knobs that are drawn at most in search of an optimum: in a few tasks every tile leaves multiprocessors idle."""
STEP_COST = 0.08
"""What a knob one value away from its best adds."""
FASTEST = 1.2
"""The best candidate's time over the roofline's."""
FAULTS: Mapping[Status, str] = MappingProxyType(
    {
        Status.WRONG: "0.3 % of the values are not the reference's",
        Status.CRASHED: "an illegal memory access",
        Status.HUNG: "no answer within 5 s",
        Status.NOT_COMPILED: "ptxas ran out of registers",
    }
)
FAULTY = 0.06
"""Part of the candidates for each kind of fault."""
STEP_BASE_SECONDS = 20e-6
"""What a step takes beside the tasks' launches."""
ROW_COST = 0.1
"""What another row of a decode step adds to its launches."""


@dataclass(frozen=True, slots=True)
class Traits:
    """``noise`` is the standard deviation of a run as a part of its time. ``disturbing`` kernels slow every step that
    has them with other than default knobs by that many seconds, or only those of ``disturbed`` programs if some are
    named. ``measure_seconds`` pass in each measurement, and for each set of choices in that of steps."""

    seed: int = 0
    noise: float = 0.005
    disturbing: Mapping[str, float] = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    measure_seconds: float = 0.0


class SyntheticBench:
    """``lynnc.autotune.trial.Bench``; ``measured`` and ``prepared`` are what was asked of it. ``wait`` passes time."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: Device,
        traits: Traits | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.traits = traits or Traits()
        self._tasks: dict[Key, Task] = {task.key: task for task in tasks}
        self._device, self._wait = device, wait
        self._plainest: dict[tuple[Key, tuple[tuple[str, int], ...]], dict[str, int]] = {}
        self._optima = {task.key: self._choose_optimum(task) for task in tasks}
        self.measured: list[Candidate] = []
        self.prepared: list[Candidate] = []

    def optimum(self, task: Task) -> Knobs:
        """The fastest knobs of a task."""
        return self._optima[task.key]

    def seconds(self, task: Task, knobs: Knobs) -> float:
        """A launch's time without noise."""
        factor, best, plain = FASTEST, self._optima[task.key], self._plain(task, knobs)
        for name, knob in task.kernel.space.items():
            factor += STEP_COST * abs(knob.values.index(plain[name]) - knob.values.index(best[name]))
        return max(factor * task.estimate.seconds, self._bound(task, knobs))

    def fault(self, task: Task, knobs: Knobs) -> Status | None:
        """What goes wrong with a candidate, if anything does: never with default or optimum."""
        plain = self._plain(task, knobs)
        if plain in (self._optima[task.key], self._plain(task, task.default(self._device))):
            return None
        chance = _chance(f"{self.traits.seed} {task.name} {sorted(plain.items())}")
        return next((status for index, status in enumerate(FAULTS) if chance < FAULTY * (index + 1)), None)

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Notes them."""
        self.prepared += candidates

    def is_ready(self, candidate: Candidate) -> bool:
        """Always: there is no compiler."""
        return True

    def measure(self, candidate: Candidate, repeats: int) -> Outcome:
        """A fault, or times with noise."""
        self._wait(self.traits.measure_seconds)
        self.measured.append(candidate)
        task = self._task(candidate)
        fault = self.fault(task, candidate.knobs)
        if fault is not None:
            return Outcome(fault, reason=FAULTS[fault])
        return self._noisy(self.seconds(task, candidate.knobs), repeats, str(sorted(candidate.knobs.items())))

    def measure_steps(self, program: str, choices: Sequence[Sequence[Candidate]], repeats: int) -> Sequence[Outcome]:
        """The sum of the launches, longer with more rows of decode, and what disturbs their neighbours."""
        self._wait(self.traits.measure_seconds * len(choices))
        steps = [self._step_seconds(program, chosen) for chosen in choices]
        return [self._noisy(step, repeats, f"{program} {index}") for index, step in enumerate(steps)]

    def close(self) -> None:
        """Nothing to end."""

    def _step_seconds(self, program: str, chosen: Sequence[Candidate]) -> float:
        disturbed = self.traits.disturbed
        total, wider = STEP_BASE_SECONDS, 1 + ROW_COST * ((program_rows(program) or 1) - 1)
        for candidate in chosen:
            task = self._task(candidate)
            total += wider * task.launches * self.seconds(task, candidate.knobs)
            if dict(candidate.knobs) != task.default(self._device) and (not disturbed or program in disturbed):
                total += self.traits.disturbing.get(task.kernel.name, 0.0)
        return total

    def _noisy(self, seconds: float, repeats: int, what: str) -> Outcome:
        """Different runs for another number of repeats or another seed, the same ones when asked again."""
        chance = random.Random(f"{self.traits.seed} {what} {repeats} {len(self.measured)}")
        runs = sorted(seconds * (1 + abs(chance.gauss(0, self.traits.noise))) for _ in range(repeats))
        return Outcome(Status.TIMED, runs[len(runs) // 2], runs[0], runs[-1], repeats)

    def _task(self, candidate: Candidate) -> Task:
        return self._tasks[key_of_names(candidate.kernel, candidate.problem)]

    def _choose_optimum(self, task: Task) -> Knobs:
        """Some legal knobs, by the seed alone, that the roofline lets be the fastest; or those it hinders least."""
        chance = random.Random(f"{self.traits.seed} {task.name}")
        best, bound = task.default(self._device), math.inf
        for _ in range(DRAWS):
            knobs = {name: chance.choice(knob.values) for name, knob in task.kernel.space.items()}
            if task.kernel.refusal(task.problem, knobs, self._device.target) is not None:
                continue
            own = self._bound(task, knobs)
            if own < bound:
                best, bound = knobs, own
            if bound <= FASTEST * task.estimate.seconds:
                break
        return plainest(task, best)

    def _plain(self, task: Task, knobs: Knobs) -> dict[str, int]:
        key = (task.key, tuple(sorted(knobs.items())))
        if key not in self._plainest:
            self._plainest[key] = plainest(task, knobs)
        return self._plainest[key]

    def _bound(self, task: Task, knobs: Knobs) -> float:
        return lower_bound(task, knobs, self._device, context=1)


def plainest(task: Task, knobs: Knobs) -> dict[str, int]:
    """The least knobs that make the same kernel."""
    same, plain = identity(task, knobs), dict(knobs)
    for name, knob in task.kernel.space.items():
        plain[name] = next(value for value in knob.values if identity(task, {**plain, name: value}) == same)
    return plain


def _chance(text: str) -> float:
    """A number from 0 to 1 that a text decides."""
    return int(digest(text.encode())[:8], 16) / 0xFFFFFFFF
