"""Chooses the next token from logits: the likeliest, or one by chance.

In: FP32 logits and a ``Sampling``. Out: a token. The same seed and logits give the same tokens on every machine.

Example::

    sampler = Sampler(Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7))
    sampler.choose(logits)                              # logits [vocabulary]
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is the greedy choice. Otherwise, of the ``top_k`` likeliest tokens (0: of all), of those the fewest
    likeliest that together have the probability ``top_p`` (1: all)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0.0


GREEDY = Sampling()


class Sampler:
    """Chooses token after token; it holds the state of the random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = random.Random(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """A token by logits FP32 [vocabulary]; NaN is never chosen while there is a number. Of equals, the lower."""
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        if self.sampling.is_greedy:
            return int(logits.argmax())
        kept, shares = candidates(logits, self.sampling)
        point = self._random.random() * float(shares.sum())
        place = int(torch.searchsorted(shares.cumsum(0), point, right=True))
        return int(kept[min(place, len(kept) - 1)])


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that may be chosen, and their shares (FP64, of all that ``top_k`` keeps), both the likeliest first where
    either limit is set."""
    shares = torch.softmax((logits.double() - logits.max()) / sampling.temperature, dim=0)
    if not sampling.top_k and sampling.top_p >= 1.0:
        return torch.arange(len(logits)), shares
    order = _likeliest(shares, sampling.top_k or len(shares))
    shares = shares[order] / shares[order].sum()
    enough = shares.cumsum(0) - shares < sampling.top_p
    return order[enough], shares[enough]


def _likeliest(shares: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens of the ``count`` largest shares in their order, of equals the lower first; only those few are sorted."""
    count = min(count, len(shares))
    found = (shares >= shares.topk(count).values[-1]).nonzero()[:, 0]
    return found[shares[found].sort(descending=True, stable=True).indices][:count]
