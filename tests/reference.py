"""The outside judge: ``transformers``' own implementation of a family, on the weights that our side dequantises.

In: a ``Case``, which names a tiny model and a seed. Out: a ``Reference``: the FP32 model of ``transformers`` whose
weights were quantised and put back, our packed arrays and FP32 values of the same weights, and a ``Run``: tokens with
the judge's logits and router logits at every position. Every weight is random and alive: norms, gates and decays too.

Example::

    reference = make(Case("tiny-moe"))
    run = judge(reference)
    run.logits[10]                             # FP32 [vocabulary], after the prompt
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lynnc.build import build_graph
from lynnc.model import Family, Mixer, ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.weights.arrays import Lookup, pack_weight, unpack_weight
from lynnc.tensors import Format, Part, Weight

PROMPT, STEPS = 11, 24
"""Tokens of the prompt, and of the decode that follows it."""
LIMIT = 1e-2
"""RMS error over the RMS of the reference that every comparison with the judge must keep."""
CLEAR_MARGIN = 0.08
"""Gap between router logits (their standard deviation is about 1) that BF16 rounding before them cannot close."""
UNPRUNED = 7
"""Experts of a layer before pruning."""

_EXPERT = re.compile(r"(?P<block>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Case:
    """A tiny model with random weights; ``formats`` and the flags differ from its model file."""

    model: str
    label: str = ""
    seed: int = 0
    formats: tuple[tuple[str, Format], ...] = ()
    normalized: bool = True
    tied: bool = False
    blocks: bool = False
    """Heads and experts of whole blocks of 128 columns, enough heads to sum by parts."""
    last_layers: int = 0
    """Only so many layers, the last of the model file's; 0 are all."""

    def __str__(self) -> str:
        return self.label or self.model

    @property
    def spec(self) -> ModelSpec:
        """The model file's spec with the changes."""
        spec = load_model(self.model)
        precision = replace(spec.precision, formats={**spec.precision.formats, **dict(self.formats)})
        moe = replace(spec.moe, normalize_top_k=self.normalized) if spec.moe else None
        spec = replace(spec, precision=precision, moe=moe, tied_embeddings=self.tied)
        if moe and self.last_layers:
            moe = replace(moe, experts=moe.experts[-self.last_layers :])
        spec = replace(spec, layers=spec.layers[-self.last_layers :], moe=moe)
        return in_blocks(spec) if self.blocks else spec


def in_blocks(spec: ModelSpec) -> ModelSpec:
    """A model with widths of 128 columns and 1,024 columns before each output projection."""
    assert spec.gdn and spec.moe
    moe = replace(spec.moe, intermediate=128, shared_intermediate=128)
    attention = replace(spec.attention, heads=8, head_dim=128)
    gdn = replace(spec.gdn, value_heads=8, value_dim=128)
    return replace(spec, moe=moe, attention=attention, gdn=gdn)


FAMILIES = (Case("tiny-moe"), Case("tiny-dense"), Case("tiny-full"))
MIXED_FORMATS = (
    ("embed", Format.NVFP4),
    ("gdn_in", Format.NVFP4),
    ("gdn_gates", Format.BF16),
    ("attention_in", Format.FP8),
    ("experts", Format.FP8),
    ("shared_expert", Format.BF16),
    ("lm_head", Format.BF16),
)
FP16_SCALES = (("experts", Format.NVFP4_FP16), ("gdn_in", Format.FP8), ("lm_head", Format.NVFP4_FP16))
WIDE_DENSE = (("mlp", Format.FP8), ("gdn_in", Format.BF16), ("attention_out", Format.BF16))
VARIANTS = (
    Case("tiny-moe", "mixed-formats", formats=MIXED_FORMATS),
    Case("tiny-moe", "fp16-scales", formats=FP16_SCALES),
    Case("tiny-dense", "wide-dense", formats=WIDE_DENSE),
    Case("tiny-dense", "tied", formats=(("embed", Format.BF16), ("lm_head", Format.BF16)), tied=True),
    Case("tiny-full", "unnormalized", normalized=False),
)
"""Formats of a checkpoint that mixes them, tied embeddings, and scores that are not normalised."""


BLOCKS = Case("tiny-moe", "blocks", blocks=True, last_layers=2)
PAIR = Case("tiny-moe", "pair", last_layers=2)
"""Each mixer once, and experts: what a long prompt is affordable with."""


@dataclass(frozen=True)
class Reference:
    """One model on both sides; ``packed`` is keyed by (weight, array), ``values`` are FP32 by weight name."""

    spec: ModelSpec
    model: PreTrainedModel
    packed: Mapping[tuple[str, str], torch.Tensor]
    values: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Teacher-forced tokens and what the judge computed at each: logits [n, V], router logits [n, E] for each layer."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    routers: tuple[torch.Tensor, ...]


def make_reference(spec: ModelSpec, seed: int) -> tuple[PreTrainedModel, Lookup]:
    """An FP32 model of ``transformers`` with random weights, and its tensors by their names in a checkpoint."""
    config = _CONFIG[spec.family](spec)
    config._attn_implementation = config._experts_implementation = "eager"
    model = _MODEL[spec.family](config).float().eval()
    _fill(spec, model, seed)
    _prune(spec, model, seed)
    return model, lambda source: place_of(model, source)


@cache
def make(case: Case) -> Reference:
    """A model whose weights went through the packed layout, on both sides."""
    spec = case.spec
    model, lookup = make_reference(spec, case.seed)
    packed, values = quantised(spec, lookup)
    for weight in build_graph(spec, 1).weights.values():
        _put_back(weight, values[weight.name], lookup)
    return Reference(spec, model, packed, values)


def quantised(spec: ModelSpec, lookup: Lookup) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, torch.Tensor]]:
    """Every weight of the model's graph: packed arrays by (weight, array), and the FP32 values they stand for."""
    packed: dict[tuple[str, str], torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for weight in build_graph(spec, 1).weights.values():
        result = pack_weight(weight, lookup)
        packed.update({(weight.name, name): array for name, array in result.arrays.items()})
        values[weight.name] = unpack_weight(result)
    return packed, values


def _put_back(weight: Weight, values: torch.Tensor, lookup: Lookup) -> None:
    """Copies a weight's dequantised values into the tensors they came from."""
    for expert in range(weight.experts):
        rows = values[expert] if len(weight.shape) == 3 else values
        for part, part_values in zip(weight.parts, rows.split([part.rows for part in weight.parts]), strict=True):
            _copy(part, part_values, expert, lookup)


def _copy(part: Part, values: torch.Tensor, expert: int, lookup: Lookup) -> None:
    place = lookup(part.source.format(expert=expert))
    place.copy_(values.reshape(place.shape))


def place_of(model: PreTrainedModel, source: str) -> torch.Tensor:
    """The memory of one checkpoint tensor; an expert's lies inside the fused parameter that ``transformers`` keeps."""
    found = _EXPERT.fullmatch(source)
    if found is None:
        return model.get_parameter(source).detach()
    expert, part = int(found["expert"]), found["part"]
    if part == "down":
        return model.get_parameter(f"{found['block']}.down_proj").detach()[expert]
    fused = model.get_parameter(f"{found['block']}.gate_up_proj").detach()[expert]
    return fused.chunk(2)[0 if part == "gate" else 1]


def _attention_config(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.attention
    rope = {"rope_type": "default", "rope_theta": attention.rope_theta}
    partial = {"partial_rotary_factor": attention.rotary_dim / attention.head_dim, "mrope_section": [11, 11, 10]}
    return {
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_parameters": rope if spec.family is Family.QWEN3_MOE else rope | partial,
    }


def _gdn_config(spec: ModelSpec) -> dict[str, Any]:
    gdn = spec.gdn
    assert gdn is not None
    return {
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
        "linear_conv_kernel_dim": gdn.conv_width,
        "layer_types": ["full_attention" if mixer is Mixer.FULL else "linear_attention" for mixer in spec.layers],
    }


def _moe_config(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    assert moe is not None
    shared = {"shared_expert_intermediate_size": moe.shared_intermediate} if moe.shared_intermediate else {}
    norm = {"norm_topk_prob": moe.normalize_top_k} if spec.family is Family.QWEN3_MOE else {}
    return {
        "num_experts": UNPRUNED,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate,
        **shared,
        **norm,
    }


def _qwen3_5_moe(spec: ModelSpec) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**_attention_config(spec), **_gdn_config(spec), **_moe_config(spec))


def _qwen3_5(spec: ModelSpec) -> Qwen3_5TextConfig:
    assert spec.dense is not None
    return Qwen3_5TextConfig(**_attention_config(spec), **_gdn_config(spec), intermediate_size=spec.dense.intermediate)


def _qwen3_moe(spec: ModelSpec) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**_attention_config(spec), **_moe_config(spec))


_CONFIG: Mapping[Family, Callable[[ModelSpec], Any]] = MappingProxyType(
    {Family.QWEN3_5_MOE: _qwen3_5_moe, Family.QWEN3_5: _qwen3_5, Family.QWEN3_MOE: _qwen3_moe}
)
_MODEL: Mapping[Family, Callable[[Any], Any]] = MappingProxyType(
    {
        Family.QWEN3_5_MOE: Qwen3_5MoeForCausalLM,
        Family.QWEN3_5: Qwen3_5ForCausalLM,
        Family.QWEN3_MOE: Qwen3MoeForCausalLM,
    }
)


def _fill(spec: ModelSpec, model: PreTrainedModel, seed: int) -> None:
    """Random values for every parameter, each from its own generator."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1_000_003 * seed + index)
        values = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(_scaled(spec, name, values))


def _scaled(spec: ModelSpec, name: str, values: torch.Tensor) -> torch.Tensor:
    """Magnitudes at which gates, decays and softmaxes are neither shut nor saturated and each branch moves the sum."""
    if "norm" in name:
        is_shifted = spec.norm_shifted and not name.endswith("linear_attn.norm.weight")
        return 0.2 * values + (0.0 if is_shifted else 1.0)
    if name.endswith("A_log"):
        return 0.8 * values - 1.0
    if name.endswith(("dt_bias", "conv1d.weight")):
        return 0.5 * values
    if name.endswith("embed_tokens.weight"):
        return values
    is_output = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight"))
    return values * (0.5 if is_output else 1.0) * values.shape[-1] ** -0.5


def _prune(spec: ModelSpec, model: PreTrainedModel, seed: int) -> None:
    """Cuts experts out of each layer, by another choice in each, and compacts what is left."""
    for layer, count in enumerate(spec.moe.experts if spec.moe else ()):
        block: Any = model.get_submodule(f"model.layers.{layer}.mlp")
        generator = torch.Generator().manual_seed(7919 * seed + layer)
        kept = torch.randperm(UNPRUNED, generator=generator)[:count].sort().values
        for owner, name in ((block.gate, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
            setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach()[kept].clone()))
        block.gate.num_experts = block.experts.num_experts = count


def judge(reference: Reference, seed: int = 0, prompt: int = PROMPT, steps: int = STEPS) -> Run:
    """A random prompt, the judge's greedy continuation, and its logits at every position in one full pass.

    A token at which some layer's routing is nearly tied is passed over for the next best (in the prompt: for another
    random one), since there both answers are right; ``routing_margin`` measures what is left.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for position in range(prompt + steps):
        if position < prompt:
            ranked = torch.randperm(reference.spec.vocabulary, generator=generator)
        else:
            ranked = _forward(reference, torch.tensor([tokens])).logits[-1].argsort(descending=True)
        tokens.append(next(token for token in ranked.tolist() if _is_clear(reference, [*tokens, token])))
    return judge_tokens(reference, tokens)


def judge_long(reference: Reference, length: int, seed: int = 0) -> Run:
    """A long random prompt: tokens are judged together, and those nearly tied are drawn anew until there are none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(reference.spec.vocabulary, (length,), generator=generator)
    while True:
        run = _forward(reference, tokens[None])
        unclear = (routing_margins(reference, run) < CLEAR_MARGIN).nonzero()[:, 0]
        if not len(unclear):
            return run
        tokens[unclear] = torch.randint(reference.spec.vocabulary, unclear.shape, generator=generator)


def judge_tokens(reference: Reference, tokens: list[int]) -> Run:
    """What the judge computes for tokens that are given."""
    return _forward(reference, torch.tensor([tokens]))


@cache
def judged(case: Case) -> Run:
    """The run that most tests share."""
    return judge(make(case))


def _is_clear(reference: Reference, tokens: list[int]) -> bool:
    return routing_margin(reference, _forward(reference, torch.tensor([tokens])), since=-1) >= CLEAR_MARGIN


def _forward(reference: Reference, tokens: torch.Tensor, model: PreTrainedModel | None = None) -> Run:
    """A whole sequence [1, n] through the judge, without any cache."""
    model = model or reference.model
    with ExitStack() as hooks, torch.no_grad():
        routers = _record_routers(reference, model, hooks)
        logits = model(tokens, use_cache=False).logits[0].float()
    return Run(tuple(tokens[0].tolist()), logits, tuple(routers))


def _record_routers(reference: Reference, model: PreTrainedModel, hooks: ExitStack) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for layer in range(len(reference.spec.layers) if reference.spec.moe else 0):
        gate = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        hooks.callback(gate.register_forward_hook(lambda _gate, _x, out: found.append(out[0].float())).remove)
    return found


def bf16_logits(reference: Reference, run: Run) -> torch.Tensor:
    """Logits of the judge in BF16: how far its own rounding moves it, for comparison."""
    model = deepcopy(reference.model).bfloat16()
    return _forward(reference, torch.tensor([run.tokens]), model).logits


def routing_margin(reference: Reference, run: Run, since: int = 0) -> float:
    """The smallest gap, over layers and tokens from ``since``, between the last logit routed to and the next one."""
    return float(routing_margins(reference, run)[since:].min())


def routing_margins(reference: Reference, run: Run) -> torch.Tensor:
    """The smallest gap over layers for each token; infinite where nothing is routed."""
    margins = torch.full((len(run.tokens),), float("inf"))
    k = reference.spec.moe.top_k if reference.spec.moe else 0
    for logits in run.routers:
        if logits.shape[-1] > k:
            ranked = logits.sort(dim=-1, descending=True).values
            margins = margins.minimum(ranked[:, k - 1] - ranked[:, k])
    return margins
