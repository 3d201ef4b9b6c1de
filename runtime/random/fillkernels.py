"""Fills arrays in a GPU's memory: hand-written PTX that every driver translates, and the launches of its entries.

In: a ``Fill``, a seed and the address of memory for it. Out: a ``FillLaunch``, for whoever owns the device to carry
out. ``fill.ptx`` asks for sm_80, so the driver's translator serves all newer GPUs; no compiler is needed.

Example::

    module = driver.load_module(read_ptx())                   # cuModuleLoadData takes the text as it is
    launch = fill_launch(fill, seed=1, address=pointer)
    driver.launch(module.function(launch.entry), launch.blocks, launch.threads, (launch.values, launch.types))
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from lynnc.runtime.random.fill import Bits, Fill, Integers, array_key

PTX_FILE = "fill.ptx"
ENTRIES = ("fill_words", "fill_bytes", "fill_halves", "fill_bf16", "fill_f32")
THREADS = 256
MOST_BLOCKS = 4096
"""Enough to keep every GPU busy; each thread goes on with the next element of its own."""


@dataclass(frozen=True, slots=True)
class FillLaunch:
    """One launch. ``values`` and ``types`` are the entry's parameters in order, as ``cuda-bindings`` takes them."""

    entry: str
    blocks: int
    threads: int
    values: tuple[int | float, ...]
    types: tuple[Any, ...]


def read_ptx() -> bytes:
    """The text of the kernels, ending in a zero byte as the driver wants it."""
    return files("lynnc.runtime.random").joinpath(PTX_FILE).read_bytes() + b"\0"


def fill_launch(fill: Fill, seed: int, address: int, first: int = 0, count: int | None = None) -> FillLaunch:
    """The launch that writes elements ``first`` to ``first + count`` (all if None) of an array to ``address``.

    The elements do not depend on how an array is cut into launches.
    """
    count = fill.count - first if count is None else count
    law = fill.law
    values: tuple[int | float, ...] = ()
    types: tuple[Any, ...] = ()
    if isinstance(law, Bits):
        entry = "fill_words"
    elif isinstance(law, Integers):
        entry = {1: "fill_bytes", 2: "fill_halves"}[law.width]
        values, types = (law.low, law.high - law.low + 1, law.flip), (ctypes.c_uint32,) * 3
    else:
        entry = f"fill_{law.dtype}"
        values, types = (law.centre, law.spread), (ctypes.c_float,) * 2
    return FillLaunch(
        entry=entry,
        blocks=max(1, min(MOST_BLOCKS, -(-count // THREADS))),
        threads=THREADS,
        values=(address, first, count, array_key(seed, fill.stream), *values),
        types=(ctypes.c_uint64,) * 4 + types,
    )
