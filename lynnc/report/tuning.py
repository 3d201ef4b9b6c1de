"""What a tuning run tried and gained, read from the summary that ``lynnc tune -o`` wrote.

In: a JSON file. Out: a ``TuneSummary``, or a ``RecordError`` of one sentence. Gains, counts and the best so far are
computed from the trials, so that no two figures of a summary can contradict each other.

Example::

    summary = read_summary(Path("study.json"), plan)
    [(study.kernel, study.gain, study.counts) for study in summary.kernels]
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lynnc.autotune.trial import Status
from lynnc.errors import RecordError, TargetError
from lynnc.jsonform import decode
from lynnc.plan import Plan
from lynnc.target import find_device

SCHEMA = 3
"""Grows when the form of a summary changes."""
WITHOUT_NOT_MEASURED = 2
"""The schema before, which is read, too: it says nothing of steps that were not measured."""
LONGEST_SECONDS = 86400.0
"""No launch and no step takes a day: such a time is damage."""
MOST = 1_000_000_000
"""Launches of a step, candidates of a kernel and positions of a slot are fewer: a longer number is damage."""
Knobs = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One candidate that passed the constraints; ``seconds`` is 0 unless its status is ``timed``."""

    number: int
    status: str
    seconds: float
    knobs: Knobs
    reason: str


@dataclass(frozen=True, slots=True)
class KernelStudy:
    """The candidates of one kernel for one problem; ``refused`` counts those that no constraint let through, by reason.

    Seconds are of one launch, ``launches`` those of a step; ``verdict`` says why the best choice is that.
    """

    program: str
    kernel: str
    problem: Mapping[str, int | str]
    launches: int
    default_seconds: float
    best_seconds: float
    default_knobs: Knobs
    best_knobs: Knobs
    refused: Mapping[str, int]
    trials: tuple[TrialRow, ...]
    importance: Mapping[str, float]
    verdict: str

    @property
    def gain(self) -> float:
        """How many times as fast the best choice is."""
        return self.default_seconds / self.best_seconds

    @property
    def saved_s(self) -> float:
        """Seconds that a step gets shorter by, if launches do not overlap."""
        return self.launches * (self.default_seconds - self.best_seconds)

    @property
    def counts(self) -> Mapping[str, int]:
        """Candidates by what became of them."""
        return {str(Status.REFUSED): sum(self.refused.values()), **Counter(trial.status for trial in self.trials)}

    @property
    def timed(self) -> tuple[TrialRow, ...]:
        """Trials with a time."""
        return tuple(trial for trial in self.trials if trial.status == Status.TIMED)

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why candidates have no time, the most frequent first; numbers are left out, so that like reasons are one."""
        found: Counter[str] = Counter()
        for reason, count in self.refused.items():
            found[f"{Status.REFUSED}: {_without_numbers(reason)}"] += count
        failed = (trial for trial in self.trials if trial.status != Status.TIMED)
        found.update(f"{trial.status}: {_without_numbers(trial.reason)}" for trial in failed)
        return dict(found.most_common())

    @property
    def changed_knobs(self) -> Mapping[str, tuple[int | None, int]]:
        """Knobs of the best choice that the default has otherwise."""
        pairs = {name: (self.default_knobs.get(name), value) for name, value in self.best_knobs.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d[\d,.]*(?<=\d)", "N", reason)


@dataclass(frozen=True, slots=True)
class StepStudy:
    """A whole step with all default knobs, with what was in use before the run, and with all chosen ones, in turns.

    ``best_spread`` is between the fastest and the slowest run of the latter.
    """

    program: str
    context: int
    default_seconds: float
    before_seconds: float
    best_seconds: float
    best_spread: float

    @property
    def gain(self) -> float:
        """How many times as fast the step is."""
        return self.default_seconds / self.best_seconds


@dataclass(frozen=True, slots=True)
class TuneSummary:
    """One run of the tuner; ``device`` is a name of the table of devices, ``gpu`` what the driver calls it.

    ``not_measured`` says of each program whose step has not all three times why.
    """

    schema: int
    lynnc: str
    model: str
    device: str
    gpu: str
    seed: int
    budget: str
    seconds: float
    is_simulated: bool
    steps: tuple[StepStudy, ...]
    not_measured: Mapping[str, str]
    kernels: tuple[KernelStudy, ...]

    @classmethod
    def from_dict(cls, data: object) -> TuneSummary:
        """The summary in parsed JSON; KeyError, TypeError or ValueError, saying what is wrong, for anything else."""
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(data, dict) and schema == WITHOUT_NOT_MEASURED:
            data, schema = {"not_measured": {}, **data, "schema": SCHEMA}, SCHEMA
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema}, and this lynnc reads {SCHEMA}")
        summary = cast(TuneSummary, decode(cls, data))
        for complaint in _complaints(summary):
            raise ValueError(complaint)
        return summary

    @property
    def counts(self) -> Mapping[str, int]:
        """Candidates of all kernels by what became of them."""
        total: Counter[str] = Counter()
        for study in self.kernels:
            total.update(study.counts)
        return {str(status): total[status] for status in Status}


def _complaints(summary: TuneSummary) -> Iterator[str]:
    if not 0 <= summary.seconds < math.inf:
        yield f"the run took {summary.seconds} s"
    for step in summary.steps:
        if not all(map(_is_time, (step.default_seconds, step.before_seconds, step.best_seconds))):
            yield f"a time of the step {step.program} cannot be"
        if not 0 <= step.context < MOST:
            yield f"the context of the step {step.program} cannot be"
        if not 0 <= step.best_spread < LONGEST_SECONDS:
            yield f"the spread of the step {step.program} is {step.best_spread} s"
    for study in summary.kernels:
        yield from _study_complaints(study, f"{study.kernel} of {study.program}")


def _study_complaints(study: KernelStudy, where: str) -> Iterator[str]:
    if not all(map(_is_time, (study.default_seconds, study.best_seconds))) or not 1 <= study.launches < MOST:
        yield f"{where} has a time or a number of launches that cannot be"
    if min(study.refused.values(), default=0) < 0:
        yield f"{where} has a negative number of refusals"
    if not all(map(math.isfinite, study.importance.values())):
        yield f"{where} has an importance that is no number"
    for trial in study.trials:
        if not 0 <= trial.number < MOST:
            yield f"a trial of {where} has a number that cannot be"
        if trial.status not in set(Status):
            yield f"trial {trial.number} of {where} has the unknown status {trial.status!r}"
        if trial.status == Status.TIMED and not _is_time(trial.seconds):
            yield f"trial {trial.number} of {where} is timed, but {trial.seconds} is no time"


def _is_time(seconds: float) -> bool:
    return 0 < seconds < LONGEST_SECONDS


def read_summary(path: Path, plan: Plan) -> TuneSummary:
    """The summary in a file; RecordError if it cannot be read, is damaged, or is of another model or architecture."""
    advice = "name a summary that `lynnc tune -o` wrote"
    try:
        summary = TuneSummary.from_dict(json.loads(path.read_text("utf-8")))
        target = find_device(summary.device).target
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): {advice}.") from error
    except (KeyError, TypeError, ValueError, RecursionError, TargetError) as error:
        why = str(error.args[0] if isinstance(error, KeyError) else error).rstrip(".")
        raise RecordError(f"{path} is no tuning summary ({why}): {advice}.") from error
    if summary.model != plan.model_name or target.name != plan.target:
        raise RecordError(
            f"{path} is of {summary.model} on {summary.device} ({target.name}), and the plan {plan.name} is "
            f"{plan.model_name} for {plan.target}: give a summary of this model and target."
        )
    return summary
