"""The header of one safetensors file: which tensors it holds and where, checked against the size of the file.

In: a file. Out: a ``Shard`` and its ``StoredTensor`` records, or a ``WeightError`` that names the file and what is
wrong with it. No data is read, and neither torch nor safetensors is needed.

Example::

    shard, tensors = read_header(Path("model.safetensors"))
    tensors[0]        # StoredTensor("lm_head.weight", "BF16", (248320, 2048), "model.safetensors", 1017118720)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from lynnc.artifact import digest
from lynnc.errors import WeightError

LENGTH = 8
"""Bytes of the number in front of the header: the header's bytes, little-endian."""
MOST_HEADER = 100_000_000
"""Bytes of a header that the file format allows."""
MOST_BYTES = 2**63 - 1
"""The largest size of a file; numbers above it are none of a shard's."""
BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "C64": 64,
    }
)
"""Bits of one element of each type of the file format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a shard: its type by the file format's name, its shape, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A file: its size, and the SHA-256 of its header, which changes with any name, type, shape or place in it."""

    name: str
    bytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class _Span:
    """A tensor and where its data lies, counted from the end of the header."""

    tensor: StoredTensor
    start: int
    end: int


def read_header(path: Path, name: str | None = None) -> tuple[Shard, tuple[StoredTensor, ...]]:
    """The shard and its tensors in the order of their data; ``name`` is what they call the shard, if not the file's.

    WeightError for a file that cannot be read, is no regular or no safetensors file, is shorter or longer than its
    header says, or whose tensors overlap, leave gaps, or have other sizes than type and shape ask for.
    """
    try:
        # Opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise WeightError(f"{path} is no regular file: put the shard there, or remove it.")
        with path.open("rb") as file:
            size = path.stat().st_size
            text = _header_text(path, size, file)
    except OSError as error:
        raise WeightError(f"{path} cannot be read ({error.strerror}): put the shard there.") from error
    spans = sorted(_spans(path, name or path.name, text), key=lambda span: (span.start, span.end))
    _check_spans(path, spans)
    _check_size(path, size, LENGTH + len(text) + (spans[-1].end if spans else 0))
    return Shard(name or path.name, size, digest(text)), tuple(span.tensor for span in spans)


def _header_text(path: Path, size: int, file: BinaryIO) -> bytes:
    start = file.read(LENGTH)
    if len(start) < LENGTH:
        raise WeightError(f"{path} is truncated: it has {size} bytes, too few for a header; copy the shard again.")
    (length,) = struct.unpack("<Q", start)
    if length > MOST_HEADER:
        raise WeightError(f"{path} is no safetensors file (it starts with no length of a header): copy it again.")
    if LENGTH + length > size:
        raise WeightError(
            f"{path} is truncated: its header alone has {length} bytes and the file {size}; copy the shard again."
        )
    return file.read(length)


def _spans(path: Path, shard: str, text: bytes) -> list[_Span]:
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path} is damaged: its header is not JSON ({error}); copy the shard again.") from None
    if not isinstance(content, dict):
        raise WeightError(f"{path} is damaged: its header is not an object; copy the shard again.")
    return [_span(path, shard, name, entry) for name, entry in content.items() if name != "__metadata__"]


def _unique(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightError(f"{path} is damaged: its header names {twice} twice; write the shard again.")
    return found


def _span(path: Path, shard: str, name: str, entry: object) -> _Span:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if (
            all(type(size) is int and 0 <= size <= MOST_BYTES for size in shape) and 0 <= start <= end <= MOST_BYTES
        ):
            pass
        case _:
            raise WeightError(f"{path} is damaged: its header's entry of {name} is not understood; copy it again.")
    if dtype not in BITS:
        raise WeightError(f"{path} holds {name} with the unknown type {dtype}: known are {', '.join(BITS)}.")
    if BITS[dtype] * prod(shape) != 8 * (end - start):
        raise WeightError(
            f"{path} is damaged: {name} of type {dtype} and shape {shape} has {end - start} bytes of data; copy the "
            "shard again."
        )
    return _Span(StoredTensor(name, dtype, tuple(shape), shard, end - start), start, end)


def _check_spans(path: Path, spans: list[_Span]) -> None:
    """Data starts behind the header and has neither gaps nor overlaps."""
    expected = 0
    for span in spans:
        if span.start != expected:
            what = "overlaps the one before it" if span.start < expected else "leaves a gap before it"
            raise WeightError(f"{path} is damaged: the data of {span.tensor.name} {what}; copy the shard again.")
        expected = span.end


def _check_size(path: Path, size: int, expected: int) -> None:
    if size < expected:
        raise WeightError(
            f"{path} is truncated: its header describes {expected} bytes and the file has {size}; copy the shard again."
        )
    if size > expected:
        raise WeightError(
            f"{path} is damaged: its header describes {expected} bytes and the file has {size}; copy the shard again."
        )
