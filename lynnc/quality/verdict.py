"""PASS or FAIL: every measured value against its limit, and where a value comes from.

In: what was measured, and thresholds. Out: ``Check`` records, and whether all hold. A value that is no number holds
nowhere: comparisons with NaN are false, and every check asks for what must be true.

Example::

    checks = judge(findings, read_thresholds("fusion"))
    all(check.is_ok for check in checks)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lynnc.quality.culprit import Culprit
from lynnc.quality.divergence import Divergence
from lynnc.quality.drift import Drift, Place, first_leaving
from lynnc.quality.greedy import GreedyResult, Outcome, PromptRun, allowance, outcome_of
from lynnc.quality.thresholds import Thresholds

_SHOWN = 3
"""Prompts that a check names before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class Check:
    """A measured value and its limit, the most allowed or (``is_least``) the least; ``where`` the value was found."""

    name: str
    value: float
    limit: float
    where: str
    is_least: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether the limit is kept."""
        return self.value >= self.limit if self.is_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Location:
    """Where a candidate that fails leaves the band first: a section, and the op if it could be found. ``sequence``
    names the tokens that showed it."""

    place: Place
    culprit: Culprit | None
    sequence: str

    @property
    def section(self) -> str:
        """Of the op, if there is one: its error may leave the band only later."""
        return self.culprit.section if self.culprit else self.place.section

    def __str__(self) -> str:
        return f"{self.section}: {self.culprit}" if self.culprit else self.section


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured."""

    greedy: GreedyResult
    text: Divergence
    drift: Drift


def judge(found: Findings, thresholds: Thresholds) -> tuple[Check, ...]:
    """Every check, in the order of the report."""
    return (
        _finite(found),
        *_greedy(found.greedy, thresholds),
        *_text(found.text, thresholds),
        *_drift(found.drift, thresholds),
    )


def _finite(found: Findings) -> Check:
    """Tokens with values that are not finite, on either side."""
    places = [place for place in found.drift.places if place.base_damaged or place.candidate_damaged]
    counts = (found.greedy.noise.damaged, found.text.base_damaged, found.text.candidate_damaged)
    count = sum(counts) + max((place.base_damaged + place.candidate_damaged for place in places), default=0)
    where = ""
    if places:
        first = places[0]
        sides = [name for name, has in (("base", first.base_damaged), ("candidate", first.candidate_damaged)) if has]
        where = f"{first.section}, {' and '.join(sides)}"
    elif count:
        where = "logits"
    return Check("values that are not finite", count, 0, where)


def _greedy(found: GreedyResult, thresholds: Thresholds) -> tuple[Check, ...]:
    outcomes = [outcome_of(run, allowance(found.noise, thresholds, run.noise)) for run in found.runs]
    by_outcome = {kind: [run for run, its in zip(found.runs, outcomes, strict=True) if its is kind] for kind in Outcome}
    wrong, explained = (by_outcome[kind] for kind in (Outcome.WRONG, Outcome.EXPLAINED))
    count = max(len(found.runs), 1)
    return (
        Check("prompts that are wrong", len(wrong) / count, thresholds.wrong_share, _names(wrong)),
        Check(
            "prompts that differ",
            (len(wrong) + len(explained)) / count,
            max(thresholds.divergent_share, thresholds.wrong_share),
            _names([*wrong, *explained]),
        ),
        _noise(found, thresholds),
    )


def _noise(found: GreedyResult, thresholds: Thresholds) -> Check:
    """Of the noisiest prompt: over all of them, a fault of one would be lost."""
    noisiest = found.noisiest
    value = noisiest.noise.relative if found.noise.positions else math.inf
    return Check("noise of logits, relative", value, thresholds.noise, noisiest.prompt.name)


def _names(runs: Sequence[PromptRun]) -> str:
    shown = ", ".join(run.prompt.name for run in runs[:_SHOWN])
    return f"{shown} and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else shown


def _text(found: Divergence, thresholds: Thresholds) -> tuple[Check, ...]:
    """Of a mean the worse end of its interval counts."""
    whole = f"{found.tokens:,} tokens"
    return (
        Check("KL, mean", found.kl.high, thresholds.mean_kl, whole),
        Check("KL, largest", found.max_kl, thresholds.max_kl, f"token {found.worst:,}"),
        Check("agreement of top-1", found.agreement.low, thresholds.agreement, whole, is_least=True),
        Check("bits per byte, increase", found.increase.high, thresholds.bits_per_byte, whole),
    )


def _drift(found: Drift, thresholds: Thresholds) -> tuple[Check, ...]:
    leaving = first_leaving(found, thresholds)
    shown = leaving or max(found.places, key=lambda place: _use_of_band(place, thresholds))
    return (
        Check("hidden state, relative L2", shown.l2, thresholds.band(shown.depth), shown.section),
        Check("hidden state, cosine", shown.cosine, thresholds.least_cosine(shown.depth), shown.section, is_least=True),
    )


def _use_of_band(place: Place, thresholds: Thresholds) -> float:
    """Share of the band that is used."""
    band = thresholds.band(place.depth)
    return place.l2 / band if band > 0 else (0.0 if place.l2 == 0 else math.inf)
