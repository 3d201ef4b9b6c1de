"""Where the hidden state of the candidate leaves the base's, layer by layer.

In: a pair of engines and the tokens of one sequence. Out: a ``Drift``: cosine and relative L2 error after the
embedding, after each layer, and of the logits; and the first of these places that lies outside the band of a kind of
change.

Part of the tokens is read at once, as a prompt, and the rest one by one, as decoding does: the two run different
kernels.

Example::

    found = trace_drift(pair, tokens, prompt=64)
    leaving = first_leaving(found, thresholds)            # Place(section="layers.3", l2=0.4, ...), or None
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lynnc.engines.engine import Engine
from lynnc.engines.optrace import section_names
from lynnc.quality.pair import Pair, pieces_of
from lynnc.quality.thresholds import Thresholds

MOST_FOLLOWED = 2048
"""Tokens whose hidden states are held at once."""


@dataclass(frozen=True, slots=True)
class Place:
    """The hidden state behind a section (of ``head``: the logits less their mean), over all tokens. ``l2``: RMS of the
    tokens' relative L2 errors; ``cosine``: mean; ``worst_l2`` is the largest error, at token ``worst``. The three are
    NaN where a side is not finite; ``base_damaged`` and ``candidate_damaged`` count such tokens."""

    section: str
    depth: int
    l2: float
    cosine: float
    worst_l2: float
    worst: int
    base_damaged: int
    candidate_damaged: int

    def is_within(self, thresholds: Thresholds) -> bool:
        """Whether it lies in the band; what is not finite never does."""
        return self.l2 <= thresholds.band(self.depth) and self.cosine >= thresholds.least_cosine(self.depth)


@dataclass(frozen=True, slots=True)
class Drift:
    """Every place in order, the tokens it was measured on, how many of them were read at once, the base's residual
    stream FP32 [layers + 1, n, hidden], and how many tokens were read before."""

    places: tuple[Place, ...]
    tokens: tuple[int, ...]
    prompt: int
    hidden: torch.Tensor
    skipped: int = 0


def trace_drift(pair: Pair, tokens: Sequence[int], prompt: int) -> Drift:
    """Both engines on one sequence: ``prompt`` tokens at once, the others one by one. Of a long sequence only the last
    tokens are followed, since every layer's hidden state is held."""
    skipped = max(len(tokens) - MOST_FOLLOWED, 0)
    followed, prompt = tokens[skipped:], max(prompt - skipped, 1)
    base, candidate = (
        _trace(side.engine, tokens[:skipped], cut(followed, prompt)) for side in (pair.base, pair.candidate)
    )
    ours, theirs = ([*hidden, logits - logits.mean(-1, keepdim=True)] for hidden, logits in (base, candidate))
    sections = section_names(len(ours) - 2)
    places = tuple(
        _compare(section, depth, *states)
        for depth, (section, *states) in enumerate(zip(sections, ours, theirs, strict=True))
    )
    return Drift(places, tuple(followed), prompt, base[0], skipped)


def first_leaving(drift: Drift, thresholds: Thresholds) -> Place | None:
    """The first place outside the band."""
    return next((place for place in drift.places if not place.is_within(thresholds)), None)


def _trace(engine: Engine, before: Sequence[int], pieces: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual stream [layers + 1, n, hidden] and logits [n, vocabulary] of the pieces, on the CPU."""
    engine.reset()
    for piece in pieces_of(before):
        engine.append(piece)
    traces = [engine.trace(piece) for piece in pieces]
    hidden = torch.cat([trace.hidden.cpu() for trace in traces], dim=1)
    return hidden, torch.cat([trace.logits.cpu() for trace in traces])


def cut(tokens: Sequence[int], prompt: int) -> list[Sequence[int]]:
    """The first ``prompt`` tokens, then each of the others."""
    return [tokens[:prompt], *([token] for token in tokens[prompt:])]


def _compare(section: str, depth: int, base: torch.Tensor, candidate: torch.Tensor) -> Place:
    """Rows [n, width] of both."""
    ours, theirs = base.double(), candidate.double()
    finite = [states.isfinite().all(-1) for states in (ours, theirs)]
    lengths = [states.norm(dim=-1) for states in (ours, theirs)]
    difference = (ours - theirs).norm(dim=-1)
    # Where the base is all zero, any difference is endless, and none is none.
    errors = torch.where(difference == 0, 0.0, difference / lengths[0])
    cosines = torch.where(difference == 0, 1.0, (ours * theirs).sum(-1) / (lengths[0] * lengths[1]))
    errors, cosines = (torch.where(finite[0] & finite[1], values, torch.nan) for values in (errors, cosines))
    worst = int(errors.nan_to_num(nan=math.inf).argmax())
    return Place(
        section=section,
        depth=depth,
        l2=float(errors.square().mean().sqrt()),
        cosine=float(cosines.mean()),
        worst_l2=float(errors[worst]),
        worst=worst,
        base_damaged=int((~finite[0]).sum()),
        candidate_damaged=int((~finite[1]).sum()),
    )
