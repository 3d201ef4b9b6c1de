"""Failures of the CUDA driver as sentences, without a driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import pytest

from lynnc.errors import DeviceError, OptionError
from lynnc.runtime import drivercalls
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.drivercalls import check, driver


class Status(IntEnum):
    """Names and numbers as the driver's header has them."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719


@dataclass(frozen=True)
class Failure:
    """A status, what was tried, and the sentence."""

    status: int
    what: str
    says: str


FAILURES = (
    Failure(
        Status.CUDA_ERROR_OUT_OF_MEMORY,
        "allocating 7 bytes of GPU memory",
        "Allocating 7 bytes of GPU memory failed: out of memory; free GPU memory that other programs hold, or choose a "
        "smaller context or fewer slots.",
    ),
    Failure(
        Status.CUDA_ERROR_ILLEGAL_ADDRESS,
        "running layers.3.experts_up",
        "Running layers.3.experts_up failed: illegal address; load the plan again, with debug to learn which launch it "
        "was.",
    ),
    Failure(
        Status.CUDA_ERROR_NO_BINARY_FOR_GPU,
        "loading the kernel linear",
        "Loading the kernel linear failed: no binary for gpu; compile the plan for this GPU's architecture.",
    ),
    Failure(Status.CUDA_ERROR_INVALID_CONTEXT, "running a step", "Running a step failed: invalid context."),
    Failure(999_999, "running a step", "Running a step failed: 999999."),
)


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: str(int(case.status)))
def test_a_failure_is_one_sentence(case: Failure) -> None:
    with pytest.raises(DeviceError) as caught:
        check((case.status, None), case.what)
    assert str(caught.value) == case.says


def test_a_success_is_what_was_returned() -> None:
    assert check((Status.CUDA_SUCCESS,), "x") == ()
    assert check((Status.CUDA_SUCCESS, 1, "b"), "x") == (1, "b")


class Driver:
    """Stands for ``cuda.bindings.driver``: a machine with some number of GPUs, or without a driver."""

    def __init__(self, gpus: int | None) -> None:
        self.gpus = gpus

    def cuDriverGetVersion(self) -> tuple[Status, int]:
        if self.gpus is None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return Status.CUDA_SUCCESS, 13000

    def cuInit(self, flags: int) -> tuple[Status]:
        return (Status.CUDA_SUCCESS if self.gpus else Status.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGetCount(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.gpus or 0


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    driver.cache_clear()
    yield
    driver.cache_clear()


@dataclass(frozen=True)
class Machine:
    """How many GPUs there are, and what opening number 1 says."""

    gpus: int | None
    says: str


MACHINES = (
    Machine(None, "No CUDA driver was found on this machine: plans run where an NVIDIA GPU is."),
    Machine(0, "Starting the CUDA driver failed: no device; plans run where an NVIDIA GPU is."),
    Machine(1, "There is no GPU 1: the driver shows 1; choose another --gpu."),
)


@pytest.mark.parametrize("case", MACHINES, ids=lambda case: str(case.gpus))
def test_a_machine_without_that_gpu(case: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivercalls, "import_module", lambda name: Driver(case.gpus))
    with pytest.raises(DeviceError) as caught:
        open_device(1)
    assert str(caught.value) == case.says


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(drivercalls, "import_module", refuse)
    with pytest.raises(OptionError, match=r"needs the Python package cuda-bindings: install .*\[runtime\]"):
        driver()
