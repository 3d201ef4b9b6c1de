"""Words, bytes and codes against the layout page's description, worked out bit by bit in plain integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.runtime.weights import nvfp4
from lynnc.runtime.weights.nvfp4 import (
    E2M1,
    WordWriter,
    bytes_from_words,
    code_values,
    pack_codes,
    scale_values,
    unpack_codes,
    words_from_bytes,
)
from lynnc.tensors import GROUP

SIGN_AND_MAGNITUDE = {
    **{0: (15, 9), 2: (12, 6), 4: (14, 3), 6: (13, 0)},
    **{1: (31, 25), 3: (28, 22), 5: (30, 19), 7: (29, 16)},
    **{8: (47, 41), 10: (44, 38), 12: (46, 35), 14: (45, 32)},
    **{9: (63, 57), 11: (60, 54), 13: (62, 51), 15: (61, 48)},
}
"""Bits of each column of a group: its sign, and the lowest of its magnitude."""

shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5).map(lambda groups: groups * GROUP))


def word_of(codes: list[int]) -> int:
    word = 0
    for column, code in enumerate(codes):
        sign, magnitude = SIGN_AND_MAGNITUDE[column]
        word |= (code >> 3) << sign | (code & 7) << magnitude
    return word - 2**64 if word >> 63 else word


def random_codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def test_every_code_at_every_place() -> None:
    codes = torch.zeros(16, GROUP, GROUP, dtype=torch.uint8)
    for code in range(16):
        codes[code].fill_diagonal_(code)
    expected = [[word_of(row) for row in rows] for rows in codes.tolist()]
    assert pack_codes(codes).squeeze(-1).tolist() == expected


@given(shapes, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_packing_follows_the_page_and_loses_nothing(shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(shape, seed)
    words = pack_codes(codes)
    assert words.shape == (*shape[:-1], shape[-1] // GROUP) and words.dtype is torch.int64
    assert words.flatten().tolist() == [word_of(group) for group in codes.view(-1, GROUP).tolist()]
    assert torch.equal(unpack_codes(words), codes)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_codes_may_have_any_integer_type(dtype: torch.dtype) -> None:
    codes = random_codes((2, 48), 0)
    assert torch.equal(pack_codes(codes.to(dtype)), pack_codes(codes))


def test_the_even_column_is_the_low_nibble() -> None:
    """By hand: columns 0 and 1 have codes 1 and 12, so byte 0xC1; in the word, 1 is at bit 9, 12 at bits 31 and 27."""
    pairs = torch.tensor([[0xC1] + [0] * 7], dtype=torch.uint8)
    assert words_from_bytes(pairs).tolist() == [[1 << 9 | 1 << 31 | 1 << 27]]
    assert unpack_codes(words_from_bytes(pairs))[0, :3].tolist() == [1, 12, 0]


@given(shapes, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_bytes_become_words_and_bytes_again(shape: tuple[int, ...], seed: int) -> None:
    codes = random_codes(shape, seed)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    words = words_from_bytes(pairs)
    assert words.flatten().tolist() == [word_of(group) for group in codes.view(-1, GROUP).tolist()]
    assert torch.equal(bytes_from_words(words), pairs)


def test_all_bytes_at_all_places() -> None:
    pairs = torch.zeros(256, 8, 8, dtype=torch.uint8)
    for byte in range(256):
        pairs[byte].fill_diagonal_(byte)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).view(-1, GROUP)
    assert words_from_bytes(pairs).flatten().tolist() == [word_of(group) for group in codes.tolist()]
    assert torch.equal(bytes_from_words(words_from_bytes(pairs)), pairs)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes((7, 80), 3)
    whole = pack_codes(codes)
    monkeypatch.setattr(nvfp4, "PIECE", 4)
    assert torch.equal(pack_codes(codes), whole)
    assert torch.equal(unpack_codes(whole), codes)


def test_memory_may_be_anywhere() -> None:
    """A slice that starts at an odd byte, and rows that are not side by side; what is read stays as it was."""
    pairs = torch.arange(1, 1 + 8 * 24, dtype=torch.int32).to(torch.uint8)
    odd, apart = torch.cat([pairs[:1], pairs])[1:].view(8, 24), pairs.view(8, 24)[::3]
    assert torch.equal(words_from_bytes(odd), words_from_bytes(pairs.view(8, 24)))
    assert torch.equal(words_from_bytes(apart), words_from_bytes(pairs.view(8, 24))[::3])
    words = words_from_bytes(pairs.view(8, 24))
    assert torch.equal(bytes_from_words(words[::3]), apart)
    codes = unpack_codes(words)
    assert torch.equal(pack_codes(torch.cat([codes.flatten()[:1], codes.flatten()])[1:].view(8, 48)), words)
    assert torch.equal(pairs, torch.arange(1, 1 + 8 * 24, dtype=torch.int32).to(torch.uint8))


def test_codes_stand_for_e2m1_values() -> None:
    values = code_values(torch.arange(16, dtype=torch.uint8))
    assert values.dtype is torch.float32
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8
    assert torch.equal(values[:8], E2M1)


def test_scales_have_the_values_that_torch_gives_them() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = scales.view(torch.float8_e4m3fn).float()
    assert torch.equal(scale_values(scales).view(torch.int32), expected.view(torch.int32))
    halves = torch.tensor([[0.0, 2.0**-24, 1.5, 65504.0]], dtype=torch.float16)
    assert torch.equal(scale_values(halves), halves.float())


@given(st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_writer_takes_codes_out_of_fp16_numbers(groups: int, seed: int) -> None:
    codes = random_codes((groups, GROUP), seed)
    halves = (code_values(codes) * 2.0**-14).half().flatten()
    words = torch.empty(groups, dtype=torch.int64)
    WordWriter.of(halves, torch.empty(8 * groups)).write(words)
    assert torch.equal(words, pack_codes(codes).flatten())
