"""The last race of a task: the default, the record in use and the best few candidates in turns.

In: a task with its study, a bench, and the knobs that the compiler would take now. Out: a ``Race``, the contenders with
their times, those first who win a tie. The best of many noisy times is too good to be true, so everyone runs again,
several times, one after the other; where nobody is faster even by the times of the search, those stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lynnc.autotune.noise import FLOOR, is_faster, joined, winner
from lynnc.autotune.problems import Task
from lynnc.autotune.search import Setting, candidate_of
from lynnc.autotune.studies import KnobStudy
from lynnc.autotune.sweep import Tried
from lynnc.autotune.trial import Bench, Outcome, Status
from lynnc.kernels.kernel import Knobs
from lynnc.target import Device

ROUNDS, REPEATS = 3, 15
FINALISTS = 3
"""Candidates beside the default and the record."""
UNTIMED = Outcome(Status.REFUSED, reason="the search did not time it")


@dataclass(frozen=True, slots=True)
class Contender:
    """Knobs with their time in the race; ``origin`` says who they are: default, record, or who proposed them."""

    knobs: Knobs
    origin: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Race:
    """Contenders of a task, the default first, then records, then the others by their earlier times; ``in_use`` are the
    knobs that the compiler would take now, ``floor`` the part by which a time must be less to count as less."""

    task: Task
    contenders: tuple[Contender, ...]
    in_use: Knobs
    floor: float = FLOOR

    @property
    def default(self) -> Contender:
        """The default."""
        return self.contenders[0]

    @property
    def incumbent(self) -> Contender:
        """Who is in use and stays unless someone proves better; the default where that could not be timed."""
        found = next(one for one in self.contenders if dict(one.knobs) == dict(self.in_use))
        return found if found.outcome.is_timed else self.default

    @property
    def best(self) -> Contender:
        """Who won; the default in a tie."""
        return self.contenders[winner([contender.outcome for contender in self.contenders], self.floor)]

    @property
    def challengers(self) -> tuple[Contender, ...]:
        """The winner, and who else beats the incumbent beyond the noise, the fastest first."""
        holder, best = self.incumbent, self.best
        if best is holder:
            return ()
        others = [
            one for one in self.contenders if one is not best and is_faster(one.outcome, holder.outcome, self.floor)
        ]
        return (best, *sorted(others, key=lambda one: one.outcome.seconds))

    @property
    def step_gain(self) -> float:
        """Seconds of a step that the winner saves by this race."""
        if not self.incumbent.outcome.is_timed:
            return 0.0
        return self.task.launches * (self.incumbent.outcome.seconds - self.best.outcome.seconds)


def promise(task: Task, study: KnobStudy, in_use: Knobs, floor: float = FLOOR) -> float:
    """Seconds of a step that a race may save, by the times of the search: 0 if it has nothing to decide, infinite where
    what is in use was not timed."""
    timed = _timed(study)
    holder = _outcome_of(in_use, timed)
    best = min((tried.outcome for tried in timed), key=lambda outcome: outcome.seconds, default=None)
    if holder is None or best is None:
        return math.inf
    return task.launches * (holder.seconds - best.seconds) if is_faster(best, holder, floor) else 0.0


def unraced(task: Task, study: KnobStudy, setting: Setting, in_use: Knobs) -> Race:
    """The default and the record in use with their times of the search."""
    timed = _timed(study)
    entered = _unchallenged(task.default(setting.device), in_use)
    contenders = [Contender(knobs, origin, _outcome_of(knobs, timed) or UNTIMED) for knobs, origin in entered]
    return Race(task, tuple(contenders), in_use, setting.floor)


def _timed(study: KnobStudy) -> list[Tried]:
    return [tried for tried in study.tried() if tried.is_whole and tried.outcome.is_timed]


def _outcome_of(knobs: Knobs, timed: Sequence[Tried]) -> Outcome | None:
    return next((tried.outcome for tried in timed if dict(tried.knobs) == dict(knobs)), None)


def run_race(task: Task, study: KnobStudy, bench: Bench, setting: Setting, in_use: Knobs) -> Race:
    """Everyone in turns, ``ROUNDS`` times; who fails once is out."""
    entered = _entered(task, study, setting.device, in_use)
    bench.prepare([candidate_of(task, knobs) for knobs, _ in entered])
    rounds: list[list[Outcome]] = [[] for _ in entered]
    for _ in range(ROUNDS):
        for outcomes, (knobs, _) in zip(rounds, entered, strict=True):
            if not outcomes or outcomes[-1].is_timed:
                outcomes.append(bench.measure(candidate_of(task, knobs), REPEATS))
    contenders = tuple(
        Contender(knobs, origin, joined(outcomes)) for (knobs, origin), outcomes in zip(entered, rounds, strict=True)
    )
    return Race(task, contenders, in_use, setting.floor)


def _entered(task: Task, study: KnobStudy, device: Device, in_use: Knobs) -> list[tuple[Knobs, str]]:
    entered = _unchallenged(task.default(device), in_use)
    whole = _timed(study)
    records = [tried for tried in whole if tried.origin == "record"]
    others = sorted(whole, key=lambda tried: tried.outcome.seconds)[: FINALISTS + 2]
    for tried in [*records, *others]:
        if len(entered) <= FINALISTS + len(records) and all(dict(tried.knobs) != dict(knobs) for knobs, _ in entered):
            entered.append((tried.knobs, tried.origin))
    return entered


def _unchallenged(default: Knobs, in_use: Knobs) -> list[tuple[Knobs, str]]:
    """The default, and the record in use if there is one."""
    return [(default, "default"), *([(in_use, "record")] if dict(in_use) != dict(default) else [])]
