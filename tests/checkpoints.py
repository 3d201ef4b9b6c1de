"""Tiny checkpoints of every format that lynnc reads, with the FP32 values that each stands for.

In: a ``Case`` of ``reference`` and a ``Flavour``. Out: a checkpoint folder, and ``Written``: the model of
``transformers`` with the checkpoint's values put back, and those values by their names in the model's graph.
``storedformats`` quantises and decodes, ``checkpointmetadata`` writes the files beside the tensors.

Example::

    written = write_checkpoint(tmp_path / "checkpoint", Case("tiny-moe"), Flavour("modelopt", fp8=("attention_in",)))
    written.values["model.layers.3.self_attn.q_proj.weight"]          # FP32 [rows, columns]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from checkpointmetadata import write_json, write_metadata
from reference import Case, make_reference
from safetensors.torch import load_file, save_file
from storedformats import Draft, Flavour, Tensors, write_values
from transformers import PreTrainedModel

from lynnc.build import build_graph
from lynnc.model import ModelSpec
from lynnc.tensors import Format

INDEX = "model.safetensors.index.json"
PLAIN = Flavour()

ALL_FLAVOURS = (
    Flavour("plain"),
    Flavour("plain", torch.float16, fused=True, label="plain-f16-fused"),
    Flavour("plain", torch.float32, prefix="model.language_model.", shards=3, extras=True, label="plain-f32-sharded"),
    Flavour("lynn-v1", fused=True, shards=2, prefix="model.language_model.", extras=True),
    Flavour("lynn-v1", kept=(), label="lynn-all-fp4"),
    Flavour("lynn-v0", fused=True),
    Flavour("compressed-tensors", shards=2, extras=True),
    Flavour("compressed-tensors", activations="nvfp4", prefix="language_model.model.", label="compressed-tensors-w4a4"),
    Flavour("modelopt", activations="nvfp4", extras=True, label="modelopt-nvfp4"),
    Flavour("modelopt", metadata="config.json", kept=("embed", "router", "shared_gate"), label="modelopt-w4a16"),
    Flavour(
        "modelopt",
        fp8=("attention_in", "attention_out", "gdn_in", "gdn_out"),
        kept=("embed", "router", "shared_gate", "gdn_gates"),
        prefix="model.language_model.",
        shards=2,
        extras=True,
        metadata="hf_quant_config.json",
        label="modelopt-mixed",
    ),
)
"""One of each, with prefixes, layouts and shards spread over them."""


@dataclass(frozen=True)
class Written:
    """A checkpoint folder. ``values``, ``formats`` and ``tensors`` (which hold them) go by names of the graph; the
    model holds the values; ``spec`` has the formats that are stored; ``skipped`` are tensors that no plan reads."""

    folder: Path
    flavour: Flavour
    spec: ModelSpec
    model: PreTrainedModel
    values: Mapping[str, torch.Tensor]
    formats: Mapping[str, Format]
    tensors: Mapping[str, tuple[str, ...]]
    skipped: frozenset[str]


def write_checkpoint(folder: Path, case: Case, flavour: Flavour = PLAIN) -> Written:
    """Writes the folder, which must not exist."""
    spec = case.spec
    model, lookup = make_reference(spec, case.seed)
    draft = Draft(flavour, spec.tensor_prefix)
    classes = class_by_name(spec)
    for key, names in _keys(spec, classes, flavour):
        is_fused = key.endswith("_proj")
        values = _fuse(key, torch.stack([lookup(name) for name in names])) if is_fused else lookup(names[0])
        placed = key if key == "lm_head.weight" else f"{flavour.prefix}{key}"
        write_values(draft, placed, values.detach(), classes[names[0]], names)
    skipped = frozenset(_write_extras(draft) if flavour.extras else ())
    for name, values in draft.values.items():
        with torch.no_grad():
            lookup(name).copy_(values.reshape(lookup(name).shape))
    folder.mkdir(parents=True)
    _save(folder, draft.tensors, flavour.shards)
    write_metadata(folder, spec, model, draft)
    return Written(
        folder=folder,
        flavour=flavour,
        spec=_stored_spec(spec, classes, draft),
        model=model,
        values=MappingProxyType(draft.values),
        formats=MappingProxyType(draft.formats),
        tensors=MappingProxyType(draft.holders),
        skipped=skipped,
    )


def class_by_name(spec: ModelSpec) -> dict[str, str]:
    """The tensor class of every name of the model's graph: from weights that hold one class each."""
    apart = {"gdn_gates": Format.BF16, "gdn_in": Format.FP8, "router": Format.BF16, "shared_gate": Format.FP8}
    formats = {**spec.precision.formats, **{name: fmt for name, fmt in apart.items() if name in spec.precision.formats}}
    found: dict[str, str] = {}
    for weight in build_graph(replace(spec, precision=replace(spec.precision, formats=formats)), 1).weights.values():
        for expert in range(weight.experts):
            for part in weight.parts:
                found.setdefault(part.source.format(expert=expert), weight.tensor_class)
    return found


def _keys(spec: ModelSpec, classes: Mapping[str, str], flavour: Flavour) -> Iterator[tuple[str, list[str]]]:
    """Names to write, without prefix, each with the names of the graph that it holds: of all experts where fused."""
    fused: dict[str, list[str]] = {}
    for name, tensor_class in classes.items():
        rest = name.removeprefix(spec.tensor_prefix)
        if tensor_class != "experts" or not flavour.fused:
            yield rest, [name]
            continue
        block, _, end = rest.partition(".experts.")
        part = end.split(".")[1]
        fused.setdefault(f"{block}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}", []).append(name)
    yield from fused.items()


def _fuse(key: str, stacked: torch.Tensor) -> torch.Tensor:
    """Matrices of experts as ``[experts, rows, columns]``; gate and up alternate and become gate rows, then up rows."""
    return stacked if key.endswith("down_proj") else stacked.unflatten(0, [-1, 2]).flatten(1, 2)


def _write_extras(draft: Draft) -> Iterator[str]:
    """Adds tensors that no plan reads, and gives their names."""
    flavour = draft.flavour
    before = set(draft.tensors)
    draft.tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(6, 4, dtype=flavour.dtype)
    draft.tensors["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2, 2, dtype=flavour.dtype)
    draft.tensors["mtp.fc.weight"] = torch.ones(4, 8, dtype=flavour.dtype)
    attention = next((key for key in before if "self_attn" in key), None)
    if attention is not None:
        block = attention[: attention.index("self_attn") + len("self_attn")]
        draft.tensors[f"{block}.rotary_emb.inv_freq"] = torch.ones(8)
    if flavour.kind != "plain":
        modules, kept = dict(draft.modules), dict(draft.values)
        write_values(draft, "mtp.layers.0.mlp.down_proj.weight", torch.randn(32, 32), "mlp", ["mtp"])
        draft.modules, draft.values = modules, kept
        del draft.formats["mtp"], draft.holders["mtp"]
    suffix = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}.get(flavour.kind)
    for module in draft.modules if suffix else ():
        shape = (1,) if flavour.kind == "compressed-tensors" else ()
        draft.tensors[f"{module}.{suffix}"] = torch.full(shape, 0.7)
        if module.endswith(("k_proj", "v_proj")):
            draft.tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(0.3)
    yield from draft.tensors.keys() - before


def _save(folder: Path, tensors: Tensors, shards: int) -> None:
    """One file, or several with an index; neighbours lie in different shards."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": 0}, "weight_map": weight_map})


def _stored_spec(spec: ModelSpec, classes: Mapping[str, str], draft: Draft) -> ModelSpec:
    """The spec with the formats that a quantised checkpoint stores; that of a plain one as it is."""
    if draft.flavour.kind == "plain":
        return spec
    formats = {classes[name]: fmt for name, fmt in draft.formats.items() if classes[name] != "vector"}
    if spec.tied_embeddings:
        formats["lm_head"] = formats["embed"]
    return replace(spec, precision=replace(spec.precision, formats={**spec.precision.formats, **formats}))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes an object in a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Changes the tensors of a checkpoint of one shard in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
