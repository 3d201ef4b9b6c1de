"""The kinds of op that only programs for prompts have: many rows by chunks, by expert, and in 4-bit activations.

They follow the grammar of ``lynnc/ir.py``; their meaning is in ``lynnc/interpret.py``.

Example::

    GroupByExpert(ids -> order, tiles, experts=256, tile=64)
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.ir import Op, read_field, state_field, weight_field, write_field
from lynnc.ops import Linear

CODES_IN_WORD, SCALES_IN_WORD = 8, 4
"""E2M1 codes and E4M3 scales in an element of the I32 tensors of quantised rows."""


@dataclass(frozen=True, slots=True)
class PartialLinear(Linear):
    """A Linear by parts of its columns, K / parts each: the products of each part, FP32 [T, parts, N]."""

    parts: int


@dataclass(frozen=True, slots=True)
class SumParts(Op):
    """``out = x[:, 0] + x[:, 1] + ...`` of x FP32 [T, parts, N] in that order, rounded once to out's dtype [T, N]."""

    x: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class QuantiseActivations(Op):
    """NVFP4 of each row of x BF16 [T, K] by its own maximum: ``x ~ code * scale * row_scale``.

    codes I32 [T, K / 8], eight E2M1 codes a word; scales I32 [T, ceil(K / 64)], four E4M3 numbers a word, one for each
    16 columns; row_scale F32 [T, 1]. ``lynnc.rowquantise`` says how, and in which order codes stand. Of x [T, k, K]
    that experts read each pair is a row, and all three have the axis of k too.
    """

    x: str = read_field()
    codes: str = write_field()
    scales: str = write_field()
    row_scale: str = write_field()


@dataclass(frozen=True, slots=True)
class QuantisedLinear(Op):
    """``out = (code * scale) @ w[first_row : first_row + N].T * row_scale``, FP32 sums, rounded once to out's dtype."""

    codes: str = read_field()
    scales: str = read_field()
    row_scale: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    first_row: int


@dataclass(frozen=True, slots=True)
class DeltaChunk(Op):
    """What each chunk of rows of a GatedDelta needs beside the state; chunks count from the step's first row.

    G and L sum max(g, least_decay) from a slot's first row in the chunk: up to a row, and to its last there. For rows
    i and j of one slot and chunk, q and k normalised, at ``[i, head, j % chunk]``: inverse + inverse_rest = (1 +
    lower)^-1 diag(beta), where lower = beta_i exp(G_i - G_j) k_i . k_j for j < i, and the second is what the first
    loses as BF16; scores = exp(G_i - G_j) q_i . k_j for j <= i. All BF16 [T, value_heads, chunk], elsewhere zero.
    scales F32 [T, value_heads, 4]: exp(G) / |k|, exp(G) / |q| * key_dim ** -0.5, exp(L - G) / |k|, exp(L).
    """

    qkv: str = read_field()
    beta: str = read_field()
    g: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    inverse: str = write_field()
    inverse_rest: str = write_field()
    scores: str = write_field()
    scales: str = write_field()
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    least_decay: float


@dataclass(frozen=True, slots=True)
class DeltaScan(Op):
    """The rest of a GatedDelta, chunk after chunk, with q, k, v as they are in qkv and scales a, b, c, e of DeltaChunk.

    change = (inverse + inverse_rest) (v - a k S); out = b q S + scores change; S' = e S + k^T (c change).
    """

    qkv: str = read_field()
    inverse: str = read_field()
    inverse_rest: str = read_field()
    scores: str = read_field()
    scales: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    state: str = state_field()
    out: str = write_field()
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int


@dataclass(frozen=True, slots=True)
class GroupByExpert(Op):
    """Pairs (row, slot) in the order of their experts, equal ones as they stand, cut into tiles of one expert each.

    ids I32 [T, k]. order I32 [T, k], flat: the pairs ``t * k + a``; those of expert e are at the places from
    ``start(e)`` to before ``start(e + 1)``. tiles I32 [T * k // tile + experts, 3]: expert, first place, place after
    the last. The tiles of expert e start at index ``start(e) // tile + e``, which leaves room for all; what is left
    over holds no places.
    """

    ids: str = read_field()
    order: str = write_field()
    tiles: str = write_field()
    experts: int
    tile: int


@dataclass(frozen=True, slots=True)
class GroupedLinear(Op):
    """``ExpertLinear`` by tiles: ``out[t, a] = x[t] (or x[t, a]) @ weight[e].T`` for the pairs in e's tiles."""

    x: str = read_field()
    order: str = read_field()
    tiles: str = read_field()
    weight: str = weight_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class QuantisedGroupedLinear(Op):
    """``GroupedLinear`` of quantised rows or pairs: ``out[t, a] = (code * scale) @ weight[e].T * row_scale``."""

    codes: str = read_field()
    scales: str = read_field()
    row_scale: str = read_field()
    order: str = read_field()
    tiles: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
