"""Rows of a step: tokens at positions of sequences.

In: tokens and where they stand. Out: ``Row`` records, or the ``Columns`` that a step's inputs are.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lynnc.errors import OptionError

Columns: TypeAlias = "Mapping[str, array[int]]"
"""I32 [rows] of each input by name: token, position, slot, start."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: a token at a position of a slot's sequence, whose rows in this step begin at ``start``."""

    token: int
    position: int
    slot: int = 0
    start: int = -1

    @property
    def begin(self) -> int:
        """``start``, or the position itself where a row is its slot's only one."""
        return self.position if self.start < 0 else self.start


PADDING_ROW = Row(token=0, position=-1)
"""A row that stores nothing and whose outputs mean nothing."""


def rows_of(tokens: Sequence[int], start: int, slot: int = 0) -> list[Row]:
    """Rows of consecutive tokens of one sequence."""
    return [Row(token, start + index, slot, start) for index, token in enumerate(tokens)]


def first_rows(rows: Sequence[Row]) -> Mapping[int, Row]:
    """The first row of each slot; OptionError unless a slot's rows stand next to each other at consecutive positions
    and share their start. ``rows`` are without padding."""
    found: dict[int, Row] = {}
    for before, row in zip([None, *rows], rows, strict=False):
        follows = before is not None and before.slot == row.slot
        expected = before.position + 1 if before is not None and follows else row.begin
        is_new = row.slot not in found
        if row.position != expected or is_new == follows or (follows and row.begin != found[row.slot].begin):
            raise OptionError(
                f"The rows of slot {row.slot} are not side by side at consecutive positions from one start: "
                "order them, as rows_of does."
            )
        found.setdefault(row.slot, row)
    return found


def columns_of(rows: Sequence[Row]) -> Columns:
    """The inputs of a step."""
    return {
        "token": array("i", [row.token for row in rows]),
        "position": array("i", [row.position for row in rows]),
        "slot": array("i", [row.slot for row in rows]),
        "start": array("i", [row.begin for row in rows]),
    }


def prompt_columns(tokens: Sequence[int], start: int, slot: int, padding: int) -> Columns:
    """The inputs of a piece of a prompt: ``padding`` rows of padding, then ``tokens`` from position ``start`` on.

    Padding goes first because logits are given for the last row; it has the slot of the others, beside whose rows it
    stands.
    """
    count = len(tokens)
    nothing = array("i", [PADDING_ROW.position]) * padding
    return {
        "token": array("i", [PADDING_ROW.token]) * padding + array("i", tokens),
        "position": nothing + array("i", range(start, start + count)),
        "slot": array("i", [slot]) * (padding + count),
        "start": nothing + array("i", [start]) * count,
    }
