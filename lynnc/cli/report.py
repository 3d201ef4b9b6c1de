"""``lynnc report``: a plan as one page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lynnc.cli.localplan import device_of
from lynnc.cli.output import note, warn
from lynnc.cli.parameters import complete_models, device_of_plan
from lynnc.cli.subject import find_subject
from lynnc.errors import OptionError, RecordError
from lynnc.outputfile import check_file, write_file
from lynnc.plan import Plan
from lynnc.report.contents import USUAL_CONTEXT, Sources, make_report
from lynnc.report.measured import Measurements, read_measurements
from lynnc.report.page import render_page
from lynnc.report.tuning import read_summary
from lynnc.target import Device, find_target


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    subject: str
    bench: Sequence[Path]
    tune: Path | None
    device: str | None
    context: int | None
    output: Path
    force: bool


@click.command("report", epilog="Example: lynnc report lynn-27b-a3b.h200.plan --bench result.json -o report.html")
@click.argument("subject", metavar="PLAN", shell_complete=complete_models)
@click.option(
    "--bench",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Records of `lynnc bench PLAN -o FILE`, measured with this very plan; may be repeated.",
)
@click.option("--tune", type=click.Path(path_type=Path), metavar="FILE", help="Summary that `lynnc tune` wrote.")
@click.option("--device", metavar="NAME", help="GPU of the roofline; the one measured or the plan's own if not given.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="S",
    help=f"Positions in the slot where nothing was measured; {USUAL_CONTEXT} or what the model has if not given.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="HTML file to write."
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def command(**options: Any) -> None:
    """Write one HTML page about a compiled plan, readable without a server.

    Layers with their experts, the launches of each program, a roofline with every kernel, the time of a token, memory,
    and, from a tuning run, gains. Times are estimates from bytes and FLOPs, with those measured beside them where
    --bench is given.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Reads everything before anything is computed, so that mistakes show at once; then writes the page."""
    check_file(arguments.output, arguments.force)
    subject = find_subject(arguments.subject)
    plan = subject.plan
    if plan is None:
        raise OptionError(
            f"{arguments.subject} is a model: run `lynnc compile {arguments.subject} --device NAME` and name the plan."
        )
    measured = read_measurements(arguments.bench, plan) if arguments.bench else None
    tuning = read_summary(arguments.tune, plan) if arguments.tune else None
    device = _device(plan, arguments, measured)
    report = make_report(plan, Sources(device, arguments.context, measured, tuning))
    if report.left_out:
        names = ", ".join(report.left_out)
        warn(f"{names} of {arguments.subject} is left out: another lynnc compiled it; compile the model again.")
    write_file(arguments.output, render_page(report), arguments.force)
    note(f"wrote {arguments.output}.")


def _device(plan: Plan, arguments: Arguments, measured: Measurements | None) -> Device:
    """``--device``, or the GPU that was measured, or the plan's. RecordError for a GPU that the plan cannot run on."""
    if measured is None or arguments.device:
        return device_of_plan(plan, arguments.subject, None, arguments.device)
    if find_target(str(measured.gpu.capability)) != find_target(plan.target):
        files = ", ".join(map(str, arguments.bench))
        raise RecordError(
            f"{files}: {measured.gpu.name} is no {plan.target}, for which the plan is: measure it with "
            "`lynnc bench PLAN -o FILE`."
        )
    return device_of(measured.gpu)
