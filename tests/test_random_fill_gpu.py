"""The kernels of ``fill.ptx`` on a GPU against their numpy twin, bit for bit. Needs a GPU: ``pytest --device cuda``.

Only torch and the driver take part: memory and the context are torch's, the PTX goes to the driver as it is.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from test_random_fill import CASES, Case

from lynnc.runtime.random.fill import Fill
from lynnc.runtime.random.fillbits import fill_array
from lynnc.runtime.random.fillkernels import FillLaunch, fill_launch, read_ptx

pytestmark = pytest.mark.gpu

COUNT = 3_000_017
"""More than all threads of a launch, and no multiple of anything."""
GUARD = 64
"""Bytes behind an array that must stay as they were."""


class Driver:
    """The CUDA driver, in torch's context."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        check(self.cuda.cuModuleLoadData(ctypes.byref(self.module), read_ptx()), "loading the PTX")

    def launch(self, launch: FillLaunch) -> None:
        function = ctypes.c_void_p()
        name = launch.entry.encode()
        check(self.cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name), launch.entry)
        cells = [kind(value) for kind, value in zip(launch.types, launch.values, strict=True)]
        parameters = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        grid = (launch.blocks, 1, 1, launch.threads, 1, 1, 0)
        check(self.cuda.cuLaunchKernel(function, *grid, None, parameters, None), launch.entry)
        torch.cuda.synchronize()


def check(code: int, what: str) -> None:
    assert code == 0, f"{what}: CUDA error {code}"


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("pieces", [(COUNT,), (1, 1_000_000, COUNT - 1_000_001)], ids=["whole", "pieces"])
def test_the_gpu_gives_the_same_bits(case: Case, pieces: tuple[int, ...], driver: Driver) -> None:
    fill = Fill("w", "data", COUNT, stream=11, law=case.law)
    size = fill.element_bytes
    memory = torch.full((COUNT * size + GUARD,), 0xA5, dtype=torch.uint8, device="cuda")
    first = 0
    for count in pieces:
        driver.launch(fill_launch(fill, 77, memory.data_ptr() + first * size, first, count))
        first += count
    found = memory.cpu().numpy()
    assert np.array_equal(found[: COUNT * size], fill_array(fill, 77).view(np.uint8))
    assert (found[COUNT * size :] == 0xA5).all()
