"""Rounding to float formats of few bits, in FP32 and in place, with the same bits on every device.

In: FP32 numbers. Out: the same memory with the nearest numbers of E2M1 (NVFP4's codes), E4M3 or FP16, halfway cases to
even. Two ideas make it a handful of passes over memory, which is what an operation of torch is:

- A float rounds itself. ``x + c - c`` rounds x to a multiple of the last place of c. With c the power of two below x,
  times 1.5 so that a negative x does not change its exponent and times a power of two, x keeps as many bits as wanted.
- FP16 holds the small formats. An E2M1 value times 2^-14 has its code at bits 11 to 9 of an FP16 number, an E4M3 value
  times 2^-8 at bits 13 to 7, those below the format's smallest normal number too: a conversion is the encoding. That
  factor is the format's ``unit``.

Example::

    rounder = Rounder.of(torch.empty(2 * n))
    rounder.values.copy_(numbers).mul_(E4M3.unit)
    rounder.round(E4M3).half()                      # E4M3 at bits 13 to 7, sign at bit 15
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PART = 2**16
"""Values for which a core's cache holds what they are worked on in, beside torch's own code."""
PART_ON_GPU = 2**23
"""Values that keep a GPU busy."""
SMALLEST_NORMAL = 2.0**-126
"""Of FP32: GPUs may take smaller numbers for 0."""

_EXPONENT = 0x7F80_0000


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A float format that FP16 contains: its smallest and largest magnitude, which FP16 number stands for its 1, and
    what a power of two is multiplied with so that adding it leaves, of 24 bits, those of the format."""

    unit: float
    smallest: float
    largest: float
    factor: float


E2M1 = SmallFloat(unit=2.0**-14, smallest=0.5, largest=6.0, factor=1.5 * 2.0**22)
E4M3 = SmallFloat(unit=2.0**-8, smallest=2.0**-9, largest=448.0, factor=1.5 * 2.0**20)
FP16 = SmallFloat(unit=1.0, smallest=2.0**-24, largest=65504.0, factor=1.5 * 2.0**13)


@dataclass(frozen=True, slots=True)
class Rounder:
    """Memory for values and for rounding them. The tensors of all steps are made beforehand, as the steps are short."""

    values: torch.Tensor  # FP32 [n]
    bits: torch.Tensor  # the same as int32
    spare: torch.Tensor  # FP32 [n]
    spare_bits: torch.Tensor  # the same as int32
    exponent: torch.Tensor

    @staticmethod
    def of(memory: torch.Tensor) -> Rounder:
        """Values in the first half of FP32 numbers."""
        values, spare = memory.chunk(2)
        exponent = torch.tensor(_EXPONENT, dtype=torch.int32, device=memory.device)
        return Rounder(values, values.view(torch.int32), spare, spare.view(torch.int32), exponent)

    def round(self, kind: SmallFloat) -> torch.Tensor:
        """Rounds the values, in units of ``kind.unit``, as if there was no largest number; 0.0 is never negative."""
        torch.bitwise_and(self.bits, self.exponent, out=self.spare_bits)
        self.spare.clamp_(min=2.0**-14)  # below FP16's, and so the format's, smallest normal number all are as close
        return self.values.add_(self.spare, alpha=kind.factor).sub_(self.spare, alpha=kind.factor)


def limit_to_codes(values: torch.Tensor) -> torch.Tensor:
    """Gives what was rounded beyond the largest code that code's value."""
    return values.clamp_(-E2M1.largest * E2M1.unit, E2M1.largest * E2M1.unit)


def part_length(device: torch.device) -> int:
    """How many values to work on at a time."""
    return PART_ON_GPU if device.type == "cuda" else PART * torch.get_num_threads()
