"""Seeded random weights as a source, made on the GPU at full size: for benchmarks, where no checkpoint is at hand.

Example::

    executor = load("qwen3.6-35b-a3b.h200.plan", GeneratedWeights(seed=1))
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.plan import Plan, aligned
from lynnc.runtime.device import Device
from lynnc.runtime.loading.weightsource import PlacedWeights, Progress
from lynnc.runtime.random.randomweights import random_weights


@dataclass(frozen=True, slots=True)
class GeneratedWeights:
    """Random weights of the plan's formats; the same seed gives the same bits on every GPU."""

    seed: int = 0

    def resident_bytes(self, plan: Plan) -> int:
        """All arrays, each at a multiple of 256 bytes."""
        return sum(aligned(fill.count * fill.element_bytes) for fill in random_weights(plan))

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        """One block of GPU memory with every array in it."""
        total, done = self.resident_bytes(plan), 0
        start = device.allocate(total)
        found = {}
        for fill in random_weights(plan):
            found[fill.weight, fill.array] = start + done
            device.fill_random(fill, self.seed, start + done)
            done += aligned(fill.count * fill.element_bytes)
            if progress:
                progress(done, total)
        device.synchronize()
        return PlacedWeights(found, total)
