"""``lynnc compile``: a model to a plan folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lynnc.artifact import Artifact
from lynnc.cli.compilereport import print_summary
from lynnc.cli.knownrecords import known_records, records_options
from lynnc.cli.output import print_json, warn
from lynnc.cli.parameters import (
    choose_destination,
    complete_knobs,
    complete_models,
    complete_programs,
    destination_options,
    json_option,
    parse_knobs,
    parse_passes,
    parse_programs,
    store_option,
    store_path,
    without_option,
)
from lynnc.cli.progress import compile_bar
from lynnc.cli.subject import find_model
from lynnc.compiler import Compiled, Request, compile_model, plan_name
from lynnc.plan import Options, Plan
from lynnc.planfile import check_output, save_plan
from lynnc.store import Store
from lynnc.summary import Summary, spilling_decode_kernels, summarize

DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    model: str
    target: str | None
    device: str | None
    output: Path | None
    without: Sequence[str]
    knob: Sequence[str]
    programs: str
    prefill_rows: int
    ptx: bool
    force: bool
    records: str
    records_folder: Path | None
    store: Path | None
    jobs: int | None
    context: int
    as_json: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the plan lies, how long it took, and how many of its kernels were compiled now."""

    plan: str
    seconds: float
    kernel_count: int
    compiled: int
    from_store: int


class CountingStore(Store):
    """A store that counts the kernels put into it: those that were compiled now."""

    saved = 0

    def save(self, artifact: Artifact, cubin: bytes, ptx: bytes) -> Artifact:
        """Like the store's."""
        self.saved += 1
        return super().save(artifact, cubin, ptx)


@click.command("compile", epilog="Example: lynnc compile lynn-27b-a3b --device spark --output lynn.plan")
@click.argument("model", shell_complete=complete_models)
@destination_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Plan folder to write; MODEL.DEVICE.plan if not given."
)
@without_option
@click.option(
    "--knob",
    multiple=True,
    metavar="KERNEL.NAME=VALUE",
    shell_complete=complete_knobs,
    help="Set a tunable of a kernel by hand, such as linear.BLOCK_N=8; may be repeated.",
)
@click.option(
    "--programs",
    default=",".join(DEFAULTS.programs),
    show_default=True,
    metavar="LIST",
    shell_complete=complete_programs,
    help="Step kinds to compile: decode/1 to decode/8, prefill/16 (any number) and prefill.",
)
@click.option(
    "--prefill-rows",
    type=click.IntRange(min=1, max=65536),
    default=DEFAULTS.prefill_rows,
    show_default=True,
    help="Most tokens of a prefill step; longer prompts run chunk by chunk.",
)
@records_options
@click.option("--ptx", is_flag=True, help="Keep the PTX of every kernel in the plan folder.")
@click.option("--force", is_flag=True, help="Replace a plan folder that exists.")
@store_option
@click.option("--jobs", type=click.IntRange(min=1), help="Compiler processes at once; one for each core if not given.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Context for which the report gives bytes a launch; the plan does not depend on it.",
)
@json_option
def command(**options: Any) -> None:
    """Compile MODEL to a plan: the name of a shipped model, or the path of a model file.

    No GPU is needed. Kernels compiled before come from the store.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks everything that needs no compiling first, so that mistakes show at once."""
    started = time.perf_counter()
    spec, request = find_model(arguments.model), _request(arguments)
    folder = arguments.output or Path(f"{plan_name(spec, request)}.plan")
    check_output(folder, arguments.force)
    store = CountingStore(store_path(arguments.store), warn)
    with compile_bar() as on_progress:
        compiled = compile_model(spec, request, store, arguments.jobs, on_progress)
    save_plan(compiled.plan, compiled.files, folder, arguments.force)
    if compiled.note:
        warn(compiled.note)
    _warn_of_idle_knobs(compiled.plan)
    kernels = len(compiled.plan.kernels)
    seconds = round(time.perf_counter() - started, 3)
    outcome = Outcome(str(folder), seconds, kernels, store.saved, kernels - store.saved)
    _report(compiled, summarize(compiled, arguments.context), outcome, arguments.as_json)


def _warn_of_idle_knobs(plan: Plan) -> None:
    launched = {entry.name for entry in plan.kernels.values()}
    for kernel in plan.options.knobs:
        if kernel not in launched:
            warn(f"--knob {kernel}... has no effect: no program of this plan launches the kernel {kernel}.")


def _request(arguments: Arguments) -> Request:
    options = Options(
        without=parse_passes(arguments.without),
        knobs=parse_knobs(arguments.knob),
        prefill_rows=arguments.prefill_rows,
        programs=parse_programs(arguments.programs),
    )
    destination = choose_destination(arguments.target, arguments.device)
    records = known_records(destination.identity, arguments.records, arguments.records_folder)
    return Request(destination.target, destination.device, options, arguments.ptx, records)


def _report(compiled: Compiled, summary: Summary, outcome: Outcome, as_json: bool) -> None:
    spilling = spilling_decode_kernels(summary)
    if spilling:
        names = ", ".join(f"{row.op} ({row.kernel}, {row.spill_bytes} bytes a thread)" for row in spilling)
        warn(f"decode kernels spill registers to memory and will be slow: {names}; try other --knob values.")
    if as_json:
        print_json({**asdict(outcome), **asdict(summary)})
        return
    print_summary(summary)
    click.echo(
        f"{outcome.plan}: {outcome.kernel_count} kernels ({outcome.compiled} compiled, "
        f"{outcome.from_store} from the store) in {outcome.seconds:.1f} s"
    )
