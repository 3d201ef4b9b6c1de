"""How certain a mean over a text is: bootstrap over blocks of neighbouring tokens, which depend on each other.

In: for each block, what was summed and over how much. Out: an ``Interval`` of the ratio of the sums.

Example::

    bootstrap(kl_sums, token_counts)            # Interval(mean=0.021, low=0.019, high=0.024)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20_240_229


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds between which it lies with 95 % confidence."""

    mean: float
    low: float
    high: float


def bootstrap(sums: torch.Tensor, weights: torch.Tensor, seed: int = SEED) -> Interval:
    """The ratio of ``sums`` [blocks] to ``weights`` [blocks] in FP64, by drawing as many blocks with replacement.

    The bounds hold the mean always. The draws depend on the seed and the number of blocks alone, so two ratios of the
    same blocks are drawn alike.
    """
    sums, weights = sums.double().cpu(), weights.double().cpu()
    mean = float(sums.sum() / weights.sum())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)
    totals = weights[drawn].sum(1)
    ratios = (sums[drawn].sum(1) / totals)[totals > 0]
    if not ratios.isfinite().all():  # a quantile would hide what is not a number
        return Interval(mean, float("nan"), float("nan"))
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(ratios.quantile(share)) for share in (tail, 1 - tail))
    return Interval(mean, min(low, mean), max(high, mean))
