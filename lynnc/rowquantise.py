"""NVFP4 of rows of activations, in torch: the meaning of ``QuantiseActivations``, bit for bit.

In: FP32 rows ``[T, K]``, K a multiple of 16. Out: codes, E4M3 scales of 16 columns and an FP32 scale for each row, as
the op's tensors hold them. Rows are scaled by their own maximum, not by the static ``input_scale`` that a checkpoint
may bring: nothing saturates, no array is added to the weights, and a row does not depend on others in its step.

A group's 16 codes stand in the order that a weight's word has once its signs stand beside their magnitudes: element
``e`` is nibble ``8 * (e // 8) + 4 * (e % 2) + 3 - e % 8 // 2`` of the group's 8 bytes, lowest first.

Example::

    quantised = quantise_rows(x)
    dequantise_rows(quantised, K)        # FP32 [T, K]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lynnc.tensors import GROUP

LARGEST = 6.0 * 448.0
"""Code times block scale, at most."""
LEAST_ROW_SCALE = 2.0**-117
"""Times the smallest E4M3 number a normal FP32 number."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLE = tuple(4 * (e % 2) + 3 - e // 2 for e in range(8))


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """I32 ``[T, K / 8]`` of 8 codes a word, I32 ``[T, ceil(K / 64)]`` of 4 E4M3 scales a word, FP32 ``[T, 1]``."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """Quantises FP32 rows [T, K]; a row that holds an infinity or a NaN gets a row scale that is not finite."""
    groups = x.unflatten(1, [-1, GROUP])
    largest = groups.abs().amax(-1)
    row_scale = largest.amax(-1, keepdim=True) / LARGEST
    row_scale = torch.where(row_scale < LEAST_ROW_SCALE, LEAST_ROW_SCALE, row_scale)
    scale_bytes = _e4m3_bytes(largest / 6.0 / row_scale)
    inverse = 1.0 / (e4m3_values(scale_bytes) * row_scale)
    magnitudes = _e2m1_codes(groups.abs() * inverse[:, :, None])
    codes = magnitudes | ((groups.view(torch.int32) >> 28) & 8)
    padded = F.pad(scale_bytes, (0, -scale_bytes.shape[1] % 4)).to(torch.uint8)
    shifts = 4 * torch.tensor(_NIBBLE, dtype=torch.int64, device=x.device)
    words = (codes.long().unflatten(-1, [2, 8]) << shifts).sum(-1).flatten(1)
    return QuantisedRows(words.to(torch.int32), padded.contiguous().view(torch.int32), row_scale)


def dequantise_rows(rows: QuantisedRows, columns: int) -> torch.Tensor:
    """What they stand for, without the row scale: FP32 [T, columns]."""
    shifts = 4 * torch.tensor(_NIBBLE, dtype=torch.int32, device=rows.codes.device)
    codes = (rows.codes[:, :, None] >> shifts) & 15
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=rows.codes.device)
    scales = e4m3_values(rows.scales.contiguous().view(torch.uint8)[:, : columns // GROUP].int())
    return table[codes.long()].flatten(1) * scales.repeat_interleave(GROUP, dim=1)


def e4m3_values(scale_bytes: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3 bytes that are positive and no NaN, given as I32."""
    normal = ((scale_bytes + (120 << 3)) << 20).view(torch.float32)
    return torch.where(scale_bytes < 8, scale_bytes.float() * 2.0**-9, normal)


def _e4m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number of positive values, ties to even, from the smallest above 0 to 448; I32."""
    small = (values + 2.0**14).view(torch.int32) - _bits(2.0**14)  # 2^14 has the spacing of E4M3 subnormals
    bits = values.view(torch.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return torch.where(values < 2.0**-6, small, normal).clamp(1, 0x7E)


def _e2m1_codes(magnitudes: torch.Tensor) -> torch.Tensor:
    """The nearest code, 0 to 7, ties to even; I32."""
    values = torch.where(magnitudes < 6.0, magnitudes, 6.0)
    small = (values + 2.0**22).view(torch.int32) - _bits(2.0**22)
    bits = values.view(torch.int32)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    return torch.where(values < 1.0, small, normal)


def _bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))
