"""Times of what torch launches on a GPU, by events on it.

In: something that launches. Out: a ``Timing`` of repeated runs, of which the first does not count.

Example::

    time_on_gpu(graph.replay, 15).median
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lynnc.bench.timing import Timing, timing_of


def time_on_gpu(run: Callable[[], object], repeats: int) -> Timing:
    """GPU time of a run, several times."""
    seconds = []
    for _ in range(repeats + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3)
    return timing_of(seconds[1:])
