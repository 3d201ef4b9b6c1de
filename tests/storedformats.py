"""The formats in which checkpoints store values: plain searches and table look-ups, and what the bits are worth.

In: FP32 values and a ``Flavour``. Out: tensors by their names in the checkpoint, in a ``Draft``, and the FP32 values
that each format's own formula gives. No code is shared with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from lynnc.tensors import Format

GROUP = 16
KEPT = ("embed", "lm_head", "router", "shared_gate", "gdn_gates")
"""Tensor classes that quantised checkpoints usually keep plain."""

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CODES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
"""Values of E2M1 codes."""
E4M3 = torch.tensor(
    [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)
"""Values of the E4M3 bytes 0 to 126; 127 is NaN."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Flavour:
    """How a checkpoint is written.

    ``kind``: plain, lynn-v1, lynn-v0, compressed-tensors or modelopt. ``dtype`` is that of plain tensors. ``fused``:
    the experts of a layer in one tensor (plain and Lynn). ``activations``: bf16 or nvfp4, as declared. ``fp8``: tensor
    classes that ModelOpt keeps in FP8, which makes it MIXED_PRECISION. ``kept``: classes that stay plain. ``extras``:
    a vision tower, an MTP layer, scales of activations and of the cache, rotary frequencies. ``metadata``: where
    ModelOpt writes its own: hf_quant_config.json, config.json, or both.
    """

    kind: str = "plain"
    dtype: torch.dtype = torch.bfloat16
    fused: bool = False
    prefix: str = "model."
    shards: int = 1
    activations: str = "bf16"
    fp8: tuple[str, ...] = ()
    kept: tuple[str, ...] = KEPT
    extras: bool = False
    metadata: str = "both"
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.kind


@dataclass
class Draft:
    """A checkpoint in the making; ``entries`` go to Lynn's manifest, ``parts`` counts what was quantised."""

    flavour: Flavour
    prefix: str
    tensors: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    formats: dict[str, Format] = field(default_factory=dict)
    holders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Format] = field(default_factory=dict)
    parts: int = 0

    def odd_factor(self) -> float:
        """A number from 0.4 to 0.99 that is no power of two, another one at each call."""
        self.parts += 1
        return 0.4 + 0.59 * ((self.parts * 0.6180339887) % 1)


def write_values(draft: Draft, key: str, values: torch.Tensor, tensor_class: str, names: list[str]) -> None:
    """Stores the values in the class's format, and notes what they are worth by each of the graph's names."""
    fmt = _format(draft.flavour, tensor_class, values)
    if fmt is Format.BF16:
        dtype = torch.float32 if key.endswith("A_log") else draft.flavour.dtype
        stored = {key: values.to(dtype).contiguous()}
        decoded = stored[key].float()
    else:
        stored, decoded = _WRITERS[draft.flavour.kind, fmt](draft, key, values)
        draft.modules[key.removesuffix(".weight")] = fmt
    draft.tensors |= stored
    parts = decoded.reshape(len(names), -1, values.shape[-1]) if key.endswith("_proj") else [decoded]
    for name, part in zip(names, parts, strict=True):
        draft.values[name], draft.formats[name], draft.holders[name] = part, fmt, tuple(stored)


def _format(flavour: Flavour, tensor_class: str, values: torch.Tensor) -> Format:
    if flavour.kind == "plain" or tensor_class in ("vector", *flavour.kept) or values.shape[-1] % GROUP:
        return Format.BF16
    if tensor_class in flavour.fp8:
        return Format.FP8
    return Format.NVFP4_FP16 if flavour.kind.startswith("lynn") else Format.NVFP4


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The index of the nearest entry of a table."""
    return (values[..., None] - table).abs().argmin(-1)


def encode(values: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[rows, columns]`` for blocks of ``step`` ``[rows, columns / 16]``, and two of them in each byte."""
    wide = step.repeat_interleave(GROUP, -1)
    codes = nearest(torch.where(wide > 0, values / wide, torch.zeros_like(values)), CODES)
    codes = torch.where((values < 0) & (codes == 0), 8, codes)
    return codes, (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def largest_by_block(values: torch.Tensor) -> torch.Tensor:
    return values.abs().unflatten(-1, [-1, GROUP]).amax(-1)


def _write_lynn(draft: Draft, key: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows = values.reshape(-1, values.shape[-1])
    divisor = torch.tensor(3 * draft.odd_factor())
    scale = (largest_by_block(rows) / 6 * divisor).to(torch.float16)
    codes, pairs = encode(rows, scale.float() / divisor)
    stem, join = (key, ".") if draft.flavour.kind == "lynn-v1" else (key.replace(".", "_"), "_")
    names = {part: f"{stem}{join}{part}" for part in ("packed", "scale", "global_scale")}
    draft.entries[key] = {f"{part}_key": name for part, name in names.items()} | {
        "original_shape": list(values.shape),
        "original_dtype": "bfloat16",
        "packed_shape": list(pairs.shape),
        "scale_shape": list(scale.shape),
    }
    decoded = CODES[codes] * (scale.float() / divisor).repeat_interleave(GROUP, -1)
    return {names["packed"]: pairs, names["scale"]: scale, names["global_scale"]: divisor}, decoded.reshape(
        values.shape
    )


def _write_compressed_tensors(draft: Draft, key: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    divisor = 448 * 6 / values.abs().max() * draft.odd_factor()
    bits = nearest(largest_by_block(values) / 6 * divisor, E4M3)
    codes, pairs = encode(values, E4M3[bits] / divisor)
    tensors = {
        f"{key}_packed": pairs,
        f"{key}_scale": bits.to(torch.uint8).view(torch.float8_e4m3fn),
        f"{key}_global_scale": divisor.reshape(1),
    }
    return tensors, CODES[codes] * (E4M3[bits] / divisor).repeat_interleave(GROUP, -1)


def _write_modelopt(draft: Draft, key: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    factor = values.abs().max() / (448 * 6) / draft.odd_factor()
    bits = nearest(largest_by_block(values) / 6 / factor, E4M3)
    codes, pairs = encode(values, E4M3[bits] * factor)
    tensors = {
        key: pairs,
        f"{key}_scale": bits.to(torch.uint8).view(torch.float8_e4m3fn),
        f"{key}_scale_2": factor,
    }
    return tensors, CODES[codes] * (E4M3[bits] * factor).repeat_interleave(GROUP, -1)


def _write_fp8(draft: Draft, key: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    factor = values.abs().max() / 448 / draft.odd_factor()
    bits = nearest((values / factor).abs(), E4M3)
    signed = (bits + 128 * (values < 0)).to(torch.uint8)
    decoded = torch.where(values < 0, -E4M3[bits], E4M3[bits]) * factor
    return {key: signed.view(torch.float8_e4m3fn), f"{key}_scale": factor}, decoded


_WRITERS: Mapping[tuple[str, Format], Callable[..., tuple[Tensors, torch.Tensor]]] = MappingProxyType(
    {
        ("lynn-v1", Format.NVFP4_FP16): _write_lynn,
        ("lynn-v0", Format.NVFP4_FP16): _write_lynn,
        ("compressed-tensors", Format.NVFP4): _write_compressed_tensors,
        ("modelopt", Format.NVFP4): _write_modelopt,
        ("modelopt", Format.FP8): _write_fp8,
    }
)
