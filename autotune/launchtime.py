"""Times of chains of launches and of whole steps, as graphs and with cold weights.

In: calls. Out: a ``Timing``. The launches of one kernel over all layers follow each other with the programmatic launch
that each has in the step. A chain that moves more than the L2 cache holds is cold by itself: a pass that does not count
goes first. Before each pass of any other a larger block of memory is overwritten. Either way the GPU is busy until the
host has started what is timed. Of a chain that takes long a part is timed: launches of all layers are alike.

Example::

    timer.chain(calls, columns, repeats=5, cold_calls=9)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import fmean

from lynnc.autotune.conditions import Pace
from lynnc.bench.timing import Timing, timing_of
from lynnc.runtime.device import Call, StepGraph
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Columns

LEAST_CALLS = 4
"""Launches of a chain that is timed in part."""


@dataclass(frozen=True, slots=True)
class Timer:
    """``flush`` is memory of ``flush_bytes`` that holds nothing; ``say_alive`` is called before each run."""

    executor: Executor
    flush: int
    flush_bytes: int
    pace: Pace
    say_alive: Callable[[], None]

    def chain(self, calls: Sequence[Call], columns: Columns, repeats: int, cold_calls: int) -> Timing:
        """GPU seconds of one of some launches, which run as a graph, at least one run even if it takes long.

        So many of them as ``cold_calls`` leave nothing in the cache of what the next pass reads first; it is 0 if all
        together leave something.
        """
        once = self._behind_itself if cold_calls else self._behind_flush
        with ExitStack() as undo:
            graph = undo.enter_context(closing(self.capture(calls)))
            whole = once(graph, columns, 1)
            wanted = math.ceil(len(calls) * self.pace.chain_seconds / whole) if whole else len(calls)
            count = min(len(calls), max(wanted, cold_calls, LEAST_CALLS))
            if count < len(calls):
                graph = undo.enter_context(closing(self.capture(calls[:count])))
            passes = _passes(whole * count / len(calls), self.pace.run_seconds, self.pace.most)
            ends = time.monotonic() + self.pace.enough_seconds
            seconds: list[float] = []
            while len(seconds) < repeats and (not seconds or time.monotonic() < ends):
                self.say_alive()
                seconds.append(once(graph, columns, passes))
        return timing_of(seconds).over(count)

    def steps(self, graphs: Sequence[StepGraph], columns: Columns, repeats: int, most: int) -> list[Timing]:
        """Seconds of a step by each graph, taken in turns: what drifts, drifts for all of them. No more than ``most``
        steps follow each other, the one included that does not count."""
        seconds: list[list[float]] = [[] for _ in graphs]
        slowest = max((self._behind_itself(graph, columns, 1) for graph in graphs), default=0.0)
        count = _passes(slowest, self.pace.step_seconds, max(1, min(most - 1, self.pace.most_steps)))
        for turn in range(repeats):
            for place in range(len(graphs)):
                which = (place + turn) % len(graphs)
                self.say_alive()
                seconds[which].append(self._behind_itself(graphs[which], columns, count))
        return [timing_of(found) for found in seconds]

    def capture(self, calls: Sequence[Call]) -> StepGraph:
        """A graph of launches, of which the first waits for what came before."""
        return self.executor.device.capture([replace(calls[0], has_pdl=False), *calls[1:]])

    def _behind_itself(self, graph: StepGraph, columns: Columns, count: int) -> float:
        """Seconds of one of ``count`` passes that follow one."""
        self.executor.write_columns(columns)
        graph.launch()
        return self._passed(graph, count)

    def _behind_flush(self, graph: StepGraph, columns: Columns, count: int) -> float:
        """Mean seconds of ``count`` passes, each behind a flushed cache."""
        seconds = []
        for _ in range(count):
            self.executor.write_columns(columns)
            self.executor.device.fill(self.flush, 0, self.flush_bytes)
            seconds.append(self._passed(graph, 1))
        return fmean(seconds)

    def _passed(self, graph: StepGraph, count: int) -> float:
        device = self.executor.device
        first = device.mark()
        for _ in range(count):
            graph.launch()
        return device.seconds_between(first, device.mark()) / count


def _passes(seconds: float, wanted: float, most: int) -> int:
    """How often something of some seconds is run to take as long as wanted."""
    return max(1, min(most, round(wanted / seconds) if seconds else most))
