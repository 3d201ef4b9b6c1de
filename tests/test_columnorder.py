"""The order of columns that lanes unpack: a permutation of each block that gives a lane what its words hold."""

from __future__ import annotations

import pytest
import torch

from lynnc.columnorder import BLOCK, ColumnOrder, columns_at_places, lane_place, places_of_columns
from lynnc.stepvalues import in_memory, natural
from lynnc.tensors import DType, Tensor

WORD, LANES = 16, 4


@pytest.mark.parametrize("width", [BLOCK, 3 * BLOCK, 2048])
def test_each_block_is_permuted_and_the_two_directions_undo_each_other(width: int) -> None:
    places, columns = places_of_columns(width), columns_at_places(width)
    assert [columns[place] for place in places] == [places[column] for column in columns] == list(range(width))
    assert all(place // BLOCK == column // BLOCK for column, place in enumerate(places))
    assert places != tuple(range(width))


@pytest.mark.parametrize("lane", range(LANES))
def test_what_a_lane_needs_is_in_the_words_that_it_unpacks(lane: int) -> None:
    """Of each 16 places a matrix instruction gives lane a places 2a, 2a + 1, 2a + 8 and 2a + 9."""
    columns = columns_at_places(2 * BLOCK)
    for block in range(0, 2 * BLOCK, BLOCK):
        places = [
            block + step + place for step in range(0, BLOCK, WORD) for pair in (0, 8) for place in (2 * lane + pair,)
        ]
        own = [columns[place + odd] for place in places for odd in (0, 1)]
        words = {(column - block) // WORD for column in own}
        assert words == {2 * lane, 2 * lane + 1} and len(set(own)) == 2 * WORD
        assert all(columns[place + 1] == columns[place] + 1 for place in places), "pairs stay together"


def test_two_places_by_hand() -> None:
    assert (lane_place(5), columns_at_places(2 * BLOCK)[33]) == (33, 5)
    assert (lane_place(BLOCK + 32), lane_place(16), lane_place(8)) == (BLOCK + 2, 64, 8)


@pytest.mark.parametrize("shape", [(2 * BLOCK,), (3, BLOCK), (2, 2 * BLOCK)], ids=str)
def test_memory_holds_at_each_place_the_column_that_stands_there(shape: tuple[int, ...]) -> None:
    tensor = Tensor("x", DType.BF16, (5, *shape), order=ColumnOrder.LANES)
    values = torch.randn(5, *shape)
    stored = in_memory(tensor, values)
    assert stored.shape == values.shape and torch.equal(natural(tensor, stored), values)
    flat = torch.tensor(columns_at_places(tensor.width))
    assert torch.equal(stored.flatten(1), values.flatten(1)[:, flat]) and not torch.equal(stored, values)
