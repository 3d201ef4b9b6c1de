"""A GPU through the CUDA driver, by ``cuda-bindings``; neither torch nor Triton is needed.

In: a device's number. Out: a ``CudaDevice``. It uses the device's primary context, which torch uses too, so tensors of
either are good for the other. The driver counts who holds that context: a device that is closed lets go of it, and it
lives on for torch and for other devices.

Example::

    device = open_device(0)
    device.facts.name                                   # "NVIDIA H200"
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lynnc.artifact import Parameter
from lynnc.errors import DeviceError, PlanError
from lynnc.plan import KernelEntry
from lynnc.runtime.device import Call, DeviceFacts, KernelFacts
from lynnc.runtime.drivercalls import check, driver
from lynnc.runtime.random.fill import Fill
from lynnc.runtime.random.fillkernels import fill_launch, read_ptx

DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory of a block that needs no leave."""


def open_device(number: int = 0, debug: bool = False) -> CudaDevice:
    """The GPU of that number; DeviceError if there is no driver or no such GPU.

    ``debug`` waits after every launch, so that a failure names the launch that failed.
    """
    cuda = driver()
    check(cuda.cuInit(0), "starting the CUDA driver")
    (count,) = check(cuda.cuDeviceGetCount(), "counting GPUs")
    if not 0 <= number < count:
        raise DeviceError(f"There is no GPU {number}: the driver shows {count}; choose another --gpu.")
    (handle,) = check(cuda.cuDeviceGet(number), f"opening GPU {number}")
    (context,) = check(cuda.cuDevicePrimaryCtxRetain(handle), f"opening GPU {number}")
    with ExitStack() as undo:
        undo.callback(_release_context, handle)
        check(cuda.cuCtxSetCurrent(context), f"opening GPU {number}")
        facts = _facts(handle)
        (stream,) = check(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "making a stream")
        undo.pop_all()
    return CudaDevice(facts, handle, context, stream, debug)


def _release_context(handle: Any) -> None:
    """Lets go of the primary context, which is the calling thread's; if nobody else holds it, the thread has none."""
    cuda = driver()
    cuda.cuDevicePrimaryCtxRelease(handle)
    status, _, is_active = cuda.cuDevicePrimaryCtxGetState(handle)
    if int(status) == 0 and not is_active:
        cuda.cuCtxSetCurrent(None)


def _facts(handle: Any) -> DeviceFacts:
    cuda, names = driver(), driver().CUdevice_attribute

    def attribute(which: Any) -> int:
        return int(check(cuda.cuDeviceGetAttribute(which, handle), "asking the GPU")[0])

    major = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    version = int(check(cuda.cuDriverGetVersion(), "asking the driver")[0])
    name = check(cuda.cuDeviceGetName(256, handle), "asking the GPU")[0]
    return DeviceFacts(
        name=name.split(b"\0")[0].decode(errors="replace"),
        capability=10 * major + minor,
        sm_count=attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        memory_bytes=int(check(cuda.cuDeviceTotalMem(handle), "asking the GPU")[0]),
        l2_bytes=attribute(names.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        driver=f"{version // 1000}.{version % 1000 // 10}",
    )


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Pinned memory of the host; the GPU reads and writes it at the same address."""

    address: int
    size: int

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


@dataclass(slots=True)
class CudaGraph:
    """An instantiated graph on its device's stream."""

    executable: Any
    stream: Any
    nodes: int

    def launch(self) -> None:
        """Runs it on the device's stream."""
        check(driver().cuGraphLaunch(self.executable, self.stream), "launching the step's graph")

    def close(self) -> None:
        """Gives its memory back, once."""
        if self.executable is not None:
            driver().cuGraphExecDestroy(self.executable)
            self.executable = None


@dataclass(frozen=True, slots=True)
class EagerSteps:
    """In the place of a graph where failures shall name their launch: the same calls, one after another."""

    device: CudaDevice
    calls: tuple[Call, ...]

    @property
    def nodes(self) -> int:
        """Launches in it."""
        return len(self.calls)

    def launch(self) -> None:
        """Starts the calls, each waited for."""
        self.device.launch(self.calls)

    def close(self) -> None:
        """Nothing was taken."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel of a plan: its module, function and facts, and its types for parameter arrays."""

    module: Any
    function: Any
    facts: KernelFacts
    types: tuple[Any, ...]


@dataclass(slots=True)
class CudaDevice:
    """See ``lynnc.runtime.device.Device``."""

    facts: DeviceFacts
    handle: Any
    context: Any
    stream: Any
    debug: bool = False
    is_closed: bool = False
    _blocks: list[int] = field(default_factory=list)
    _pinned: list[int] = field(default_factory=list)
    _kernels: dict[str, _Loaded] = field(default_factory=dict)
    _graphs: list[CudaGraph] = field(default_factory=list)
    _random: list[Any] = field(default_factory=list)
    """The module of random fills, once it is loaded."""

    def make_current(self) -> None:
        """Lets the calling thread use the device."""
        check(driver().cuCtxSetCurrent(self.context), "choosing the GPU")

    def free_bytes(self) -> int:
        """Memory that an allocation may take now."""
        return int(check(driver().cuMemGetInfo(), "asking for free memory")[0])

    def allocate(self, size: int) -> int:
        """Memory of the GPU, aligned to 256 bytes; DeviceError if there is not enough."""
        address = int(check(driver().cuMemAlloc(max(size, 1)), f"allocating {size} bytes of GPU memory")[0])
        self._blocks.append(address)
        return address

    def allocate_host(self, size: int) -> PinnedMemory:
        """Pinned memory of the host, zeroed."""
        cuda = driver()
        flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(check(cuda.cuMemHostAlloc(max(size, 1), flags), f"pinning {size} bytes of host memory")[0])
        self._pinned.append(address)
        ctypes.memset(address, 0, size)
        return PinnedMemory(address, size)

    def free_host(self, memory: PinnedMemory) -> None:
        """Gives pinned memory back early."""
        self._pinned.remove(memory.address)
        check(driver().cuMemFreeHost(memory.address), "freeing pinned memory")

    def free_all(self) -> None:
        """Gives back all memory, kernels and graphs; what a lost device refuses is lost with it."""
        if self.is_closed:
            return
        cuda = driver()
        cuda.cuCtxSetCurrent(self.context)
        cuda.cuStreamSynchronize(self.stream)
        for graph in self._graphs:
            graph.close()
        for module in [*(kernel.module for kernel in self._kernels.values()), *self._random]:
            cuda.cuModuleUnload(module)
        for address in self._blocks:
            cuda.cuMemFree(address)
        for address in self._pinned:
            cuda.cuMemFreeHost(address)
        for kept in (self._graphs, self._blocks, self._pinned, self._random):
            kept.clear()
        self._kernels.clear()

    def close(self) -> None:
        """Gives everything back, the stream and the hold on the context too; no harm if that was done before."""
        if self.is_closed:
            return
        self.free_all()
        self.is_closed = True
        driver().cuStreamDestroy(self.stream)
        self.stream = None
        _release_context(self.handle)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Sets memory of the GPU."""
        check(driver().cuMemsetD8Async(address, byte, size, self.stream), f"filling {size} bytes")

    def fill_random(self, fill: Fill, seed: int, address: int) -> None:
        """Random elements of one array, all of it."""
        cuda, what = driver(), "filling memory with random numbers"
        if not self._random:
            self._random += check(cuda.cuModuleLoadData(read_ptx()), what)
        start = fill_launch(fill, seed, address)
        (function,) = check(cuda.cuModuleGetFunction(self._random[0], start.entry.encode()), what)
        block = (start.threads, 1, 1)
        parameters = (start.values, start.types)
        check(cuda.cuLaunchKernel(function, start.blocks, 1, 1, *block, 0, self.stream, parameters, 0), what)

    def upload(self, address: int, source: int, size: int) -> None:
        """Copies from host memory."""
        check(driver().cuMemcpyHtoDAsync(address, source, size, self.stream), f"copying {size} bytes to the GPU")

    def download(self, target: int, address: int, size: int) -> None:
        """Copies to host memory."""
        check(driver().cuMemcpyDtoHAsync(target, address, size, self.stream), f"copying {size} bytes from the GPU")

    def load_kernel(self, entry: KernelEntry, cubin: bytes) -> KernelFacts:
        """Makes a plan's kernel ready to be called by its key."""
        cuda, what = driver(), f"loading the kernel {entry.name}"
        facts = kernel_facts(entry)
        if facts.scratch_bytes:
            raise PlanError(f"The kernel {entry.name} wants scratch memory, which it does not get: compile again.")
        (module,) = check(cuda.cuModuleLoadData(cubin), what)
        (function,) = check(cuda.cuModuleGetFunction(module, facts.symbol.encode()), what)
        if facts.shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cuda.cuFuncSetAttribute(function, attribute, facts.shared_bytes), what)
        types = tuple(_c_type(parameter) for parameter in facts.parameters)
        self._kernels[entry.key] = _Loaded(module, function, facts, types)
        return facts

    def unload_kernel(self, key: str) -> None:
        """Forgets a kernel that nothing calls any more, and no graph that is open."""
        self.synchronize()
        check(driver().cuModuleUnload(self._kernels.pop(key).module), "unloading a kernel")

    def launch(self, calls: Sequence[Call]) -> None:
        """Starts the calls one after another."""
        for call in calls:
            self._launch(call)
            if self.debug:
                check(driver().cuStreamSynchronize(self.stream), f"running {call.op}")

    def _launch(self, call: Call) -> None:
        cuda, kernel = driver(), self._kernels[call.kernel]
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = call.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.facts.threads, 1, 1
        config.sharedMemBytes = kernel.facts.shared_bytes
        config.hStream = self.stream
        if call.has_pdl:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        parameters = (call.values, kernel.types)
        check(cuda.cuLaunchKernelEx(config, kernel.function, parameters, 0), f"launching {call.op}")

    def capture(self, calls: Sequence[Call]) -> CudaGraph | EagerSteps:
        """The calls as one graph; with ``debug`` launch by launch, or a failure would name the step alone."""
        if self.debug:
            return EagerSteps(self, tuple(calls))
        cuda, what = driver(), "capturing a step"
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cuda.cuStreamBeginCapture(self.stream, mode), what)
        try:
            for call in calls:
                self._launch(call)
        finally:
            ended = cuda.cuStreamEndCapture(self.stream)
        (graph,) = check(ended, what)
        nodes = int(check(cuda.cuGraphGetNodes(graph), what)[-1])
        (executable,) = check(cuda.cuGraphInstantiate(graph, 0), what)
        check(cuda.cuGraphDestroy(graph), what)
        captured = CudaGraph(executable, self.stream, nodes)
        self._graphs = [*(graph for graph in self._graphs if graph.executable is not None), captured]
        return captured

    def synchronize(self) -> None:
        """Waits for everything on the stream; DeviceError if any of it failed."""
        check(driver().cuStreamSynchronize(self.stream), "running a step")

    def synchronize_all(self) -> None:
        """Waits for everything on the GPU, whoever started it."""
        check(driver().cuCtxSynchronize(), "waiting for the GPU")

    def is_idle(self) -> bool:
        """Whether nothing is left to do on the stream; DeviceError if any of it failed."""
        status = driver().cuStreamQuery(self.stream)
        if status[0] == driver().CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(status, "running a step")
        return True

    def mark(self) -> Any:
        """A point on the stream, for ``seconds_between``."""
        (event,) = check(driver().cuEventCreate(0), "making an event")
        check(driver().cuEventRecord(event, self.stream), "recording an event")
        return event

    def wait_for(self, event: Any) -> None:
        """Waits until the stream has passed a mark."""
        check(driver().cuEventSynchronize(event), "waiting for a copy")
        driver().cuEventDestroy(event)

    def seconds_between(self, first: Any, last: Any) -> float:
        """Time from one mark to a later one, waiting for it."""
        cuda = driver()
        check(cuda.cuEventSynchronize(last), "waiting for an event")
        (milliseconds,) = check(cuda.cuEventElapsedTime(first, last), "reading an event")
        for event in (first, last):
            cuda.cuEventDestroy(event)
        return float(milliseconds) / 1e3


def kernel_facts(entry: KernelEntry) -> KernelFacts:
    """What a plan says of a kernel's machine code."""
    artifact: Any = entry.artifact
    return KernelFacts(
        symbol=str(artifact["symbol"]),
        threads=int(artifact["threads"]),
        shared_bytes=int(artifact["shared_bytes"]),
        scratch_bytes=int(artifact["global_scratch_bytes"]) + int(artifact["profile_scratch_bytes"]),
        has_pdl=bool(artifact["pdl"]),
        parameters=tuple(Parameter(**item) for item in artifact["parameters"]),
    )


def _c_type(parameter: Parameter) -> Any:
    return ctypes.c_void_p if parameter.type.startswith("*") else ctypes.c_int32
