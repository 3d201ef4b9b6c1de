"""The metadata of compressed-tensors: section ``quantization_config`` of ``config.json``.

In: a checkpoint and the section. Out: ``Recognised`` for format ``nvfp4-pack-quantized``, or a ``WeightError``.

Example::

    read_compressed_tensors(checkpoint, section).activations       # "nvfp4", or "bf16" where input_activations is null
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.runtime.checkpoints.checkpoint import Checkpoint
from lynnc.runtime.checkpoints.declared import Recognised, SourceKind, mapping, names, refuse, settle_activations
from lynnc.tensors import GROUP, Format

FORMAT = "nvfp4-pack-quantized"
_WEIGHTS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "num_bits": (4,),
        "type": ("float",),
        "strategy": ("tensor_group",),
        "group_size": (GROUP,),
        "symmetric": (True, None),
        "dynamic": (False, None),
        "actorder": (None, False),
        "scale_dtype": ("torch.float8_e4m3fn", None),
        "zp_dtype": (None, "torch.float8_e4m3fn"),
    }
)
"""Settings of weights with the values that are read; an absent one counts as None."""
_ACTIVATIONS: Mapping[tuple[object, ...], str] = MappingProxyType(
    {(4, "float", "tensor_group"): "nvfp4", (8, "float", "tensor"): "fp8", (8, "float", "token"): "fp8"}
)
"""Bits, type and strategy of activations to the name of their precision."""


def read_compressed_tensors(checkpoint: Checkpoint, section: Mapping[str, object]) -> Recognised:
    """What the section declares; WeightError for any other format, group size, strategy, or a rotation of weights."""
    _check_whole(checkpoint, section)
    groups = mapping(section.get("config_groups"))
    if not groups:
        refuse(checkpoint, "has a quantization_config without config_groups")
    targets: dict[str, Format] = {}
    activations = []
    for name, group in groups.items():
        targets |= dict.fromkeys(_read_group(checkpoint, name, mapping(group)), Format.NVFP4)
        activations.append(_activations(checkpoint, name, mapping(group)))
    settled, notes = settle_activations(activations)
    if section.get("kv_cache_scheme") is not None:
        notes += ("keys and values are declared quantised: the plan's cache keeps them BF16",)
    return Recognised(
        kind=SourceKind.COMPRESSED_TENSORS,
        detail=f"compressed-tensors {FORMAT}, {' and '.join(sorted(set(activations)))} activations",
        activations=settled,
        declared=MappingProxyType(targets),
        ignored=names(checkpoint, section.get("ignore"), "ignore"),
        notes=notes,
    )


def _check_whole(checkpoint: Checkpoint, section: Mapping[str, object]) -> None:
    if section.get("format") != FORMAT:
        refuse(checkpoint, f"is compressed-tensors of the format {section.get('format')!r}")
    if section.get("quantization_status", "compressed") != "compressed":
        refuse(checkpoint, f"is compressed-tensors of the status {section['quantization_status']!r}")
    sparsity, transform = section.get("sparsity_config"), section.get("transform_config")
    if sparsity and mapping(sparsity).get("format") != "dense":
        refuse(checkpoint, "has sparse weights (sparsity_config)")
    if transform and (not isinstance(transform, Mapping) or any(transform.values())):
        refuse(checkpoint, "has rotated weights (transform_config)")


def _read_group(checkpoint: Checkpoint, name: str, group: Mapping[str, object]) -> tuple[str, ...]:
    """The group's targets."""
    if group.get("format") not in (FORMAT, None):
        refuse(checkpoint, f"has the config group {name} of the format {group['format']!r}")
    weights = mapping(group.get("weights"))
    for setting, accepted in _WEIGHTS.items():
        if weights.get(setting) not in accepted:
            refuse(checkpoint, f"has the config group {name} with weights of {setting} {weights.get(setting)!r}")
    targets = names(checkpoint, group.get("targets"), f"{name}.targets")
    if not targets:
        refuse(checkpoint, f"has the config group {name} without targets")
    return targets


def _activations(checkpoint: Checkpoint, name: str, group: Mapping[str, object]) -> str:
    """The precision in which activations meet the group's weights."""
    if group.get("output_activations") is not None:
        refuse(checkpoint, f"has the config group {name} with quantised output activations")
    if group.get("input_activations") is None:
        return "bf16"
    declared = mapping(group["input_activations"])
    bits, kind, strategy = settings = tuple(declared.get(setting) for setting in ("num_bits", "type", "strategy"))
    found = next((precision for known, precision in _ACTIVATIONS.items() if known == settings), None)
    if found is None or (found == "nvfp4" and declared.get("group_size") != GROUP):
        refuse(checkpoint, f"has the config group {name} with activations of {bits} bits, {kind}, by {strategy}")
    return found
