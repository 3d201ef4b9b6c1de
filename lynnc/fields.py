"""Reads nested plain values, as YAML or JSON give them, through a table of fields that says what each may hold.

In: a ``Section`` (the table), a value, and the place it stands. Out: the values by field name, defaults filled in, or
a ``ModelError`` of one sentence that names the file, the field and the remedy.

Example::

    norm = Section({"eps": Field(positive_number), "weight": Field(one_of("shifted", "plain"), "plain")})
    norm.read({"eps": 1e-6}, Place("tiny.yaml", "norm"))     # {"eps": 1e-06, "weight": "plain"}
    norm.read({"esp": 1e-6}, Place("tiny.yaml", "norm"))     # tiny.yaml: norm.esp is no known field; write eps instead
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from lynnc.errors import ModelError

REQUIRED = object()
"""The default of a field that must be given."""
MOST = 2**31 - 1
"""The largest whole number of a file: sizes and positions are I32 on the device."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """A field of a file, for messages. ``names`` renames fields where the file has a vocabulary of its own."""

    file: str
    path: str = ""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def field(self, name: object) -> Place:
        """The place of the field ``name`` of the section here."""
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))

    def item(self, index: int) -> Place:
        """The place of entry ``index`` of the list here."""
        return replace(self, path=f"{self.path}[{index}]")

    def fail(self, problem: str, advice: str) -> NoReturn:
        """Raise the ``ModelError`` that says what is wrong here and what to do."""
        name, bracket, index = self.path.partition("[")
        shown = self.names.get(name, name) + bracket + index
        raise ModelError(f"{self.file}: {shown or 'the content'} {problem}; {advice}")


Read = Callable[[object, Place], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One value: how it is read, and its value where it is not given."""

    read: Read
    default: object = REQUIRED


@dataclass(frozen=True, slots=True)
class Section:
    """Fields by name. Where the section is not given it is an error, or None, or (``default={}``) all defaults."""

    fields: Mapping[str, Field | Section]
    default: object = REQUIRED
    noun: str = "field"

    def read(self, value: object, place: Place) -> dict[str, Any]:
        """The value of each field of the table; raises ``ModelError`` for an unknown, missing or wrong one."""
        if not isinstance(value, Mapping):
            place.fail(f"is {describe(value)}, not a mapping", f"write its fields: {', '.join(self.fields)}")
        for name in value:
            if name not in self.fields:
                self._refuse(name, place.field(name))
        return {name: _read_part(part, name, value, place.field(name)) for name, part in self.fields.items()}

    def _refuse(self, name: object, place: Place) -> NoReturn:
        near = get_close_matches(str(name), self.fields, n=1)
        known = f"remove it or write one of {', '.join(self.fields)}"
        place.fail(f"is no known {self.noun}", f"write {near[0]} instead" if near else known)


def _read_part(part: Field | Section, name: str, value: Mapping[str, object], place: Place) -> object:
    if name in value:
        return part.read(value[name], place)
    if part.default is REQUIRED:
        place.fail("is missing", "add it")
    if isinstance(part, Section) and part.default is not None:
        return part.read(part.default, place)
    return part.default


def describe(value: object) -> str:
    """A value in words, cut to a line: ``the text '2048'``, ``true``, ``a list``, ``empty``."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {reprlib.repr(value)}"
    if isinstance(value, int | float):
        return reprlib.repr(value)
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def text(value: object, place: Place) -> str:
    """Any text."""
    if not isinstance(value, str):
        place.fail(f"is {describe(value)}, not text", "write text, in quotation marks if it looks like a number")
    return value


def word(value: object, place: Place) -> str:
    """A name that can stand in a file name."""
    if not _NAME.fullmatch(text(value, place)):
        place.fail(f"is {describe(value)}", "write a name of letters, digits, '.', '_' and '-'")
    return str(value)


def flag(value: object, place: Place) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        place.fail(f"is {describe(value)}, not a flag", "write true or false")
    return value


def whole(least: int, most: int = MOST) -> Read:
    """A whole number from ``least`` to ``most``; true and false are none."""
    advice = f"write a whole number from {least} up"

    def read(value: object, place: Place) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            place.fail(f"is {describe(value)}, not a whole number", advice)
        if not least <= value <= most:
            place.fail(f"is {describe(value)}", advice if value < least else f"write at most {most}")
        return value

    return read


count = whole(1)


def positive_number(value: object, place: Place) -> float:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        place.fail(f"is {describe(value)}, not a number", "write a number above zero, such as 1e-6")
    if not 0 < value <= sys.float_info.max:
        place.fail(f"is {describe(value)}", "write a finite number above zero, such as 1e-6")
    return float(value)


def one_of(*words: str) -> Read:
    """One of ``words``; the result is the entry of ``words`` itself, so enum members stay what they are."""
    known = {str(entry): entry for entry in words}

    def read(value: object, place: Place) -> str:
        if not isinstance(value, str) or value not in known:
            near = get_close_matches(str(value), known, n=1)
            place.fail(
                f"is {describe(value)}, not {' or '.join(known)}", f"write {near[0] if near else 'one of these'}"
            )
        return known[value]

    return read


def list_of(read: Read) -> Read:
    """A list with at least one entry, each read by ``read``; the result is a tuple."""

    def read_list(value: object, place: Place) -> tuple[object, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            place.fail(f"is {describe(value)}, not a list", "write a list, such as [a, b]")
        if not value:
            place.fail("is an empty list", "give it at least one entry")
        return tuple(read(entry, place.item(index)) for index, entry in enumerate(value))

    return read_list


def one_or_list_of(read: Read) -> Read:
    """One value, or a list of them; the result is the value or a tuple."""
    several = list_of(read)

    def read_either(value: object, place: Place) -> object:
        return several(value, place) if isinstance(value, list | tuple) else read(value, place)

    return read_either
