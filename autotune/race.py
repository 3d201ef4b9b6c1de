"""The last race of a task: the default, the best known record and the best few candidates in turns.

In: a task with its study, a bench. Out: a ``Race``, the contenders with their times, those first who win a tie. The
best of many noisy times is too good to be true, so everyone runs again, several times, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.autotune.noise import is_faster, joined, winner
from lynnc.autotune.problems import Task
from lynnc.autotune.search import candidate_of
from lynnc.autotune.studies import KnobStudy
from lynnc.autotune.trial import Bench, Outcome
from lynnc.kernels.kernel import Knobs
from lynnc.target import Device

ROUNDS, REPEATS = 3, 15
FINALISTS = 3
"""Candidates beside the default and the record."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Knobs with their time in the race; ``origin`` says who they are: default, record, or who proposed them."""

    knobs: Knobs
    origin: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Race:
    """Contenders of a task, the default first, then the record, then the others by their earlier times."""

    task: Task
    contenders: tuple[Contender, ...]

    @property
    def default(self) -> Contender:
        """The default."""
        return self.contenders[0]

    @property
    def best(self) -> Contender:
        """Who won; the default in a tie."""
        return self.contenders[winner([contender.outcome for contender in self.contenders])]

    @property
    def challengers(self) -> tuple[Contender, ...]:
        """Those that beat the default beyond the noise, the winner first, then the fastest."""
        faster = [one for one in self.contenders[1:] if is_faster(one.outcome, self.default.outcome)]
        return tuple(sorted(faster, key=lambda one: (one is not self.best, one.outcome.seconds)))

    @property
    def step_gain(self) -> float:
        """Seconds of a step that the winner saves by this race."""
        if not self.default.outcome.is_timed:
            return 0.0
        return self.task.launches * (self.default.outcome.seconds - self.best.outcome.seconds)


def run_race(task: Task, study: KnobStudy, bench: Bench, device: Device) -> Race:
    """Everyone in turns, ``ROUNDS`` times; who fails once is out."""
    entered = _entered(task, study, device)
    bench.prepare([candidate_of(task, knobs) for knobs, _ in entered])
    rounds: list[list[Outcome]] = [[] for _ in entered]
    for _ in range(ROUNDS):
        for outcomes, (knobs, _) in zip(rounds, entered, strict=True):
            if not outcomes or outcomes[-1].is_timed:
                outcomes.append(bench.measure(candidate_of(task, knobs), REPEATS))
    contenders = tuple(
        Contender(knobs, origin, joined(outcomes)) for (knobs, origin), outcomes in zip(entered, rounds, strict=True)
    )
    return Race(task, contenders)


def _entered(task: Task, study: KnobStudy, device: Device) -> list[tuple[Knobs, str]]:
    default = task.default(device)
    entered: list[tuple[Knobs, str]] = [(default, "default")]
    whole = [tried for tried in study.tried() if tried.is_whole and tried.outcome.is_timed]
    records = [tried for tried in whole if tried.origin == "record"]
    others = sorted(whole, key=lambda tried: tried.outcome.seconds)[: FINALISTS + 2]
    for tried in [*records, *others]:
        if len(entered) <= FINALISTS + len(records) and all(dict(tried.knobs) != dict(knobs) for knobs, _ in entered):
            entered.append((tried.knobs, tried.origin))
    return entered
