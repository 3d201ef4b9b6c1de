"""Greedy generation of base and candidate, and whether the measured noise explains where they part.

In: a pair of engines and prompts as token ids. Out: a ``GreedyResult``: for each prompt the generated ids of the base,
and each position at which the candidate, behind the same ids, would have gone on with another one.

Both read the base's choices, so up to the first difference this is what each would have generated alone, and later
positions still say something. Noise is how far the logits of the two are apart where they agree on the token; a
position where they do not is no evidence of its own excuse.

Example::

    found = run_greedy(pair, prompts, tokens=128)
    outcome_of(found.runs[0], allowance(found.noise, thresholds))       # Outcome.EXPLAINED
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from lynnc.quality.pair import Pair, is_finite, pieces_of
from lynnc.quality.prompts import Encoded
from lynnc.quality.thresholds import Thresholds


class Outcome(StrEnum):
    """What a prompt shows."""

    EXACT = "exact"
    EXPLAINED = "explained-by-margin"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Flip:
    """A generated position at which the two choose different tokens. ``margin``: the base's best logit less its second;
    ``gap``: less that of the candidate's token. Infinite where logits of one side are not finite."""

    position: int
    base: int
    candidate: int
    margin: float
    gap: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Difference of the two sides' logits, each less its mean: RMS and maximum; ``scale`` is the RMS of the base's own.
    ``damaged`` counts rows that are not finite, which are in none of the others."""

    rms: float
    largest: float
    scale: float
    positions: int
    damaged: int

    @property
    def relative(self) -> float:
        """RMS over the base's; infinite if nothing could be compared."""
        return self.rms / self.scale if self.positions and self.scale > 0 else math.inf


@dataclass(frozen=True, slots=True)
class PromptRun:
    """A prompt, the ids that the base generated, where the candidate differs, in order, and the noise behind it."""

    prompt: Encoded
    ids: tuple[int, ...]
    flips: tuple[Flip, ...]
    noise: Noise


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """Every prompt, and the noise over all of them."""

    runs: tuple[PromptRun, ...]
    noise: Noise

    @property
    def noisiest(self) -> PromptRun:
        """The prompt with the most noise; one behind which nothing could be compared has none of its own."""
        return max(self.runs, key=lambda run: run.noise.relative if run.noise.positions else 0.0)


class NoiseMeter:
    """Sums up differences of logits."""

    def __init__(self) -> None:
        self.squares = self.base_squares = self.largest = 0.0
        self.elements = self.positions = self.damaged = 0

    def add(self, base: torch.Tensor, candidate: torch.Tensor) -> None:
        """Rows [n, vocabulary] of both behind the same tokens."""
        finite = is_finite(base) & is_finite(candidate)
        self.damaged += int((~finite).sum())
        used = finite & (base.argmax(-1) == candidate.argmax(-1))
        if not used.any():
            return
        ours, theirs = (logits[used].double() for logits in (base, candidate))
        ours, theirs = (logits - logits.mean(-1, keepdim=True) for logits in (ours, theirs))
        difference = ours - theirs
        self.squares += float(difference.square().sum())
        self.base_squares += float(ours.square().sum())
        self.largest = max(self.largest, float(difference.abs().max()))
        self.elements += difference.numel()
        self.positions += len(difference)

    def include(self, other: NoiseMeter) -> None:
        """Another meter's sums as well."""
        self.squares += other.squares
        self.base_squares += other.base_squares
        self.largest = max(self.largest, other.largest)
        self.elements += other.elements
        self.positions += other.positions
        self.damaged += other.damaged

    def result(self) -> Noise:
        """What was measured."""
        count = max(self.elements, 1)
        rms, scale = math.sqrt(self.squares / count), math.sqrt(self.base_squares / count)
        return Noise(rms, self.largest, scale, self.positions, self.damaged)


def run_greedy(
    pair: Pair, prompts: Sequence[Encoded], tokens: int, on_prompt: Callable[[str], None] = lambda name: None
) -> GreedyResult:
    """Generates ``tokens`` ids behind each prompt."""
    whole = NoiseMeter()
    runs = []
    for prompt in prompts:
        on_prompt(prompt.name)
        meter = NoiseMeter()
        runs.append(run_prompt(pair, prompt, tokens, meter))
        whole.include(meter)
    return GreedyResult(tuple(runs), whole.result())


def run_prompt(pair: Pair, prompt: Encoded, tokens: int, meter: NoiseMeter) -> PromptRun:
    """One prompt in a sequence of its own, measured by a meter of its own."""
    pair.reset()
    base, candidate = pair.begin(prompt.ids) if pair.has_prefill else _read_prompt(pair, prompt, meter)
    ids: list[int] = []
    flips: list[Flip] = []
    while True:
        meter.add(base, candidate)
        flip = find_flip(len(ids), base[0], candidate[0])
        flips += [flip] if flip else []
        ids.append(choose(base[0]))
        if len(ids) == tokens:
            return PromptRun(prompt, tuple(ids), tuple(flips), meter.result())
        base, candidate = pair.step(ids[-1])


def _read_prompt(pair: Pair, prompt: Encoded, meter: NoiseMeter) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, vocabulary] behind a prompt of which every token has some: those before the last tell of noise."""
    *head, last = pieces_of(prompt.ids)
    for piece in head:
        meter.add(*pair.read(piece))
    base, candidate = pair.read(last)
    meter.add(base[:-1], candidate[:-1])
    return base[-1:], candidate[-1:]


def choose(logits: torch.Tensor) -> int:
    """The greedy choice: the lowest of the largest; NaN never wins."""
    return int(logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax())


def find_flip(position: int, base: torch.Tensor, candidate: torch.Tensor) -> Flip | None:
    """The difference at one position [vocabulary], if there is one."""
    ours, theirs = choose(base), choose(candidate)
    if not (base.isfinite().all() and candidate.isfinite().all()):
        return Flip(position, ours, theirs, math.inf, math.inf)
    if ours == theirs:
        return None
    best, second = base.double().topk(2).values.tolist()
    return Flip(position, ours, theirs, best - second, best - float(base[theirs]))


def allowance(noise: Noise, thresholds: Thresholds, own: Noise | None = None) -> float:
    """The widest gap that noise explains: that over all prompts, or the prompt's own where it is larger, since a router
    that was nearly tied moves all that follows it in that prompt. Noise beyond its limit widens it no further: a broken
    candidate, whose logits are all far off, must not excuse itself. Gaps that BF16 cannot tell apart are explained
    without any noise."""
    rms = max(noise.rms, own.rms if own and own.positions else 0.0)
    measured = thresholds.margin_multiple * min(rms, thresholds.noise * noise.scale)
    return max(measured, thresholds.resolution * noise.scale)


def classify(flip: Flip, widest: float) -> Outcome:
    """Whether a gap of at most ``widest`` explains a difference."""
    return Outcome.EXPLAINED if flip.gap <= widest else Outcome.WRONG


def outcome_of(run: PromptRun, widest: float) -> Outcome:
    """The worst of a prompt's differences."""
    found = {classify(flip, widest) for flip in run.flips}
    if not found:
        return Outcome.EXACT
    return Outcome.WRONG if Outcome.WRONG in found else Outcome.EXPLAINED


def first_wrong(run: PromptRun, widest: float) -> Flip | None:
    """The first difference that nothing explains."""
    return next((flip for flip in run.flips if classify(flip, widest) is Outcome.WRONG), None)
