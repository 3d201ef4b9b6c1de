"""What a run of the tuner found, as plain values: for its tables, the report page and records.

In: trials and verdicts of a run. Out: a ``Sweep``.

Example::

    sweep = tuner.conclude(budget, about, seconds)
    for found in sweep.findings:
        print(found.kernel, found.counts, found.gain)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lynnc.autotune.trial import Outcome, Status
from lynnc.kernels.kernel import Knobs


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate of a study. ``origin`` says who proposed it; ``is_whole`` whether it got every repeat."""

    number: int
    knobs: Knobs
    outcome: Outcome
    origin: str
    worker: str = ""
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """A task: what was tried, how its best did against the default in the last race, and which knobs it got.

    ``in_use`` are the knobs before the run. ``verdict`` is a sentence. ``default`` and ``best`` are not timed where the
    budget did not reach the task. ``importances`` is how much of the differences each knob explains, as far as known.
    """

    kernel: str
    program: str
    programs: tuple[str, ...]
    problem: Mapping[str, int | str]
    launches: int
    share: float
    bound_seconds: float
    default_knobs: Knobs
    in_use: Knobs
    knobs: Knobs
    default: Outcome
    best: Outcome
    verdict: str
    tried: tuple[Tried, ...] = ()
    importances: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether the default stays."""
        return dict(self.knobs) == dict(self.default_knobs)

    @property
    def is_changed(self) -> bool:
        """Whether the run found better knobs than those in use."""
        return dict(self.knobs) != dict(self.in_use)

    @property
    def is_raced(self) -> bool:
        """Whether both times are there."""
        return self.default.is_timed and self.best.is_timed

    @property
    def gain(self) -> float:
        """The part of the default's time that the chosen knobs save; 0 where the default stays."""
        return 1 - self.best.seconds / self.default.seconds if self.is_raced and not self.is_default else 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """Candidates by what became of them."""
        return Counter(tried.outcome.status.value for tried in self.tried)

    @property
    def refusals(self) -> Mapping[str, int]:
        """Refused candidates by reason, numbers left out so that like reasons are one."""
        reasons = (tried.outcome.reason for tried in self.tried if tried.outcome.status is Status.REFUSED)
        return Counter(_kind_of(reason) for reason in reasons)


@dataclass(frozen=True, slots=True)
class StepFinding:
    """Whole steps of a program in turns: with every default, with what was in use, and with the chosen knobs.

    A program for whose steps there was no time is here, too, with the reason: then none of its knobs have changed.
    """

    program: str
    default: Outcome
    before: Outcome
    tuned: Outcome

    @property
    def is_timed(self) -> bool:
        """Whether all three are there."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why one of the three is not there, or ``""``."""
        named = (("all defaults", self.default), ("until now", self.before), ("tuned", self.tuned))
        failed = [(name, one) for name, one in named if not one.is_timed]
        if len({one.reason for _, one in failed}) == 1 and len(failed) == len(named):
            return self.tuned.reason
        return "; ".join(f"{name}: {one.reason or one.status.value}" for name, one in failed)

    @property
    def gain(self) -> float:
        """The part of the time until now that is saved."""
        return 1 - self.tuned.seconds / self.before.seconds if self.before.is_timed and self.tuned.is_timed else 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """A run. ``is_simulated`` says that no device measured anything; ``settings`` is what was asked for."""

    run: str
    model: str
    device: str
    is_simulated: bool
    seconds: float
    settings: Mapping[str, str | int]
    findings: tuple[Finding, ...]
    steps: tuple[StepFinding, ...] = ()


def outcome_from(values: Mapping[str, Any]) -> Outcome:
    """An outcome from plain values."""
    return Outcome(**{**values, "status": Status(values["status"])})


def _kind_of(reason: str) -> str:
    """A reason without its numbers."""
    words = ("N" if any(letter.isdigit() for letter in word) else word for word in reason.split(":")[0].split())
    return " ".join(words)
