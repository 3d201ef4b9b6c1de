"""Time of one token: what the bytes need, what launching needs, and the rest; at the least, and as measured.

In: costed programs and measurements. Out: a ``TimeRow`` for each bar: steps that were measured beside the least that
they could take, or that least alone where nothing was measured.

Example::

    for row in decode_rows(programs, 4096, measured):
        print(row.label, row.is_measured, row.parts.seconds)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lynnc.plan import Program
from lynnc.programs import expected_rows, prefill_programs, program_rows
from lynnc.report.costing import CostedProgram, Parts
from lynnc.report.measured import Measurements
from lynnc.runtime.prompts import pieces_of


@dataclass(frozen=True, slots=True)
class TimeRow:
    """Seconds of one token of a step or prompt; ``least_s`` is the least that it could take."""

    label: str
    parts: Parts
    least_s: float
    is_measured: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second."""
        return 1 / self.parts.seconds

    @property
    def is_overlapped(self) -> bool:
        """Whether less was measured than bytes and launches need one after the other."""
        return self.is_measured and self.parts.seconds < self.least_s


def decode_rows(
    programs: Mapping[str, CostedProgram], context: int, measured: Measurements | None
) -> tuple[TimeRow, ...]:
    """Rows for each decode program: at each context that was measured, else at ``context``."""
    found: list[TimeRow] = []
    for name, costed in programs.items():
        rows = program_rows(name)
        if rows is None:
            continue
        steps = [step for step in (measured.steps if measured else ()) if step.rows == rows]
        for step in sorted(steps, key=lambda step: step.context):
            least = costed.parts(rows, step.context)
            found += _pair(_decode_label(name, step.context), least, rows, step.timing.median)
        if not steps:
            least = costed.parts(rows, context).over(rows)
            found.append(TimeRow(_decode_label(name, context), least, least.seconds, is_measured=False))
    return tuple(found)


def _decode_label(name: str, context: int) -> str:
    return f"{name} at {context:,}"


def _pair(label: str, least: Parts, tokens: int, seconds: float) -> Iterator[TimeRow]:
    """The measured row, then the least."""
    one = least.over(tokens)
    yield TimeRow(label, one.measured(seconds / tokens), one.seconds, is_measured=True)
    yield TimeRow(label, one, one.seconds, is_measured=False)


def prompt_rows(programs: Mapping[str, CostedProgram], measured: Measurements | None) -> tuple[TimeRow, ...]:
    """Rows for each length of prompt that was measured, else for a full step of each program."""
    names = prefill_programs(programs)
    if not names:
        return ()
    found: list[TimeRow] = []
    for prompt in sorted(measured.prompts if measured else (), key=lambda prompt: prompt.tokens):
        least = _prompt_parts(programs, names, prompt.tokens)
        found += _pair(f"prompt of {prompt.tokens:,}", least, prompt.tokens, prompt.timing.median)
    if found:
        return tuple(found)
    for name in names:
        tokens = min(expected_rows(name), programs[name].program.max_rows)
        least = programs[name].parts(tokens, tokens).over(tokens)
        found.append(TimeRow(f"{name}, prompt of {tokens:,}", least, least.seconds, is_measured=False))
    return tuple(found)


def _prompt_parts(programs: Mapping[str, CostedProgram], names: tuple[str, ...], tokens: int) -> Parts:
    """All steps of a prompt, as the runtime cuts it."""
    whole = Parts(0.0, 0.0, 0.0)
    inner: list[Program] = [programs[name].program for name in names]
    for piece in pieces_of(tokens, inner):
        whole = whole.plus(programs[piece.program.name].parts(piece.count, piece.first + piece.count))
    return whole
