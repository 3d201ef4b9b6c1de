"""Block scales of NVFP4: the nearest to a sixth of the largest magnitude, or the best of a few.

In: a matrix's values and the largest magnitude of each block of 16. Out: the scales in their format, E4M3 or FP16, and
the steps that values are divided by to get codes. All as ``docs/layout.md`` says, with the same bits on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

import torch

from lynnc.runtime.weights.smallfloat import (
    E2M1,
    E4M3,
    FP16,
    SMALLEST_NORMAL,
    Rounder,
    SmallFloat,
    limit_to_codes,
    part_length,
)
from lynnc.tensors import GROUP, Format

SEARCH_RATIOS = (15 / 16, 23 / 16, 25 / 16)
"""What the search tries beside the default block scale, as multiples of the largest magnitude / 6. Near 24 / 16 the
largest magnitude gets the code of 4, whose neighbours are closer than those of 6."""

_FORMATS = {Format.NVFP4: E4M3, Format.NVFP4_FP16: FP16}


def global_scale_of(largest: float, scale_format: Format) -> float:
    """Brings the largest block scale to the largest E4M3 number; FP16 scales only need one outside of their range."""
    if scale_format is Format.NVFP4:
        return fp32_scale(largest / (E2M1.largest * E4M3.largest))
    scale = largest / E2M1.largest
    if largest == 0 or 2.0**-8 <= scale <= 2.0**15:
        return 1.0
    return max(2.0 ** (frexp(scale)[1] - 1), SMALLEST_NORMAL / FP16.smallest)


def fp32_scale(scale: float) -> float:
    """A scale of E4M3 numbers in FP32: 1 for 0; products of both are normal numbers, as GPUs may take others for 0."""
    return max(float(torch.tensor(scale, dtype=torch.float32)), SMALLEST_NORMAL / E4M3.smallest) if scale else 1.0


def choose_scales(
    source: torch.Tensor,
    numbers: torch.Tensor,
    memory: torch.Tensor,
    global_scale: float,
    scale_format: Format,
    search: bool,
) -> tuple[torch.Tensor, bool]:
    """Block scales ``[blocks]`` in their format, and whether they are safe: no value rounds beyond the largest code.

    ``numbers``, the largest magnitudes of blocks, become their steps. A step is scale times global, rounded to FP32,
    times 2^14: what values are divided by so that FP16 holds codes.
    """
    kind = _FORMATS[scale_format]
    unit = global_scale / kind.unit
    # Divisors are tensors, because on a GPU torch multiplies with the reciprocal of a plain number instead.
    six, divisor = torch.tensor([E2M1.largest, unit], device=source.device).unbind()
    dtype = torch.uint8 if kind is E4M3 else torch.float16
    stored = torch.empty(len(numbers), dtype=dtype, device=source.device)
    length = len(memory) // 2
    smallest = []
    parts = zip(numbers.split(length), source.split(length * GROUP), stored.split(length), strict=True)
    for part, values, out in parts:
        wanted = part.div_(six).div_(divisor)
        scales = _search(values, wanted, unit, kind) if search else _nearest(wanted, kind, memory)
        smallest.append(scales.min())
        halves = scales.half()
        out.copy_(halves.view(torch.int16).bitwise_right_shift_(7) if kind is E4M3 else halves)
        torch.mul(scales, unit / E2M1.unit, out=part)
    return stored, _are_safe(torch.stack(smallest), kind)


def _are_safe(scales: torch.Tensor, kind: SmallFloat) -> bool:
    """Whether rounding took a 17th at most: with the smallest ratio of the search, the largest magnitude of a block is
    then at most 6 * 16/15 * 17/16 = 6.8 steps, and 7 would be too many."""
    return bool((scales >= 8 * kind.smallest * kind.unit).all())


def _nearest(wanted: torch.Tensor, kind: SmallFloat, memory: torch.Tensor) -> torch.Tensor:
    """The nearest scales, in ``memory``. None is 0: the smallest serves a block at least as well, and can divide."""
    rounder = Rounder.of(memory[: 2 * len(wanted)])
    torch.clamp(wanted, kind.smallest * kind.unit, kind.largest * kind.unit, out=rounder.values)
    return rounder.round(kind)


def _search(source: torch.Tensor, wanted: torch.Tensor, unit: float, kind: SmallFloat) -> torch.Tensor:
    """For each block the candidate with the smallest squared error; the nearest to what is wanted if that is one."""
    ratios = torch.tensor([1.0, *SEARCH_RATIOS], device=source.device)[:, None]
    factor = 2.0 ** -frexp(unit)[1]  # squares of small weights would be 0
    length = min(part_length(source.device), len(source))
    memory = torch.empty(3 * length, device=source.device)
    found = []
    for values, part in zip(source.split(length), wanted.split(length // GROUP), strict=True):
        trial = _Trial.of(values, factor, memory[: 3 * len(values)])
        all_wanted = (part * ratios).view(-1)
        candidates = _nearest(all_wanted, kind, all_wanted.new_empty(2 * len(all_wanted))).view(len(ratios), -1)
        is_safe = _are_safe(candidates, kind)
        steps = candidates * (factor * unit / E2M1.unit)
        best, least = candidates[0], trial.squared_error(steps[0], is_safe).clone()
        for scale, step in zip(candidates[1:], steps[1:], strict=True):
            error = trial.squared_error(step, is_safe)
            best = torch.where(error < least, scale, best)
            torch.minimum(error, least, out=least)
        found.append(best)
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Blocks ``[n]`` whose scales are tried: their values ``[16, n]``, and memory to encode them in."""

    values: torch.Tensor
    codes: torch.Tensor
    rounder: Rounder
    sums: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # halves of what is added up, each of which holds the next ones

    @staticmethod
    def of(source: torch.Tensor, factor: float, memory: torch.Tensor) -> _Trial:
        """Of values times a factor, in three times their memory in FP32."""
        values, codes, _ = memory.view(3, 1, GROUP, -1)
        # In three dimensions, because torch uses one thread for a plain transpose.
        values.copy_(source.view(1, -1, GROUP).transpose(1, 2)).mul_(factor)
        sums = tuple((codes[0, :half], codes[0, half : 2 * half]) for half in (8, 4, 2, 1))
        return _Trial(values[0], codes[0], Rounder.of(memory[values.numel() :]), sums)

    def squared_error(self, step: torch.Tensor, is_safe: bool) -> torch.Tensor:
        """Of each block ``[n]``, until the next call."""
        torch.div(self.values, step, out=self.codes)
        codes = self.rounder.round(E2M1)
        if not is_safe:
            limit_to_codes(codes)
        self.codes.mul_(step).sub_(self.values).mul_(self.codes)
        for one, other in self.sums:  # an order of summation of our own: that of ``sum`` differs between devices
            one.add_(other)
        return self.sums[-1][0][0]
