"""The tensor class of a checkpoint's tensor, by its name: the unit of a model file's precision rules.

In: a name without its prefix. Out: a class of ``lynnc.model.TENSOR_CLASSES``, or None for what is never quantised
(norms, convolutions, gate vectors) or no part of the model.

Example::

    tensor_class("layers.3.mlp.experts.12.gate_proj.weight")       # "experts"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        r"embed_tokens": "embed",
        r"lm_head": "lm_head",
        r"layers\.\d+\.linear_attn\.in_proj_(?:qkv|z)": "gdn_in",
        r"layers\.\d+\.linear_attn\.in_proj_[ab]": "gdn_gates",
        r"layers\.\d+\.linear_attn\.out_proj": "gdn_out",
        r"layers\.\d+\.self_attn\.[qkv]_proj": "attention_in",
        r"layers\.\d+\.self_attn\.o_proj": "attention_out",
        r"layers\.\d+\.mlp\.gate": "router",
        r"layers\.\d+\.mlp\.shared_expert_gate": "shared_gate",
        r"layers\.\d+\.mlp\.experts\.(?:\d+\.)?(?:gate|up|gate_up|down)_proj": "experts",
        r"layers\.\d+\.mlp\.shared_expert\.(?:gate|up|down)_proj": "shared_expert",
        r"layers\.\d+\.mlp\.(?:gate|up|down)_proj": "mlp",
    }
)
_PATTERNS = tuple((re.compile(rf"{module}(?:\.weight)?"), name) for module, name in _CLASSES.items())
LINEAR_CLASSES = frozenset(_CLASSES.values()) - {"embed", "router"}
"""Classes that quantisation tools mean by the module class ``Linear``; routers are a class of their own."""


def tensor_class(name: str) -> str | None:
    """The class of a name; the experts of a layer may be one tensor or one for each expert."""
    return next((found for pattern, found in _PATTERNS if pattern.fullmatch(name)), None)
