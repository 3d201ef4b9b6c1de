"""Reads a packed folder into GPU memory at the speed of the disk: a shard lies there byte for byte.

In: a folder that ``lynnc pack`` wrote. Out: addresses of the plan's arrays. Each shard is one block of GPU memory;
several threads each read arrays into two pinned buffers in turn, so that one is filled while the other is copied, and
compute their digests on the way.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lynnc.errors import OptionError, WeightError
from lynnc.plan import Plan
from lynnc.runtime.checkpoints.shardheader import read_header
from lynnc.runtime.device import Device, HostMemory
from lynnc.runtime.loading.weightsource import PlacedWeights, Progress, arrays_of
from lynnc.runtime.weights.packedindex import INDEX_FILE, PADDING, PackedIndex, array_name, read_index

THREADS = 8
PIECE = 8 << 20
"""Bytes of one pinned buffer; each thread has two."""
AGAIN = "copy the packed folder again, or pack the checkpoint again"


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array in a shard: where its data lies in the file and in the shard's block, and the digest it should have."""

    name: str
    path: Path
    position: int
    offset: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard's arrays, and the bytes of the block that holds them as they lie."""

    arrays: tuple[_Stored, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """A packed folder as a source of weights; ``is_checked`` compares every array with its digest."""

    folder: Path
    is_checked: bool = True
    threads: int = THREADS

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # callers write a string, too

    def resident_bytes(self, plan: Plan) -> int:
        """Bytes of the shards, without their headers; WeightError if the folder is not of the plan's model."""
        index = checked_index(self.folder, plan)
        return sum(_read_shard(self.folder / shard.name, index).bytes for shard in index.shards)

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        """Every array of the shards, in a block for each shard."""
        index = checked_index(self.folder, plan)
        shards = [_read_shard(self.folder / shard.name, index) for shard in index.shards]
        total = sum(shard.bytes for shard in shards)
        reader = _Reader(device, self.is_checked, sum(array.bytes for s in shards for array in s.arrays), progress)
        found: dict[str, int] = {}
        waiting: list[Future[None]] = []
        with ThreadPoolExecutor(self.threads) as pool, ExitStack() as failure:
            failure.callback(_stop, waiting, reader)
            for shard in shards:
                block = device.allocate(shard.bytes)
                found.update({array.name: block + array.offset for array in shard.arrays})
                waiting += [pool.submit(reader.read, array, block + array.offset) for array in shard.arrays]
            for future in waiting:
                future.result()
            failure.pop_all()
        device.synchronize()
        reader.release()
        addresses = {
            (weight.name, array.array): found[array_name(weight.name, array.array)] for weight, array in arrays_of(plan)
        }
        return PlacedWeights(addresses, total)


def _stop(waiting: list[Future[None]], reader: _Reader) -> None:
    """Ends all reads, also those that have begun."""
    reader.is_stopped.set()
    for future in waiting:
        future.cancel()


def checked_index(folder: Path, plan: Plan) -> PackedIndex:
    """The folder's index; WeightError if its layout, model or weights are not the plan's."""
    index = read_index(folder)
    if index.layout != plan.layout:
        raise WeightError(f"{folder} has layout {index.layout} and the plan reads {plan.layout}: pack again.")
    if index.model_digest != plan.model_digest or dict(index.weights) != dict(plan.weights):
        raise WeightError(
            f"{folder} was packed for another model ({index.model['name']}) than the plan was compiled for "
            f"({plan.model_name}): compile the plan from {folder / 'model.yaml'}."
        )
    return index


def _read_shard(path: Path, index: PackedIndex) -> _Shard:
    """Arrays of a shard by its header; what fills gaps between them is not read."""
    _, tensors = read_header(path)
    size = sum(tensor.bytes for tensor in tensors)
    start, offset = path.stat().st_size - size, 0
    arrays = []
    for tensor in tensors:
        if not tensor.name.startswith(f"{PADDING}."):
            if tensor.name not in index.digests:
                raise WeightError(f"{path} holds {tensor.name}, of which {INDEX_FILE} says nothing: {AGAIN}.")
            place = (start + offset, offset, tensor.bytes)
            arrays.append(_Stored(tensor.name, path, *place, index.digests[tensor.name]))
        offset += tensor.bytes
    return _Shard(tuple(arrays), size)


class _Reader:
    """What the threads share: the device, progress, and pinned buffers of their own."""

    def __init__(self, device: Device, is_checked: bool, total: int, progress: Progress | None) -> None:
        self.is_stopped = threading.Event()
        self._device, self._total, self._progress = device, total, progress
        self._hasher: Any = import_digest() if is_checked else None
        self._lock = threading.Lock()
        self._done = 0
        self._own = threading.local()
        self._buffers: list[HostMemory] = []

    def read(self, array: _Stored, address: int) -> None:
        """One array from its file to GPU memory. WeightError if it cannot be read or is not what was packed."""
        hasher = self._hasher() if self._hasher else None
        try:
            with array.path.open("rb", buffering=0) as file:
                self._copy(file.fileno(), array, address, hasher)
        except OSError as error:
            raise WeightError(f"{array.path} cannot be read ({error.strerror}): {AGAIN}.") from error
        if hasher and hasher.hexdigest() != array.digest:
            raise WeightError(f"{array.path}: {array.name} was changed since packing: {AGAIN}.")

    def _copy(self, file: int, array: _Stored, address: int, hasher: Any) -> None:
        buffers = self._own_buffers()
        for first in range(0, array.bytes, PIECE):
            if self.is_stopped.is_set():
                return
            buffer = buffers.next()
            count = min(PIECE, array.bytes - first)
            piece = buffer.memory.view[:count]
            if _read_fully(file, piece, array.position + first) != count:
                raise WeightError(f"{array.path} is truncated at {array.name}: {AGAIN}.")
            if hasher:
                hasher.update(piece)
            self._device.upload(address + first, buffer.memory.address, count)
            buffer.mark = self._device.mark()
            self._count(count)

    def _own_buffers(self) -> _Buffers:
        found: _Buffers | None = getattr(self._own, "buffers", None)
        if found is None:
            self._device.make_current()
            with self._lock:
                pair = [_Buffer(self._device, self._device.allocate_host(PIECE)) for _ in range(2)]
                self._buffers += [buffer.memory for buffer in pair]
            found = self._own.buffers = _Buffers(pair)
        return found

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._progress:
                self._progress(self._done, self._total)

    def release(self) -> None:
        """Gives the pinned buffers back."""
        for memory in self._buffers:
            self._device.free_host(memory)


def _read_fully(file: int, piece: memoryview, position: int) -> int:
    """Bytes read into the whole piece; fewer only where the file ends. One read may give less, on some file systems."""
    done = 0
    while done < len(piece):
        count = os.preadv(file, [piece[done:]], position + done)
        if count == 0:
            break
        done += count
    return done


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer, and the mark of the copy that last read it."""

    device: Device
    memory: HostMemory
    mark: Any = None


@dataclass(slots=True)
class _Buffers:
    pair: list[_Buffer]
    turn: int = field(default=0)

    def next(self) -> _Buffer:
        """The other buffer, once it has been copied."""
        self.turn = 1 - self.turn
        buffer = self.pair[self.turn]
        if buffer.mark is not None:
            buffer.device.wait_for(buffer.mark)
            buffer.mark = None
        return buffer


def import_digest() -> Any:
    """XXH3-128 as a hasher; OptionError if its package is not there."""
    try:
        return import_module("xxhash").xxh3_128
    except ImportError:
        raise OptionError(
            "Checking packed weights needs the Python package xxhash: install lynnc with its extra, as in "
            "`pip install -e '.[runtime]'`."
        ) from None
