"""What commands print: tables and one JSON document on standard output, notes on standard error.

In: rows of text, or values for JSON. Out: text; colours only on a terminal, and not where ``NO_COLOR`` is set.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from lynnc.units import amount, duration, size

__all__ = ["Column", "amount", "duration", "note", "number", "print_json", "print_table", "size", "text", "warn"]

WIDE = 1000
"""More than any table needs: nothing is cut or folded, and ``less -S`` scrolls what a terminal is too narrow for."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; numbers stand to the right."""

    name: str
    is_number: bool = False


def text(name: str) -> Column:
    """A column of words."""
    return Column(name)


def number(name: str) -> Column:
    """A column of numbers."""
    return Column(name, is_number=True)


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table under its title; nothing at all without rows."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.name, justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    on_terminal = sys.stdout.isatty()
    console = Console(file=io.StringIO(), width=WIDE, force_terminal=on_terminal, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_json(document: object) -> None:
    """The one JSON document of a command."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def note(message: str) -> None:
    """A remark on standard error, where it cannot disturb what is read from standard output."""
    click.echo(f"lynnc: {message}", err=True)


def warn(message: str) -> None:
    """A warning on standard error."""
    note(f"warning: {message}")
