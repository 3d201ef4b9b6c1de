"""NVFP4 in torch: quantise, permute codes into 64-bit words, and back.

A value is ``code * block scale * global scale``: E2M1 codes, an E4M3 (or FP16) scale for each 16 columns, an FP32
scale for each part. Element e of a group of 16 stands in half ``e % 2`` of 32-bit half-word ``e // 8`` of a 64-bit word
as code ``j = e % 8 // 2``; the sign and the three magnitude bits of code j lie at bits (15, 11:9), (12, 8:6), (14, 5:3)
and (13, 2:0) of that 16-bit half, so that a kernel gets FP16 pairs with one to four integer instructions.

Example::

    codes, scales, global_scale = quantise(w)            # w FP32 [rows, columns]
    words = pack_codes(codes)                            # int64 [rows, columns / 16]
"""

from __future__ import annotations

from math import floor, log2

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes by code."""
LARGEST_CODE = 6.0
LARGEST_E4M3 = 448.0
GROUP = 16
SIGN_BIT = (15, 12, 14, 13)
MAGNITUDE_BIT = (9, 6, 3, 0)


def quantise(values: torch.Tensor, scale_format: str = "e4m3") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[rows, columns]``, block scales (uint8 E4M3 bytes or FP16) and the FP32 global scale of one part.

    Two levels: the global scale maps the largest block scale to the largest E4M3 value; each block scale is
    amax / 6 rounded to its format; codes are the nearest with ties to the even code.
    """
    blocks = values.float().unflatten(-1, [-1, GROUP])
    largest = blocks.abs().amax(-1)
    if scale_format == "e4m3":
        global_scale = largest.max() / (LARGEST_CODE * LARGEST_E4M3)
        global_scale = torch.where(global_scale > 0, global_scale, torch.ones_like(global_scale))
        stored = (largest / LARGEST_CODE / global_scale).to(torch.float8_e4m3fn)
        scales, scale_values = stored.view(torch.uint8), stored.float()
    else:
        global_scale = _fp16_global(float(largest.max()) / LARGEST_CODE)
        scales = (largest / LARGEST_CODE / global_scale).to(torch.float16)
        scale_values = scales.float()
    step = (scale_values * global_scale)[..., None]
    scaled = torch.where(
        step > 0, blocks / torch.where(step > 0, step, torch.ones_like(step)), torch.zeros_like(blocks)
    )
    return _nearest_code(scaled).flatten(-2), scales, global_scale.float()


def _fp16_global(largest_scale: float) -> torch.Tensor:
    """1, or the power of two that brings block scales FP16 cannot hold, or holds as subnormals, near 1."""
    if largest_scale == 0 or 2**-8 <= largest_scale <= 2**15:
        return torch.ones(())
    return torch.tensor(2.0 ** floor(log2(largest_scale)))


def _nearest_code(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code; halfway cases go to the even code."""
    magnitude = scaled.abs().clamp(max=LARGEST_CODE)
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    above = torch.bucketize(magnitude, middle, right=False)
    is_tie = (magnitude == middle[above.clamp(max=6)]) & (above % 2 == 1)
    code = above + is_tie.long()
    return (code + 8 * (scaled < 0).long()).to(torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[..., columns]`` to permuted words int64 ``[..., columns / 16]``."""
    groups = codes.long().unflatten(-1, [-1, GROUP])
    words = torch.zeros(groups.shape[:-1], dtype=torch.int64)
    for element in range(GROUP):
        base, j = _half_base(element), element % 8 // 2
        code = groups[..., element]
        words |= ((code >> 3) << (base + SIGN_BIT[j])) | ((code & 7) << (base + MAGNITUDE_BIT[j]))
    return words


def unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_codes``."""
    codes = []
    for element in range(GROUP):
        base, j = _half_base(element), element % 8 // 2
        sign = (words >> (base + SIGN_BIT[j])) & 1
        codes.append((sign << 3) | ((words >> (base + MAGNITUDE_BIT[j])) & 7))
    return torch.stack(codes, dim=-1).flatten(-2).to(torch.uint8)


def _half_base(element: int) -> int:
    return 32 * (element // 8) + 16 * (element % 2)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """FP32 ``code * scale * global``; ``global_scale`` is a number or one for each row ``[..., rows, 1]``."""
    values = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    scale_values = scales.view(torch.float8_e4m3fn).float() if scales.dtype is torch.uint8 else scales.float()
    blocks: torch.Tensor = values.unflatten(-1, [-1, GROUP]) * scale_values[..., None]
    return blocks.flatten(-2) * global_scale
