"""How long to tune: seconds, candidates or both, handed out in parts.

In: what the user allows, and a clock. Out: for each task an ``Allowance`` that says whether there is more; what one
task leaves goes to the next.

Example::

    budget = Budget(seconds=600)
    allowance = budget.part(0.4)        # 40 % of what is left for the search
    while allowance.is_left():
        measure(...)
        budget.spend()
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from lynnc.errors import OptionError

CONFIRMING = 0.2
"""Part of the time that is kept for racing the best again and for whole steps."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LEAST_TRIALS = 4
"""Candidates of a task that is begun at all."""

Clock = Callable[[], float]


def parse_duration(text: str) -> float:
    """``90s``, ``10m``, ``1.5h`` or ``1h30m`` in seconds; OptionError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise OptionError(f"--budget {text}: write a time with its unit, such as 90s, 10m or 1h30m.")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not seconds:
        raise OptionError(f"--budget {text}: give more than no time, such as 10m.")
    return seconds


class Budget:
    """Seconds and candidates of a run; either may be without limit."""

    def __init__(self, seconds: float | None = None, trials: int | None = None, clock: Clock = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._end = math.inf if seconds is None else clock() + seconds
        self._search_end = math.inf if seconds is None else clock() + (1 - CONFIRMING) * seconds
        self._trials = math.inf if trials is None else trials
        self.spent = 0

    @property
    def seconds_spent(self) -> float:
        """Since the budget began."""
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float:
        """Until everything must be done."""
        return self._end - self._clock()

    @property
    def search_seconds_left(self) -> float:
        """Until the search must be done."""
        return self._search_end - self._clock()

    @property
    def trials_left(self) -> float:
        """Candidates that may still be measured."""
        return self._trials - self.spent

    def spend(self) -> None:
        """One candidate more was measured."""
        self.spent += 1

    def part(self, fraction: float) -> Allowance:
        """A part of what the search has left; what is not used stays in the budget."""
        now = self._clock()
        trials = self.trials_left if math.isinf(self.trials_left) else math.ceil(fraction * self.trials_left)
        return Allowance(self, now + fraction * self.search_seconds_left, self.spent + trials, self._clock)


class Allowance:
    """What one task may take."""

    def __init__(self, budget: Budget, end: float, most_spent: float, clock: Clock) -> None:
        self._budget, self._end, self._clock = budget, end, clock
        self._first, self._most_spent = budget.spent, most_spent

    def is_left(self) -> bool:
        """Whether another candidate may be measured: a task that was begun gets its first few."""
        if self._budget.trials_left <= 0 or self._budget.search_seconds_left <= 0:
            return False
        if self._budget.spent - self._first < LEAST_TRIALS:
            return True
        return self._clock() < self._end and self._budget.spent < self._most_spent
