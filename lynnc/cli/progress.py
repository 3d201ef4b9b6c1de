"""Bars on standard error while kernels compile or weights are read; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from lynnc.compile import Progress as OnProgress

OnBytes = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all and what is next."""


def compile_bar() -> AbstractContextManager[OnProgress | None]:
    """Gives what ``compile_model`` calls for each kernel, or None; the bar is gone afterwards."""
    return _bar(TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def bytes_bar(verb: str) -> AbstractContextManager[OnBytes | None]:
    """Gives what is called with bytes done, or None; shows rate and time left."""
    return _bar(TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def steps_bar(verb: str) -> AbstractContextManager[OnProgress | None]:
    """Gives what is called with steps done, steps in all and what is next, or None."""
    return _bar(TextColumn(verb), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def tune_bar(seconds: float | None, trials: int | None) -> Iterator[Callable[[float, int, str], None] | None]:
    """Gives what is called with seconds and candidates spent and the last result, or None; the nearer end counts."""
    with _bar(TextColumn("tuning"), BarColumn(), TimeElapsedColumn()) as on_progress:
        if on_progress is None:
            yield None
            return

        def on_result(passed: float, spent: int, label: str) -> None:
            done = max(passed / seconds if seconds else 0.0, spent / trials if trials else 0.0)
            on_progress(round(1000 * done), 1000, f"{spent} candidates; {label}")

        yield on_result


@contextmanager
def _bar(*columns: ProgressColumn) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar of these columns, and of what is next."""
    if not sys.stderr.isatty():
        yield None
        return
    following = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    with Progress(*columns, following, console=Console(stderr=True), transient=True, expand=True) as progress:
        task = progress.add_task("", total=None)

        def on_progress(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield on_progress
