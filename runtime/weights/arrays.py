"""The arrays of a weight in the plan's layout: from matrices as stored, and back to the values they stand for.

In: a weight's description and its parts as ``Matrix`` records. Out: its arrays (``data``, ``scale``, ``global``, and
``divisor`` where a checkpoint divides). What came quantised is copied; plain values are quantised if the weight asks.

Example::

    packed = pack_weight(weight, lookup)        # lookup: checkpoint name -> tensor, as the tests use it
    unpack_weight(packed)                       # FP32 in the weight's shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lynnc.errors import WeightError
from lynnc.runtime.weights.matrix import Fp4Matrix, Fp8Matrix, Matrix, PlainMatrix, decode_blocks, row_count
from lynnc.runtime.weights.nvfp4 import scale_values
from lynnc.runtime.weights.packedindex import DIVISOR
from lynnc.runtime.weights.quantise import find_not_finite, quantise_fp8, quantise_nvfp4
from lynnc.tensors import Format, Weight

Lookup = Callable[[str], torch.Tensor]
"""A checkpoint tensor by name, of any float type."""

PLAIN_TYPES: Mapping[Format, torch.dtype] = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Arrays of one weight by name."""

    weight: Weight
    arrays: Mapping[str, torch.Tensor]


def format_of(matrix: Matrix) -> Format:
    """How a matrix is stored; BF16 stands for every plain type."""
    if isinstance(matrix, PlainMatrix):
        return Format.BF16
    if isinstance(matrix, Fp8Matrix):
        return Format.FP8
    return Format.NVFP4 if matrix.scales.dtype is torch.uint8 else Format.NVFP4_FP16


def convert(matrix: Matrix, fmt: Format, name: str, search: bool = False) -> Matrix:
    """The matrix in a weight's format: plain values are rounded or quantised, what is quantised stays as it is.

    ``name`` is for messages. WeightError for values that are not finite, or a quantised matrix of another format.
    """
    if not isinstance(matrix, PlainMatrix):
        if format_of(matrix) is not fmt:
            raise WeightError(f"{name} is stored as {format_of(matrix)}, which is never made into {fmt}.")
        return matrix
    try:
        if fmt is Format.FP8:
            return quantise_fp8(matrix.values)
        if fmt.is_packed:
            return quantise_nvfp4(matrix.values, fmt, search)
    except WeightError:
        _refuse_place(matrix, find_not_finite(matrix.values), name)
        raise
    _refuse_place(matrix, find_not_finite(matrix.values), name)
    values = matrix.values.to(PLAIN_TYPES[fmt])
    if values.dtype is not matrix.values.dtype:
        _refuse_place(matrix, find_not_finite(values), name, f", too large for {fmt}")
    return PlainMatrix(values)


def _refuse_place(matrix: PlainMatrix, place: tuple[int, int] | None, name: str, why: str = "") -> None:
    """WeightError that names a value and its place, if there is one."""
    if place is not None:
        found = float(matrix.values[place])
        raise WeightError(f"{name} holds {found} at row {place[0]}, column {place[1]}{why}: repair the checkpoint.")


def part_arrays(weight: Weight, matrix: Matrix) -> dict[str, torch.Tensor]:
    """The rows that one part (of one expert) gives to each of the weight's arrays; ``divisor`` for packed formats."""
    if isinstance(matrix, PlainMatrix):
        return {"data": matrix.values}
    copies = row_count(matrix) // weight.part_rows
    if isinstance(matrix, Fp8Matrix):
        return {"data": matrix.data, "global": _repeated(matrix.scale, copies)}
    divisor = matrix.global_scale if matrix.divides else torch.zeros_like(matrix.global_scale)
    return {
        "data": matrix.words,
        "scale": matrix.scales,
        "global": _repeated(matrix.multiplier, copies),
        DIVISOR: _repeated(divisor, copies),
    }


def _repeated(number: torch.Tensor, copies: int) -> torch.Tensor:
    return number.float().reshape(1).repeat(copies)


def pack_weight(weight: Weight, lookup: Lookup) -> PackedWeight:
    """Quantises or copies a weight's parts, expert by expert, and joins them; everything is held in memory."""
    experts = [_pack_expert(weight, lookup, expert) for expert in range(weight.experts)]
    if len(weight.shape) < 3:
        return PackedWeight(weight, experts[0])
    return PackedWeight(weight, {name: torch.stack([arrays[name] for arrays in experts]) for name in experts[0]})


def _pack_expert(weight: Weight, lookup: Lookup, expert: int) -> dict[str, torch.Tensor]:
    parts = []
    for part in weight.parts:
        name = part.source.format(expert=expert)
        values = lookup(name)
        if values.numel() != part.rows * weight.columns:
            wanted = f"{part.rows} x {weight.columns}"
            raise WeightError(f"{name} has shape {list(values.shape)} where {weight.name} needs {wanted}.")
        plain = PlainMatrix(values.reshape(part.rows, weight.columns))
        parts.append(part_arrays(weight, convert(plain, weight.format, name)))
    arrays = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: array.flatten() if len(weight.shape) == 1 else array for name, array in arrays.items()}


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """The FP32 values that a weight's arrays stand for, in the weight's shape; bit for bit the checkpoint's own."""
    weight, arrays = packed.weight, packed.arrays
    if weight.format in PLAIN_TYPES:
        return arrays["data"].float().reshape(weight.shape)
    factor = _of_rows(weight, arrays["global"])
    if weight.format is Format.FP8:
        return (scale_values(arrays["data"]) * factor).reshape(weight.shape)
    multiplied = decode_blocks(arrays["data"], arrays["scale"], factor)
    if DIVISOR not in arrays or not arrays[DIVISOR].any():
        return multiplied.reshape(weight.shape)
    divisor = _of_rows(weight, arrays[DIVISOR])
    divided = decode_blocks(arrays["data"], arrays["scale"], torch.where(divisor > 0, divisor, 1.0), divides=True)
    return torch.where(divisor > 0, divided, multiplied).reshape(weight.shape)


def _of_rows(weight: Weight, numbers: torch.Tensor) -> torch.Tensor:
    """One number for each row, ``[..., rows, 1]``, from one for each ``part_rows`` rows."""
    return numbers.repeat_interleave(weight.part_rows, dim=-1)[..., None]


def part_matrix(weight: Weight, arrays: Mapping[str, torch.Tensor], first_row: int, rows: int) -> Matrix:
    """One part out of the arrays of one expert ``[rows, ...]``: the inverse of ``part_arrays``."""
    kept = slice(first_row, first_row + rows)
    if weight.format in PLAIN_TYPES:
        return PlainMatrix(arrays["data"].reshape(weight.rows, weight.columns)[kept])
    index = first_row // weight.part_rows
    multiplier = arrays["global"][index]
    if weight.format is Format.FP8:
        return Fp8Matrix(arrays["data"][kept], multiplier)
    divisor = arrays[DIVISOR][index] if DIVISOR in arrays else torch.zeros(())
    divides = bool(divisor > 0)
    return Fp4Matrix(arrays["data"][kept], arrays["scale"][kept], divisor if divides else multiplier, divides)
