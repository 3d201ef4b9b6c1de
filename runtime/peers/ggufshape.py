"""A model's shape as llama.cpp wants it: architecture, hyperparameters, and tensors with the types its quantiser gives.

In: a ``ModelSpec``. Out: a frozen ``GgufModel``. Tensors are named and shaped as llama.cpp's loader asks for them, the
largest dimension first as in numpy; types follow its mixture ``Q4_K_M``: 4-bit blocks, six bits for the head and for
some of the value and down projections, FP32 for norms and routers.

llama.cpp knows one number of experts for all layers. A model pruned layer by layer gets the mean, which keeps both the
bytes of the file and those of a token. Layers for predicting further tokens are left out.

Example::

    shape = gguf_model(load_model("qwen3.6-35b-a3b"))
    shape.architecture, shape.bytes                       # "qwen35moe", 21_155_768_832
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from lynnc.errors import ModelError
from lynnc.model import Family, Mixer, ModelSpec, MoeSpec

ARCHITECTURES: Mapping[Family, str] = {
    Family.QWEN3_5_MOE: "qwen35moe",
    Family.QWEN3_5: "qwen35",
    Family.QWEN3_MOE: "qwen3moe",
}
BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_K": (256, 144),
    "Q5_0": (32, 22),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
}
"""Elements and bytes of a block."""
NARROW: Mapping[str, str] = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""What llama.cpp falls back to where rows are no multiple of 256."""
MOST_EXPERTS = 512
"""LLAMA_MAX_EXPERTS."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor, rows of ``shape[-1]`` elements. ``role`` says what random values must look like: ``matrix``, ``norm``,
    ``decay``, ``bias``, ``conv``."""

    name: str
    shape: tuple[int, ...]
    type: str
    role: str = "matrix"

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        elements, size = BLOCKS[self.type]
        return prod(self.shape) // elements * size


@dataclass(frozen=True, slots=True)
class GgufModel:
    """``hyperparameters`` are keys below the architecture's name; whole numbers are unsigned 32-bit ones there."""

    name: str
    architecture: str
    hyperparameters: Mapping[str, int | float | tuple[int, ...]]
    tensors: tuple[GgufTensor, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)


def gguf_model(spec: ModelSpec) -> GgufModel:
    """The shape; ModelError if llama.cpp has no such model."""
    _check(spec)
    architecture = ARCHITECTURES[spec.family]
    return GgufModel(spec.name, architecture, _hyperparameters(spec), tuple(_tensors(spec)))


def _check(spec: ModelSpec) -> None:
    gdn = spec.gdn
    if gdn and gdn.key_dim != gdn.value_dim:
        raise ModelError(
            f"{spec.name} has GDN keys of {gdn.key_dim} and values of {gdn.value_dim} dimensions, which llama.cpp "
            "takes for equal: leave --peer out."
        )
    if _regular(spec.layers) != spec.layers:
        raise ModelError(
            f"{spec.name} has full attention at irregular layers, where llama.cpp takes every n-th: leave --peer out."
        )
    if spec.moe and mean_experts(spec.moe) > MOST_EXPERTS:
        raise ModelError(
            f"{spec.name} has {mean_experts(spec.moe)} experts a layer and llama.cpp at most {MOST_EXPERTS}: "
            "leave --peer out."
        )
    if spec.family is Family.QWEN3_MOE and spec.attention.rotary_dim != spec.attention.head_dim:
        raise ModelError(
            f"{spec.name} rotates {spec.attention.rotary_dim} of {spec.attention.head_dim} dimensions, which llama.cpp "
            "does not know of this family: leave --peer out."
        )


def _interval(layers: tuple[Mixer, ...]) -> int:
    """Every how many layers attention is full; one more than there are if never."""
    return layers.index(Mixer.FULL) + 1 if Mixer.FULL in layers else len(layers) + 1


def _regular(layers: tuple[Mixer, ...]) -> tuple[Mixer, ...]:
    interval = _interval(layers)
    return tuple(Mixer.GDN if (layer + 1) % interval else Mixer.FULL for layer in range(len(layers)))


def mean_experts(moe: MoeSpec) -> int:
    """Experts of each layer where every layer has as many, at least as many as a token chooses."""
    return max(moe.top_k, round(sum(moe.experts) / len(moe.experts)))


def _hyperparameters(spec: ModelSpec) -> dict[str, int | float | tuple[int, ...]]:
    attention = spec.attention
    found: dict[str, int | float | tuple[int, ...]] = {
        "block_count": len(spec.layers),
        "context_length": spec.max_context,
        "embedding_length": spec.hidden,
        "vocab_size": spec.vocabulary,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": float(attention.rope_theta),
        "rope.dimension_count": attention.rotary_dim,
    }
    if spec.family is not Family.QWEN3_MOE:
        found["rope.dimension_sections"] = _rope_sections(attention.rotary_dim)
    if spec.gdn:
        found["ssm.conv_kernel"] = spec.gdn.conv_width
        found["ssm.state_size"] = spec.gdn.key_dim
        found["ssm.group_count"] = spec.gdn.key_heads
        found["ssm.time_step_rank"] = spec.gdn.value_heads
        found["ssm.inner_size"] = spec.gdn.value_heads * spec.gdn.value_dim
        found["full_attention_interval"] = _interval(spec.layers)
    return found | _feed_forward_lengths(spec)


def _rope_sections(rotary_dim: int) -> tuple[int, int, int, int]:
    """The pairs that turn with time, height and width; for text all turn with the position, so only the sum counts."""
    pairs = rotary_dim // 2
    return (pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0


def _feed_forward_lengths(spec: ModelSpec) -> dict[str, int | float | tuple[int, ...]]:
    if not spec.moe:
        assert spec.dense is not None
        return {"feed_forward_length": spec.dense.intermediate}
    found: dict[str, int | float | tuple[int, ...]] = {
        "expert_count": mean_experts(spec.moe),
        "expert_used_count": spec.moe.top_k,
        "expert_feed_forward_length": spec.moe.intermediate,
        "feed_forward_length": spec.moe.intermediate * spec.moe.top_k,
    }
    if spec.moe.shared_intermediate:
        found["expert_shared_feed_forward_length"] = spec.moe.shared_intermediate
    return found


def _tensors(spec: ModelSpec) -> Iterator[GgufTensor]:
    table = (spec.vocabulary, spec.hidden)
    yield _matrix("token_embd", table, 6 if spec.tied_embeddings else 4)
    yield _vector("output_norm.weight", spec.hidden)
    if not spec.tied_embeddings:
        yield _matrix("output", table, 6)
    mixers = {Mixer.GDN: _gdn, Mixer.FULL: _attention}
    for layer, mixer in enumerate(spec.layers):
        p = f"blk.{layer}."
        bits = _more_bits(layer, len(spec.layers))
        yield _vector(f"{p}attn_norm.weight", spec.hidden)
        yield from mixers[mixer](spec, p, bits)
        second = "ffn_norm" if spec.family is Family.QWEN3_MOE else "post_attention_norm"
        yield _vector(f"{p}{second}.weight", spec.hidden)
        yield from _experts(spec, spec.moe, p, bits) if spec.moe else _dense(spec, p, bits)


def _more_bits(layer: int, layers: int) -> int:
    """Bits of value and down projections: six in the first and last eighth and in every third layer between."""
    eighth = layers // 8
    is_more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return 6 if is_more else 4


def _attention(spec: ModelSpec, p: str, bits: int) -> Iterator[GgufTensor]:
    attention = spec.attention
    width, kv_width = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield _matrix(f"{p}attn_q", (width * (2 if attention.output_gate else 1), spec.hidden))
    yield _matrix(f"{p}attn_k", (kv_width, spec.hidden))
    yield _matrix(f"{p}attn_v", (kv_width, spec.hidden), bits)
    yield _matrix(f"{p}attn_output", (spec.hidden, width))
    yield _vector(f"{p}attn_q_norm.weight", attention.head_dim)
    yield _vector(f"{p}attn_k_norm.weight", attention.head_dim)


def _gdn(spec: ModelSpec, p: str, bits: int) -> Iterator[GgufTensor]:
    gdn = spec.gdn
    assert gdn is not None
    value = gdn.value_heads * gdn.value_dim
    channels = 2 * gdn.key_heads * gdn.key_dim + value
    yield _matrix(f"{p}attn_qkv", (channels, spec.hidden), bits)
    yield _matrix(f"{p}attn_gate", (value, spec.hidden))
    yield GgufTensor(f"{p}ssm_conv1d.weight", (channels, gdn.conv_width), "F32", "conv")
    yield _vector(f"{p}ssm_dt.bias", gdn.value_heads, "bias")
    yield _vector(f"{p}ssm_a", gdn.value_heads, "decay")
    yield _matrix(f"{p}ssm_beta", (gdn.value_heads, spec.hidden))
    yield _matrix(f"{p}ssm_alpha", (gdn.value_heads, spec.hidden))
    yield _vector(f"{p}ssm_norm.weight", gdn.value_dim)
    yield _matrix(f"{p}ssm_out", (spec.hidden, value))


def _experts(spec: ModelSpec, moe: MoeSpec, p: str, bits: int) -> Iterator[GgufTensor]:
    experts, size, hidden = mean_experts(moe), moe.intermediate, spec.hidden
    yield GgufTensor(f"{p}ffn_gate_inp.weight", (experts, hidden), "F32")
    yield _matrix(f"{p}ffn_gate_exps", (experts, size, hidden))
    yield _matrix(f"{p}ffn_up_exps", (experts, size, hidden))
    yield _matrix(f"{p}ffn_down_exps", (experts, hidden, size), bits)
    if moe.shared_intermediate:
        shared = moe.shared_intermediate
        yield GgufTensor(f"{p}ffn_gate_inp_shexp.weight", (hidden,), "F32")
        yield _matrix(f"{p}ffn_gate_shexp", (shared, hidden))
        yield _matrix(f"{p}ffn_up_shexp", (shared, hidden))
        yield _matrix(f"{p}ffn_down_shexp", (hidden, shared), bits)


def _dense(spec: ModelSpec, p: str, bits: int) -> Iterator[GgufTensor]:
    assert spec.dense is not None
    size = spec.dense.intermediate
    yield _matrix(f"{p}ffn_gate", (size, spec.hidden))
    yield _matrix(f"{p}ffn_up", (size, spec.hidden))
    yield _matrix(f"{p}ffn_down", (spec.hidden, size), bits)


def _matrix(name: str, shape: tuple[int, ...], bits: int = 4) -> GgufTensor:
    wanted = "Q6_K" if bits == 6 else "Q4_K"
    narrow = NARROW[wanted]
    fits = (kind for kind in (wanted, narrow, "F16") if shape[-1] % BLOCKS[kind][0] == 0)
    return GgufTensor(f"{name}.weight", shape, next(fits))


def _vector(name: str, length: int, role: str = "norm") -> GgufTensor:
    return GgufTensor(name, (length,), "F32", role)
