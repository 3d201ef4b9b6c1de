"""Random elements in numpy, to the same bits as the kernels of ``fill.ptx``.

In: a ``Fill`` and a seed. Out: an array of its elements: uint64, uint8, uint16 (BF16 and FP16 as bits) or float32.

Example::

    fill_array(fill, seed=1)                              # all elements
    fill_array(fill, seed=1, first=100, count=50)         # the same as [100:150] of that
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from lynnc.runtime.random.fill import GOLDEN, MULTIPLIERS, SHIFTS, Bits, Fill, Integers, Uniform, array_key

Array: TypeAlias = np.ndarray[Any, Any]


def fill_array(fill: Fill, seed: int, first: int = 0, count: int | None = None) -> Array:
    """Elements ``first`` to ``first + count`` (all if None) of an array, flat."""
    count = fill.count - first if count is None else count
    bits = random_bits(array_key(seed, fill.stream), first, count)
    if isinstance(fill.law, Bits):
        return bits
    if isinstance(fill.law, Integers):
        return _integers(bits, fill.law)
    numbers = _numbers(bits, fill.law)
    return round_to_bf16(numbers) if fill.law.dtype == "bf16" else numbers


def random_bits(key: int, first: int, count: int) -> Array:
    """64 bits for each of the elements, uint64 ``[count]``."""
    index = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    return _mix(_mix(index * np.uint64(GOLDEN)) ^ np.uint64(key))


def _mix(x: Array) -> Array:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(multiplier)
    mixed: Array = x ^ x >> np.uint64(SHIFTS[-1])
    return mixed


def _integers(bits: Array, law: Integers) -> Array:
    drawn = ((bits >> np.uint64(32)) * np.uint64(law.high - law.low + 1) >> np.uint64(32)) + np.uint64(law.low)
    kept: Array = drawn ^ bits & np.uint64(law.flip)
    return kept.astype(np.uint8 if law.width == 1 else np.uint16)


def _numbers(bits: Array, law: Uniform) -> Array:
    upper = (bits >> np.uint64(32)).astype(np.uint32).view(np.int32)
    unit = upper.astype(np.float32) * np.float32(2.0**-31)
    scaled: Array = unit * np.float32(law.spread) + np.float32(law.centre)
    return scaled


def round_to_bf16(numbers: Array) -> Array:
    """The bits of the nearest BF16 numbers, ties to even, uint16; for finite float32."""
    bits = numbers.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype(np.uint16)
