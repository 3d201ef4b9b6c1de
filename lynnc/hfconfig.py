"""A published ``config.json`` to a ``ModelSpec``.

In: the configuration of a family that lynnc knows (nested under ``text_config``, or the flat configuration of the text
model alone), and the experts left in each layer if the checkpoint was pruned. Out: a checked ``ModelSpec``, or a
``ModelError`` that names file and field. The weights are given the usual formats: a configuration says nothing of them.

Example::

    config = read_json(Path("config.json"))
    experts = read_expert_spec(Path("lynn_engine_variable_expert_spec.json"))
    spec = import_config(config, name="mine", experts=experts)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lynnc.errors import ModelError
from lynnc.fields import Place, count, describe, flag, list_of, one_of, positive_number
from lynnc.model import Family, Mixer, ModelSpec
from lynnc.modelfile import read_text
from lynnc.modelshape import FAMILIES, from_dict

EXPERT_SPEC = "lynn_engine_variable_expert_spec.json"
"""The file beside a pruned checkpoint that says how many experts each layer still has."""
_BY_LAYER = "remaining_experts_by_layer"

_SHARED_FIELDS = {
    "hidden": "hidden_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "norm.eps": "rms_norm_eps",
    "attention.heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
}
_GDN_FIELDS = {
    "gdn.key_heads": "linear_num_key_heads",
    "gdn.value_heads": "linear_num_value_heads",
    "gdn.key_dim": "linear_key_head_dim",
    "gdn.value_dim": "linear_value_head_dim",
    "gdn.conv_width": "linear_conv_kernel_dim",
}
_MOE_FIELDS = {
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.intermediate": "moe_intermediate_size",
}
_SHARED_EXPERT_FIELDS = {"moe.shared_intermediate": "shared_expert_intermediate_size"}
_MIXER_NAMES = {Mixer.GDN: "linear_attention", Mixer.FULL: "full_attention"}
_SUPPORTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention_bias": (False, None),
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
        "mtp_use_dedicated_embeddings": (False, None),
    }
)
"""The values of a setting that lynnc compiles, the first one the usual; absent is always fine."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the configuration of a family names and defaults things; ``fields``: the model file's name to theirs."""

    fields: Mapping[str, str]
    norm: str = "shifted"
    output_gate: bool = True
    rotary_share: float = 0.25
    normalize_top_k: bool = True


DIALECTS: Mapping[Family, Dialect] = MappingProxyType(
    {
        Family.QWEN3_5_MOE: Dialect(_SHARED_FIELDS | _GDN_FIELDS | _MOE_FIELDS | _SHARED_EXPERT_FIELDS),
        Family.QWEN3_5: Dialect(_SHARED_FIELDS | _GDN_FIELDS | {"dense.intermediate": "intermediate_size"}),
        Family.QWEN3_MOE: Dialect(_SHARED_FIELDS | _MOE_FIELDS, "plain", False, 1.0, False),
    }
)


@dataclass(frozen=True, slots=True)
class _Source:
    """A configuration being read: the part that describes the text model, its place, and the whole of it."""

    text: Mapping[str, object]
    place: Place
    whole: Mapping[str, object]
    family: Family
    dialect: Dialect

    def need(self, name: str) -> object:
        if self.text.get(name) is None:
            self.place.field(name).fail("is missing", "add it")
        return self.text[name]

    def count(self, name: str) -> int:
        return int(count(self.need(name), self.place.field(name)))


def import_config(
    config: Mapping[str, object],
    *,
    name: str,
    experts: Mapping[str, int] | None = None,
    file: str = "config.json",
    experts_file: str = EXPERT_SPEC,
) -> ModelSpec:
    """The model of a published configuration; ``experts`` holds the count of each layer of a pruned checkpoint by the
    layer's number as text. Both file names are for messages. Raises ``ModelError`` for what is missing, contradictory
    or not supported."""
    source = _open(config, file)
    _refuse_unsupported(source)
    values = dict(_read_fields(source))
    values |= {"name": name, "description": f"imported from {Path(file).name}", "family": str(source.family)}
    if experts is not None:
        values["moe.experts"] = _experts(source, experts, len(_layers(source)), Place(experts_file, _BY_LAYER))
    return from_dict(_nest(values), Place(file, names=_names(source)))


def read_json(path: Path) -> Mapping[str, object]:
    """The object in a JSON file; raises ``ModelError`` for no file, no JSON, no object, a key given twice, and for
    nesting and numbers beyond what Python reads."""
    place = Place(str(path))

    def pairs(entries: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in entries:
            if key in found:
                place.field(key).fail("is given twice", "keep one of them")
            found[key] = value
        return found

    try:
        return _mapping(json.loads(read_text(path), object_pairs_hook=pairs), place)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: line {error.lineno} is not JSON ({error.msg}); correct the file there") from None
    except RecursionError:
        raise ModelError(f"{path}: the content is nested too deeply; write the file again") from None
    except ValueError:
        # Nothing else is left that Python's reader refuses.
        raise ModelError(f"{path}: the content holds a number of too many digits; write the file again") from None


def read_expert_spec(path: Path) -> Mapping[str, int]:
    """Experts by layer from ``lynn_engine_variable_expert_spec.json``; raises ``ModelError``."""
    place = Place(str(path)).field(_BY_LAYER)
    content = read_json(path)
    if _BY_LAYER not in content:
        place.fail("is missing", "give the number of experts of each layer there")
    layers = _mapping(content[_BY_LAYER], place)
    return {layer: count(held, place.field(layer)) for layer, held in layers.items()}


def _mapping(value: object, place: Place) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        place.fail(f"is {describe(value)}, not an object", "write an object of names and values")
    return value


def _open(config: Mapping[str, object], file: str) -> _Source:
    top = Place(file)
    family = _family(config, top)
    nested = "text_config" in config
    place = top.field("text_config") if nested else top
    text = _mapping(config["text_config"], place) if nested else config
    if "model_type" in text and _family(text, place) is not family:
        place.field("model_type").fail(f"is {describe(text['model_type'])}, unlike model_type", "make the two agree")
    if "num_local_experts" in text:
        text = {"num_experts": text["num_local_experts"], **text}
    return _Source(text, place, config, family, DIALECTS[family])


def _family(config: Mapping[str, object], place: Place) -> Family:
    known = {str(family): family for family in Family} | {
        f"{family}_text": family for family in (Family.QWEN3_5_MOE, Family.QWEN3_5)
    }
    if "model_type" not in config:
        place.field("model_type").fail("is missing", f"add it, as one of {', '.join(known)}")
    return known[one_of(*known)(config["model_type"], place.field("model_type"))]


def _refuse_unsupported(source: _Source) -> None:
    supported = {**_SUPPORTED, "attn_output_gate": (source.dialect.output_gate, None)}
    for name, values in supported.items():
        value = source.text.get(name)
        if value not in values:
            advice = f"use a checkpoint with {name} {json.dumps(values[0])}"
            source.place.field(name).fail(f"is {json.dumps(value)}, which lynnc does not compile", advice)


def _read_fields(source: _Source) -> Iterator[tuple[str, object]]:
    """Each field by its path in a model file, and its value."""
    for ours, theirs in source.dialect.fields.items():
        yield ours, source.need(theirs)
    yield "attention.head_dim", _head_dim(source)
    yield "mtp.layers", source.text.get("mtp_num_hidden_layers", 0)
    yield "norm.weight", source.dialect.norm
    yield "attention.output_gate", source.dialect.output_gate
    yield "tied_embeddings", _tied(source)
    yield "layers.pattern", _layers(source)
    yield from _rope(source)
    if FAMILIES[source.family].feed_forward == "moe":
        yield "moe.normalize_top_k", _normalize(source)
    yield "precision.default", "nvfp4"
    yield "tensor_prefix", "model.language_model." if "text_config" in source.whole else "model."


def _normalize(source: _Source) -> bool:
    """Only qwen3_moe reads the setting; the other families always normalise."""
    usual = source.dialect.normalize_top_k
    return usual or flag(source.text.get("norm_topk_prob", usual), source.place.field("norm_topk_prob"))


def _tied(source: _Source) -> bool:
    name = "tie_word_embeddings"
    inner = flag(source.text.get(name, source.whole.get(name, False)), source.place.field(name))
    if inner is not flag(source.whole.get(name, inner), Place(source.place.file, name)):
        source.place.field(name).fail(f"is {describe(inner)}, unlike {name}", "make the two agree")
    return inner


def _layers(source: _Source) -> list[str]:
    mixers = {_MIXER_NAMES[mixer]: str(mixer) for mixer in FAMILIES[source.family].mixers}
    depth, types = source.count("num_hidden_layers"), source.text.get("layer_types")
    if types is None and len(mixers) == 1:
        return [*mixers.values()] * depth
    if types is None:
        interval = source.count("full_attention_interval")
        return ["gdn" if layer % interval else "full" for layer in range(1, depth + 1)]
    place = source.place.field("layer_types")
    found = list_of(one_of(*mixers))(types, place)
    if len(found) != depth:
        place.fail(f"lists {len(found)} layers but num_hidden_layers is {depth}", "make the two agree")
    return [mixers[kind] for kind in found]


def _rope(source: _Source) -> Iterator[tuple[str, object]]:
    """The settings under ``rope_parameters`` win over those beside it; ``rope_scaling`` is its former name."""
    section = next((name for name in ("rope_parameters", "rope_scaling") if source.text.get(name)), "rope_parameters")
    place = source.place.field(section)
    rope = _mapping(source.text.get(section) or {}, place)
    for name in ("rope_type", "type"):
        if rope.get(name, "default") != "default":
            place.field(name).fail(f"is {describe(rope[name])}, which lynnc does not compile", "use default RoPE")
    theta, theta_place = _either(source, rope, place, "rope_theta")
    if theta is None:
        theta_place.fail("is missing", "add it")
    yield "attention.rope.theta", positive_number(theta, theta_place)
    share, share_place = _either(source, rope, place, "partial_rotary_factor")
    share = positive_number(source.dialect.rotary_share if share is None else share, share_place)
    yield "attention.rope.dims", int(_head_dim(source) * share)


def _either(source: _Source, rope: Mapping[str, object], place: Place, name: str) -> tuple[object, Place]:
    if rope.get(name) is None and source.text.get(name) is not None:
        return source.text[name], source.place.field(name)
    return rope.get(name), place.field(name)


def _head_dim(source: _Source) -> int:
    """``head_dim``, or an even share of the hidden size where it is not given."""
    if source.text.get("head_dim") is not None:
        return source.count("head_dim")
    return source.count("hidden_size") // source.count("num_attention_heads")


def _experts(source: _Source, experts: Mapping[str, int], layers: int, place: Place) -> list[int]:
    if FAMILIES[source.family].feed_forward != "moe":
        place.fail("is given for a model without experts", "leave it out")
    least, most = source.count("num_experts_per_tok"), source.count("num_experts")
    numbers = [str(layer) for layer in range(layers)]
    for number in (*numbers, *experts):
        if number not in experts:
            place.field(number).fail("is missing", f"give every layer from 0 to {layers - 1}")
        if number not in numbers:
            place.field(number).fail(f"is none of the {layers} layers", "remove it")
        if not least <= count(experts[number], place.field(number)) <= most:
            problem = f"is {experts[number]} but a token selects {least} of the full model's {most} experts"
            place.field(number).fail(problem, f"give {least} to {most}")
    return [experts[number] for number in numbers]


def _nest(values: Mapping[str, object]) -> dict[str, object]:
    """``{"a.b": 1}`` to ``{"a": {"b": 1}}``."""
    root: dict[str, object] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        inner = root
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = value
    return root


def _names(source: _Source) -> Mapping[str, str]:
    """What the configuration calls each of our fields, for messages."""
    theirs = {
        **source.dialect.fields,
        "attention.head_dim": "head_dim",
        "mtp.layers": "mtp_num_hidden_layers",
        "layers.pattern": "layer_types",
        "attention.rope.theta": "rope_parameters.rope_theta",
        "attention.rope.dims": "rope_parameters.partial_rotary_factor",
    }
    return {ours: source.place.field(name).path for ours, name in theirs.items()}
