"""What the runtime needs of a GPU, as a protocol: memory, copies, kernels, one stream, graphs.

``lynnc.runtime.cudadevice`` implements it with the CUDA driver. Addresses are integers, sizes are bytes. Everything but
allocation is ordered on one stream; a copy between host and GPU needs pinned host memory to run beside the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lynnc.artifact import Parameter
from lynnc.plan import KernelEntry
from lynnc.runtime.random.fill import Fill


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU: ``capability`` 90 is sm_90; ``driver`` the CUDA version that it serves, such as ``13.0``."""

    name: str
    capability: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What a launch must know of a machine code; the fields are those of a plan's ``artifact``."""

    symbol: str
    threads: int
    shared_bytes: int
    scratch_bytes: int
    has_pdl: bool
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One launch with everything known: the op it computes, kernel, grid in blocks, and the parameters' values.

    ``values`` are addresses and 32-bit integers in the order of the machine code's parameters, hidden ones included.
    """

    op: str
    kernel: str
    grid: tuple[int, int, int]
    values: tuple[int, ...]
    has_pdl: bool


class HostMemory(Protocol):
    """Pinned memory of the host that the GPU reaches too, at ``address`` for both."""

    @property
    def address(self) -> int:
        """Where it starts."""
        ...

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        ...


class StepGraph(Protocol):
    """A captured list of launches."""

    @property
    def nodes(self) -> int:
        """Launches in it."""
        ...

    def launch(self) -> None:
        """Runs it on the device's stream."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...


class Device(Protocol):
    """One GPU with a context and a stream; see the module's docstring."""

    @property
    def facts(self) -> DeviceFacts:
        """Name and size."""
        ...

    def free_bytes(self) -> int:
        """Memory that an allocation may take now."""
        ...

    def allocate(self, size: int) -> int:
        """Memory of the GPU, aligned to 256 bytes; DeviceError if there is not enough."""
        ...

    def allocate_host(self, size: int) -> HostMemory:
        """Pinned memory of the host, zeroed."""
        ...

    def free_host(self, memory: Any) -> None:
        """Gives pinned memory back early."""
        ...

    def make_current(self) -> None:
        """Lets the calling thread use the device."""
        ...

    def synchronize_all(self) -> None:
        """Waits for everything on the GPU, whoever started it."""
        ...

    def is_idle(self) -> bool:
        """Whether nothing is left to do on the stream; DeviceError if any of it failed."""
        ...

    def wait_for(self, mark: Any) -> None:
        """Waits until the stream has passed a mark, which is then spent."""
        ...

    def free_all(self) -> None:
        """Gives back all memory, kernels and graphs; after a lost device too."""
        ...

    def close(self) -> None:
        """Gives back the device itself, too: it is of no use any more. No harm if that was done before."""
        ...

    def fill(self, address: int, byte: int, size: int) -> None:
        """Sets memory of the GPU."""
        ...

    def fill_random(self, fill: Fill, seed: int, address: int) -> None:
        """Random elements of one array, all of it."""
        ...

    def upload(self, address: int, source: int, size: int) -> None:
        """Copies from host memory."""
        ...

    def download(self, target: int, address: int, size: int) -> None:
        """Copies to host memory."""
        ...

    def load_kernel(self, entry: KernelEntry, cubin: bytes) -> KernelFacts:
        """Makes a plan's kernel ready to be called by its key."""
        ...

    def unload_kernel(self, key: str) -> None:
        """Forgets a kernel that nothing calls any more, and no graph that is open."""
        ...

    def launch(self, calls: Sequence[Call]) -> None:
        """Starts the calls one after another."""
        ...

    def capture(self, calls: Sequence[Call]) -> StepGraph:
        """The calls as one graph."""
        ...

    def synchronize(self) -> None:
        """Waits for everything on the stream; DeviceError if any of it failed."""
        ...

    def mark(self) -> Any:
        """A point on the stream, for ``seconds_between``."""
        ...

    def seconds_between(self, first: Any, last: Any) -> float:
        """Time from one mark to a later one, waiting for it."""
        ...
