"""Inputs of steps on their way to the GPU, in pinned memory of the host.

In: columns of integers. Out: their copies in GPU memory, in the order of the stream. The inputs of each step lie behind
those of the one before, so the host prepares and starts several steps without waiting for the first: only when all
places are taken does it wait for the GPU to have read them.

Example::

    staging = Staging(device, device.allocate_host(16 * step_bytes))
    staging.upload(addresses, rows_columns)
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from lynnc.runtime.device import Device, HostMemory

STEPS_STAGED = 16
"""Of the longest step: how many have their inputs staged before the host waits."""


@dataclass(slots=True)
class Staging:
    """``used`` bytes of the pinned memory hold inputs that the GPU may not have read yet."""

    device: Device
    memory: HostMemory
    used: int = 0

    def upload(self, addresses: Mapping[str, int], columns: Mapping[str, array[int]]) -> None:
        """Copies each column to the address of its name."""
        data = {name: column.tobytes() for name, column in columns.items()}
        size = sum(map(len, data.values()))
        if self.used + size > len(self.memory.view):
            self.device.synchronize()
            self.used = 0
        first, self.used = self.used, self.used + size
        self.memory.view[first : self.used] = b"".join(data.values())
        for name, part in data.items():
            self.device.upload(addresses[name], self.memory.address + first, len(part))
            first += len(part)
