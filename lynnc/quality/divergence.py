"""Base and candidate on the same held-out text: how far apart their predictions are, and how well each predicts it.

In: a pair of engines and a text as tokens with the bytes of each. Out: a ``Divergence``. Both read the text's own
tokens, never what they generate. Sums and KL in FP64; intervals by bootstrap over blocks.

Example::

    found = compare_on_text(pair, heldout, sequence=512)
    found.kl.mean, found.increase.high              # nats a token, bits a byte
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lynnc.errors import OptionError
from lynnc.quality.bootstrap import Interval, bootstrap
from lynnc.quality.pair import Pair, is_finite, pieces_of

BLOCK = 32
"""Tokens of a bootstrap block."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A text's tokens, and the UTF-8 bytes that each stands for."""

    name: str
    ids: tuple[int, ...]
    bytes: tuple[int, ...]

    def first(self, tokens: int) -> HeldOut:
        """Its first tokens."""
        return HeldOut(self.name, self.ids[:tokens], self.bytes[:tokens])


@dataclass(frozen=True, slots=True)
class Divergence:
    """``kl`` from base to candidate in nats a token, the largest at token ``worst`` of the text; ``agreement``: share
    of tokens with the same most likely next one; bits a byte of both, and by how much the candidate's are more.
    ``base_damaged`` and ``candidate_damaged`` count tokens with logits that are not finite, ``first_damaged`` is the
    first of them or -1. They are part of every mean, which is then NaN."""

    tokens: int
    bytes: int
    blocks: int
    kl: Interval
    max_kl: float
    worst: int
    agreement: Interval
    base_bits: Interval
    candidate_bits: Interval
    increase: Interval
    base_damaged: int
    candidate_damaged: int
    first_damaged: int


@dataclass(frozen=True, slots=True)
class _Scores:
    """What each predicted token [n] gives, FP64; ``at`` is the place in the text of the token read before it."""

    at: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor
    base_bits: torch.Tensor
    candidate_bits: torch.Tensor
    base_finite: torch.Tensor
    candidate_finite: torch.Tensor


def kl_divergence(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL from base to candidate in nats, FP64 [n], of logits [n, vocabulary]; never below 0, NaN where a row has
    one."""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (base, candidate))
    return (ours.exp() * (ours - theirs)).sum(-1).clamp_min(0.0)


def compare_on_text(
    pair: Pair, heldout: HeldOut, sequence: int, on_sequence: Callable[[str], None] = lambda name: None
) -> Divergence:
    """Runs the text in sequences of so many tokens, each in a context of its own."""
    if len(heldout.ids) < 2:
        raise OptionError(f"{heldout.name} has {len(heldout.ids)} tokens and nothing to predict: give a longer --text.")
    found: list[_Scores] = []
    for first in range(0, len(heldout.ids) - 1, sequence):
        ids = heldout.ids[first : first + sequence + 1]
        on_sequence(f"tokens {first:,} to {first + len(ids) - 1:,}")
        pair.reset()
        found += [_score(pair, ids, start, first) for start in range(0, len(ids) - 1, len(next(pieces_of(ids))))]
    joined = (torch.cat(parts) for parts in zip(*map(_fields, found), strict=True))
    sizes = torch.tensor(heldout.bytes, dtype=torch.float64)
    scores = _Scores(*joined)
    return _summary(scores, sizes[scores.at + 1])


def _fields(scores: _Scores) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(scores, name) for name in _Scores.__slots__)


def _score(pair: Pair, ids: Sequence[int], start: int, first: int) -> _Scores:
    """One piece of a sequence whose tokens stand from ``first`` on in the text."""
    piece = next(pieces_of(ids[start:-1]))
    base, candidate = pair.read(piece)
    following = torch.tensor(ids[start + 1 : start + 1 + len(piece)], device=base.device)
    bits = [
        -logits.double().log_softmax(-1).gather(1, following[:, None])[:, 0] / math.log(2)
        for logits in (base, candidate)
    ]
    return _Scores(
        at=torch.arange(first + start, first + start + len(piece)),
        kl=kl_divergence(base, candidate).cpu(),
        agrees=(base.argmax(-1) == candidate.argmax(-1)).double().cpu(),
        base_bits=bits[0].cpu(),
        candidate_bits=bits[1].cpu(),
        base_finite=is_finite(base).cpu(),
        candidate_finite=is_finite(candidate).cpu(),
    )


def _summary(scores: _Scores, sizes: torch.Tensor) -> Divergence:
    blocks = torch.arange(len(scores.kl)) // BLOCK
    count = int(blocks[-1]) + 1

    def by_block(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64).index_add(0, blocks, values)

    ones, finite = by_block(torch.ones_like(scores.kl)), scores.base_finite & scores.candidate_finite
    agrees = torch.where(finite, scores.agrees, torch.nan)
    damaged = (~finite).nonzero()
    worst = int(scores.kl.nan_to_num(nan=math.inf).argmax())
    return Divergence(
        tokens=len(scores.kl),
        bytes=int(sizes.sum()),
        blocks=count,
        kl=bootstrap(by_block(scores.kl), ones),
        max_kl=float(scores.kl[worst]),
        worst=int(scores.at[worst]),
        agreement=bootstrap(by_block(agrees), ones),
        base_bits=bootstrap(by_block(scores.base_bits), by_block(sizes)),
        candidate_bits=bootstrap(by_block(scores.candidate_bits), by_block(sizes)),
        increase=bootstrap(by_block(scores.candidate_bits - scores.base_bits), by_block(sizes)),
        base_damaged=int((~scores.base_finite).sum()),
        candidate_damaged=int((~scores.candidate_finite).sum()),
        first_damaged=int(scores.at[damaged[0]]) if len(damaged) else -1,
    )
