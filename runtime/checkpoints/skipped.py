"""Tensors of a checkpoint that a plan has no use for, each with the reason.

In: a tensor's name. Out: why it is left out, or None for one that must find its place.

Example::

    skip_reason("model.visual.patch_embed.proj.weight")       # "vision tower: the plan is of the text model"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_REASONS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "vision tower: the plan is of the text model": re.compile(
            r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\."
        ),
        "MTP layer: the compiler makes no program for it yet": re.compile(
            r"(model\.|model\.language_model\.|language_model\.)?mtp\."
        ),
        "scale of activations: no kernel reads it": re.compile(r".*\.(input_scale|input_global_scale)"),
        "scale of the key/value cache: the plan's cache is BF16": re.compile(
            r".*\.(k_scale|v_scale|kv_scale|k_proj\.output_scale|v_proj\.output_scale)"
        ),
        "rotary frequencies: kernels compute them": re.compile(r".*\.rotary_emb\.inv_freq"),
    }
)
TIED_HEAD = "output projection: the model uses the embedding table for it"


def skip_reason(name: str) -> str | None:
    """Why the tensor of that name is left out. A part of the model matches by how its name starts."""
    for reason, pattern in _REASONS.items():
        found = pattern.match(name)
        if found and (found[0].endswith(".") or found.end() == len(name)):
            return reason
    return None
