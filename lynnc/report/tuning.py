"""What a tuning run tried and gained, read from the summary that ``lynnc tune`` wrote, and ordered for the page.

In: a JSON file, and the plan. Out: a ``Sweep`` whose every field was checked, or a ``RecordError`` of one sentence;
``Study`` values, which give the history, the slices and the reasons of one finding.

Example::

    sweep = read_sweep(Path("tune.json"), plan)
    [(study.finding.kernel, study.finding.gain, study.reasons) for study in studies_of(sweep)]
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lynnc.autotune.sweep import SCHEMA, Finding, Sweep, Tried
from lynnc.autotune.trial import Outcome, Status
from lynnc.errors import RecordError
from lynnc.jsonform import decode
from lynnc.plan import Plan
from lynnc.target import DEVICES


@dataclass(frozen=True, slots=True)
class Study:
    """One finding as the page shows it."""

    finding: Finding

    @property
    def timed(self) -> tuple[Tried, ...]:
        """Candidates with a time."""
        return tuple(tried for tried in self.finding.tried if tried.outcome.is_timed)

    @property
    def failed(self) -> int:
        """Candidates that were compiled or run, or should have been, and have no time."""
        return len(self.finding.tried) - len(self.timed) - self.finding.counts.get(Status.REFUSED.value, 0)

    @property
    def saved_s(self) -> float:
        """Seconds that a step gets shorter by, if launches do not overlap."""
        return self.finding.launches * self.finding.gain * self.finding.default.seconds

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why candidates have no time, the most frequent first; refusals without their numbers, so that like ones are
        one."""
        failures = (tried.outcome for tried in self.finding.tried if tried.outcome.status not in _TIMED_OR_REFUSED)
        found = Counter({f"refused: {reason}": count for reason, count in self.finding.refusals.items()})
        found.update(f"{outcome.status}: {outcome.reason}" for outcome in failures)
        return dict(found.most_common())

    @property
    def changed_knobs(self) -> Mapping[str, tuple[int | None, int]]:
        """Knobs that are chosen otherwise than the default: from, to."""
        default = self.finding.default_knobs
        pairs = {name: (default.get(name), value) for name, value in self.finding.knobs.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


_TIMED_OR_REFUSED = (Status.TIMED, Status.REFUSED)


def studies_of(sweep: Sweep) -> tuple[Study, ...]:
    """The findings, those that save the most first."""
    return tuple(sorted(map(Study, sweep.findings), key=lambda study: -study.saved_s))


def counts_of(sweep: Sweep) -> Mapping[str, int]:
    """Candidates of all kernels by what became of them."""
    total: Counter[str] = Counter()
    for finding in sweep.findings:
        total.update(finding.counts)
    return {status.value: total[status.value] for status in Status}


def from_dict(data: object) -> Sweep:
    """The sweep in parsed JSON; KeyError, TypeError or ValueError, saying what is wrong, for anything else."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(data, dict) or schema != SCHEMA:
        raise ValueError(f"its schema is {schema}, and this lynnc reads {SCHEMA}")
    sweep = cast(Sweep, decode(Sweep, {name: value for name, value in data.items() if name != "schema"}))
    for complaint in _complaints(sweep):
        raise ValueError(complaint)
    return sweep


def _complaints(sweep: Sweep) -> Iterator[str]:
    if not math.isfinite(sweep.seconds):
        yield f"the run took {sweep.seconds} s"
    for step in sweep.steps:
        yield from _outcome_complaints(f"the step {step.program}", step.default, step.tuned)
    for finding in sweep.findings:
        where = f"{finding.kernel} of {finding.program}"
        if finding.launches < 1:
            yield f"{where} has {finding.launches} launches"
        if not all(map(math.isfinite, (finding.bound_seconds, *finding.importances.values()))):
            yield f"{where} has a bound or an importance that is no number"
        yield from _outcome_complaints(where, finding.default, finding.best)
        yield from _outcome_complaints(f"a candidate for {where}", *(tried.outcome for tried in finding.tried))


def _outcome_complaints(where: str, *outcomes: Outcome) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.is_timed and not (math.isfinite(outcome.seconds) and outcome.seconds > 0):
            yield f"{where} is timed, but {outcome.seconds} is no time"


def read_sweep(path: Path, plan: Plan) -> Sweep:
    """The sweep in a file; RecordError if it cannot be read, is damaged, or is of another model or architecture."""
    advice = "name a summary that `lynnc tune` wrote"
    try:
        sweep = from_dict(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): {advice}.") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = error.args[0] if isinstance(error, KeyError) else error
        raise RecordError(f"{path} is no tuning summary ({why}): {advice}.") from error
    device = DEVICES.get(sweep.device)
    target = device.target.name if device else plan.target
    if sweep.model != plan.model_name or target != plan.target:
        raise RecordError(
            f"{path} is of {sweep.model} on {sweep.device} ({target}), and the plan {plan.name} is "
            f"{plan.model_name} for {plan.target}: give a summary of this model and target."
        )
    return sweep
