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


def size(count: float) -> str:
    """Bytes in decimal units, as data sheets give bandwidth: ``1.66 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """A count in decimal units: ``6.71 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """A short time: ``3.14 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"
