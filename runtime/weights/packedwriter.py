"""Writes the shards of a packed folder in pieces, so that a killed run goes on where it stopped.

In: the layout of the shards, and each weight's arrays, some rows at a time, from any process and in any order. Out: the
folder, under its name only when whole. Until then ``.NAME.partial`` beside it holds the shards at their full length and
a journal with a line for each finished weight. A later run of the same request keeps what the journal lists and the
digests confirm. The safetensors library writes a shard from memory at once, which would hold gigabytes and lose them
when killed; it reads what is written here.

Example::

    with PackedWriter.open(Path("packed"), layouts, request="...") as writer:
        if "embed" not in writer.finished:
            written = writer.array("embed.data").write(0, table)
            writer.finish(Finished("embed", {}, source="..."), {"embed.data": written})
        writer.publish(index, side_files)
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
import xxhash

from lynnc.errors import OutputError
from lynnc.jsonform import decode, encode
from lynnc.outputfolder import folder_exists, place_folder
from lynnc.runtime.weights.digests import stored_bytes
from lynnc.runtime.weights.packedindex import (
    INDEX_FILE,
    MODEL_FILE,
    SIDE_FILES,
    PackedIndex,
    ShardLayout,
    index_text,
    shard_header,
    shard_metadata,
)
from lynnc.runtime.weights.unfinished import JOURNAL, REQUEST, partial_folder

LOCK = "lock"
SHARD_NAME = re.compile(r"weights-\d{5}-of-\d{5}\.safetensors")
LOCK_SECONDS = 3.0
READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Finished:
    """A weight that is written: digests of its arrays, and of what was read for it; where scales were searched for, the
    squared errors without and with that."""

    weight: str
    digests: Mapping[str, str]
    source: str
    plain_error: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """Where an array lies on disk: file, first byte, and bytes."""

    path: Path
    start: int
    bytes: int

    def write(self, offset: int, values: torch.Tensor) -> int:
        """Writes elements from a byte of the array on, from any process; gives the bytes written. OutputError if the
        system refuses."""
        data = stored_bytes(values)
        if not 0 <= offset <= self.bytes - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} are not within an array of {self.bytes} in {self.path}")
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                _write_all(descriptor, data, self.start + offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_error(self.path.parent, error) from error
        return len(data)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def write_error(folder: Path, error: OSError) -> OutputError:
    """What a user is told where a packed folder cannot be written; ``folder`` may be the partial one."""
    why = error.strerror or str(error)
    return OutputError(
        f"{folder} cannot be written ({why}): mend that and run the same command again, it goes on where it stopped."
    )


class PackedWriter:
    """The partial folder of one run; made by ``open``. Errors of the system become ``OutputError``."""

    def __init__(self, folder: Path, layouts: tuple[ShardLayout, ...], header_bytes: tuple[int, ...], force: bool):
        self._folder, self._partial, self._force = folder, partial_folder(folder), force
        self._layouts, self._header_bytes = layouts, header_bytes
        self._files: list[BinaryIO] = []
        self._arrays: dict[str, ArrayFile] = {}
        self._lock: BinaryIO | None = None
        self.finished: dict[str, Finished] = {}

    @classmethod
    def open(
        cls, folder: Path, layouts: tuple[ShardLayout, ...], draft: PackedIndex, request: str, force: bool = False
    ) -> PackedWriter:
        """Goes on with what a killed run of an equal ``request`` left, or begins anew.

        ``draft`` is the index but for digests of equal length, so that headers keep their length to the end. With
        ``force``, a folder that exists is replaced in the end.
        """
        headers = tuple(len(shard_header(layout, shard_metadata(draft, layout))) for layout in layouts)
        writer = cls(folder, layouts, headers, force)
        try:
            writer._begin(request)
        except OSError as error:
            writer.close()
            raise write_error(writer._partial, error) from error
        except OutputError:
            writer.close()
            raise
        return writer

    def _begin(self, request: str) -> None:
        self._take_lock()
        note = self._partial / REQUEST
        if not note.is_file() or note.read_bytes() != request.encode():
            self._clear()
            note.write_bytes(request.encode())
        for layout, header in zip(self._layouts, self._header_bytes, strict=True):
            path = self._partial / layout.name
            path.touch()
            file = path.open("r+b")
            self._files.append(file)
            file.truncate(header + layout.bytes)
        self._arrays = {
            place.name: ArrayFile(self._partial / layout.name, header + place.offset, place.bytes)
            for layout, header in zip(self._layouts, self._header_bytes, strict=True)
            for place in layout.arrays
        }
        self._keep_finished()

    def _take_lock(self) -> None:
        """Makes the partial folder, and waits a little: processes of a killed run hold the lock until they notice."""
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            if self._folder.exists() and not self._force:
                raise folder_exists(self._folder)
            self._partial.mkdir(parents=True, exist_ok=True)
            lock = (self._partial / LOCK).open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The folder may have been published, and its name gone, since the lock was opened.
                if _is_at(self._partial / LOCK, lock):
                    self._lock = lock
                    return
            except BlockingIOError:
                time.sleep(0.05)
            lock.close()
        raise OutputError(f"{self._folder} is being written by another process: wait for it.")

    def _clear(self) -> None:
        """Removes what another request left; OutputError for a file that no run writes."""
        own = {JOURNAL, REQUEST, LOCK, MODEL_FILE, INDEX_FILE, *SIDE_FILES}
        held = list(self._partial.iterdir())
        for path in held:
            if path.name not in own and not SHARD_NAME.fullmatch(path.name):
                raise OutputError(f"{path} is no file of lynnc's, and would have to go: move it away.")
        for path in held:
            if path.name != LOCK:
                path.unlink()

    def _keep_finished(self) -> None:
        """Weights whose line in the journal is whole and whose bytes still have the digests it names."""
        journal = self._partial / JOURNAL
        lines = journal.read_bytes().split(b"\n")[:-1] if journal.is_file() else []
        weights = {name for layout in self._layouts for name in layout.weights}
        for line in lines:
            try:
                entry: Finished = decode(Finished, json.loads(line))
            except (KeyError, TypeError, ValueError, RecursionError):
                continue
            if entry.weight in weights and self._has_all(entry):
                self.finished[entry.weight] = entry
        journal.write_text("".join(f"{encode(entry)}\n" for entry in self.finished.values()), "utf-8")

    def _has_all(self, entry: Finished) -> bool:
        """Whether every array of the weight is noted, and has the bytes that the note's digest is of."""
        arrays = {name for name in self._arrays if name.rpartition(".")[0] == entry.weight}
        return entry.digests.keys() == arrays and all(self._digest(n) == value for n, value in entry.digests.items())

    def _digest(self, name: str) -> str:
        array, digest = self._arrays[name], xxhash.xxh3_128()
        with array.path.open("rb") as file:
            file.seek(array.start)
            left = array.bytes
            while left:
                data = file.read(min(READ_BYTES, left))
                if not data:
                    raise OSError(f"{array.path} is shorter than it was")
                digest.update(data)
                left -= len(data)
        return digest.hexdigest()

    def array(self, name: str) -> ArrayFile:
        """Where to write an array."""
        return self._arrays[name]

    def finish(self, entry: Finished, written: Mapping[str, int]) -> Finished:
        """Notes that a weight is there, with ``written`` bytes of each of its arrays; gives ``entry`` with digests."""
        short = [name for name, count in written.items() if count != self._arrays[name].bytes]
        if short or not written:
            raise ValueError(f"{', '.join(short) or entry.weight} was not filled")
        try:
            done = replace(entry, digests={name: self._digest(name) for name in written})
            with (self._partial / JOURNAL).open("a", encoding="utf-8") as journal:
                journal.write(f"{encode(done)}\n")
        except OSError as error:
            raise write_error(self._partial, error) from error
        self.finished[entry.weight] = done
        return done

    def publish(self, index: PackedIndex, side_files: Mapping[str, Path], texts: Mapping[str, str]) -> None:
        """Writes headers, index and side files, and gives the folder its name."""
        try:
            for layout, room, file in zip(self._layouts, self._header_bytes, self._files, strict=True):
                header = shard_header(layout, shard_metadata(index, layout))
                assert len(header) == room, "the draft of the index has digests of another length"
                _write_all(file.fileno(), memoryview(header), 0)
                os.fsync(file.fileno())
            for name, path in side_files.items():
                shutil.copyfile(path, self._partial / name)
            for name, text in {**texts, INDEX_FILE: index_text(index)}.items():
                (self._partial / name).write_text(text, "utf-8")
            self._rename()
        except OSError as error:
            raise write_error(self._partial, error) from error

    def _rename(self) -> None:
        if self._folder.exists() and not self._force:
            raise folder_exists(self._folder)
        for name in (JOURNAL, REQUEST):
            (self._partial / name).unlink(missing_ok=True)
        # The lock goes last, and only under the folder's own name: nobody may begin in the folder before.
        place_folder(self._partial, self._folder, self._force)
        (self._folder / LOCK).unlink()

    def close(self) -> None:
        """Closes the files; what is not published stays for the next run."""
        for file in (*self._files, *([self._lock] if self._lock else [])):
            file.close()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file still has this path."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
