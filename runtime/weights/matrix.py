"""A matrix as a checkpoint stores it: plain values, NVFP4 or FP8, and what the stored bits stand for.

In: tensors as read from a checkpoint or computed by the quantiser. Out: one of three records, which the packer copies
into the plan's arrays without touching a code or a scale, and ``decode``, the FP32 values. The order of operations in
``decode`` is that of compressed-tensors (``code * (scale / divisor)``) and ModelOpt (``code * (scale * global)``), each
step rounded to FP32, so that the values equal theirs bit for bit.

Example::

    decode(Fp4Matrix(words, scales, global_scale, divides=True))        # FP32 [rows, columns]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lynnc.runtime.weights.nvfp4 import code_values, scale_values, unpack_codes
from lynnc.tensors import GROUP


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """Values ``[rows, columns]`` of BF16, FP16 or FP32; a vector has one column."""

    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """NVFP4: words int64 ``[rows, columns / 16]`` in the plan's order of codes, scales of the same shape (uint8 E4M3
    bits, or FP16), and one FP32 number that values are multiplied with, or divided by."""

    words: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    divides: bool = False

    @property
    def multiplier(self) -> torch.Tensor:
        """What a kernel multiplies with: the FP32 nearest to the reciprocal where the checkpoint divides."""
        return self.global_scale.reciprocal() if self.divides else self.global_scale


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """FP8: uint8 E4M3 bits ``[rows, columns]`` and one FP32 number that values are multiplied with."""

    data: torch.Tensor
    scale: torch.Tensor


Matrix: TypeAlias = PlainMatrix | Fp4Matrix | Fp8Matrix


def decode(matrix: Matrix) -> torch.Tensor:
    """FP32 values ``[rows, columns]``."""
    if isinstance(matrix, PlainMatrix):
        return matrix.values.float()
    if isinstance(matrix, Fp8Matrix):
        return scale_values(matrix.data) * matrix.scale
    return decode_blocks(matrix.words, matrix.scales, matrix.global_scale, matrix.divides)


def decode_blocks(
    words: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, divides: bool = False
) -> torch.Tensor:
    """FP32 values of NVFP4 words; ``global_scale`` is a number, or one for each row ``[..., rows, 1]``."""
    block = scale_values(scales)
    block = block / global_scale if divides else block * global_scale
    codes = code_values(unpack_codes(words)).unflatten(-1, [-1, GROUP])
    values: torch.Tensor = codes * block[..., None]
    return values.flatten(-2)


def row_count(matrix: Matrix) -> int:
    """Rows of a matrix."""
    if isinstance(matrix, PlainMatrix):
        return matrix.values.shape[0]
    return (matrix.data if isinstance(matrix, Fp8Matrix) else matrix.words).shape[0]


def row_windows(matrix: Matrix, values: int) -> Iterator[slice]:
    """Runs of rows, in order, that hold about so many values each."""
    if isinstance(matrix, Fp4Matrix):
        columns = matrix.words.shape[1] * GROUP
    else:
        columns = (matrix.data if isinstance(matrix, Fp8Matrix) else matrix.values).shape[1]
    rows = max(1, values // max(1, columns))
    for first in range(0, row_count(matrix), rows):
        yield slice(first, first + rows)


def select_rows(matrix: Matrix, rows: torch.Tensor | slice) -> Matrix:
    """The given rows, in the given order, or a view of a run of rows; scales follow."""
    if isinstance(matrix, PlainMatrix):
        return PlainMatrix(matrix.values[rows])
    if isinstance(matrix, Fp8Matrix):
        return Fp8Matrix(matrix.data[rows], matrix.scale)
    return Fp4Matrix(matrix.words[rows], matrix.scales[rows], matrix.global_scale, matrix.divides)
