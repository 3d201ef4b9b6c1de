"""The metadata of ModelOpt: ``hf_quant_config.json``, or the section ``quantization_config`` of ``config.json``.

In: a checkpoint and the section, which may be empty. Out: ``Recognised``, or a ``WeightError``. Where both exist they
must agree.

Example::

    read_modelopt(checkpoint, {}).declared          # {"lm_head": Format.NVFP4, "...q_proj": Format.FP8, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.runtime.checkpoints.checkpoint import CONFIG, MODELOPT_FILE, Checkpoint
from lynnc.runtime.checkpoints.declared import (
    ANY_LINEAR,
    Recognised,
    SourceKind,
    mapping,
    names,
    refuse,
    settle_activations,
)
from lynnc.runtime.checkpoints.skipped import skip_reason
from lynnc.tensors import GROUP, Format

MIXED = "MIXED_PRECISION"
FP8 = "FP8"
_NVFP4 = {"NVFP4": "nvfp4", "W4A16_NVFP4": "bf16"}
"""Algorithms with 4-bit weights, to the precision of activations."""
_UNQUANTISED = (None, "UNQUANTIZED", "NONE")


def read_modelopt(checkpoint: Checkpoint, section: Mapping[str, object]) -> Recognised:
    """What the metadata declares; WeightError for another algorithm or group size, or where two places differ."""
    places = {
        MODELOPT_FILE: mapping(checkpoint.side_files.get(MODELOPT_FILE, {}).get("quantization")),
        CONFIG: section,
    }
    present = {place: found for place, found in places.items() if found}
    algorithm = _agreed(checkpoint, {place: found.get("quant_algo") for place, found in present.items()}, "quant_algo")
    for place, found in present.items():
        _check_settings(checkpoint, place, found)
    notes: tuple[str, ...] = ()
    if algorithm == MIXED:
        declared, activations, notes = _read_layers(checkpoint, present)
    elif isinstance(algorithm, str) and algorithm in _NVFP4:
        declared, activations = {ANY_LINEAR: Format.NVFP4}, _NVFP4[algorithm]
    else:
        refuse(checkpoint, f"is quantised by ModelOpt's algorithm {algorithm!r}")
    if any(found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme") for found in present.values()):
        notes += ("keys and values are declared quantised: the plan's cache keeps them BF16",)
    formats = sorted(set(declared.values()))
    return Recognised(
        kind=SourceKind.MODELOPT,
        detail=f"ModelOpt {algorithm}: {' and '.join(formats)} weights, {activations} activations",
        activations=activations,
        declared=MappingProxyType(declared),
        ignored=_ignored(checkpoint, present),
        notes=notes,
    )


def _agreed(checkpoint: Checkpoint, found: Mapping[str, object], what: str) -> object:
    """The one value that all places have."""
    values = list(found.values())
    if any(value != values[0] for value in values):
        told = " and ".join(f"{value!r} in {place}" for place, value in found.items())
        refuse(checkpoint, f"has metadata that contradicts itself ({what} is {told})")
    return values[0] if values else None


def _check_settings(checkpoint: Checkpoint, place: str, found: Mapping[str, object]) -> None:
    groups = [mapping(mapping(group).get("weights")) for group in mapping(found.get("config_groups")).values()]
    sizes = [found.get("group_size"), *(group.get("group_size") for group in groups if group.get("num_bits") == 4)]
    for size in sizes:
        if size not in (GROUP, None):
            refuse(checkpoint, f"has the group_size {size!r} in {place}")
    if found.get("has_zero_point"):
        refuse(checkpoint, f"has zero points (has_zero_point in {place})")


def _read_layers(
    checkpoint: Checkpoint, present: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, Format], str, tuple[str, ...]]:
    """Formats by layer, the precision of activations of the 4-bit ones, and notes."""
    tables = {place: _layer_table(checkpoint, place, found) for place, found in present.items()}
    layers = dict.fromkeys(layer for table in tables.values() for layer in table)
    if not layers:
        refuse(checkpoint, f"is {MIXED} without quantized_layers")
    declared, activations = {}, []
    for layer in layers:
        settings = {place: table[layer] for place, table in tables.items() if layer in table}
        by_place = {place: found.get("quant_algo") for place, found in settings.items()}
        algorithm = _agreed(checkpoint, by_place, f"quant_algo of {layer}")
        for place, found in settings.items():
            _check_settings(checkpoint, f"{place} for {layer}", found)
        if isinstance(algorithm, str) and algorithm in _NVFP4:
            declared[layer] = Format.NVFP4
            activations.append(_NVFP4[algorithm])
        elif algorithm == FP8:
            declared[layer] = Format.FP8
        elif algorithm not in _UNQUANTISED:
            refuse(checkpoint, f"has the layer {layer} in ModelOpt's algorithm {algorithm!r}")
    if not declared:
        refuse(checkpoint, f"is {MIXED} whose quantized_layers name no quantised layer but {', '.join(layers)}")
    settled, notes = settle_activations(activations)
    fp8 = sum(fmt is Format.FP8 for fmt in declared.values())
    if fp8:
        notes += (f"{fp8} FP8 layers declare FP8 activations: they get BF16",)
    return declared, settled, notes


def _layer_table(checkpoint: Checkpoint, place: str, found: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    """Settings of each layer that a plan may read, as one place has them."""
    table = found.get("quantized_layers")
    if not isinstance(table, Mapping | None):
        refuse(checkpoint, f"has quantized_layers in {place} that are no object")
    read: dict[str, Mapping[str, object]] = {}
    for layer, settings in (table or {}).items():
        if skip_reason(f"{layer}.") is not None:
            continue
        if not isinstance(settings, Mapping):
            refuse(checkpoint, f"has the layer {layer} in quantized_layers of {place} as {settings!r}, no object")
        read[layer] = settings
    return read


def _ignored(checkpoint: Checkpoint, present: Mapping[str, Mapping[str, object]]) -> tuple[str, ...]:
    """What either place excludes, by either of the two names that ModelOpt has for the list."""
    found: dict[str, None] = {}
    for section in present.values():
        for key in ("exclude_modules", "ignore"):
            found |= dict.fromkeys(names(checkpoint, section.get(key), key))
    return tuple(found)
