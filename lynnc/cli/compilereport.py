"""The tables of ``lynnc compile``."""

from __future__ import annotations

import click

from lynnc.cli.output import number, print_table, size, text
from lynnc.summary import KernelRow, KnobRow, PrecisionRow, ProgramRow, Summary


def print_summary(summary: Summary) -> None:
    """Kernels, where their knobs come from, programs, precision and sizes."""
    _print_kernels(summary)
    _print_knobs(summary.knobs, [program.name for program in summary.programs])
    _print_programs(summary.programs)
    _print_precision(summary.precision)
    state = summary.state
    click.echo(f"activations meet weights in {summary.activations}")
    click.echo(f"weights: {size(summary.weight_bytes)} packed")
    click.echo(
        f"state of a slot: {size(state.fixed_bytes)} + {size(state.bytes_per_1k)} for each 1,000 tokens of context, "
        f"{size(state.bytes_at_max)} at {state.max_context:,}"
    )


def _print_kernels(summary: Summary) -> None:
    names = [program.name for program in summary.programs]
    columns = [
        text("op"),
        text("kernel"),
        *(number(name) for name in names),
        number("grid"),
        number("warps"),
        number("registers"),
        number("shared"),
        number("spills"),
        number("bytes/launch"),
        text("knobs from"),
    ]
    rows = [_kernel_cells(row, names) for row in summary.kernels]
    title = f"{summary.name} for {summary.arch}: launches in a step; grid and bytes at S = {summary.context:,}"
    print_table(title, columns, rows)


def _kernel_cells(row: KernelRow, programs: list[str]) -> list[str]:
    return [
        row.op,
        row.kernel,
        *(str(row.launches.get(name, "")) for name in programs),
        row.grid,
        str(row.num_warps),
        str(row.registers),
        str(row.shared_bytes),
        str(row.spill_bytes),
        size(row.bytes_per_launch),
        row.origin,
    ]


def _print_knobs(rows: tuple[KnobRow, ...], names: list[str]) -> None:
    columns = [text("knobs from"), *map(number, names), text("file")]
    cells = [[row.origin, *(str(row.launches.get(name, "")) for name in names), row.file] for row in rows]
    print_table("Launches by origin of knobs", columns, cells)


def _print_programs(programs: tuple[ProgramRow, ...]) -> None:
    mixers = tuple(programs[0].launches_per_layer)
    columns = [
        text("program"),
        number("rows"),
        number("launches"),
        *(number(f"{mixer} layer") for mixer in mixers),
        number("outside layers"),
        number("workspace"),
    ]
    rows = [
        [
            program.name,
            str(program.max_rows),
            str(program.launches),
            *(str(program.launches_per_layer[mixer]) for mixer in mixers),
            str(program.launches_outside),
            size(program.workspace_bytes),
        ]
        for program in programs
    ]
    print_table("Launches in a step, in one layer of each kind, and outside of layers", columns, rows)


def _print_precision(rows: tuple[PrecisionRow, ...]) -> None:
    cells = [[row.tensor_class, ", ".join(row.formats), size(row.bytes)] for row in rows]
    print_table("Weights by tensor class", [text("class"), text("format"), number("bytes")], cells)
