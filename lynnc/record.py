"""Measured choices: which knobs were fastest for a kernel and a problem on a GPU.

In: the text of a file of records. Out: frozen ``Record`` values, and the same text from them: a file for a device, keys
and records sorted, one record a line. Whatever is no record of this schema is left out, as a damaged cache entry is;
what the fields mean is in ``docs/tune-records.md``.

Example::

    records = parse_records(path.read_text())            # () for a damaged file or one of another schema
    path.write_text(records_text(records))
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from lynnc.deviceidentity import Identity, safe_name
from lynnc.jsonform import decode, encode

SCHEMA = 2


class RecordOrigin(StrEnum):
    """How a record came to be."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    """Ranked by facts of the machine code; never run."""
    CARRIED_OVER = "carried over"
    """Measured on an earlier text of the template, and held valid by review; not all of its figures were kept."""


@dataclass(frozen=True, slots=True)
class Record:
    """The best knobs known for one problem of a kernel on one device.

    ``template`` is the digest of the template's text that they are valid for. ``seconds`` is the median time of a
    launch, ``spread`` the seconds between the least and the greatest of the runs, ``gain`` the part of the default's
    time in the same run that the knobs save, so that 0.08 is 8 % less. What nobody measured is None.
    """

    kernel: str
    problem: Mapping[str, int | str]
    knobs: Mapping[str, int]
    device: Identity
    template: str
    origin: RecordOrigin = RecordOrigin.MEASURED
    triton: str | None = None
    ptxas: str | None = None
    seconds: float | None = None
    spread: float | None = None
    gain: float | None = None
    date: str | None = None

    @property
    def question(self) -> str:
        """What the knobs answer, as text: records with the same one are rivals."""
        return encode([self.kernel, self.problem, self.device, self.template, self.compiler])

    @property
    def compiler(self) -> str:
        """Release of the Triton that it was measured with, such as ``3.9``; empty if that is not known."""
        return release_of(self.triton or "")

    @property
    def is_simulated(self) -> bool:
        """Whether no device ran it."""
        return self.origin is RecordOrigin.SIMULATED

    def beats(self, rival: Record) -> bool:
        """Whether this answer to the same question is the better one: measured, then faster."""
        return self._badness < rival._badness

    @property
    def _badness(self) -> tuple[bool, float]:
        return self.is_simulated, math.inf if self.seconds is None else self.seconds


def release_of(version: str) -> str:
    """``3.9`` of ``3.9.0``: another release makes code of other speed from the same knobs."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Parsed:
    """The records of a file, and how many of its entries are none."""

    records: tuple[Record, ...] = ()
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class _Line:
    """A record as its line of a file has it: the device stands at the head of the file."""

    kernel: str
    problem: Mapping[str, int | str]
    knobs: Mapping[str, int]
    template: str
    origin: str
    triton: str | None
    ptxas: str | None
    seconds: float | None
    spread: float | None
    gain: float | None
    date: str | None


def parse_records(text: str | bytes) -> tuple[Record, ...]:
    """The records of a file's text; those that are damaged, and all of another schema, are left out."""
    return parse_file(text).records


def parse_file(text: str | bytes) -> Parsed:
    """The same with the number of damaged entries; nothing at all for another schema."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            return Parsed()
        device = decode(Identity, data["device"])
        lines = list(data["records"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Parsed()
    if device.name != safe_name(device.name):
        return Parsed()
    records = tuple(record for line in lines if (record := _record_of(device, line)))
    return Parsed(records, len(lines) - len(records))


def records_text(records: Iterable[Record]) -> str:
    """Records of one device as the text of a file: the best of all rivals, sorted."""
    best = merge_records(records)
    devices = {record.device for record in best}
    assert len(devices) == 1, f"a file of records is of one device, not of {len(devices)}"
    lines = ",\n".join("  " + encode(_line_of(record)) for record in best)
    return f'{{\n "schema": {SCHEMA},\n "device": {encode(devices.pop())},\n "records": [\n{lines}\n ]\n}}\n'


def merge_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """The best of all rivals, of equal ones the first, in the order of files."""
    found: dict[str, Record] = {}
    for record in records:
        rival = found.get(record.question)
        if rival is None or record.beats(rival):
            found[record.question] = record
    return tuple(sorted(found.values(), key=lambda record: record.question))


def _line_of(record: Record) -> dict[str, Any]:
    values = asdict(replace(record, problem=dict(record.problem), knobs=dict(record.knobs)))
    del values["device"]
    return values


def _record_of(device: Identity, data: Any) -> Record | None:
    try:
        line = decode(_Line, data)
        origin = RecordOrigin(line.origin)
        if line.date is not None:
            datetime.date.fromisoformat(line.date)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not _are_figures(line):
        return None
    values = {name: getattr(line, name) for name in _Line.__slots__}
    return Record(**{**values, "device": device, "origin": origin})


def _are_figures(line: _Line) -> bool:
    """Finite; a time above 0, a spread not below it, and no more than all of the default's time saved."""
    figures = [figure for figure in (line.seconds, line.spread, line.gain) if figure is not None]
    if not all(map(math.isfinite, figures)):
        return False
    return (
        (line.seconds is None or line.seconds > 0)
        and (line.spread is None or line.spread >= 0)
        and (line.gain is None or line.gain <= 1)
    )
