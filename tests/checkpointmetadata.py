"""The metadata that tools write beside a checkpoint's tensors: configuration, manifests, quantisation sections.

In: a ``Draft`` of the tensors, and the model. Out: JSON files in the checkpoint's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference import UNPRUNED
from storedformats import GROUP, Draft, Flavour
from transformers import PreTrainedModel

from lynnc.model import Family, ModelSpec
from lynnc.tensors import Format


def write_metadata(folder: Path, spec: ModelSpec, model: PreTrainedModel, draft: Draft) -> None:
    config = _config(spec, model, draft.flavour)
    kind = draft.flavour.kind
    if kind.startswith("lynn"):
        config["quantization_config"] = {"quant_method": "lynn_native", "format": "nvfp4_e2m1_rowwise_per_16"}
        write_json(folder / "lynn_quant_manifest.json", _manifest(draft))
    if kind == "compressed-tensors":
        config["quantization_config"] = _compressed_tensors_section(draft)
    if kind == "modelopt":
        section = _modelopt_section(draft)
        if draft.flavour.metadata in ("both", "hf_quant_config.json"):
            write_json(folder / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": section})
        if draft.flavour.metadata in ("both", "config.json"):
            renamed = {**section, "ignore": section["exclude_modules"], "quant_method": "modelopt"}
            config["quantization_config"] = {k: v for k, v in renamed.items() if k != "exclude_modules"}
    write_json(folder / "config.json", config)
    if spec.moe and set(spec.moe.experts) != {UNPRUNED}:
        counts = {str(layer): count for layer, count in enumerate(spec.moe.experts)}
        side = {"hf_vanilla_compatible": False, "remaining_experts_by_layer": counts}
        write_json(folder / "lynn_engine_variable_expert_spec.json", side)


def _config(spec: ModelSpec, model: PreTrainedModel, flavour: Flavour) -> dict[str, Any]:
    """The configuration as ``transformers`` writes it; nested where the prefix is that of a multimodal model."""
    text = json.loads(model.config.to_json_string(use_diff=False))
    if flavour.prefix == "model." or spec.family is Family.QWEN3_MOE:
        return text
    return {"model_type": str(spec.family), "tie_word_embeddings": spec.tied_embeddings, "text_config": text}


def _manifest(draft: Draft) -> dict[str, Any]:
    held = {name for entry in draft.entries.values() for name in entry.values() if isinstance(name, str)}
    kept = {
        name: {"shape": list(t.shape), "dtype": "bfloat16"} for name, t in draft.tensors.items() if name not in held
    }
    return {
        "schema_version": f"lynn-variable-nvfp4-pack-{draft.flavour.kind[-2:]}",
        "quantization": {
            "format": "nvfp4_e2m1_rowwise_per_16",
            "weight_activation_contract": "W4A16_weight_only",
            "group_size": GROUP,
        },
        "kept_tensors": kept,
        "quantized_tensors": draft.entries,
    }


def _compressed_tensors_section(draft: Draft) -> dict[str, Any]:
    four_bits = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": GROUP, "strategy": "tensor_group"}
    activations = {**four_bits, "dynamic": "local"} if draft.flavour.activations == "nvfp4" else None
    group = {
        "targets": ["Linear"],
        "weights": {**four_bits, "dynamic": False, "actorder": None, "observer": "minmax"},
        "input_activations": activations,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*visual.*", "re:mtp.*", *_ignored(draft, "re:.*")],
        "kv_cache_scheme": None,
    }


def _modelopt_section(draft: Draft) -> dict[str, Any]:
    four_bits = "NVFP4" if draft.flavour.activations == "nvfp4" else "W4A16_NVFP4"
    section = {"quant_algo": four_bits, "kv_cache_quant_algo": None, "group_size": GROUP}
    section["exclude_modules"] = ["mtp*", "model.visual*", *_ignored(draft, "*")]
    if not draft.flavour.fp8:
        return section
    del section["group_size"]
    layers = {}
    for module, fmt in draft.modules.items():
        is_fp8 = fmt is Format.FP8
        name = f"{module.partition('.experts.')[0]}.experts" if ".experts." in module else module
        layers[name] = {"quant_algo": "FP8"} if is_fp8 else {"quant_algo": four_bits, "group_size": GROUP}
    return {**section, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _ignored(draft: Draft, any_of: str) -> Iterator[str]:
    """The kept classes as tools list them: in full, by patterns (``any_of`` stands for any start), fused and split."""
    blocks = {key.split(".linear_attn.")[0] for key in draft.tensors if ".linear_attn." in key}
    blocks |= {key.split(".self_attn.")[0] for key in draft.tensors if ".self_attn." in key}
    entries: dict[str, list[str]] = {
        "lm_head": ["lm_head"],
        "router": [f"{any_of}.mlp.gate" + ("$" if any_of.startswith("re:") else "")],
        "shared_gate": [f"{any_of}shared_expert_gate"],
        "gdn_gates": [f"{block}.linear_attn.in_proj_ba" for block in sorted(blocks)],
        "gdn_in": [f"{any_of}.in_proj_qkvz"],
        "gdn_out": [f"{block}.linear_attn.out_proj" for block in sorted(blocks)],
        "attention_in": [f"{block}.self_attn.{part}_proj" for block in sorted(blocks) for part in "qkv"],
        "attention_out": [f"{any_of}.o_proj"],
        "mlp": [f"{any_of}.gate_up_proj", f"{any_of}.mlp.down_proj"],
    }
    for tensor_class in draft.flavour.kept:
        yield from entries.get(tensor_class, [])


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))
