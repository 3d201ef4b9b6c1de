"""The kinds of op that mix tokens, between a layer's projections: Gated DeltaNet, and attention over a cache.

They follow the grammar of ``lynnc/ir.py``; their meaning is in ``lynnc/interpret.py``.

Example::

    AttentionCombine(partial, position, heads=16, head_dim=256, splits=32, tile=64) -> attention
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.ir import Op, read_field, state_field, weight_field, write_field


@dataclass(frozen=True, slots=True)
class CausalConv(Op):
    """Depthwise causal convolution, then SiLU: FP32 sums over ``width`` inputs, rounded to BF16, silu, rounded to BF16.

    x BF16 [T, C], weight BF16 [C, width], state BF16 [ring, C]: the input at position p is kept at ``p % ring``.
    Inputs at positions before 0 are zero whatever the state holds. position, slot: I32 [T, 1].
    """

    x: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    start: str = read_field()
    weight: str = weight_field()
    state: str = state_field()
    out: str = write_field()
    width: int
    ring: int


@dataclass(frozen=True, slots=True)
class DeltaGates(Op):
    """``beta = sigmoid(b)``, ``g = -exp(a_log) * softplus(a + dt_bias)``, FP32 [T, value_heads]; stable softplus."""

    b: str = read_field()
    a: str = read_field()
    a_log: str = weight_field()
    dt_bias: str = weight_field()
    beta: str = write_field()
    g: str = write_field()


@dataclass(frozen=True, slots=True)
class GatedDelta(Op):
    """The gated delta rule, token by token in FP32; out is rounded to BF16 [T, value_heads, value_dim].

    q, k = L2 normalised over ``key_dim`` (eps 1e-6 inside the root), q also * key_dim ** -0.5;
    S *= exp(g); d = beta * (v - S^T k); S += k d^T; out = S^T q.
    qkv BF16 [T, 2 * key_heads * key_dim + value_heads * value_dim]; state F32 [value_heads, key_dim, value_dim].
    A row at position 0 starts from a zero state whatever the slot holds.
    """

    qkv: str = read_field()
    beta: str = read_field()
    g: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    state: str = state_field()
    out: str = write_field()
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class GatedNorm(Op):
    """Per head: ``bf16(bf16(x / rms(x)) * w) * silu(z in FP32)``, rounded to BF16; w plain, [head_dim].

    x BF16 [T, heads, head_dim], z BF16 [T, heads * head_dim], out BF16 [T, heads * head_dim].
    """

    x: str = read_field()
    z: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNormRope(Op):
    """Per head: RMS norm over head_dim (``shifted``: * (1 + w)), rounded to BF16, then RoPE.

    Head i of row t stands at ``x[t, i * head_stride : i * head_stride + head_dim]``. The first ``rotary_dim`` of
    head_dim are rotated in half-split pairs (i, i + rotary_dim / 2) by position * theta ** (-2 i / rotary_dim) in
    FP32; the rest pass. out BF16 [T, heads, head_dim].
    """

    x: str = read_field()
    position: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    heads: int
    head_dim: int
    head_stride: int
    rotary_dim: int
    theta: float
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class CacheAppend(Op):
    """Stores k [T, kv_heads, head_dim] and v [T, kv_heads * head_dim] at each row's slot and position.

    k_cache, v_cache: BF16 [kv_heads, S, head_dim] for each slot. Rows with position < 0 are padding: nothing stored.
    """

    k: str = read_field()
    v: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Causal attention of each row over positions 0..position of its slot; softmax in FP32.

    out BF16 [T, heads, head_dim].
    """

    q: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    out: str = write_field()
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class AttentionPartial(Op):
    """Attention over one of ``splits`` contiguous runs of tiles of ``tile`` positions.

    A row at position p has ``n = p // tile + 1`` tiles and a run is ``ceil(n / splits)`` of them, so the work follows
    the row's own length and the result of a row does not depend on other rows. partial F32
    [T, heads, splits, head_dim + 2]: the unnormalised sum, then the running maximum and the sum of exponentials.
    Runs past the end are not written.
    """

    q: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    partial: str = write_field()
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    splits: int
    tile: int


@dataclass(frozen=True, slots=True)
class AttentionCombine(Op):
    """Joins the partial results of the non-empty runs in order. out BF16 [T, heads, head_dim]."""

    partial: str = read_field()
    position: str = read_field()
    out: str = write_field()
    heads: int
    head_dim: int
    splits: int
    tile: int


@dataclass(frozen=True, slots=True)
class OutputGate(Op):
    """``out = x * bf16(sigmoid(gate))``; the gate of head i stands at ``gate[t, i * stride + offset : + head_dim]``."""

    x: str = read_field()
    gate: str = read_field()
    out: str = write_field()
    heads: int
    head_dim: int
    stride: int
    offset: int
