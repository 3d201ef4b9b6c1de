"""Chains of launches on a GPU that takes a fixed time for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lynnc.autotune.conditions import Pace
from lynnc.autotune.launchtime import LEAST_CALLS, Timer
from lynnc.runtime.device import Call


@dataclass
class Gpu:
    """Its clock moves by launches alone; ``captured`` are the sizes of graphs, ``open`` how many are not closed."""

    launch_seconds: float
    now: float = 0.0
    captured: list[int] = field(default_factory=list)
    open: int = 0
    fills: int = 0

    def capture(self, calls: Sequence[Call]) -> Any:
        self.captured.append(len(calls))
        self.open += 1
        return SimpleNamespace(launch=lambda: self.run(len(calls)), close=self.closed)

    def run(self, count: int) -> None:
        self.now += count * self.launch_seconds

    def closed(self) -> None:
        self.open -= 1

    def mark(self) -> float:
        return self.now

    def seconds_between(self, first: float, last: float) -> float:
        return last - first

    def fill(self, address: int, value: int, size: int) -> None:
        self.fills += 1


def chain(gpu: Gpu, calls: int, cold_calls: int) -> Any:
    executor: Any = SimpleNamespace(device=gpu, write_columns=lambda columns: None)
    call = Call("op", "kernel", (1, 1, 1), (), True)
    timer = Timer(executor, 0, 100, Pace(chain_seconds=4e-3), lambda: None)
    return timer.chain([call] * calls, {}, repeats=3, cold_calls=cold_calls)


@pytest.mark.parametrize(
    ("launch_seconds", "cold_calls", "captured"),
    [
        (50e-6, 9, [40]),  # 2 ms in all
        (300e-6, 9, [40, 14]),  # 4 ms
        (300e-6, 20, [40, 20]),  # as many as leave no weight in the cache
        (5e-3, 1, [40, LEAST_CALLS]),
        (5e-3, 0, [40, LEAST_CALLS]),  # behind a flushed cache
    ],
)
def test_a_long_chain_is_timed_in_part(launch_seconds: float, cold_calls: int, captured: list[int]) -> None:
    gpu = Gpu(launch_seconds)
    timing = chain(gpu, 40, cold_calls)
    assert gpu.captured == captured and gpu.open == 0
    assert timing.median == pytest.approx(launch_seconds) and timing.runs == 3
    assert (gpu.fills > 0) is (cold_calls == 0)


def test_a_short_chain_is_timed_whole_however_long_it_takes() -> None:
    gpu = Gpu(1.0)
    assert chain(gpu, 2, 1).median == pytest.approx(1.0) and gpu.captured == [2]
