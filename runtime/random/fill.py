"""How one array is filled with random elements: the laws, and the key that makes an array's elements its own.

In: nothing but numbers. Out: frozen ``Fill`` records. ``fillkernels`` carries them out on a GPU, ``fillbits`` in numpy,
to the same bits.

Example::

    fill = Fill("lm_head", "scale", count=4096, stream=7, law=Integers(1, low=0x38, high=0x3F))
    array_key(seed=1, stream=fill.stream)              # 64 bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, made odd: consecutive numbers times this are far apart."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
"""Constants of the 64-bit mixer."""
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Bits:
    """64-bit words of random bits."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Whole numbers of ``width`` bytes (1 or 2), uniform from ``low`` to ``high``, the bits of ``flip`` inverted or not
    at random; where they are the bits of a float, ``flip`` is its sign bit."""

    width: int
    low: int
    high: int
    flip: int = 0


@dataclass(frozen=True, slots=True)
class Uniform:
    """Numbers of ``dtype`` (``bf16`` or ``f32``), uniform between ``centre - spread`` and ``centre + spread``."""

    dtype: str
    centre: float
    spread: float


Law: TypeAlias = Bits | Integers | Uniform


@dataclass(frozen=True, slots=True)
class Fill:
    """An array of a weight, its elements, its number among all arrays, and how the elements are drawn."""

    weight: str
    array: str
    count: int
    stream: int
    law: Law

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        if isinstance(self.law, Bits):
            return 8
        return self.law.width if isinstance(self.law, Integers) else {"bf16": 2, "f32": 4}[self.law.dtype]


def mix(x: int) -> int:
    """A bijection of 64 bits; every bit of the result depends on every bit of ``x``."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ x >> shift) * multiplier & _MASK
    return x ^ x >> SHIFTS[-1]


def array_key(seed: int, stream: int) -> int:
    """The 64 bits that set one array of one seed apart from every other."""
    return mix(mix((seed + 1) * GOLDEN & _MASK) ^ (stream + 1) * GOLDEN & _MASK)
