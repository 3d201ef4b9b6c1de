"""The tables of ``lynnc tune``."""

from __future__ import annotations

from collections import Counter

import click

from lynnc.autotune.sweep import Finding, StepFinding, Sweep
from lynnc.autotune.trial import Outcome, Status
from lynnc.cli.output import duration, number, print_table, text

FAULTS = (Status.NOT_COMPILED, Status.WRONG, Status.CRASHED, Status.HUNG)
MOST_REASONS = 12


def print_sweep(sweep: Sweep) -> None:
    """Kernels, reasons of refusals, whole steps, and a last line."""
    simulated = sweep.settings.get("how", "simulated: ranked by what the compiler made, not measured")
    how = simulated if sweep.is_simulated else "measured"
    columns = [text("program"), text("kernel"), text("problem"), number("tried"), number("refused")]
    columns += [*(number(status.value) for status in FAULTS), number("timed"), number("default"), number("best")]
    columns += [number("saved"), text("verdict")]
    print_table(f"{sweep.model} on {sweep.device} ({how})", columns, [_cells(found) for found in sweep.findings])
    print_table("refused before compiling", [number("candidates"), text("reason")], _reasons(sweep))
    columns = [text("step"), number("all defaults"), number("until now"), number("tuned"), number("saved")]
    columns.append(text("not measured"))
    print_table("whole steps, in turns", columns, [_step_cells(step) for step in sweep.steps])
    total: Counter[str] = Counter()
    for found in sweep.findings:
        total.update(found.counts)
    words = ", ".join(f"{total[status.value]} {status.value}" for status in Status)
    better = sum(found.is_changed for found in sweep.findings)
    click.echo(
        f"{sum(total.values())} candidates ({words}) in {sweep.seconds:.0f} s: {better} of {len(sweep.findings)} "
        f"problems have better knobs; run {sweep.run}"
    )


def _cells(found: Finding) -> list[str]:
    counts = found.counts
    problem = " ".join(f"{name}={value}" for name, value in sorted(found.problem.items()))
    return [
        found.program,
        found.kernel,
        problem,
        str(sum(counts.values())),
        str(counts[Status.REFUSED]),
        *(str(counts[status]) for status in FAULTS),
        str(counts[Status.TIMED]),
        _time(found.default),
        _time(found.best),
        _part(found.gain) if found.is_raced else "",
        found.verdict,
    ]


def _step_cells(step: StepFinding) -> list[str]:
    saved = _part(step.gain) if step.before.is_timed and step.tuned.is_timed else ""
    return [step.program, _time(step.default), _time(step.before), _time(step.tuned), saved, step.why_not]


def _reasons(sweep: Sweep) -> list[list[str]]:
    total: Counter[str] = Counter()
    for found in sweep.findings:
        total.update(found.refusals)
    return [[str(count), reason] for reason, count in total.most_common(MOST_REASONS)]


def _time(outcome: Outcome) -> str:
    """A time, or why there is none; nothing where the budget did not reach a task."""
    if outcome.is_timed:
        return duration(outcome.seconds)
    return "" if outcome.status is Status.REFUSED else outcome.status.value


def _part(gain: float) -> str:
    return f"{100 * gain:.1f} %"
