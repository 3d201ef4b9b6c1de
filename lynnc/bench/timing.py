"""Times of decode steps on a GPU.

In: an executor, a context and how often to measure. Out: a ``Timing``: median, least and greatest of repeated runs. The
caches hold zeros where no prompt was read: a step costs the same whatever they hold.

Example::

    timing = time_decode(executor, context=128, effort=Effort())
    1 / timing.median                                        # tokens a second
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import rows_of

TOKEN = 1
"""The token that a measured sequence goes on from."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Repeats whose median counts, steps of each, and steps before the first."""

    repeats: int = 20
    steps: int = 50
    warmup: int = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: median and spread (least, greatest) of ``runs`` runs."""

    median: float
    least: float
    greatest: float
    runs: int

    def over(self, count: float) -> Timing:
        """The time of one of ``count`` equal parts."""
        return Timing(self.median / count, self.least / count, self.greatest / count, self.runs)


def timing_of(seconds: Sequence[float]) -> Timing:
    """Median and spread of measured times."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def repeat(executor: Executor, run: Callable[[], None], repeats: int) -> Timing:
    """GPU time of a run, several times; the first one is not counted."""
    device, seconds = executor.device, []
    for index in range(repeats + 1):
        first = device.mark()
        run()
        passed = device.seconds_between(first, device.mark())
        if index:
            seconds.append(passed)
    return timing_of(seconds)


def time_decode(executor: Executor, context: int, effort: Effort) -> Timing:
    """GPU time of one step that decodes one token behind ``context`` tokens, on the captured graph."""

    def run() -> None:
        executor.enqueue(effort.steps)

    executor.assume(context, TOKEN)
    executor.enqueue(effort.warmup)
    seconds = []
    for _ in range(effort.repeats):
        executor.assume(context, TOKEN)
        executor.enqueue(1)
        first = executor.device.mark()
        run()
        seconds.append(executor.device.seconds_between(first, executor.device.mark()))
    return timing_of(seconds).over(effort.steps)


def time_rows(executor: Executor, rows: int, context: int, effort: Effort) -> Timing:
    """GPU time of a step of several rows of one sequence behind ``context`` tokens; each repeat begins there again."""
    graph, device, seconds = executor.graph(f"decode/{rows}"), executor.device, []
    for _ in range(effort.repeats):
        executor.write_rows(rows_of([TOKEN] * rows, context))
        graph.launch()
        first = device.mark()
        for _ in range(effort.steps):
            graph.launch()
        seconds.append(device.seconds_between(first, device.mark()))
    return timing_of(seconds).over(effort.steps)


def time_generation(executor: Executor, context: int, effort: Effort) -> tuple[Timing, Timing]:
    """Wall time of a decoded token, the host included, and the host's own time to start one."""
    walls, hosts = [], []
    for _ in range(effort.repeats):
        executor.assume(context, TOKEN)
        executor.decode(1)
        started = time.perf_counter()
        executor.enqueue(effort.steps)
        hosts.append(time.perf_counter() - started)
        executor.device.synchronize()
        walls.append(time.perf_counter() - started)
    return timing_of(walls).over(effort.steps), timing_of(hosts).over(effort.steps)
