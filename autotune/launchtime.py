"""Times of chains of launches and of whole steps, as graphs and with cold weights.

In: calls. Out: a ``Timing``. The launches of one kernel over all layers follow each other with the programmatic launch
that each has in the step. A chain that moves more than the L2 cache holds is cold by itself: a pass that does not count
goes first. Before each pass of any other a larger block of memory is overwritten. Either way the GPU is busy until the
host has started what is timed.

Example::

    timer.chain(calls, columns, repeats=5, is_rotating=True).over(len(calls))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lynnc.autotune.conditions import Pace
from lynnc.bench.timing import Timing, timing_of
from lynnc.runtime.device import Call, StepGraph
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Columns


@dataclass(frozen=True, slots=True)
class Timer:
    """``flush`` is memory of ``flush_bytes`` that holds nothing; ``say_alive`` is called before each run."""

    executor: Executor
    flush: int
    flush_bytes: int
    pace: Pace
    say_alive: Callable[[], None]

    def chain(self, calls: Sequence[Call], columns: Columns, repeats: int, is_rotating: bool) -> Timing:
        """GPU seconds of some launches as a graph, at least one run even if it takes long."""
        once = self._behind_itself if is_rotating else self._behind_flush
        graph = self.capture(calls)
        try:
            passes = _passes(once(graph, columns, 1), self.pace.run_seconds, self.pace.most)
            ends = time.monotonic() + self.pace.enough_seconds
            seconds: list[float] = []
            while len(seconds) < repeats and (not seconds or time.monotonic() < ends):
                self.say_alive()
                seconds.append(once(graph, columns, passes))
        finally:
            graph.close()
        return timing_of(seconds)

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
