"""Quantises plain weights to NVFP4 or FP8: what ``docs/layout.md`` says, on any device with the same bits.

In: a matrix of BF16, FP16 or FP32 values. Out: an ``Fp4Matrix`` or ``Fp8Matrix``. The work is done in FP32, a part of
the matrix at a time that stays in the processor's cache, in steps that write over their operands: beside the result and
the memory for a few parts nothing is held. What makes the steps few:

- A float rounds itself. ``x + c - c`` rounds x to a multiple of the last place of c, halfway cases to even. With c the
  power of two below x, times 1.5 so that a negative x does not change its exponent and times a power of two, x keeps as
  many bits as wanted.
- FP16 holds the small formats. An E2M1 value times 2^-14 has its code at bits 11 to 9 of an FP16 number, an E4M3 value
  times 2^-8 at bits 13 to 7, those below the format's smallest normal number too: a conversion is the encoding.

Example::

    matrix = quantise_nvfp4(values)                  # Fp4Matrix: words int64 and scales uint8 [rows, columns / 16]
    matrix = quantise_nvfp4(values, search=True)     # block scales chosen by squared error
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import frexp, isfinite

import torch

from lynnc.errors import WeightError
from lynnc.ir import GROUP, Format
from lynnc.runtime.weights.matrix import Fp4Matrix, Fp8Matrix
from lynnc.runtime.weights.nvfp4 import write_words

SEARCH_RATIOS = (15 / 16, 17 / 16, 23 / 16, 25 / 16)
"""What the search tries beside the default block scale, as multiples of the largest magnitude / 6. Near 24 / 16 the
largest magnitude gets the code of 4, whose neighbours are closer than those of 6."""

PART = 2**16
"""Values for which a core's cache holds what they are worked on in; a part has as many for each of torch's threads."""
PART_ON_GPU = 2**21
"""Enough to keep a GPU busy."""
PARTS = 4
"""Parts whose codes become words at once: a code in FP16 is half as wide as a value."""

_EXPONENT = 0x7F80_0000
_SMALLEST_NORMAL = 2.0**-126
_TOO_LARGE = 2.0**112
"""Above it, a step times 2^14 may be infinite."""


@dataclass(frozen=True, slots=True)
class _Floats:
    """FP32 numbers, and their bits: the same memory as int32."""

    numbers: torch.Tensor
    bits: torch.Tensor

    @staticmethod
    def of(numbers: torch.Tensor) -> _Floats:
        """Numbers with their bits."""
        return _Floats(numbers, numbers.view(torch.int32))


@dataclass(frozen=True, slots=True)
class _SmallFloat:
    """A float format that FP16 contains: bits of its mantissa, the bias of its exponent, its range of magnitudes."""

    mantissa_bits: int
    bias: int
    smallest: float
    largest: float

    @property
    def unit(self) -> float:
        """The FP16 number whose exponent has the bits that 1 has in this format."""
        return 2.0 ** (self.bias - 15)

    def round(self, values: _Floats, spare: _Floats, out: torch.Tensor) -> torch.Tensor:
        """Values in units of ``unit``, rounded as if there was no largest number; 0.0 is never negative."""
        torch.bitwise_and(values.bits, _EXPONENT, out=spare.bits)
        spare.numbers.clamp_(min=2.0**-14)  # below FP16's, and so the format's, smallest normal number all are as close
        factor = 1.5 * 2.0 ** (23 - self.mantissa_bits)
        return torch.add(values.numbers, spare.numbers, alpha=factor, out=out).sub_(spare.numbers, alpha=factor)


_E2M1 = _SmallFloat(mantissa_bits=1, bias=1, smallest=0.5, largest=6.0)
_E4M3 = _SmallFloat(mantissa_bits=3, bias=7, smallest=2.0**-9, largest=448.0)
_FP16 = _SmallFloat(mantissa_bits=10, bias=15, smallest=2.0**-24, largest=65504.0)
_SCALES = {Format.NVFP4: _E4M3, Format.NVFP4_FP16: _FP16}


@dataclass(frozen=True, slots=True)
class _Part:
    """Memory for one part of a matrix: FP32 values, and as much for rounding them."""

    memory: torch.Tensor
    values: _Floats
    blocks: torch.Tensor
    spare: _Floats

    @staticmethod
    def of(length: int, device: torch.device) -> _Part:
        """Memory for so many values, or for a part if they are more."""
        length = min(length, _part_length(device))
        return _Part.within(torch.empty(2 * length, device=device), length)

    @staticmethod
    def within(memory: torch.Tensor, length: int) -> _Part:
        """The same memory for fewer values."""
        values, spare = memory[:length], memory[length : 2 * length]
        return _Part(memory, _Floats.of(values), values.view(-1, GROUP), _Floats.of(spare))

    def encode(self, source: torch.Tensor, steps: torch.Tensor, halves: torch.Tensor, is_limited: bool) -> None:
        """Codes of values over steps ``[n, 1]``, as FP16 numbers that contain them."""
        self.values.numbers.copy_(source)
        self.blocks.div_(steps)
        codes = _E2M1.round(self.values, self.spare, out=self.values.numbers)
        halves.copy_(codes if is_limited else _limit(codes))


def quantise_nvfp4(values: torch.Tensor, scale_format: Format = Format.NVFP4, search: bool = False) -> Fp4Matrix:
    """NVFP4 of a matrix ``[rows, columns]``, columns a multiple of 16, with E4M3 scales or, for NVFP4_FP16, FP16 ones.

    ``search`` chooses each block's scale among a few by squared error. WeightError for a NaN or an infinity.
    """
    source, shape = values.reshape(-1), (values.shape[0], values.shape[1] // GROUP)
    part = _Part.of(len(source), values.device)
    words = torch.empty(len(source) // GROUP, dtype=torch.int64, device=values.device)
    # A number for each block waits in the upper half of the words' own memory: words are written after the numbers of
    # their blocks were read, and do not reach those of later blocks.
    numbers = words.view(torch.float32)[len(words) :]
    _write_magnitudes(source, part.memory, numbers)
    largest = float(numbers.max())
    _refuse_not_finite(largest)
    if largest > _TOO_LARGE:
        smaller = quantise_nvfp4(values * 2.0**-32, scale_format, search)
        return replace(smaller, global_scale=smaller.global_scale * 2.0**32)
    global_scale = _global_scale(largest, scale_format)
    scales, is_limited = _choose_scales(source, numbers, global_scale, scale_format, search)
    _write_words(source, numbers, part, words, is_limited)
    return Fp4Matrix(words.view(shape), scales.view(shape), torch.tensor(global_scale, device=values.device))


def quantise_fp8(values: torch.Tensor) -> Fp8Matrix:
    """FP8 of a matrix ``[rows, columns]``: E4M3 numbers and one FP32 scale. WeightError for a NaN or an infinity."""
    source, device = values.reshape(-1), values.device
    largest = float(torch.stack(source.aminmax()).abs().max())
    _refuse_not_finite(largest)
    scale = _fp32_scale(largest / _E4M3.largest)
    divisor = torch.tensor(scale / _E4M3.unit, device=device)
    data = torch.empty(values.shape, dtype=torch.uint8, device=device)
    length = min(_part_length(device), len(source))
    memory = torch.empty(2, length, device=device)
    for part, out in zip(source.split(length), data.view(-1).split(length), strict=True):
        quotients, spare = _Floats.of(memory[0, : len(part)]), _Floats.of(memory[1, : len(part)])
        quotients.numbers.copy_(part).div_(divisor)
        bits = _E4M3.round(quotients, spare, out=quotients.numbers).half().view(torch.int16)
        negative = torch.lt(bits, 0, out=torch.empty_like(bits))
        out.copy_(bits.bitwise_right_shift_(7).add_(negative, alpha=0x80))
    return Fp8Matrix(data, torch.tensor(scale, device=device))


def find_not_finite(values: torch.Tensor) -> tuple[int, int] | None:
    """Row and column of the first NaN or infinity of a matrix ``[rows, columns]``."""
    if not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all()):
        return None
    row = next(row for row, numbers in enumerate(values) if not numbers.isfinite().all())
    return row, int((~values[row].isfinite()).nonzero()[0])


def _write_magnitudes(source: torch.Tensor, memory: torch.Tensor, out: torch.Tensor) -> None:
    """The largest magnitude of each block, found by bits: without their sign they sort as the numbers do."""
    integer = torch.int32 if source.dtype is torch.float32 else torch.int16
    bits, magnitudes = source.view(integer).view(-1, GROUP), memory.view(integer).view(-1, GROUP)
    most = len(magnitudes)
    for blocks, part in zip(bits.split(most), out.split(most), strict=True):
        if len(blocks) < most:
            magnitudes = magnitudes[: len(blocks)]
        torch.bitwise_and(blocks, torch.iinfo(integer).max, out=magnitudes)
        part.copy_(magnitudes.amax(-1).view(source.dtype))


def _write_words(source: torch.Tensor, steps: torch.Tensor, part: _Part, words: torch.Tensor, is_limited: bool) -> None:
    """Codes of all values over the steps of their blocks, joined to words for a few parts at once."""
    length = len(part.blocks) * GROUP
    memory = torch.empty(min(PARTS * length, len(source)), dtype=torch.float16, device=source.device)
    parts = zip(source.split(length), steps[:, None].split(length // GROUP), strict=True)
    for out in words.split(len(memory) // GROUP):
        halves = memory[: len(out) * GROUP]
        for own, (values, step) in zip(halves.split(length), parts, strict=False):
            if len(values) < len(part.blocks) * GROUP:
                part = _Part.within(part.memory, len(values))
            part.encode(values, step, own, is_limited)
        write_words(halves, part.memory.view(torch.int64), out)


def _choose_scales(
    source: torch.Tensor, numbers: torch.Tensor, global_scale: float, scale_format: Format, search: bool
) -> tuple[torch.Tensor, bool]:
    """Block scales ``[blocks]`` in their format; ``numbers``, the largest magnitudes of blocks, become their steps. Also
    whether no value can round to more than the largest code.

    A step is scale times global, rounded to FP32, times 2^14: what values are divided by so that FP16 holds codes.
    """
    kind = _SCALES[scale_format]
    unit = global_scale / kind.unit
    # Divisors are tensors, because on a GPU torch multiplies with the reciprocal of a plain number instead.
    six, divisor = torch.tensor([_E2M1.largest, unit], device=source.device)
    dtype = torch.uint8 if kind is _E4M3 else torch.float16
    stored = torch.empty(len(numbers), dtype=dtype, device=source.device)
    length = _part_length(source.device)
    is_limited = not search
    for part, values, out in zip(
        numbers.split(length), source.split(length * GROUP), stored.split(length), strict=True
    ):
        wanted = part.div_(six).div_(divisor)
        scales = _search(values, wanted, unit, kind) if search else _nearest(wanted, kind)
        # From the fourth scale on, rounding takes at most a ninth away; codes have room for a seventh.
        is_limited = is_limited and float(scales.min()) >= 4 * kind.smallest * kind.unit
        halves = scales.half()
        out.copy_(halves.view(torch.int16).bitwise_right_shift_(7) if kind is _E4M3 else halves)
        torch.mul(scales, unit / _E2M1.unit, out=part)
    return stored, is_limited


def _nearest(wanted: torch.Tensor, kind: _SmallFloat) -> torch.Tensor:
    """The nearest scales, not 0: the smallest serves a block at least as well, and can divide."""
    scales = _Floats.of(wanted.clamp(kind.smallest * kind.unit, kind.largest * kind.unit))
    return kind.round(scales, _Floats.of(torch.empty_like(wanted)), out=scales.numbers)


def _search(source: torch.Tensor, wanted: torch.Tensor, unit: float, kind: _SmallFloat) -> torch.Tensor:
    """For each block the candidate with the smallest squared error; the nearest to what is wanted if that is one."""
    ratios = torch.tensor([1.0, *SEARCH_RATIOS], device=source.device)[:, None]
    length = min(_part_length(source.device), len(source))
    memory = torch.empty(4 * length, device=source.device)
    found = []
    for values, part in zip(source.split(length), wanted.split(length // GROUP), strict=True):
        columns = memory[: 4 * len(values)].view(4, GROUP, -1)
        # In three dimensions, because torch uses one thread for a plain transpose.
        columns[:1].copy_(values.view(1, -1, GROUP).transpose(1, 2))
        candidates = _nearest(part * ratios, kind)
        steps = candidates * (unit / _E2M1.unit)
        best, least = candidates[0], _squared_error(columns, steps[0], candidates[0])
        for scale, step in zip(candidates[1:], steps[1:], strict=True):
            error = _squared_error(columns, step, scale)
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        found.append(best)
    return torch.cat(found)


def _squared_error(columns: torch.Tensor, step: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of blocks ``[n]`` but for a common factor; ``columns`` ``[4, 16, n]`` are their values and memory to work in."""
    values, quotients, rounded, spare = columns
    torch.div(values, step, out=quotients)
    squares = _limit(_E2M1.round(_Floats.of(quotients), _Floats.of(spare), out=rounded)).sub_(quotients)
    squares.mul_(squares)
    for half in (8, 4, 2, 1):  # an order of summation of our own: that of ``sum`` differs between devices
        squares[:half].add_(squares[half : 2 * half])
    return squares[0].mul(scale).mul_(scale)


def _limit(values: torch.Tensor) -> torch.Tensor:
    """Gives what was rounded beyond the largest code the value of that."""
    return values.clamp_(-_E2M1.largest * _E2M1.unit, _E2M1.largest * _E2M1.unit)


def _part_length(device: torch.device) -> int:
    """Values in a part."""
    return PART_ON_GPU if device.type == "cuda" else PART * torch.get_num_threads()


def _global_scale(largest: float, scale_format: Format) -> float:
    """Brings the largest block scale to the largest E4M3 number; FP16 scales only need one outside of their range."""
    if scale_format is Format.NVFP4:
        return _fp32_scale(largest / (_E2M1.largest * _E4M3.largest))
    scale = largest / _E2M1.largest
    if largest == 0 or 2.0**-8 <= scale <= 2.0**15:
        return 1.0
    return max(2.0 ** (frexp(scale)[1] - 1), _SMALLEST_NORMAL / _FP16.smallest)


def _fp32_scale(scale: float) -> float:
    """A scale of E4M3 numbers in FP32: 1 for 0; products of both are normal numbers, as GPUs may take others for 0."""
    return max(float(torch.tensor(scale, dtype=torch.float32)), _SMALLEST_NORMAL / _E4M3.smallest) if scale else 1.0


def _refuse_not_finite(largest: float) -> None:
    if not isfinite(largest):
        raise WeightError("A matrix to quantise holds a NaN or an infinity: repair the checkpoint.")
