"""Times of chains of launches and of whole steps, as graphs and with cold weights.

In: calls. Out: a ``Timing``. Before each run a block of memory larger than the L2 cache is overwritten, so that no run
finds weights that the one before has left there, and the GPU is busy until the host has started the graph. The launches
of one kernel over all layers follow each other as in the step: each has the programmatic launch that it has there.

Example::

    timer = Timer(executor, flush, flush_bytes)
    timer.chain(calls, columns, repeats=5).over(len(calls))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lynnc.autotune.conditions import Pace
from lynnc.bench.timing import Timing, timing_of
from lynnc.runtime.device import Call, StepGraph
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Columns


@dataclass(frozen=True, slots=True)
class Timer:
    """``flush`` is memory of ``flush_bytes`` that holds nothing."""

    executor: Executor
    flush: int
    flush_bytes: int
    pace: Pace

    def chain(self, calls: Sequence[Call], columns: Columns, repeats: int) -> Timing:
        """GPU seconds of some launches as a graph, at least one run even if it takes long."""
        graph = self.capture(calls)
        try:
            passes = _passes(self._once(graph, columns, 1), self.pace.run_seconds, self.pace.most)
            ends = time.monotonic() + self.pace.enough_seconds
            seconds: list[float] = []
            while len(seconds) < repeats and (not seconds or time.monotonic() < ends):
                seconds.append(fmean(self._once(graph, columns, 1) for _ in range(passes)))
        finally:
            graph.close()
        return timing_of(seconds)

    def steps(self, graphs: Sequence[StepGraph], columns: Columns, repeats: int, most: int) -> list[Timing]:
        """Seconds of a step by each graph, taken in turns: what drifts, drifts for all of them. No more than ``most``
        steps follow each other."""
        seconds: list[list[float]] = [[] for _ in graphs]
        slowest = max((self._once(graph, columns, 1) for graph in graphs), default=0.0)
        count = _passes(slowest, self.pace.step_seconds, min(most, self.pace.most_steps))
        for turn in range(repeats):
            for place in range(len(graphs)):
                which = (place + turn) % len(graphs)
                seconds[which].append(self._once(graphs[which], columns, count))
        return [timing_of(found) for found in seconds]

    def capture(self, calls: Sequence[Call]) -> StepGraph:
        """A graph of launches, of which the first waits for what came before."""
        return self.executor.device.capture([replace(calls[0], has_pdl=False), *calls[1:]])

    def _once(self, graph: StepGraph, columns: Columns, count: int) -> float:
        """Seconds of one of ``count`` passes."""
        device = self.executor.device
        self.executor.write_columns(columns)
        device.fill(self.flush, 0, self.flush_bytes)
        first = device.mark()
        for _ in range(count):
            graph.launch()
        return device.seconds_between(first, device.mark()) / count


def _passes(seconds: float, wanted: float, most: int) -> int:
    """How often something of some seconds is run to take as long as wanted."""
    return max(1, min(most, round(wanted / seconds) if seconds else most))
