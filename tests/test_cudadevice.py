"""``CudaDevice`` with a driver that only notes what it is asked: what is given back, and what debug mode waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from executing import plan_for
from reference import Case

import lynnc.runtime
from lynnc.errors import DeviceError, PlanError
from lynnc.planfile import save_plan
from lynnc.runtime import drivercalls
from lynnc.runtime.cudadevice import CudaDevice, open_device
from lynnc.runtime.device import Call
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.random.randomweights import random_weights

TINY = Case("tiny-dense")
CONTEXT = "the primary context"


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Names:
    """Stands for the driver's enumerations, whose members are their names here."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass
class Driver:
    """Notes its calls. ``references`` are those to the primary context, ``fails`` the functions that fail."""

    references: int = 0
    current: Any = None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    fails: dict[str, Status] = field(default_factory=dict)
    CUdevice_attribute = CUstream_flags = CUlaunchAttributeID = CUfunction_attribute = Names()
    CU_MEMHOSTALLOC_PORTABLE = CU_MEMHOSTALLOC_DEVICEMAP = 1
    CUlaunchConfig = SimpleNamespace
    CUlaunchAttribute = staticmethod(lambda: SimpleNamespace(value=SimpleNamespace()))

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in self.fails:
                return (self.fails[name],)
            self.asked.append((name, arguments[0] if arguments else None))
            return Status.CUDA_SUCCESS, *self.answer(name, arguments)

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        handle = f"{name} {len(self.asked)}"
        if name == "cuDevicePrimaryCtxRetain":
            self.references += 1
            return (CONTEXT,)
        if name == "cuDevicePrimaryCtxRelease":
            assert self.references > 0
            self.references -= 1
        if name == "cuCtxSetCurrent":
            self.current = arguments[0]
        known = {
            "cuDeviceGetCount": (1,),
            "cuDeviceGetAttribute": (9,),
            "cuDeviceGetName": (b"a GPU\0",),
            "cuDevicePrimaryCtxGetState": (0, int(self.references > 0)),
            "cuDriverGetVersion": (13000,),
            "cuDeviceTotalMem": (1 << 34,),
            "cuMemAlloc": (len(self.asked) << 8,),
        }
        return known.get(name, (handle,))

    def of(self, *names: str) -> list[Any]:
        """First arguments of every call of some functions."""
        return [argument for name, argument in self.asked if name in names]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(drivercalls, "import_module", lambda name: found)
    drivercalls.driver.cache_clear()
    yield found
    drivercalls.driver.cache_clear()


def with_kernel(device: CudaDevice, *ops: str) -> list[Call]:
    """Calls of a kernel that has been loaded."""
    facts = {"symbol": "f", "threads": 32, "shared_bytes": 0, "global_scratch_bytes": 0, "profile_scratch_bytes": 0}
    entry = next(iter(plan_for(TINY).kernels.values()))
    device.load_kernel(replace(entry, artifact={**facts, "pdl": False, "parameters": ()}), b"code")
    return [Call(op, entry.key, (1, 1, 1), (), has_pdl=False) for op in ops]


def test_a_closed_device_gives_everything_back_once(driver: Driver) -> None:
    device = open_device()
    with_kernel(device)
    block = device.allocate(64)
    fills = random_weights(plan_for(TINY))
    for fill in fills[:3]:
        device.fill_random(fill, 0, block)
    loaded = [*(module for name, module in driver.asked if name == "cuModuleLoadData")]
    assert len(loaded) == 2, "one module of random fills serves all arrays"
    assert (driver.references, driver.current) == (1, CONTEXT)
    stream = device.stream
    device.close()
    assert len(set(driver.of("cuModuleUnload"))) == 2
    assert driver.of("cuMemFree") == [block] and driver.of("cuStreamDestroy") == [stream]
    assert (driver.references, driver.current) == (0, None), "a context that is gone is no thread's"
    order = [name for name, _ in driver.asked]
    assert order.index("cuStreamSynchronize") < order.index("cuModuleUnload") < order.index("cuStreamDestroy")
    assert order.index("cuStreamDestroy") < order.index("cuDevicePrimaryCtxRelease")
    asked = len(driver.asked)
    device.close()
    device.free_all()
    assert len(driver.asked) == asked


def test_a_closed_device_leaves_the_context_to_others(driver: Driver) -> None:
    driver.references = 1  # torch's
    first, second = open_device(), open_device()
    assert driver.references == 3 and first.stream != second.stream
    first.close()
    assert driver.references == 2 and driver.current == CONTEXT
    assert second.stream not in driver.of("cuStreamDestroy")
    second.close()
    assert driver.references == 1 and driver.current == CONTEXT, "tensors of torch stay valid"


@pytest.mark.parametrize("name", ["cuStreamCreate", "cuCtxSetCurrent", "cuDeviceTotalMem"])
def test_a_device_that_cannot_be_opened_holds_nothing(driver: Driver, name: str) -> None:
    driver.fails[name] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="out of memory"):
        open_device()
    assert driver.references == 0


def test_a_plan_that_is_refused_holds_nothing(driver: Driver, tmp_path: Path) -> None:
    save_plan(plan_for(TINY), {}, tmp_path / "tiny.plan")
    with pytest.raises(PlanError, match=r"is for sm_90a and a GPU is sm_99"):
        lynnc.runtime.load(tmp_path / "tiny.plan", GeneratedWeights())
    assert driver.references == 0 and len(driver.of("cuStreamDestroy")) == 1


def test_weights_that_are_refused_hold_nothing(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plan(plan_for(TINY), {}, tmp_path / "tiny.plan")
    monkeypatch.setattr("lynnc.runtime.loader.check_architecture", lambda plan, facts: None)
    with pytest.raises(FileNotFoundError):
        lynnc.runtime.load(tmp_path / "tiny.plan", tmp_path / "nothing")
    assert driver.references == 0 and len(driver.of("cuStreamDestroy")) == 1


OPS = ("embed", "layers.0.mlp_up")


@pytest.mark.parametrize("is_step", [False, True], ids=["launches", "step"])
def test_debug_mode_waits_after_every_launch(driver: Driver, is_step: bool) -> None:
    with closing(open_device(debug=True)) as device:
        calls = with_kernel(device, *OPS)
        driver.asked.clear()
        device.capture(calls).launch() if is_step else device.launch(calls)
        assert [name for name, _ in driver.asked] == ["cuLaunchKernelEx", "cuStreamSynchronize"] * 2
        driver.fails["cuStreamSynchronize"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(DeviceError, match=r"^Running embed failed: illegal address; load the plan again"):
            device.launch(calls)
        with pytest.raises(DeviceError, match=r"^Running layers\.0\.mlp_up failed: illegal address"):
            device.launch(calls[1:])


def test_without_debug_nothing_waits_and_a_step_is_a_graph(driver: Driver) -> None:
    with closing(open_device()) as device:
        calls = with_kernel(device, *OPS)
        driver.asked.clear()
        device.launch(calls)
        assert [name for name, _ in driver.asked] == ["cuLaunchKernelEx"] * 2


@pytest.mark.parametrize("debug", [False, True])
def test_a_launch_that_is_refused_names_its_op(driver: Driver, debug: bool) -> None:
    with closing(open_device(debug=debug)) as device:
        calls = with_kernel(device, *OPS)
        driver.fails["cuLaunchKernelEx"] = Status.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(DeviceError, match=r"^Launching embed failed: out of memory"):
            device.launch(calls)
        with pytest.raises(DeviceError, match=r"^Launching layers\.0\.mlp_up failed: out of memory"):
            device.launch(calls[1:])
