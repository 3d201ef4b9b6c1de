"""A device that is no GPU: memory is the host's, and kernels run in Triton's interpreter.

In: calls of the runtime, with addresses. Out: the same memory contents as a GPU's. It lets the whole runtime run
without one; what only a GPU shows (machine code, streams, graphs) is not shown here. Triton's interpreter takes seconds
for a step of a tiny model, so ``runs`` may be another function of a step's calls: ``Meaning.run`` for their meaning, or
``record_only`` where nothing depends on values.

Example::

    device = SimulatedDevice()
    executor = prepare(plan, {}, source, device)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lynnc.artifact import Parameter
from lynnc.errors import DeviceError
from lynnc.plan import KernelEntry
from lynnc.runtime.cudadevice import kernel_facts
from lynnc.runtime.device import Call, DeviceFacts, KernelFacts
from lynnc.runtime.random.fill import Fill
from lynnc.runtime.random.fillbits import fill_array
from lynnc.simulate import POINTER_DTYPE, Simulator

POISON = 0xFF
ALIGNMENT = 256
LAUNCH_SECONDS = 1e-6
"""What a launch takes by the device's clock."""


@dataclass(frozen=True)
class Block:
    """An allocation; ``buffer`` keeps it alive."""

    address: int
    size: int
    buffer: Any = field(repr=False)

    @property
    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


@dataclass
class SimulatedGraph:
    device: SimulatedDevice
    calls: tuple[Call, ...]
    is_closed: bool = False

    @property
    def nodes(self) -> int:
        return len(self.calls)

    def launch(self) -> None:
        assert not self.is_closed
        self.device.launch(self.calls)

    def close(self) -> None:
        self.is_closed = True


def record_only(calls: Sequence[Call]) -> None:
    """Launches nothing."""


class SimulatedDevice:
    """``lynnc.runtime.device.Device`` on the host. ``fail_at`` names an op whose launch fails."""

    def __init__(
        self,
        memory_bytes: int = 1 << 34,
        capability: int = 90,
        runs: Callable[[Sequence[Call]], None] | None = None,
    ) -> None:
        self.facts = DeviceFacts("simulated GPU", capability, 4, memory_bytes, 1 << 20, "0.0")
        self.blocks: list[Block] = []
        self.pinned: list[Block] = []
        self.entries: dict[str, KernelEntry] = {}
        self.launched: list[Call] = []
        self.fail_at = ""
        self.is_closed = False
        self.runs = runs or self.run_kernels

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.entries, {}, {}, 0)

    def free_bytes(self) -> int:
        return self.facts.memory_bytes - self.taken

    @property
    def taken(self) -> int:
        return sum(block.size for block in self.blocks)

    def allocate(self, size: int) -> int:
        if size > self.free_bytes():
            raise DeviceError(f"Allocating {size} bytes of GPU memory failed: out of memory.")
        self.blocks.append(_block(size))
        return self.blocks[-1].address

    def allocate_host(self, size: int) -> Block:
        self.pinned.append(_block(size))
        ctypes.memset(self.pinned[-1].address, 0, size)
        return self.pinned[-1]

    def free_host(self, memory: Block) -> None:
        self.pinned.remove(memory)

    def free_all(self) -> None:
        self.blocks.clear()
        self.pinned.clear()
        self.entries.clear()

    def close(self) -> None:
        self.free_all()
        self.is_closed = True

    def make_current(self) -> None:
        pass

    def fill(self, address: int, byte: int, size: int) -> None:
        self._room(address, size)
        ctypes.memset(address, byte, size)

    def fill_random(self, fill: Fill, seed: int, address: int) -> None:
        values = fill_array(fill, seed)
        self.upload(address, values.ctypes.data, values.nbytes)

    def upload(self, address: int, source: int, size: int) -> None:
        self._room(address, size)
        ctypes.memmove(address, source, size)

    def download(self, target: int, address: int, size: int) -> None:
        self._room(address, size)
        ctypes.memmove(target, address, size)

    def load_kernel(self, entry: KernelEntry, cubin: bytes) -> KernelFacts:
        self.entries[entry.key] = entry
        if entry.artifact:
            return kernel_facts(entry)
        parameters = tuple(Parameter(name, kind) for name, kind in entry.signature.items())
        hidden = Parameter("global_scratch", "*i8", hidden=True)
        return KernelFacts("kernel", 128, 0, 0, bool(entry.structure["pdl"]), (*parameters, hidden))

    def unload_kernel(self, key: str) -> None:
        del self.entries[key]

    def launch(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if call.op == self.fail_at:
                raise DeviceError(f"Running {call.op} failed: launch failed.")
            assert call.kernel in self.entries, f"{call.op} is launched with a kernel that was not loaded"
        self.launched += calls
        self.runs(calls)

    def run_kernels(self, calls: Sequence[Call]) -> None:
        """In Triton's interpreter."""
        for call in calls:
            entry = self.entries[call.kernel]
            values = zip(entry.signature.items(), call.values, strict=False)
            arguments = {name: self._argument(kind, value) for (name, kind), value in values}
            self.simulator.function(entry)[call.grid](**arguments, **entry.constants)

    def _argument(self, kind: str, value: int) -> Any:
        if kind not in POINTER_DTYPE:
            return value
        dtype = POINTER_DTYPE[kind]
        if value == 0:
            return torch.zeros(1, dtype=dtype)
        count = self._room(value) // dtype.itemsize
        return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(value), dtype=dtype)

    def _room(self, address: int, size: int = 0) -> int:
        """Bytes from an address to the end of its allocation, at least ``size``."""
        for block in [*self.blocks, *self.pinned]:
            left = block.address + block.size - address
            if address >= block.address and left >= max(size, 1):
                return left
        raise AssertionError(f"{size} bytes at {address} lie in no allocation")

    def capture(self, calls: Sequence[Call]) -> SimulatedGraph:
        return SimulatedGraph(self, tuple(calls))

    def synchronize(self) -> None:
        pass

    def synchronize_all(self) -> None:
        pass

    def is_idle(self) -> bool:
        return True

    def mark(self) -> int:
        return len(self.launched)

    def wait_for(self, mark: Any) -> None:
        pass

    def seconds_between(self, first: int, last: int) -> float:
        return (last - first) * LAUNCH_SECONDS


def _block(size: int) -> Block:
    """Memory that holds no zeros, at a multiple of ``ALIGNMENT``."""
    buffer = ctypes.create_string_buffer(size + ALIGNMENT)
    address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    ctypes.memset(address, POISON, size)
    return Block(address, size, buffer)
