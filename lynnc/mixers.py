"""The two ways in which a layer mixes tokens, one op for each mathematical step.

In: the builder, a layer's number and its normed input. Out: the name of the mixer's output, before the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lynnc.builder import Builder, Projection
from lynnc.mixerops import (
    Attention,
    CacheAppend,
    CausalConv,
    DeltaGates,
    GatedDelta,
    GatedNorm,
    HeadNormRope,
    OutputGate,
)
from lynnc.model import GdnSpec, Mixer
from lynnc.ops import Linear
from lynnc.tensors import DType, Format, Part, S, Weight

CONV_RING = 16
"""Positions that the convolution state keeps: room for the 3 previous inputs and 8 rows a step, as a power of two."""


def gdn(b: Builder, layer: int, x: str) -> str:
    """A Gated DeltaNet: projections, convolution, gates, delta rule, gated norm, output projection."""
    spec = b.spec.gdn
    assert spec is not None
    p = f"layers.{layer}"
    key, value = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    source = b.source(layer, "linear_attn.in_proj_")
    qkv, z, beta_in, decay_in = b.linears(
        p,
        x,
        (
            Projection("qkv", "gdn_in", f"{source}qkv.weight", 2 * key + value),
            Projection("z", "gdn_in", f"{source}z.weight", value),
            Projection("b", "gdn_gates", f"{source}b.weight", spec.value_heads),
            Projection("a", "gdn_gates", f"{source}a.weight", spec.value_heads),
        ),
        DType.BF16,
    )
    mixed = _gated_delta(b, layer, spec, _conv(b, layer, spec, qkv), _gates(b, layer, spec, beta_in, decay_in))
    weight = b.vector(f"{p}.gated_norm_weight", b.source(layer, "linear_attn.norm.weight"), spec.value_dim)
    normed = b.tensor(f"{p}.gated", DType.BF16, value)
    b.add(GatedNorm(name=f"{p}.gated_norm", x=mixed, z=z, weight=weight, out=normed, eps=b.spec.norm_eps))
    return _output(b, layer, "gdn_out", "linear_attn.out_proj.weight", normed)


def _conv(b: Builder, layer: int, spec: GdnSpec, qkv: str) -> str:
    p = f"layers.{layer}"
    channels = b.tensors[qkv].width
    parts = (Part(b.source(layer, "linear_attn.conv1d.weight"), channels),)
    weight = Weight(f"{p}.conv_weight", Format.BF16, (channels, spec.conv_width), parts, "vector")
    b.weights[weight.name] = weight
    conv = CausalConv(
        name=f"{p}.conv",
        x=qkv,
        position="position",
        slot="slot",
        start="start",
        weight=weight.name,
        state=b.state(f"{p}.conv_state", DType.BF16, CONV_RING, channels),
        out=b.tensor(f"{p}.conv_out", DType.BF16, channels),
        width=spec.conv_width,
        ring=CONV_RING,
    )
    b.add(conv)
    return conv.out


def _gates(b: Builder, layer: int, spec: GdnSpec, beta_in: str, decay_in: str) -> tuple[str, str]:
    p, heads = f"layers.{layer}", spec.value_heads
    gates = DeltaGates(
        name=f"{p}.gates",
        b=beta_in,
        a=decay_in,
        a_log=b.vector(f"{p}.a_log", b.source(layer, "linear_attn.A_log"), heads, Format.F32),
        dt_bias=b.vector(f"{p}.dt_bias", b.source(layer, "linear_attn.dt_bias"), heads, Format.F32),
        beta=b.tensor(f"{p}.beta", DType.F32, heads),
        g=b.tensor(f"{p}.g", DType.F32, heads),
    )
    b.add(gates)
    return gates.beta, gates.g


def _gated_delta(b: Builder, layer: int, spec: GdnSpec, qkv: str, gates: tuple[str, str]) -> str:
    p = f"layers.{layer}"
    delta = GatedDelta(
        name=f"{p}.delta",
        qkv=qkv,
        beta=gates[0],
        g=gates[1],
        position="position",
        slot="slot",
        state=b.state(f"{p}.delta_state", DType.F32, spec.value_heads, spec.key_dim, spec.value_dim),
        out=b.tensor(f"{p}.delta_out", DType.BF16, spec.value_heads, spec.value_dim),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
    )
    b.add(delta)
    return delta.out


def full_attention(b: Builder, layer: int, x: str) -> str:
    """Full attention: projections, head norm and rotation, cache, attention, output gate, output projection."""
    spec = b.spec.attention
    q_stride = spec.head_dim * (2 if spec.output_gate else 1)
    kv_rows = spec.kv_heads * spec.head_dim
    q, k, v = b.linears(
        f"layers.{layer}",
        x,
        (
            Projection("q", "attention_in", b.source(layer, "self_attn.q_proj.weight"), spec.heads * q_stride),
            Projection("k", "attention_in", b.source(layer, "self_attn.k_proj.weight"), kv_rows),
            Projection("v", "attention_in", b.source(layer, "self_attn.v_proj.weight"), kv_rows),
        ),
        DType.BF16,
    )
    q_rotated = _head_norm_rope(b, layer, "q", q, q_stride)
    k_rotated = _head_norm_rope(b, layer, "k", k, spec.head_dim)
    attended = _attend(b, layer, q_rotated, _append(b, layer, k_rotated, v))
    if spec.output_gate:
        attended = _output_gate(b, layer, attended, q, q_stride)
    return _output(b, layer, "attention_out", "self_attn.o_proj.weight", attended)


def _head_norm_rope(b: Builder, layer: int, which: str, x: str, head_stride: int) -> str:
    spec = b.spec.attention
    p, heads = f"layers.{layer}", spec.heads if which == "q" else spec.kv_heads
    source = b.source(layer, f"self_attn.{which}_norm.weight")
    op = HeadNormRope(
        name=f"{p}.{which}_norm_rope",
        x=x,
        position="position",
        weight=b.vector(f"{p}.{which}_norm_weight", source, spec.head_dim),
        out=b.tensor(f"{p}.{which}_rotated", DType.BF16, heads, spec.head_dim),
        heads=heads,
        head_dim=spec.head_dim,
        head_stride=head_stride,
        rotary_dim=spec.rotary_dim,
        theta=spec.rope_theta,
        eps=b.spec.norm_eps,
        shifted=b.spec.norm_shifted,
    )
    b.add(op)
    return op.out


def _append(b: Builder, layer: int, k: str, v: str) -> tuple[str, str]:
    """Stores the new keys and values; the names of the two caches."""
    spec, p = b.spec.attention, f"layers.{layer}"
    k_cache, v_cache = (b.state(f"{p}.{n}_cache", DType.BF16, spec.kv_heads, S, spec.head_dim) for n in ("k", "v"))
    b.add(
        CacheAppend(
            name=f"{p}.append",
            k=k,
            v=v,
            position="position",
            slot="slot",
            k_cache=k_cache,
            v_cache=v_cache,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
        )
    )
    return k_cache, v_cache


def _attend(b: Builder, layer: int, q: str, caches: tuple[str, str]) -> str:
    spec, p = b.spec.attention, f"layers.{layer}"
    attention = Attention(
        name=f"{p}.attention",
        q=q,
        position="position",
        slot="slot",
        k_cache=caches[0],
        v_cache=caches[1],
        out=b.tensor(f"{p}.attended", DType.BF16, spec.heads, spec.head_dim),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
    )
    b.add(attention)
    return attention.out


def _output_gate(b: Builder, layer: int, attended: str, q: str, q_stride: int) -> str:
    """The gate of a head stands behind its query in q_proj's output."""
    spec, p = b.spec.attention, f"layers.{layer}"
    gate = OutputGate(
        name=f"{p}.output_gate",
        x=attended,
        gate=q,
        out=b.tensor(f"{p}.gated", DType.BF16, spec.heads, spec.head_dim),
        heads=spec.heads,
        head_dim=spec.head_dim,
        stride=q_stride,
        offset=spec.head_dim,
    )
    b.add(gate)
    return gate.out


def _output(b: Builder, layer: int, tensor_class: str, source: str, x: str) -> str:
    """The projection from a mixer's heads back to the hidden size."""
    out = b.tensor(f"layers.{layer}.mixed", DType.BF16, b.spec.hidden)
    parts = {b.source(layer, source): b.spec.hidden}
    weight = b.matrix(f"layers.{layer}.out_weight", tensor_class, b.tensors[x].width, parts)
    b.add(Linear(name=f"layers.{layer}.out_proj", x=x, weight=weight, out=out, first_row=0))
    return out


MIXERS: Mapping[Mixer, Callable[[Builder, int, str], str]] = MappingProxyType(
    {Mixer.GDN: gdn, Mixer.FULL: full_attention}
)
"""How each kind of layer mixes tokens."""
