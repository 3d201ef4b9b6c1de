"""From checkpoint tensors to the arrays of a weight in the plan's layout, and their dequantised values.

In: a weight's description and a lookup of checkpoint tensors by name. Out: its arrays (data, scale, global), and on
request the FP32 values they stand for. One tensor at a time; nothing wider than FP32 of one part is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lynnc.errors import LynncError
from lynnc.ir import Format, Weight
from lynnc.runtime.weights.nvfp4 import dequantise, pack_codes, quantise, unpack_codes

Lookup = Callable[[str], torch.Tensor]
"""A checkpoint tensor by name, of any float type."""

_PLAIN = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}


class WeightError(LynncError):
    """A checkpoint tensor that is missing, of another shape, or holds values that cannot be stored."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Arrays of one weight by name (data, scale, global), as the plan describes them."""

    weight: Weight
    arrays: Mapping[str, torch.Tensor]


def pack_weight(weight: Weight, lookup: Lookup) -> PackedWeight:
    """Quantises or copies a weight's parts, expert by expert, and joins them."""
    experts = [_pack_expert(weight, lookup, expert) for expert in range(weight.experts)]
    if len(weight.shape) < 3:
        return PackedWeight(weight, experts[0])
    return PackedWeight(weight, {name: torch.stack([arrays[name] for arrays in experts]) for name in experts[0]})


def _pack_expert(weight: Weight, lookup: Lookup, expert: int) -> dict[str, torch.Tensor]:
    parts = []
    for part in weight.parts:
        values = lookup(part.source.format(expert=expert)).float()
        columns = weight.columns if len(weight.shape) > 1 else 1
        if values.numel() != part.rows * columns:
            wanted = f"{part.rows} x {columns}"
            raise WeightError(f"{part.source} has shape {list(values.shape)} where {weight.name} needs {wanted}.")
        if not values.isfinite().all():
            raise WeightError(
                f"{part.source.format(expert=expert)} holds a value that is not finite: repair the checkpoint."
            )
        parts.append(_pack_part(weight, values.reshape(part.rows, columns), part.rows))
    arrays = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: array.flatten() if len(weight.shape) == 1 else array for name, array in arrays.items()}


def _pack_part(weight: Weight, values: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
    if weight.format in _PLAIN:
        return {"data": values.to(_PLAIN[weight.format])}
    copies = rows // weight.part_rows
    if weight.format is Format.FP8:
        largest = values.abs().max()
        scale = torch.where(largest > 0, largest / 448.0, torch.ones_like(largest))
        return {"data": (values / scale).to(torch.float8_e4m3fn).view(torch.uint8), "global": scale.repeat(copies)}
    kind = "e4m3" if weight.format is Format.NVFP4 else "fp16"
    codes, scales, global_scale = quantise(values, kind)
    return {"data": pack_codes(codes), "scale": scales, "global": global_scale.repeat(copies)}


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """The FP32 values that a weight's arrays stand for, in the weight's shape."""
    weight, arrays = packed.weight, packed.arrays
    if weight.format in _PLAIN:
        return arrays["data"].float().reshape(weight.shape)
    row_scale = arrays["global"].repeat_interleave(weight.part_rows, dim=-1)[..., None]
    if weight.format is Format.FP8:
        return (arrays["data"].view(torch.float8_e4m3fn).float() * row_scale).reshape(weight.shape)
    return dequantise(unpack_codes(arrays["data"]), arrays["scale"], row_scale).reshape(weight.shape)
