"""The shape of a model description: its fields, what each may hold, and the rules between them.

In: nested plain values in the shape of a model file (``models/README.md`` documents it). Out: a ``ModelSpec`` that
keeps every rule here, or a ``ModelError`` that names file and field. ``lynnc.modelfile`` and ``lynnc.hfconfig`` both
come through ``from_dict``.

Example::

    from_dict(yaml_content, Place("tiny-moe.yaml"))     # ModelSpec(name="tiny-moe", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lynnc.fields import (
    Field,
    Place,
    Section,
    count,
    flag,
    list_of,
    one_of,
    one_or_list_of,
    positive_number,
    text,
    whole,
    word,
)
from lynnc.model import (
    TENSOR_CLASSES,
    AttentionSpec,
    DenseSpec,
    Family,
    GdnSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    PrecisionSpec,
)
from lynnc.tensors import GROUP, Format

KEPT_BF16 = ("embed", "router", "shared_gate")
"""Tensor classes that stay BF16 whatever the default format is, unless the file names a format for them."""

MATRIX_FORMATS = (Format.NVFP4, Format.NVFP4_FP16, Format.FP8, Format.BF16)
"""Formats that kernels read matrices in; FP32 is for the few gate vectors alone."""
ACTIVATIONS = ("bf16", "nvfp4")
"""Precisions in which activations may be declared to meet NVFP4 weights."""
MOST_CONV_WIDTH = 9
"""Inputs of a convolution: its state keeps 16 positions, 8 of them for the rows of a step."""
MOST_STATE = 32768
"""Values of a GDN head's state, which one program keeps in registers."""
MOST_EXPERTS = 4096
"""Experts of a layer that one program ranks."""

ATTENTION = Section(
    {
        "heads": Field(count),
        "kv_heads": Field(count),
        "head_dim": Field(count),
        "output_gate": Field(flag, False),
        "rope": Section({"theta": Field(positive_number), "dims": Field(count)}),
    }
)
GDN = Section(
    {
        "key_heads": Field(count),
        "value_heads": Field(count),
        "key_dim": Field(count),
        "value_dim": Field(count),
        "conv_width": Field(count),
    },
    default=None,
)
MOE = Section(
    {
        "experts": Field(one_or_list_of(count)),
        "top_k": Field(count),
        "intermediate": Field(count),
        "normalize_top_k": Field(flag, True),
        "shared_intermediate": Field(whole(0), 0),
    },
    default=None,
)
PRECISION = Section(
    {"default": Field(one_of(*MATRIX_FORMATS)), "activations": Field(one_of(*ACTIVATIONS), "bf16")}
    | {name: Field(one_of(*MATRIX_FORMATS), None) for name in TENSOR_CLASSES},
    noun="tensor class",
)
SHAPE = Section(
    {
        "name": Field(word),
        "description": Field(text, ""),
        "family": Field(one_of(*Family)),
        "representative": Field(flag, False),
        "hidden": Field(count),
        "vocabulary": Field(count),
        "context": Field(count),
        "tied_embeddings": Field(flag, False),
        "norm": Section({"eps": Field(positive_number), "weight": Field(one_of("shifted", "plain"))}),
        "layers": Section({"pattern": Field(list_of(one_of(*Mixer))), "repeat": Field(whole(1, most=1000), 1)}),
        "attention": ATTENTION,
        "gdn": GDN,
        "moe": MOE,
        "dense": Section({"intermediate": Field(count)}, default=None),
        "mtp": Section({"layers": Field(whole(0), 0)}, default={}),
        "precision": PRECISION,
        "tensor_prefix": Field(text, None),
    }
)
"""Every field of a model file."""


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What the name of a family fixes: its feed-forward section, its mixers, where its tensors stand."""

    feed_forward: str
    mixers: tuple[Mixer, ...]
    tensor_prefix: str


FAMILIES: Mapping[Family, FamilyFacts] = MappingProxyType(
    {
        Family.QWEN3_5_MOE: FamilyFacts("moe", (Mixer.GDN, Mixer.FULL), "model.language_model."),
        Family.QWEN3_5: FamilyFacts("dense", (Mixer.GDN, Mixer.FULL), "model.language_model."),
        Family.QWEN3_MOE: FamilyFacts("moe", (Mixer.FULL,), "model."),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule: the field it is put down to, what is wrong, what to do."""

    path: str
    problem: str
    advice: str


def from_dict(data: object, place: Place) -> ModelSpec:
    """The checked model that ``data`` describes; ``place`` is its file. Raises ``ModelError``."""
    spec = _build(SHAPE.read(data, place))
    for rule in RULES:
        for problem in rule(spec):
            place.field(problem.path).fail(problem.problem, problem.advice)
    return spec


def _build(values: Mapping[str, Any]) -> ModelSpec:
    layers: tuple[Mixer, ...] = values["layers"]["pattern"] * values["layers"]["repeat"]
    rope, norm, prefix = values["attention"].pop("rope"), values["norm"], values["tensor_prefix"]
    return ModelSpec(
        **{name: values[name] for name in ("name", "description", "family", "representative", "hidden", "vocabulary")},
        layers=layers,
        max_context=values["context"],
        norm_eps=norm["eps"],
        norm_shifted=norm["weight"] == "shifted",
        tied_embeddings=values["tied_embeddings"],
        attention=AttentionSpec(**values["attention"], rotary_dim=rope["dims"], rope_theta=rope["theta"]),
        gdn=GdnSpec(**values["gdn"]) if values["gdn"] else None,
        moe=_build_moe(values["moe"], len(layers)) if values["moe"] else None,
        dense=DenseSpec(**values["dense"]) if values["dense"] else None,
        mtp_layers=values["mtp"]["layers"],
        precision=_build_precision(values["precision"]),
        tensor_prefix=FAMILIES[values["family"]].tensor_prefix if prefix is None else prefix,
    )


def _build_moe(values: Mapping[str, Any], layers: int) -> MoeSpec:
    experts = values["experts"]
    return MoeSpec(**{**values, "experts": (experts,) * layers if isinstance(experts, int) else experts})


def _build_precision(values: Mapping[str, Any]) -> PrecisionSpec:
    formats = {name: values[name] or default_format(name, values["default"]) for name in TENSOR_CLASSES}
    return PrecisionSpec(MappingProxyType(formats), values["activations"])


def default_format(tensor_class: str, default: Format) -> Format:
    """The format of a tensor class that the file does not name."""
    return Format.BF16 if tensor_class in KEPT_BF16 else default


def one_feed_forward(spec: ModelSpec) -> Iterator[Problem]:
    """Each family has one kind of feed-forward block."""
    wanted = FAMILIES[spec.family].feed_forward
    other = "dense" if wanted == "moe" else "moe"
    if spec.moe and spec.dense:
        yield Problem(other, f"stands beside {wanted}", f"keep only {wanted}, which family {spec.family} has")
    if getattr(spec, other):
        yield Problem(other, f"is not what family {spec.family} has", f"give {wanted} instead or change the family")
    if not getattr(spec, wanted):
        yield Problem(wanted, "is missing", f"give the feed-forward blocks of family {spec.family}")


def mixers_described(spec: ModelSpec) -> Iterator[Problem]:
    """The pattern holds mixers of the family, and ``gdn`` is there exactly when a layer needs it."""
    for index, mixer in enumerate(spec.layers):
        if mixer not in FAMILIES[spec.family].mixers:
            known = " or ".join(FAMILIES[spec.family].mixers)
            yield Problem(f"layers.pattern[{index}]", f"is {mixer}, unknown to family {spec.family}", f"write {known}")
    if Mixer.GDN in spec.layers and not spec.gdn:
        yield Problem("gdn", "is missing though layers.pattern has gdn layers", "give key_heads, value_heads and so on")
    if Mixer.GDN not in spec.layers and spec.gdn:
        yield Problem("gdn", "describes a mixer that no layer of layers.pattern uses", "remove it or add gdn layers")


def heads_divide(spec: ModelSpec) -> Iterator[Problem]:
    """Query heads share key/value heads evenly, and GDN value heads share key heads."""
    attention, gdn = spec.attention, spec.gdn
    if attention.heads % attention.kv_heads:
        problem = f"is {attention.kv_heads}, which does not divide the {attention.heads} query heads"
        yield Problem("attention.kv_heads", problem, "give a divisor of the query heads")
    if gdn and gdn.value_heads % gdn.key_heads:
        problem = f"is {gdn.key_heads}, which does not divide the {gdn.value_heads} value heads"
        yield Problem("gdn.key_heads", problem, "give a divisor of the value heads")


def rotary_fits(spec: ModelSpec) -> Iterator[Problem]:
    """RoPE rotates pairs inside a head."""
    dims, head_dim = spec.attention.rotary_dim, spec.attention.head_dim
    if dims % 2:
        yield Problem(
            "attention.rope.dims", f"gives {dims} rotated dimensions", "make the number even, as RoPE rotates pairs"
        )
    if dims > head_dim:
        problem = f"gives {dims} rotated dimensions, more than the {head_dim} of a head"
        yield Problem("attention.rope.dims", problem, "give at most all of them")


def columns_divide(spec: ModelSpec) -> Iterator[Problem]:
    """The columns of every weight split into groups that share a scale."""
    advice = f"give a multiple of {GROUP}, the columns that share one scale"
    for path, columns in _columns(spec):
        if columns % GROUP:
            yield Problem(path, f"makes weights of {columns} columns", advice)


def _columns(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "hidden", spec.hidden
    yield "attention.head_dim", spec.attention.heads * spec.attention.head_dim
    if spec.gdn:
        yield "gdn.value_dim", spec.gdn.value_heads * spec.gdn.value_dim
    if spec.moe:
        yield "moe.intermediate", spec.moe.intermediate
        yield "moe.shared_intermediate", spec.moe.shared_intermediate
    if spec.dense:
        yield "dense.intermediate", spec.dense.intermediate


def experts_for_each_layer(spec: ModelSpec) -> Iterator[Problem]:
    """One expert count for each layer, each enough for the experts that a token selects."""
    if not spec.moe:
        return
    experts, top_k = spec.moe.experts, spec.moe.top_k
    if len(experts) != len(spec.layers):
        problem = f"lists {len(experts)} layers but the model has {len(spec.layers)}"
        yield Problem("moe.experts", problem, "give one number for each layer, or one number for all")
    for layer, held in enumerate(experts):
        if held < top_k:
            problem = f"leaves layer {layer} with {held}, fewer than the {top_k} experts that a token selects"
            path = "moe.experts" if len(set(experts)) == 1 else f"moe.experts[{layer}]"
            yield Problem(path, problem, f"give the layer at least {top_k} or let a token select fewer")


def within_reach_of_kernels(spec: ModelSpec) -> Iterator[Problem]:
    """Sizes that a single program must hold."""
    gdn = spec.gdn
    if gdn and not 2 <= gdn.conv_width <= MOST_CONV_WIDTH:
        yield Problem("gdn.conv_width", f"is {gdn.conv_width}", f"give 2 to {MOST_CONV_WIDTH}, which the kernels serve")
    if gdn and gdn.key_dim * gdn.value_dim > MOST_STATE:
        problem = f"makes a head's state {gdn.key_dim} x {gdn.value_dim} values"
        yield Problem("gdn.key_dim", problem, f"give dimensions whose product is at most {MOST_STATE:,}")
    if spec.moe and max(spec.moe.experts) > MOST_EXPERTS:
        problem = f"gives a layer {max(spec.moe.experts):,} experts"
        yield Problem("moe.experts", problem, f"give at most {MOST_EXPERTS:,}, which the kernels rank")


RULES: tuple[Callable[[ModelSpec], Iterator[Problem]], ...] = (
    one_feed_forward,
    mixers_described,
    heads_divide,
    rotary_fits,
    columns_divide,
    experts_for_each_layer,
    within_reach_of_kernels,
)
"""Each yields what breaks it; the first problem is reported."""
