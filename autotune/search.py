"""The search for one task: candidates are drawn, refused or compiled ahead, measured, and dropped early or kept.

In: a task, its study, a bench, an allowance. Out: nothing but what stands in the study afterwards. The default and the
best known record come first and always get every repeat. A small space is tried whole; in a larger one the sampler
and the neighbours of the best so far take turns. Of each round of repeats the better half goes on to the next.

Example::

    search = Search(task, study, bench, Setting(device), legal_space(task, device.target))
    search.begin([record.knobs])
    search.run(budget.part(0.3), budget)
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lynnc.autotune.bounds import identity, least_bound, lower_bound
from lynnc.autotune.budget import Allowance, Budget
from lynnc.autotune.legalspace import LegalSpace
from lynnc.autotune.noise import FLOOR, difference_that_counts
from lynnc.autotune.problems import Task
from lynnc.autotune.studies import KnobStudy, Ticket
from lynnc.autotune.sweep import Tried
from lynnc.autotune.trial import Bench, Candidate, Outcome, Status
from lynnc.kernels.kernel import Knobs
from lynnc.target import Device

REPEATS = (5, 10, 20)
"""Runs of a candidate in each round; half of the candidates go on to the next."""
WHOLE_SPACE = 64
"""Kernels of a space that is tried whole."""
MOST_DRAWS = 48
"""Draws in a row that may be refused or known before a legal candidate is taken at random."""
RANDOM_DRAWS = 400
"""Random combinations that are looked at for a legal one that is new, before the space counts as used up."""
AHEAD = 12
"""Candidates that compile while one is measured."""
FIRST = 4
"""Candidates that compile before a task's turn comes."""
PATIENCE = 6
"""Timed candidates for each knob without a gain that counts, after which more are not expected to bring one."""
WAIT_SECONDS = 0.02
"""Between looks whether a candidate is compiled."""
LOOK_SECONDS = 3.0
"""Between looks at what other workers did."""

Say = Callable[[Task, Tried], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the roofline needs, the seed of random choices, and by what part a time must be less to count as less."""

    device: Device
    context: int = 4096
    seed: int = 0
    ahead: int = AHEAD
    floor: float = FLOOR


class Search:
    """One task by one worker."""

    def __init__(self, task: Task, study: KnobStudy, bench: Bench, setting: Setting, space: LegalSpace) -> None:
        self.task, self.study, self._space = task, study, space
        self._bench, self._setting = bench, setting
        self._random = random.Random(f"{setting.seed} {task.name}")
        self._window: deque[Ticket] = deque()
        self._tried: set[str] = set()  # kernels
        self._in_hand: Counter[str] = Counter()  # kernels that some worker held when that was looked at last
        self._best: Outcome | None = None
        self._best_knobs: Knobs = {}
        self._is_neighbours_turn = False
        self._whole_space = self._kernels_of_small_space()
        self._is_used_up = False
        self._looked = 0.0

    def begin(self, records: Sequence[Knobs]) -> None:
        """Puts the default in front, then the records, then every kernel of a small space, and has the first compiled.

        ``run`` or ``release`` must follow.
        """
        self.study.replace_lost()
        self.study.offer(self.task.default(self._setting.device), "default")
        for knobs in records:
            self.study.offer(knobs, "record")
        for knobs in self._whole_space:
            self.study.offer(knobs, "whole space")
        self._look_at_others()
        self._fill(min(FIRST, self._setting.ahead))

    def run(self, allowance: Allowance, budget: Budget, say: Say | None = None) -> None:
        """Measures until the allowance is used up or nothing more is to be expected; puts back what it still holds."""
        try:
            while allowance.is_left() and not self.is_settled():
                self._look_at_others()
                self._fill(self._setting.ahead)
                ticket = self._next(allowance)
                if ticket is None:
                    return
                outcome = self._measure(ticket)  # put back with the others if it is interrupted
                self._window.remove(ticket)
                budget.spend()
                if say:
                    say(self.task, Tried(ticket.trial.number, ticket.knobs, outcome, ticket.origin))
        finally:
            self.release()

    def _next(self, allowance: Allowance) -> Ticket | None:
        """The first in hand that is compiled: what keeps a compiler busy for a minute keeps the device from nothing."""
        while self._window:
            ready = next(
                (ticket for ticket in self._window if self._bench.is_ready(self._candidate(ticket.knobs))), None
            )
            if ready is not None or not allowance.is_left():
                return ready
            time.sleep(WAIT_SECONDS)
        return None

    def release(self) -> None:
        """Puts back what was drawn and not measured."""
        self.study.put_back(*self._window)
        self._window.clear()

    def is_settled(self) -> bool:
        """Whether no further gain is expected: the roofline is reached, or the last candidates brought none."""
        best = self._best
        if best is None or self._whole_space or any(ticket.is_guarded for ticket in self._window):
            return False
        bound = least_bound(self.task, self._setting.device, self._setting.context)
        if best.seconds - bound <= difference_that_counts(best, best):
            return True
        return self._is_without_gain() and self._new_neighbour() is None

    def _is_without_gain(self) -> bool:
        """Whether the best of all is no better, beyond the noise, than the best before the last candidates."""
        knobs = sum(len(knob.values) > 1 for knob in self._space.knobs.values())
        timed = [tried.outcome for tried in self.study.tried() if tried.outcome.is_timed]
        patience = PATIENCE * max(knobs, 1)
        if len(timed) <= patience:
            return False
        before = min(timed[:-patience], key=lambda outcome: outcome.seconds)
        best = min(timed, key=lambda outcome: outcome.seconds)
        return before.seconds - best.seconds <= difference_that_counts(before, best)

    def _kernels_of_small_space(self) -> tuple[Knobs, ...]:
        """Every kernel of the space, each once, where they are few; else nothing."""
        kernels: dict[str, Knobs] = {}
        for knobs in self._space.combinations:
            kernels.setdefault(identity(self.task, knobs), knobs)
            if len(kernels) > WHOLE_SPACE:
                return ()
        return tuple(kernels.values())

    def _refusal(self, knobs: Knobs) -> str | None:
        return self.task.kernel.refusal(self.task.problem, knobs, self._setting.device.target)

    def _look_at_others(self) -> None:
        """Takes over what other workers finished or lost, now and then."""
        now = time.monotonic()
        if self._looked and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self.study.replace_lost()
        self._look_at_hands()
        for tried in self.study.tried():
            if tried.outcome.status is not Status.REFUSED:
                self._tried.add(identity(self.task, tried.knobs))
            if tried.is_whole:
                self._take(tried.outcome, tried.knobs)

    def _look_at_hands(self) -> None:
        self._in_hand = Counter(identity(self.task, knobs) for knobs in self.study.running())

    def _take(self, outcome: Outcome, knobs: Knobs) -> None:
        """Remembers the best time of every repeat."""
        if outcome.is_timed and (self._best is None or outcome.seconds < self._best.seconds):
            self._best, self._best_knobs = outcome, knobs

    def _fill(self, most: int) -> None:
        """Draws until so many candidates are in hand, and has them compiled."""
        fresh = []
        while len(self._window) < most and not self._is_used_up:
            ticket = self._draw()
            if ticket is None:
                self._is_used_up = True
            else:
                self._window.append(ticket)
                fresh.append(self._candidate(ticket.knobs))
        if fresh:
            self._bench.prepare(fresh)

    def _draw(self) -> Ticket | None:
        """A legal candidate that is new and not hopeless, or None if there seems to be none."""
        for _ in range(MOST_DRAWS):
            if self._whole_space and not self.study.has_offers():
                return None
            self._offer_neighbour()
            ticket = self._accept(self.study.draw())
            if ticket is not None:
                return ticket
        knobs = self._random_new()
        if knobs is None:
            return None
        self.study.offer(knobs, "random")
        return self._accept(self.study.draw())

    def _offer_neighbour(self) -> None:
        """Every other time, something next to the best so far."""
        self._is_neighbours_turn = not self._is_neighbours_turn
        knobs = self._new_neighbour() if self._is_neighbours_turn and not self._whole_space else None
        if knobs is not None:
            self.study.offer(knobs, "neighbour")

    def _new_neighbour(self) -> Knobs | None:
        """A legal candidate that is new and differs from the best in one knob by one value."""
        moves = []
        for name, value in self._best_knobs.items():
            values = self._space.knobs[name].values
            near = (values.index(value) - 1, values.index(value) + 1)
            moves += [{**self._best_knobs, name: values[index]} for index in near if 0 <= index < len(values)]
        return self._first_new(self._random.sample(moves, len(moves)))

    def _accept(self, ticket: Ticket) -> Ticket | None:
        why = self._refusal(ticket.knobs) or self._hopeless(ticket)
        if why:
            self.study.finish(ticket, Outcome(Status.REFUSED, reason=why))
            return None
        same = identity(self.task, ticket.knobs)
        if not ticket.is_guarded and self._has_twin(same):
            self.study.drop(ticket, "the same kernel was tried before")
            return None
        self._in_hand[same] += 1
        return ticket

    def _has_twin(self, same: str) -> bool:
        """Whether the kernel of a candidate just drawn was tried, or is in hand a second time: others may have put it
        back since, or died."""
        if same in self._in_hand and same not in self._tried:
            self._look_at_hands()
            return self._in_hand[same] > 1
        return same in self._tried

    def _hopeless(self, ticket: Ticket) -> str | None:
        best = self._best
        if best is None or ticket.is_guarded:
            return None
        bound = lower_bound(self.task, ticket.knobs, self._setting.device, self._setting.context)
        if bound <= best.seconds:
            return None
        return f"the roofline allows no less than {bound * 1e6:.2f} us, the best takes {best.seconds * 1e6:.2f} us"

    def _random_new(self) -> Knobs | None:
        listed, space = self._space.combinations, self._space.knobs
        if listed:
            return self._first_new(self._random.sample(listed, len(listed)))
        return self._first_new(
            {name: self._random.choice(knob.values) for name, knob in space.items()} for _ in range(RANDOM_DRAWS)
        )

    def _first_new(self, proposals: Iterable[Knobs]) -> Knobs | None:
        for knobs in proposals:
            same = identity(self.task, knobs)
            if self._refusal(knobs) is None and same not in self._tried and same not in self._in_hand:
                return knobs
        return None

    def _measure(self, ticket: Ticket) -> Outcome:
        candidate = self._candidate(ticket.knobs)
        self.study.begin(ticket)
        for step, repeats in enumerate(REPEATS):
            outcome = self._bench.measure(candidate, repeats)
            if not outcome.is_timed:
                return self._finish(ticket, outcome)
            is_last = step == len(REPEATS) - 1
            if not self.study.report(ticket, outcome, 1 << step) and not is_last:
                return self._finish(ticket, outcome, is_whole=False)
        self._take(outcome, ticket.knobs)
        return self._finish(ticket, outcome)

    def _finish(self, ticket: Ticket, outcome: Outcome, is_whole: bool = True) -> Outcome:
        if self.study.finish(ticket, outcome, is_whole):
            self._tried.add(identity(self.task, ticket.knobs))
        return outcome

    def _candidate(self, knobs: Knobs) -> Candidate:
        return candidate_of(self.task, knobs)


def candidate_of(task: Task, knobs: Knobs) -> Candidate:
    """The candidate of some knobs for a task."""
    return Candidate(task.program, task.kernel.name, task.problem, dict(knobs))
