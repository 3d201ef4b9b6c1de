"""Rows of a step: tokens at positions of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
