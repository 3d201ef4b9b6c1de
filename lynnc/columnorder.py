"""In which order the columns of an activation stand in memory.

Tensor cores take the weight from registers: there a lane of a warp needs columns 2a, 2a + 1, 2a + 8 and 2a + 9 of each
16, but unpacks words of 16 neighbours. A product does not care in which order its columns are summed, so the other
operand stands in memory in the order in which lanes unpack theirs, and no weight changes hands. In each ``BLOCK``
columns, lane a of four unpacks words 2a and 2a + 1.

Example::

    places_of_columns(256)[5]     # 33: where column 5 stands
    columns_at_places(256)[33]    # 5
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

BLOCK = 128
"""Columns that are reordered among themselves: two words of 16 for each of the four lanes that share a row."""


class ColumnOrder(StrEnum):
    """Natural, or that of the lanes which unpack the weight."""

    NATURAL = "natural"
    LANES = "lanes"


def lane_place(column: int) -> int:
    """Where a column stands: its lane's number moves from the front to behind the four pairs of each half word."""
    block, column = column // BLOCK * BLOCK, column % BLOCK
    lane, word, half, pair, odd = column // 32, column // 16 % 2, column // 8 % 2, column // 2 % 4, column % 2
    return block + word * 64 + pair * 16 + half * 8 + lane * 2 + odd


@cache
def places_of_columns(width: int) -> tuple[int, ...]:
    """Where each of ``width`` columns stands, in the order of lanes; ``width`` is a multiple of ``BLOCK``."""
    return tuple(lane_place(column) for column in range(width))


@cache
def columns_at_places(width: int) -> tuple[int, ...]:
    """Which column stands at each place."""
    found = [0] * width
    for column, place in enumerate(places_of_columns(width)):
        found[place] = column
    return tuple(found)
