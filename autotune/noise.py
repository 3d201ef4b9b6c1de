"""When two times differ: the noise of a measurement, and who wins a race.

In: ``Outcome`` values of medians with their least and greatest run. Out: whether one is faster than another beyond the
noise of both; else it is a tie, which goes to the one that comes first.

Example::

    noise_of(Outcome(Status.TIMED, 10e-6, 9.9e-6, 10.3e-6, 20))     # standard error of the median, 3.1e-8 or so
    is_faster(challenger, default)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from lynnc.autotune.trial import Outcome, Status

MEDIAN_FACTOR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
MOST_SIGMAS = 4.0
"""Standard deviations that the range of many runs spans; of few runs it spans about the root of their number."""
SIGMAS = 2.0
"""Standard errors by which a time must be less to count as less."""
FLOOR = 0.01
"""Part of a time below which no difference counts: clocks and neighbours move it by as much between two processes."""
SIMULATED_FLOOR = 0.25
"""The same for predicted times: by less they say nothing, see ``benchmarks/results/h200-ranking.json``."""
STEP_FLOOR = 0.003
"""The same for whole steps, which are measured in turns in one process."""


def noise_of(outcome: Outcome) -> float:
    """Standard error of a median in seconds, from the range of its runs."""
    runs = max(outcome.repeats, 1)
    deviation = (outcome.greatest - outcome.least) / max(1.0, min(math.sqrt(runs), MOST_SIGMAS))
    return MEDIAN_FACTOR * deviation / math.sqrt(runs)


def difference_that_counts(one: Outcome, other: Outcome, floor: float = FLOOR) -> float:
    """Seconds by which two times must differ."""
    together = SIGMAS * math.hypot(noise_of(one), noise_of(other))
    return max(together, floor * min(one.seconds, other.seconds))


def is_faster(challenger: Outcome, holder: Outcome, floor: float = FLOOR) -> bool:
    """Whether the challenger takes less time than the holder beyond the noise."""
    if not (challenger.is_timed and holder.is_timed):
        return challenger.is_timed
    return holder.seconds - challenger.seconds > difference_that_counts(challenger, holder, floor)


def winner(outcomes: Sequence[Outcome], floor: float = FLOOR) -> int:
    """Index of the first whose time no other beats beyond the noise; ties go to those that stand in front."""
    timed = [index for index, outcome in enumerate(outcomes) if outcome.is_timed]
    best = min(timed, key=lambda index: outcomes[index].seconds, default=0)
    return next((index for index in timed if not is_faster(outcomes[best], outcomes[index], floor)), best)


def joined(rounds: Sequence[Outcome]) -> Outcome:
    """One outcome of several rounds; the first that is not timed if one is not."""
    for outcome in rounds:
        if not outcome.is_timed:
            return outcome
    return Outcome(
        Status.TIMED,
        median(outcome.seconds for outcome in rounds),
        min(outcome.least for outcome in rounds),
        max(outcome.greatest for outcome in rounds),
        sum(outcome.repeats for outcome in rounds),
    )
