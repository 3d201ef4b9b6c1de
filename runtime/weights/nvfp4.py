"""NVFP4 codes in memory: 64-bit words in the plan's layout, bytes as checkpoints keep them, and what codes stand for.

In and out: tensors of codes, words or bytes on any device, the last axis along the columns. A word holds 16 E2M1 codes
in four fields of 16 bits; element ``e`` stands in field ``2 * (e // 8) + e % 2`` as its code ``j = e % 8 // 2``, whose
sign and three magnitude bits lie at bits (15, 11:9), (12, 8:6), (14, 5:3) and (13, 2:0) of the field for j = 0 to 3. So
a kernel gets FP16 pairs with one to four integer instructions.

Codes are moved by shifts and masks on whole words, a piece at a time that stays in the processor's cache: every step is
a pass of torch over memory, so what counts is how many there are.

Example::

    words = words_from_bytes(checkpoint_bytes)      # uint8 [rows, columns / 2] -> int64 [rows, columns / 16]
    codes = unpack_codes(words)                     # uint8 [rows, columns], 0 to 15
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes by code."""

PIECE = 2**16
"""Words of a piece: half a MiB, and twice as much to work in."""
PIECE_ON_GPU = 2**22
"""Enough to keep a GPU busy."""

_SIGNS = ((0x0008, 12), (0x0080, 5), (0x0800, 3), (0x8000, -2))
"""Sign bits of four codes side by side in 16 bits, and how far left each lies in a field of a word."""


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 ``[..., columns]`` of any integer type to words int64 ``[..., columns / 16]``."""
    pairs = codes.to(torch.uint8, copy=True, memory_format=torch.contiguous_format).view(torch.int16)
    return words_from_bytes((pairs | pairs >> 4).to(torch.uint8))


def unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[..., columns]``: the inverse of ``pack_codes``."""
    pairs = bytes_from_words(words).to(torch.int16)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)


def words_from_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """Words int64 ``[..., columns / 16]`` from a checkpoint's bytes uint8 ``[..., columns / 2]``: two codes each, the
    even column in the low nibble."""
    words = torch.empty(*pairs.shape[:-1], pairs.shape[-1] // 8, dtype=torch.int64, device=pairs.device)
    words.view(torch.uint8).copy_(pairs)
    for word, signs, spare in _pieces(words):
        _gather_parity(word, spare)
        # Signs at bits 0, 4, 8, 12 of a field come to 15, 12, 14, 13: no two products of this factor meet in one bit.
        torch.bitwise_right_shift(word, 3, out=signs).bitwise_and_(_fields(0x1111))
        signs.view(torch.int16).mul_(_as_signed(1 << 15 | 1 << 8 | 1 << 6 | 1 << 1, 16))
        signs.bitwise_and_(_fields(0xF000))
        torch.bitwise_right_shift(word, 4, out=spare).bitwise_and_(_fields(0x0707))
        word.bitwise_and_(_fields(0x0707)).bitwise_left_shift_(3).bitwise_or_(spare)  # two magnitudes in 6 bits
        torch.bitwise_right_shift(word, 8, out=spare).bitwise_and_(_fields(0x003F))
        word.bitwise_and_(_fields(0x003F)).bitwise_left_shift_(6).bitwise_or_(spare)  # four in 12
        word.bitwise_or_(signs)
    return words


def bytes_from_words(words: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 ``[..., columns / 2]``: the inverse of ``words_from_bytes``."""
    words = words.clone(memory_format=torch.contiguous_format)
    for word, signs, spare in _pieces(words):
        signs.zero_()
        for mask, shift in _SIGNS:
            signs.bitwise_or_(_shift_left(word, -shift, spare).bitwise_and_(_fields(mask)))
        torch.bitwise_right_shift(word, 6, out=spare).bitwise_and_(_fields(0x003F))
        word.bitwise_and_(_fields(0x003F)).bitwise_left_shift_(8).bitwise_or_(spare)
        torch.bitwise_right_shift(word, 3, out=spare).bitwise_and_(_fields(0x0707))
        word.bitwise_and_(_fields(0x0707)).bitwise_left_shift_(4).bitwise_or_(spare)
        word.bitwise_or_(signs)
        _scatter_parity(word, spare)
    return words.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class WordWriter:
    """Joins codes to words: from FP16 numbers ``[16 n]``, each a code's value times 2^-14, which has the sign at bit 15
    and the magnitude at bits 11 to 9. The tensors of all steps are made beforehand, since the steps are short.
    """

    pairs: torch.Tensor  # the numbers as int64 [4 n]
    spare: torch.Tensor  # int64 [4 n]
    lower: torch.Tensor  # int32 [4 n]: half of that memory
    joined: torch.Tensor  # int64 [2 n]: the same half
    moved: torch.Tensor  # int64 [2 n]: the other half
    shifts: tuple[torch.Tensor, ...]  # how far right ...
    masks: tuple[torch.Tensor, ...]  # ... and what of it

    @staticmethod
    def of(halves: torch.Tensor, memory: torch.Tensor) -> WordWriter:
        """For the numbers in ``halves``; at least as many bytes of ``memory`` are worked in."""
        pairs = halves.view(torch.int64)
        spare = memory.view(torch.int64)[: len(pairs)]
        joined, moved = spare.chunk(2)
        shifts = torch.tensor([35, 38, 33, 31], device=halves.device)
        masks = torch.tensor([_fields(bits, 32) for bits in (0x11C0, 0x003F, 0x4000, 0x2000)], device=halves.device)
        return WordWriter(pairs, spare, joined.view(torch.int32), joined, moved, shifts.unbind(), masks.unbind())

    def write(self, words: torch.Tensor) -> None:
        """Words ``[n]`` of what the numbers are now; the numbers are written over."""
        torch.bitwise_right_shift(self.pairs, self.shifts[0], out=self.spare).bitwise_and_(self.masks[0])
        self.pairs.bitwise_or_(self.spare)  # of 4 columns, the first 2 as codes 0, the others as codes 1, in 32 bits
        self.lower.copy_(self.pairs)
        for shift, mask in zip(self.shifts[1:], self.masks[1:], strict=True):  # columns 4 to 7 become codes 2 and 3
            torch.bitwise_right_shift(self.joined, shift, out=self.moved).bitwise_and_(mask)
            self.joined.bitwise_or_(self.moved)
        words.view(torch.int32).copy_(self.joined)


def code_values(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of codes 0 to 15; code 8 is -0.0."""
    wide = codes.to(torch.int16)
    # As FP16, a sign at bit 15 with the magnitude at bits 11 to 9 is the code's value times 2^-14.
    halves = (wide << 12).bitwise_and_(-0x8000).bitwise_or_((wide << 9).bitwise_and_(0x0E00))
    return halves.view(torch.float16).to(torch.float32).mul_(2.0**14)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """FP32 values of block scales, or of FP8 data: uint8 E4M3 bits, or FP16."""
    if scales.dtype is not torch.uint8:
        return scales.float()
    # torch converts E4M3 one number at a time; a table of all 256 is ten times as fast.
    table = torch.arange(256, dtype=torch.uint8, device=scales.device).view(torch.float8_e4m3fn).float()
    return table.index_select(0, scales.reshape(-1).to(torch.int32)).view(scales.shape)


def _pieces(words: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Pieces of contiguous words, each with two tensors like it to work in."""
    length = PIECE_ON_GPU if words.is_cuda else PIECE
    memory = torch.empty(2, min(length, words.numel()), dtype=torch.int64, device=words.device)
    for piece in words.view(-1).split(length):
        yield piece, memory[0, : len(piece)], memory[1, : len(piece)]


def _gather_parity(word: torch.Tensor, spare: torch.Tensor) -> None:
    """Nibbles in the order of the columns to fields of 16 bits: those of four even, then of four odd columns."""
    _swap(word, spare, 4, _fields(0x00F0))
    _swap(word, spare, 8, _as_signed(0x0000FF00_0000FF00, 64))


def _scatter_parity(word: torch.Tensor, spare: torch.Tensor) -> None:
    """The inverse of ``_gather_parity``."""
    _swap(word, spare, 8, _as_signed(0x0000FF00_0000FF00, 64))
    _swap(word, spare, 4, _fields(0x00F0))


def _swap(word: torch.Tensor, spare: torch.Tensor, distance: int, mask: int) -> None:
    """Exchanges the bits of the mask with those ``distance`` higher."""
    torch.bitwise_right_shift(word, distance, out=spare).bitwise_xor_(word).bitwise_and_(mask)
    word.bitwise_xor_(spare).bitwise_xor_(spare.bitwise_left_shift_(distance))


def _shift_left(word: torch.Tensor, distance: int, out: torch.Tensor) -> torch.Tensor:
    if distance < 0:
        return torch.bitwise_right_shift(word, -distance, out=out)
    return torch.bitwise_left_shift(word, distance, out=out)


def _fields(bits: int, width: int = 64) -> int:
    """A mask of 16 bits in every field of a word, or of its half."""
    return _as_signed(bits * 0x0001_0001_0001_0001 & (1 << width) - 1, width)


def _as_signed(bits: int, width: int) -> int:
    """The integer of that many bits in two's complement, which is how torch wants it."""
    return bits - (1 << width) if bits >> (width - 1) else bits
