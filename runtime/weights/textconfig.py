"""The ``config.json`` of a checkpoint that holds the text model alone, as ``transformers`` reads it.

In: the configuration of the checkpoint that was packed (nested under ``text_config``, or flat) and the packed model.
Out: a flat configuration without vision parts, draft layers and quantisation, and what is worth saying about it.

Example::

    text_config(config, spec, "bfloat16", is_tied=False)["architectures"]      # ["Qwen3_5MoeForCausalLM"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from lynnc.errors import ModelError
from lynnc.hfconfig import import_config
from lynnc.model import Family, ModelSpec


@dataclass(frozen=True, slots=True)
class TextModel:
    """How ``transformers`` names the text model of a family, and whether its published checkpoints fuse experts."""

    architecture: str
    model_type: str
    has_fused_experts: bool


TEXT_MODELS: Mapping[Family, TextModel] = MappingProxyType(
    {
        Family.QWEN3_5_MOE: TextModel("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", True),
        Family.QWEN3_5: TextModel("Qwen3_5ForCausalLM", "qwen3_5_text", False),
        Family.QWEN3_MOE: TextModel("Qwen3MoeForCausalLM", "qwen3_moe", False),
    }
)

_DRAFT_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_OF_THE_TEXT = (
    "auto_map",
    "compression_config",
    "image_token_id",
    "num_local_experts",
    "quantization_config",
    "text_config",
    "torch_dtype",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)
"""Settings of other parts, and those that have another name in what is written."""
_NOT_COMPARED = ("name", "description", "precision", "mtp_layers", "tensor_prefix", "representative")
"""Fields of a model that a text model's configuration does not hold, or holds as they were before packing."""


def text_config(config: Mapping[str, object], spec: ModelSpec, dtype: str, is_tied: bool) -> dict[str, object]:
    """The configuration of what is written. ``dtype`` is spelled ``bfloat16``; ``is_tied`` says whether the output
    projection is the embedding table. Where layers differ in their experts, ``num_experts`` is the largest count."""
    nested = config.get("text_config")
    text = {**nested} if isinstance(nested, Mapping) else {**config}
    for name in _TOKENS:
        if text.get(name) is None and config.get(name) is not None:
            text[name] = config[name]
    known = TEXT_MODELS[spec.family]
    found = {name: value for name, value in text.items() if name not in _NOT_OF_THE_TEXT}
    found |= {"architectures": [known.architecture], "model_type": known.model_type, "dtype": dtype}
    found |= {name: 0 for name in _DRAFT_LAYERS if name in found}
    found["tie_word_embeddings"] = is_tied
    if spec.moe:
        found["num_experts"] = max(spec.moe.experts)
    return found


def differences(config: Mapping[str, object], spec: ModelSpec) -> Iterator[str]:
    """What ``config``, made by ``text_config``, says unlike the packed model, a sentence for each; ``transformers``
    follows the configuration and a plan the model."""
    try:
        configured = import_config(config, name=spec.name)
    except ModelError as error:
        yield f"the checkpoint's configuration is not one that lynnc understands ({error})"
        return
    if spec.moe and configured.moe:
        configured = replace(configured, moe=replace(configured.moe, experts=spec.moe.experts))
    configured = replace(configured, tied_embeddings=spec.tied_embeddings)
    for field in fields(spec):
        found, packed = getattr(configured, field.name), getattr(spec, field.name)
        if field.name not in _NOT_COMPARED and found != packed:
            yield f"config.json and the packed model differ in {field.name}: {found} and {packed}"
