"""Where the values of one part of a weight lie in a checkpoint, and reading them.

In: a name of the model's graph, found by ``Source.locate``. Out: ``Located``, known before any data is read, and from
it a ``Matrix`` as stored: codes put into the plan's order, nothing rounded. Refused are scales that are NaN or
infinite, FP16 scales below zero, and values beyond what BF16 and FP32 hold. E4M3 scales may be negative: all bytes but
NaN decode.

Example::

    read_matrix(reader, stored, located)            # Fp4Matrix(words, scales, global_scale, divides=True)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.stored import Stored
from lynnc.runtime.checkpoints.tensorreader import Index, TensorReader
from lynnc.runtime.weights.matrix import Fp4Matrix, Fp8Matrix, Matrix, PlainMatrix
from lynnc.runtime.weights.nvfp4 import words_from_bytes
from lynnc.tensors import GROUP, Format

_MAGNITUDE = 0x7F
"""All bits of an E4M3 number but its sign; NaN where they are all set."""
_LARGEST_CODE = 6.0
"""The largest magnitude of an E2M1 code."""
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST_VALUE = torch.finfo(torch.bfloat16).max
"""BF16's limit, 0.4 % below that of FP32: no order of rounding takes a value below it to infinity."""
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Located:
    """A matrix ``[rows, columns]`` in the checkpoint; a vector has one column.

    ``tensors`` are all that hold it, data first; ``index`` selects the matrix where its data is part of a larger
    tensor. ``key`` is the checkpoint's name of the values, ``dtype`` the type of the data. ``format`` is BF16 for
    every plain type. ``divides`` says that the global scale is a divisor.
    """

    name: str
    key: str
    tensors: tuple[str, ...]
    format: Format
    dtype: str
    rows: int
    columns: int
    index: Index = ()
    divides: bool = False

    @property
    def stored(self) -> str:
        """How it is stored, in a word: a plain type, or a format."""
        return self.dtype if self.format is Format.BF16 else str(self.format)

    @property
    def bytes(self) -> int:
        """Bytes that reading it takes."""
        elements = self.rows * self.columns
        if self.format is Format.BF16:
            return elements * _BYTES[self.dtype]
        if self.format is Format.FP8:
            return elements + 4
        return elements // 2 + elements // GROUP * (1 if self.format is Format.NVFP4 else 2) + 4


def read_matrix(reader: TensorReader, stored: Stored, located: Located) -> Matrix:
    """The matrix; WeightError for a scale, or an FP8 value, that is NaN, infinite, or not positive where it must be.

    WeightError also for scales that together make values too large for FP32, and for a multiplier too small for it.
    """
    data = reader.read(stored.data, located.index)
    if not stored.is_quantised:
        return PlainMatrix(data.reshape(located.rows, located.columns))
    assert stored.global_scale is not None
    global_scale = reader.read(stored.global_scale).reshape(())
    multiplier = _check_global(stored.global_scale, global_scale, stored.divides)
    if stored.format is Format.FP8:
        data = data.view(torch.uint8)
        _check_range(stored.global_scale, _check_e4m3(stored.data, data) * multiplier)
        return Fp8Matrix(data, global_scale)
    assert stored.scale is not None
    scales = reader.read(stored.scale, located.index)
    if stored.format is Format.NVFP4:
        scales = scales.view(torch.uint8)
        largest = _check_e4m3(stored.scale, scales)
    else:
        largest = _check_fp16(stored.scale, scales)
    _check_range(stored.global_scale, _LARGEST_CODE * largest * multiplier)
    return Fp4Matrix(words_from_bytes(data), scales, global_scale, stored.divides)


def _check_global(name: str, scale: torch.Tensor, divides: bool) -> float:
    """Finite and above zero, and so must be the multiplier that kernels get, which is returned."""
    if not (scale.isfinite() and scale > 0):
        raise WeightError(f"{name} is {float(scale)}, and a scale is a number above zero: repair the checkpoint.")
    if divides and not scale.reciprocal().isfinite():
        raise WeightError(f"{name} is {float(scale)}, too small a divisor for FP32: repair the checkpoint.")
    multiplier = 1 / float(scale) if divides else float(scale)
    if multiplier < _SMALLEST_NORMAL:
        what = "whose reciprocal" if divides else "which"
        raise WeightError(
            f"{name} is {float(scale)}, {what} is subnormal in FP32 (below 2^-126), and GPUs take that for zero: "
            "repair the checkpoint."
        )
    return multiplier


def _check_range(name: str, largest: float) -> None:
    """The largest magnitude that codes and scales can make is a finite number of BF16 and FP32."""
    if largest > _LARGEST_VALUE:
        raise WeightError(
            f"{name} makes values of up to {largest:.3g}, more than BF16 and FP32 hold ({_LARGEST_VALUE:.3g}): repair "
            "the checkpoint."
        )


def _check_e4m3(name: str, bits: torch.Tensor) -> float:
    """The largest magnitude among E4M3 bytes of either sign, none of which is NaN."""
    magnitudes = bits & _MAGNITUDE
    _refuse(name, magnitudes == _MAGNITUDE, "NaN")
    return float(magnitudes.amax().view(torch.float8_e4m3fn)) if bits.numel() else 0.0


def _check_fp16(name: str, scales: torch.Tensor) -> float:
    """The largest of FP16 scales, each finite and none negative."""
    _refuse(name, ~scales.isfinite(), "not finite")
    _refuse(name, scales < 0, "negative")
    return float(scales.amax()) if scales.numel() else 0.0


def _refuse(name: str, is_wrong: torch.Tensor, what: str) -> None:
    if is_wrong.any():
        row, column = (int(place) for place in is_wrong.nonzero()[0])
        raise WeightError(f"{name} is {what} at row {row}, column {column}: repair the checkpoint.")
