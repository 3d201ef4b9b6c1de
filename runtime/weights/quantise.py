"""Quantises plain weights to NVFP4 or FP8: what ``docs/layout.md`` says, on any device with the same bits.

In: a matrix of BF16, FP16 or FP32 values. Out: an ``Fp4Matrix`` or ``Fp8Matrix``. The work is done in FP32, a part of
the matrix at a time that stays in the processor's cache, in steps that write over their operands: beside the result and
the memory for a few parts nothing is held.

Example::

    matrix = quantise_nvfp4(values)                  # Fp4Matrix: words int64 and scales uint8 [rows, columns / 16]
    matrix = quantise_nvfp4(values, search=True)     # block scales chosen by squared error
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import torch

from lynnc.errors import WeightError
from lynnc.runtime.weights.blockscales import choose_scales, fp32_scale, global_scale_of
from lynnc.runtime.weights.matrix import Fp4Matrix, Fp8Matrix
from lynnc.runtime.weights.nvfp4 import WordWriter
from lynnc.runtime.weights.smallfloat import E2M1, E4M3, Rounder, limit_to_codes, part_length
from lynnc.tensors import GROUP, Format

PARTS = 2
"""Parts whose codes become words at once: a code in FP16 is half as wide as a value."""
TOO_LARGE = 2.0**112
"""Above this, a step times 2^14 may be infinite."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Memory for parts whose codes become words at once: for each a rounder, its values as blocks, and FP16 codes."""

    parts: tuple[tuple[Rounder, torch.Tensor, torch.Tensor], ...]
    writer: WordWriter

    @staticmethod
    def of(length: int, memory: torch.Tensor) -> _Piece:
        """For so many values in parts that all use the same memory; the last one may be shorter."""
        codes = torch.empty(length, dtype=torch.float16, device=memory.device)
        halves = codes.split(len(memory) // 2)
        rounders = [Rounder.of(memory[: 2 * len(half)]) for half in halves]
        blocks = [rounder.values.view(-1, GROUP) for rounder in rounders]
        return _Piece(tuple(zip(rounders, blocks, halves, strict=True)), WordWriter.of(codes, memory))

    def encode(self, sources: Iterator[tuple[torch.Tensor, torch.Tensor]], words: torch.Tensor, is_safe: bool) -> None:
        """Words of the codes of the next values over the steps ``[n, 1]`` of their blocks."""
        for (rounder, blocks, half), (values, steps) in zip(self.parts, sources, strict=False):
            rounder.values.copy_(values)
            blocks.div_(steps)
            codes = rounder.round(E2M1)
            half.copy_(codes if is_safe else limit_to_codes(codes))
        self.writer.write(words)


def quantise_nvfp4(values: torch.Tensor, scale_format: Format = Format.NVFP4, search: bool = False) -> Fp4Matrix:
    """NVFP4 of a matrix ``[rows, columns]``, columns a multiple of 16, with E4M3 scales or, for NVFP4_FP16, FP16 ones.

    ``search`` chooses each block's scale among a few by squared error. WeightError for a NaN or an infinity, or other
    columns.
    """
    rows, columns = values.shape
    if columns % GROUP:
        raise WeightError(
            f"A matrix of {columns} columns cannot be NVFP4, whose blocks have {GROUP}: keep it as it is."
        )
    source, shape = values.reshape(-1), (rows, columns // GROUP)
    memory = torch.empty(2 * min(part_length(values.device), len(source)), device=values.device)
    words = torch.empty(len(source) // GROUP, dtype=torch.int64, device=values.device)
    # A number for each block waits in the upper half of the words' own memory: words are written after the numbers of
    # their blocks were read, and do not reach those of later blocks.
    numbers = words.view(torch.float32)[len(words) :]
    _write_magnitudes(source, memory, numbers)
    largest = float(numbers.max())
    _refuse_not_finite(largest)
    if largest > TOO_LARGE:
        smaller = quantise_nvfp4(values * 2.0**-32, scale_format, search)
        return replace(smaller, global_scale=smaller.global_scale * 2.0**32)
    global_scale = global_scale_of(largest, scale_format)
    scales, is_safe = choose_scales(source, numbers, memory, global_scale, scale_format, search)
    _write_words(source, numbers, memory, words, is_safe)
    return Fp4Matrix(words.view(shape), scales.view(shape), torch.tensor(global_scale, device=values.device))


def quantise_fp8(values: torch.Tensor) -> Fp8Matrix:
    """FP8 of a matrix ``[rows, columns]``: E4M3 numbers and one FP32 scale. WeightError for a NaN or an infinity."""
    source, device = values.reshape(-1), values.device
    largest = float(torch.stack(source.aminmax()).abs().max())
    _refuse_not_finite(largest)
    scale = fp32_scale(largest / E4M3.largest)
    divisor = torch.tensor(scale / E4M3.unit, device=device)
    data = torch.empty(values.shape, dtype=torch.uint8, device=device)
    length = min(part_length(device), len(source))
    memory = torch.empty(2 * length, device=device)
    rounder = Rounder.of(memory)
    for part, out in zip(source.split(length), data.view(-1).split(length), strict=True):
        if len(part) < length:
            rounder = Rounder.of(memory[: 2 * len(part)])
        rounder.values.copy_(part).div_(divisor)
        bits = rounder.round(E4M3).half().view(torch.int16)
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
    mask = torch.tensor(torch.iinfo(integer).max, dtype=integer, device=source.device)
    most = len(magnitudes)
    for blocks, part in zip(bits.split(most), out.split(most), strict=True):
        magnitudes = magnitudes[: len(blocks)]
        torch.bitwise_and(blocks, mask, out=magnitudes)
        part.copy_(magnitudes.amax(-1).view(source.dtype))


def _write_words(
    source: torch.Tensor, steps: torch.Tensor, memory: torch.Tensor, words: torch.Tensor, is_safe: bool
) -> None:
    """Words of the codes of all values over the steps of their blocks."""
    length = len(memory) // 2
    parts = zip(source.split(length), steps[:, None].split(length // GROUP), strict=True)
    most = min(PARTS * length, len(source)) // GROUP
    piece = _Piece.of(most * GROUP, memory)
    for out in words.split(most):
        if len(out) < most:
            piece = _Piece.of(len(out) * GROUP, memory)
        piece.encode(parts, out, is_safe)


def _refuse_not_finite(largest: float) -> None:
    if not isfinite(largest):
        raise WeightError("A matrix to quantise holds a NaN or an infinity: repair the checkpoint.")
