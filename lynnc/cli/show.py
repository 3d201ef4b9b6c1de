"""``lynnc show``: what the compiler makes of a model, stage by stage, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from lynnc.choose import choose_all
from lynnc.cli.knownrecords import known_records, records_options
from lynnc.cli.output import warn
from lynnc.cli.parameters import (
    Destination,
    choose_destination,
    complete_models,
    complete_program,
    destination_options,
    parse_passes,
    store_option,
    store_path,
    without_option,
)
from lynnc.cli.subject import Subject, find_subject, is_plan, settle_with_warning
from lynnc.compile import KernelSource, compile_kernels
from lynnc.compiler import fused_graph, model_graph
from lynnc.errors import OptionError, PlanError
from lynnc.ir import Graph, Op
from lynnc.lower import lower
from lynnc.plan import KernelEntry, Plan, Program
from lynnc.planfile import kernel_file
from lynnc.store import Store
from lynnc.target import find_target

STAGES = ("model", "fused", "choices", "source", "ptx")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    subject: str
    stage: str
    program: str
    op: str | None
    target: str | None
    device: str | None
    without: Sequence[str]
    records: str
    records_folder: Path | None
    store: Path | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One launch of a program: its op, its kernel as the plan lists it, and the kernel's source."""

    op: str
    entry: KernelEntry
    source: KernelSource


@click.command("show", epilog="Example: lynnc show tiny-moe --stage source --op 'layers.0.*' --target sm_90")
@click.argument("subject", metavar="MODEL|PLAN", shell_complete=complete_models)
@click.option("--stage", type=click.Choice(STAGES), default="fused", show_default=True, help="What to print.")
@click.option(
    "--program",
    default="decode/1",
    show_default=True,
    shell_complete=complete_program,
    help="Step kind: decode/1 to decode/8, prefill, or prefill/16 (any number).",
)
@click.option("--op", metavar="NAME", help="Only this op, or those that a pattern such as 'layers.0.*' fits.")
@destination_options
@without_option
@records_options
@store_option
def command(**options: Any) -> None:
    """Print a stage of a model or of a compiled plan.

    model: one op for each mathematical step. fused: one op for each launch. choices: kernel and knobs of each launch.
    source: rendered Triton source. ptx: the PTX of the kernels, compiled now unless the plan holds it.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Prints the stage; a plan's own choices and sources are printed, not those that would be made today."""
    if is_plan(arguments.subject) and (arguments.target or arguments.device):
        raise OptionError(f"{arguments.subject} is a plan and has its own target: leave --target and --device out.")
    subject = find_subject(arguments.subject, parse_passes(arguments.without) if arguments.without else ())
    if arguments.stage in ("model", "fused"):
        _print_graph(subject, arguments)
        return
    chosen = tuple(_from_plan(subject, subject.plan, arguments) if subject.plan else _from_model(subject, arguments))
    names = set(_selected([launch.op for launch in chosen], arguments.op))
    chosen = tuple(launch for launch in chosen if launch.op in names)
    if arguments.stage == "choices":
        for launch in chosen:
            click.echo(f"{launch.op}: {_choice_text(launch.entry)}")
    elif arguments.stage == "source":
        _print_each(chosen, {launch.entry.key: launch.source.text for launch in chosen}, "#")
    else:
        _print_each(chosen, _ptx(subject, chosen, Store(store_path(arguments.store), warn)), "//")


def _print_graph(subject: Subject, arguments: Arguments) -> None:
    if subject.plan:
        _program(subject, subject.plan, arguments.program)
    if arguments.stage == "model":
        graph = model_graph(subject.spec, arguments.program)
    else:
        without = subject.options.without
        if arguments.target or arguments.device:
            target = choose_destination(arguments.target, arguments.device).target
            without = settle_with_warning(subject, target).without
        graph = fused_graph(subject.spec, arguments.program, without)
    if arguments.op is None:
        click.echo(str(graph), nl=False)
        return
    names = set(_selected([op.name for op in graph.ops], arguments.op))
    for op in graph.ops:
        if op.name in names:
            click.echo(_op_text(graph, op))


def _op_text(graph: Graph, op: Op) -> str:
    """The op with the tensors, weights and states that it names."""
    tables = (
        *(graph.tensors[name] for name in dict.fromkeys((*op.reads, *op.writes))),
        *(graph.weights[name] for name in op.names("weight")),
        *(graph.states[name] for name in op.names("state")),
    )
    lines = (*str(op).splitlines(), *map(str, tables))
    return "\n".join([f"{op.name}:", *(f"  {line}" for line in lines)])


def _selected(names: Sequence[str], wanted: str | None) -> list[str]:
    """The names that a name or pattern picks; OptionError with the nearest ones if there is none."""
    if wanted is None:
        return list(names)
    found = [wanted] if wanted in names else [name for name in names if fnmatchcase(name, wanted)]
    if not found:
        near = get_close_matches(wanted, names, n=3, cutoff=0.3) or list(names[:3])
        raise OptionError(f"--op {wanted}: there is no such op; the nearest are {', '.join(near)}.")
    return found


def _from_model(subject: Subject, arguments: Arguments) -> Iterator[Chosen]:
    destination: Destination = choose_destination(arguments.target, arguments.device)
    graph = fused_graph(subject.spec, arguments.program, settle_with_warning(subject, destination.target).without)
    records = known_records(destination.identity, arguments.records, arguments.records_folder)
    choices = choose_all(graph, destination.target, records)
    lowered = lower(graph, choices, destination.target)
    for launch in lowered.program.launches:
        call = lowered.kernels[launch.kernel]
        yield Chosen(launch.op, call.entry, call.source)


def _from_plan(subject: Subject, plan: Plan, arguments: Arguments) -> Iterator[Chosen]:
    program = _program(subject, plan, arguments.program)
    sources = {key: _source(subject.folder, plan, entry) for key, entry in plan.kernels.items()}
    for launch in program.launches:
        yield Chosen(launch.op, plan.kernels[launch.kernel], sources[launch.kernel])


def _program(subject: Subject, plan: Plan, name: str) -> Program:
    """A program that the plan holds; OptionError with those it does for any other."""
    if name not in plan.programs:
        known = ", ".join(plan.programs)
        raise OptionError(f"--program {name}: {subject.folder} holds {known}; choose one of them.")
    return plan.programs[name]


def _source(folder: Path, plan: Plan, entry: KernelEntry) -> KernelSource:
    target, name = find_target(plan.target), kernel_file(entry, "py")
    if name not in plan.files:
        again = f"run `lynnc compile {plan.model_name} --target {plan.target}` again"
        raise PlanError(f"{folder} holds no {name}: {again}.")
    return KernelSource(
        template=entry.template,
        text=(folder / name).read_text("utf-8"),
        signature=tuple(entry.signature.items()),
        constants=tuple(entry.constants.items()),
        target=target,
        num_warps=entry.knobs["num_warps"],
        num_stages=entry.knobs["num_stages"],
        max_registers=entry.knobs.get("maxnreg", 0),
        pdl=target.has_pdl,
        label=entry.label,
    )


def _choice_text(entry: KernelEntry) -> str:
    problem = " ".join(f"{name}={value}" for name, value in sorted(entry.problem.items()))
    knobs = " ".join(f"{name}={value}" for name, value in sorted(entry.knobs.items()))
    return f"{entry.name} [{problem}] {knobs} ({entry.origin})"


def _ptx(subject: Subject, chosen: Sequence[Chosen], store: Store) -> dict[str, str]:
    """PTX by kernel key: from the plan's folder if it is there, else compiled."""
    kept: dict[str, str] = {}
    missing: dict[str, KernelSource] = {}
    for launch in chosen:
        name = kernel_file(launch.entry, "ptx")
        if subject.plan and name in subject.plan.files:
            kept[launch.entry.key] = (subject.folder / name).read_text("utf-8")
        else:
            missing[launch.entry.key] = launch.source
    if any(source.key != key for key, source in missing.items()):
        warn("the plan was compiled with other tools than those here: its own PTX may differ from what follows.")
    artifacts = compile_kernels(list(missing.values()), store)
    return kept | {key: artifacts[source.key].ptx_path.read_text("utf-8") for key, source in missing.items()}


def _print_each(chosen: Sequence[Chosen], texts: Mapping[str, str], comment: str) -> None:
    """Each kernel once, after a line with the ops that it computes."""
    ops: dict[str, list[str]] = {}
    for launch in chosen:
        ops.setdefault(launch.entry.key, []).append(launch.op)
    for index, (key, names) in enumerate(ops.items()):
        if index:
            click.echo()
        click.echo(f"{comment} {', '.join(names)}")
        click.echo(texts[key].rstrip("\n"))
