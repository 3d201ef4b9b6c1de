"""The kinds of op around the token mixers: embedding, norms, projections, feed-forward blocks, the greedy choice.

They follow the grammar of ``lynnc/ir.py``; their meaning is in ``lynnc/interpret.py``. The mixers' own kinds are in
``lynnc/mixerops.py``, those that only programs for prompts have in ``lynnc/promptops.py``.

Example::

    RmsNorm(h -> x, weight=layers.0.input_norm, eps=1e-06, shifted=True)
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.ir import Op, read_field, state_field, weight_field, write_field


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """``out[t] = table[token[t]]``. token I32 [T, 1], table [vocabulary, D], out BF16 [T, D]."""

    token: str = read_field()
    table: str = weight_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """``out = x / rms(x) * w`` in FP32, ``* (1 + w)`` if ``shifted``; w plain BF16 [D]."""

    x: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """``out = x @ w[first_row : first_row + N].T`` with FP32 accumulation, rounded once to out's dtype [T, N]."""

    x: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    first_row: int


@dataclass(frozen=True, slots=True)
class Add(Op):
    """``out = a + b`` in FP32, each rounded to BF16 first where it is FP32, rounded once to out's dtype."""

    a: str = read_field()
    b: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class SiluMul(Op):
    """``out = bf16(silu(gate)) * up``; x holds gate then up along its last axis: [T, ..., 2 I] -> [T, ..., I]."""

    x: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class TopK(Op):
    """Softmax over all E logits in FP32, the k largest (ties: lower index), divided by their sum if ``normalize``.

    logits F32 [T, E]; ids I32 [T, k], distinct and in range even for NaN logits (NaN counts as -inf); scores F32
    [T, k].
    """

    logits: str = read_field()
    ids: str = write_field()
    scores: str = write_field()
    experts: int
    k: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ExpertLinear(Op):
    """``out[t, a] = x[t] (or x[t, a]) @ weight[ids[t, a]].T``; out [T, k, N]. FP32 accumulation, rounded once."""

    x: str = read_field()
    ids: str = read_field()
    weight: str = weight_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """``out[t] = sum over a, in order, of scores[t, a] * x[t, a]`` in FP32; x [T, k, D], out F32 [T, D]."""

    x: str = read_field()
    scores: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class SharedAdd(Op):
    """``out = experts + sigmoid(gate) * shared`` in FP32, rounded to BF16; gate F32 [T, 1], the others [T, D]."""

    experts: str = read_field()
    shared: str = read_field()
    gate: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Argmax(Op):
    """Index of the largest logit (ties: lower index; NaN never wins). logits F32 [T, V] -> out I32 [T, 1]."""

    logits: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class ArgmaxPartial(Op):
    """Largest logit of each run of ``block`` columns: values F32 [T, blocks], indices I32 [T, blocks]."""

    logits: str = read_field()
    values: str = write_field()
    indices: str = write_field()
    block: int


@dataclass(frozen=True, slots=True)
class ArgmaxFinal(Op):
    """The index that belongs to the largest value (ties: lower index). out I32 [T, 1]."""

    values: str = read_field()
    indices: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Advance(Op):
    """The inputs of a next step of one row for each sequence: the row's position + 1, a padding row's as it was.

    ``history[slot, position + 1] = token`` keeps what was chosen, as far as the context reaches. token, position, slot,
    following, following_start I32 [T, 1]; history I32 [S].
    """

    token: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    history: str = state_field()
    following: str = write_field()
    following_start: str = write_field()


@dataclass(frozen=True, slots=True)
class LastRow(Op):
    """``out[0] = x[T - 1]``: the row whose logits a prefill needs. x BF16 [T, D], out BF16 [1, D]."""

    x: str = read_field()
    out: str = write_field()
