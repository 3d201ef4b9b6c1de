"""What a sweep leaves behind: records for the compiler, and a summary for the report page.

In: a ``Sweep``. Out: ``Record`` values in the user's folder, one for each task that was raced, also where the default
won (it then stands in the way of a record of a near problem); and a ``TuneSummary``.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from lynnc.autotune.sweep import Finding, StepFinding, Sweep
from lynnc.autotune.trial import Status
from lynnc.deviceidentity import Identity
from lynnc.kernels.table import KERNELS
from lynnc.record import Record, RecordOrigin
from lynnc.recordfiles import write_user_record
from lynnc.render import template_digest
from lynnc.report.tuning import SCHEMA, KernelStudy, StepStudy, TrialRow, TuneSummary
from lynnc.tools import find_tools
from lynnc.version import VERSION


def records_of(sweep: Sweep, device: Identity, day: datetime.date) -> Iterator[Record]:
    """A record for each finding that has times."""
    tools = find_tools()
    ptxas = tools.ptxas_for(int("".join(filter(str.isdigit, device.arch))))
    templates = {kernel.name: kernel.template for kernel in KERNELS}
    for found in sweep.findings:
        if found.is_raced:
            yield Record(
                kernel=found.kernel,
                problem=dict(found.problem),
                knobs=dict(found.knobs),
                device=device,
                template=template_digest(templates[found.kernel]),
                origin=RecordOrigin.SIMULATED if sweep.is_simulated else RecordOrigin.MEASURED,
                triton=tools.triton_version,
                ptxas=ptxas.version if ptxas else None,
                seconds=found.best.seconds,
                spread=found.best.greatest - found.best.least,
                gain=found.gain,
                date=day.isoformat(),
            )


def write_records(sweep: Sweep, device: Identity, folder: Path) -> int:
    """Puts the records into the user's folder and says how many they are."""
    records = tuple(records_of(sweep, device, datetime.datetime.now(datetime.UTC).date()))
    for record in records:
        write_user_record(folder, record)
    return len(records)


def summary_of(sweep: Sweep, device: str, gpu: str, before: Callable[[str], int]) -> TuneSummary:
    """What ``lynnc report --tune`` reads; ``device`` is a name of the table, ``gpu`` what the driver says, ``before``
    how many tokens stood before a program's steps."""
    return TuneSummary(
        schema=SCHEMA,
        lynnc=VERSION,
        model=sweep.model,
        device=device,
        gpu=gpu,
        seed=int(sweep.settings.get("seed", 0)),
        budget=str(sweep.settings.get("budget", "")),
        seconds=sweep.seconds,
        is_simulated=sweep.is_simulated,
        steps=tuple(_step(step, before(step.program)) for step in sweep.steps if step.is_timed),
        not_measured={step.program: step.why_not for step in sweep.steps if not step.is_timed},
        kernels=tuple(_study(found) for found in sweep.findings if found.is_raced),
    )


def _step(step: StepFinding, context: int) -> StepStudy:
    default, before, tuned = step.default, step.before, step.tuned
    spread = tuned.greatest - tuned.least
    return StepStudy(step.program, context, default.seconds, before.seconds, tuned.seconds, spread)


def _study(found: Finding) -> KernelStudy:
    refused = Counter(one.outcome.reason for one in found.tried if one.outcome.status is Status.REFUSED)
    return KernelStudy(
        program=found.program,
        kernel=found.kernel,
        problem=dict(found.problem),
        launches=found.launches,
        default_seconds=found.default.seconds,
        best_seconds=found.best.seconds,
        default_knobs=dict(found.default_knobs),
        best_knobs=dict(found.knobs),
        refused=dict(refused),
        trials=tuple(
            TrialRow(one.number, one.outcome.status.value, one.outcome.seconds, dict(one.knobs), one.outcome.reason)
            for one in found.tried
            if one.outcome.status is not Status.REFUSED
        ),
        importance=dict(found.importances),
        verdict=found.verdict,
    )
