"""Random weights: which law every array gets, and that the models they make are alive, judged by the interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from reference import VARIANTS

from lynnc.build import build_graph
from lynnc.errors import PlanError
from lynnc.interpret import interpret, new_states, step_inputs
from lynnc.layout import weight_entries
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.plan import Options, Plan, WeightEntry
from lynnc.runtime.random.fill import Fill, Uniform
from lynnc.runtime.random.fillbits import fill_array
from lynnc.runtime.random.randomweights import CODE_MEAN_SQUARE, random_weights, weight_fills
from lynnc.runtime.weights.arrays import PackedWeight, unpack_weight
from lynnc.runtime.weights.nvfp4 import code_values
from lynnc.tensors import Weight

CONTEXT = 512
STEP = 64
TOKENS = 384
"""Enough that each of 256 experts, 8 to a token, is expected a dozen times."""


def wide() -> ModelSpec:
    """The proportions of Qwen3.6-35B-A3B at a quarter of its width: 256 experts a layer, 8 to a token."""
    spec = load_model("qwen3.6-35b-a3b")
    assert spec.gdn and spec.moe
    return replace(
        spec,
        name="a quarter of 35B-A3B",
        hidden=512,
        vocabulary=1024,
        layers=spec.layers[:4],
        attention=replace(spec.attention, heads=4, kv_heads=2, head_dim=64, rotary_dim=16),
        gdn=replace(spec.gdn, key_heads=4, value_heads=8, key_dim=32, value_dim=32),
        moe=replace(spec.moe, experts=(256,) * 4, intermediate=128, shared_intermediate=128),
    )


def deep() -> ModelSpec:
    """Forty layers of the tiny mixture: what grows with depth would show."""
    spec = load_model("tiny-moe")
    assert spec.moe
    moe = replace(spec.moe, experts=(16,) * 40, top_k=4)
    return replace(spec, name="forty layers", layers=spec.layers * 10, moe=moe)


TINY = ("tiny-moe", "tiny-dense", "tiny-full")
MODELS = (*map(load_model, TINY), *(case.spec for case in VARIANTS), wide(), deep())


@dataclass(frozen=True)
class Alive:
    """What a model computes for random tokens: logits, the residual stream behind each layer, experts by layer."""

    logits: torch.Tensor
    streams: tuple[torch.Tensor, ...]
    chosen: tuple[torch.Tensor, ...]


def fills_of(spec: ModelSpec) -> tuple[Fill, ...]:
    return weight_fills(weight_entries(build_graph(spec, 1).weights.values()).values(), spec.norm_shifted)


def values_of(spec: ModelSpec, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """FP32 values of every weight, from the bits that a GPU would be filled with."""
    weights = build_graph(spec, 1).weights
    entries = weight_entries(weights.values())
    arrays: dict[str, dict[str, torch.Tensor]] = {}
    for fill in fills_of(spec):
        arrays.setdefault(fill.weight, {})[fill.array] = as_tensor(fill, entries[fill.weight], seed)
    for name, found in arrays.items():
        yield name, unpack_weight(PackedWeight(weights[name], found))


def as_tensor(fill: Fill, entry: WeightEntry, seed: int) -> torch.Tensor:
    array = next(array for array in entry.arrays if array.array == fill.array)
    kinds = {"i64": torch.int64, "u8": torch.uint8, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    elements = torch.frombuffer(bytearray(fill_array(fill, seed).tobytes()), dtype=kinds[array.dtype])
    assert fill.element_bytes == elements.element_size() and elements.nbytes == array.bytes
    return elements.reshape(array.shape)


@cache
def run(spec_index: int, seed: int = 1) -> Alive:
    spec = MODELS[spec_index]
    weights = dict(values_of(spec, seed))
    graph = build_graph(spec, STEP)
    states = new_states(graph, 1, CONTEXT)
    tokens = torch.randint(0, spec.vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    steps = [
        interpret(graph, weights, states, step_inputs(tokens[first : first + STEP], first))
        for first in range(0, TOKENS, STEP)
    ]
    return Alive(
        joined(steps, "logits"),
        tuple(joined(steps, f"h.{layer + 1}").float() for layer in range(len(spec.layers))),
        tuple(joined(steps, f"layers.{layer}.ids") for layer in range(len(spec.layers) if spec.moe else 0)),
    )


def joined(steps: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.cat([values[name] for values in steps])


def every_model() -> pytest.MarkDecorator:
    names = [spec.name for spec in MODELS]
    return pytest.mark.parametrize("index", range(len(MODELS)), ids=[f"{i}-{name}" for i, name in enumerate(names)])


@every_model()
def test_the_model_is_alive(index: int) -> None:
    found = run(index)
    assert torch.isfinite(found.logits).all()
    spread = found.logits.std(-1)
    assert spread.min() > 0.5 and spread.max() < 2.0
    assert len(set(found.logits.argmax(-1).tolist())) > 20, "one choice for all tokens"


@every_model()
def test_no_layer_drowns_or_dies_out(index: int) -> None:
    rms = [float(stream.square().mean().sqrt()) for stream in run(index).streams]
    grown = [after / before for before, after in itertools.pairwise(rms)]
    assert 0.5 < rms[0] < 4.0 and max(rms) < 16.0
    assert min(grown) > 0.99 and max(grown) < 1.6


@pytest.mark.parametrize("index", [i for i, spec in enumerate(MODELS) if spec.moe], ids=str)
def test_every_expert_is_chosen(index: int) -> None:
    moe = MODELS[index].moe
    assert moe is not None
    for experts, ids in zip(moe.experts, run(index).chosen, strict=True):
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert len(counts) == experts and counts.min() > 0, "an expert that no token chooses"
        assert counts.max() < TOKENS, "an expert that every token chooses"


def test_seeds_make_different_models_and_one_seed_the_same() -> None:
    first, again, other = run(0), run.__wrapped__(0), run(0, seed=2)
    assert torch.equal(first.logits, again.logits)
    assert not torch.allclose(first.logits, other.logits, atol=0.1)


@every_model()
def test_rows_have_the_length_that_was_meant(index: int) -> None:
    spec = MODELS[index]
    weights: Mapping[str, Weight] = build_graph(spec, 1).weights
    for name, values in values_of(spec, 1):
        if weights[name].tensor_class == "vector":
            continue
        wanted = 1.0 if name == "embed" else values.shape[-1] ** -0.5
        wanted *= 0.5 if name.endswith(("out_weight", "down_weight")) else 1.0
        # A part's rows share one scale but nothing else: short rows of few columns scatter.
        noise = 4 * values.numel() ** -0.5
        assert float(values.square().mean().sqrt()) == pytest.approx(wanted, rel=noise + 0.002), name
        assert abs(float(values.mean())) < 5 * wanted * values.numel() ** -0.5, name


def test_vectors_lie_where_their_meaning_is() -> None:
    values = dict(values_of(load_model("tiny-moe"), 1))
    plain = dict(values_of(load_model("tiny-full"), 1))
    assert abs(float(values["layers.0.input_norm_weight"].mean())) < 0.15
    assert abs(float(values["layers.0.gated_norm_weight"].mean()) - 1) < 0.15
    assert abs(float(plain["layers.0.input_norm_weight"].mean()) - 1) < 0.15
    decay = torch.exp(-values["layers.0.a_log"].exp() * torch.nn.functional.softplus(values["layers.0.dt_bias"]))
    assert decay.min() > 0.05 and decay.max() < 0.99


def test_codes_have_the_mean_square_that_scales_count_on() -> None:
    assert float(code_values(torch.arange(16, dtype=torch.uint8)).square().mean()) == CODE_MEAN_SQUARE


def test_every_array_has_a_stream_of_its_own_and_its_bytes() -> None:
    for spec in MODELS:
        fills = fills_of(spec)
        assert sorted(fill.stream for fill in fills) == list(range(len(fills)))
        packed = sum(weight.bytes for weight in build_graph(spec, 1).weights.values())
        assert sum(fill.count * fill.element_bytes for fill in fills) == packed


def test_arrays_do_not_depend_on_the_order_of_weights() -> None:
    entries = list(weight_entries(build_graph(load_model("tiny-moe"), 1).weights.values()).values())
    assert weight_fills(entries[::-1], True) == weight_fills(entries, True)


def test_a_plan_says_how_norms_are_stored() -> None:
    spec = load_model("tiny-full")
    weights = weight_entries(build_graph(spec, 1).weights.values())
    empty: Mapping[str, object] = {}
    plan = Plan(
        name="tiny-full.sm_90",
        lynnc="",
        arch="",
        target="",
        device="",
        tools={},
        options=Options(),
        model={"name": "tiny-full", "norm": {"eps": 1e-6, "weight": "plain"}},
        model_digest="",
        layout="",
        weights=weights,
        states={},
        kernels={},
        programs={},
        files={},
    )
    norm = next(fill for fill in random_weights(plan) if fill.weight == "final_norm_weight")
    assert isinstance(norm.law, Uniform) and norm.law.centre == 1.0
    with pytest.raises(PlanError, match=r"tiny-full\.sm_90 does not say how its model's norms are stored"):
        random_weights(replace(plan, model=empty))
