"""``lynnc explain``: bytes, FLOPs and the speed that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from lynnc.cli.output import amount, duration, number, print_json, print_table, size, text
from lynnc.cli.parameters import (
    choose_destination,
    complete_models,
    complete_program,
    destination_options,
    device_of_plan,
    json_option,
    parse_passes,
    without_option,
)
from lynnc.cli.subject import find_subject, settle_with_warning
from lynnc.explain import Ceiling, Group, Question, Step, ceilings, explain_step, merge_shapes, without_launches
from lynnc.target import Device

NOTICE = (
    "These are ceilings from a model of bytes, FLOPs and launches, not measurements: "
    "real kernels are slower, and caches may make small ones faster."
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    subject: str
    target: str | None
    device: str | None
    context: int
    program: str
    without: Sequence[str]
    each_shape: bool
    as_json: bool


@click.command("explain", epilog="Example: lynnc explain lynn-27b-a3b --device spark --context 32768")
@click.argument("subject", metavar="MODEL|PLAN", shell_complete=complete_models)
@destination_options
@click.option(
    "--context", type=click.IntRange(min=1), default=4096, show_default=True, help="Positions in the slot: S."
)
@click.option(
    "--program",
    default="decode/1",
    show_default=True,
    shell_complete=complete_program,
    help="Step kind of the table of launches: decode/1 to decode/8, prefill, or prefill/16 (any number).",
)
@without_option
@click.option("--each-shape", is_flag=True, help="One line for each shape where layers differ, as --json has it.")
@json_option
def command(**options: Any) -> None:
    """Print the least bytes and FLOPs of each launch, and the speed they allow at most on a device.

    T stands for the tokens of a step and S for the context. Launches of one kind share a line, with the formulas of
    their most frequent shape and the mean of the figures where the layers of a pruned model differ.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Prints the launches of one program, then the ceilings of several."""
    subject = find_subject(arguments.subject, parse_passes(arguments.without) if arguments.without else ())
    if subject.plan:
        device = device_of_plan(subject.plan, arguments.subject, arguments.target, arguments.device)
    else:
        device = choose_destination(arguments.target, arguments.device).measure
    settled = settle_with_warning(subject, device.target)
    question = Question(device, arguments.context, settled.without)
    step = explain_step(subject.spec, arguments.program, question, subject.options.prefill_rows)
    limits = ceilings(subject.spec, question)
    if arguments.as_json:
        print_json({**_document(subject.spec.name, question, step, limits), "note": settled.note})
        return
    _print_step(subject.spec.name, question.device, step, arguments.each_shape)
    _print_ceilings(question, limits)


def _print_step(model: str, device: Device, step: Step, each_shape: bool) -> None:
    whole, groups = step.ceiling, step.groups if each_shape else merge_shapes(step.groups)
    where = f"{whole.program} on {device.name} at T = {whole.rows}, S = {whole.context:,}"
    columns = [text("op"), text("kind"), number("launches"), number("shapes")]
    columns += [text("bytes of one"), text("FLOPs of one")]
    print_table(f"{model} {whole.program}: formulas", columns, [_formula_cells(group) for group in groups])
    columns = [text("op"), number("launches")]
    columns += [number(name) for name in ("bytes", "FLOPs", "FLOPs/byte", "memory", "compute", "launch")]
    columns += [text("bound"), number("all launches"), number("share")]
    print_table(f"{model} {where}: one launch", columns, [_figure_cells(group, whole) for group in groups])


def _formula_cells(group: Group) -> list[str]:
    count, shapes = str(group.count), str(group.shapes)
    return [group.name, group.kind, count, shapes, str(group.cost.bytes), str(group.cost.flops)]


def _figure_cells(group: Group, whole: Ceiling) -> list[str]:
    one = group.estimate
    return [
        group.name,
        str(group.count),
        size(one.bytes),
        amount(one.flops),
        f"{one.intensity:.2f}",
        duration(one.memory_s),
        duration(one.compute_s),
        duration(one.launch_s),
        one.bound,
        duration(group.seconds),
        f"{100 * group.seconds / whole.seconds:.1f} %",
    ]


def _print_ceilings(question: Question, limits: Sequence[Ceiling]) -> None:
    names = ("launches", "weights", "state", "activations", "FLOPs", "launching", "step", "tokens/s at most")
    columns = [text("program"), number("T"), number("S"), *map(number, names), number("if launching were free")]
    rows = [
        [
            limit.program,
            str(limit.rows),
            f"{limit.context:,}",
            str(limit.launches),
            size(limit.weight_bytes),
            size(limit.state_bytes),
            size(limit.activation_bytes),
            amount(limit.flops),
            duration(limit.launch_s),
            duration(limit.seconds),
            f"{limit.tokens_per_s:,.0f}",
            f"{without_launches(limit).tokens_per_s:,.0f}",
        ]
        for limit in limits
    ]
    device = question.device
    print_table(f"Ceilings on {device.name}, all T tokens of one sequence, experts evenly routed", columns, rows)
    click.echo(
        f"{device.name}: {device.bandwidth_bytes_per_s / 1e12:.3f} TB/s, "
        f"{device.flops_per_s / 1e12:.0f} TFLOP/s (BF16), "
        f"{device.launch_overhead_s * 1e6:.2f} us a launch ({device.source})."
    )
    click.echo(NOTICE)


def _document(model: str, question: Question, step: Step, limits: Sequence[Ceiling]) -> dict[str, object]:
    device = question.device
    return {
        "notice": NOTICE,
        "model": model,
        "device": {
            "name": device.name,
            "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
            "flops_per_s": device.flops_per_s,
            "launch_overhead_s": device.launch_overhead_s,
            "source": device.source,
        },
        "without": list(question.without),
        "step": _ceiling_document(step.ceiling),
        "groups": [_group_document(group) for group in step.groups],
        "ceilings": [_ceiling_document(limit) for limit in limits],
    }


def _group_document(group: Group) -> dict[str, object]:
    one = group.estimate
    return {
        "op": group.name,
        "kind": group.kind,
        "launches": group.count,
        "bytes_formula": str(group.cost.bytes),
        "flops_formula": str(group.cost.flops),
        "bytes": one.bytes,
        "flops": one.flops,
        "flops_per_byte": one.intensity,
        "memory_s": one.memory_s,
        "compute_s": one.compute_s,
        "launch_s": one.launch_s,
        "bound": one.bound,
        "all_launches_s": group.seconds,
    }


def _ceiling_document(limit: Ceiling) -> dict[str, object]:
    return {
        "program": limit.program,
        "rows": limit.rows,
        "context": limit.context,
        "launches": limit.launches,
        "weight_bytes": limit.weight_bytes,
        "state_bytes": limit.state_bytes,
        "activation_bytes": limit.activation_bytes,
        "flops": limit.flops,
        "launch_s": limit.launch_s,
        "step_s": limit.seconds,
        "tokens_per_s": limit.tokens_per_s,
        "tokens_per_s_if_launching_were_free": without_launches(limit).tokens_per_s,
    }
