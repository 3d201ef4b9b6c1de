"""Packed folders into memory of a simulated device: byte for byte, checked, and with one error for what is wrong."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from executing import HostWeights, executor_on, logits_of, meaning_device, plan_of
from packing import DIVIDED, PLAIN, packed_to, written
from runners import CONTEXT
from safetensors.torch import load_file
from simulated import Block, SimulatedDevice, record_only
from storedformats import Flavour

from lynnc.errors import OptionError, WeightError
from lynnc.modelfile import load_model
from lynnc.plan import Plan
from lynnc.runtime.budget import Room
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading import packedfolder
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import arrays_of
from lynnc.runtime.weights.packedindex import INDEX_FILE

ROOM = Room(1, CONTEXT)
SHARD = 120_000
"""Bytes of a shard: several of them."""
NAME = "layers.1.mlp_down_weight.data"
PIECE = 4096
"""Bytes that are copied at once: large arrays take many."""


class LateDevice(SimulatedDevice):
    """Copies from pinned memory happen when somebody waits for them: a buffer that is filled too early shows."""

    def __init__(self) -> None:
        super().__init__(runs=record_only)
        self.waiting: list[tuple[int, tuple[int, int, int]]] = []
        self.count = 0
        self.lock = threading.Lock()

    def upload(self, address: int, source: int, size: int) -> None:
        with self.lock:
            self.count += 1
            self.waiting.append((self.count, (address, source, size)))

    def mark(self) -> int:
        return self.count

    def wait_for(self, mark: int) -> None:
        with self.lock:
            while self.waiting and self.waiting[0][0] <= mark:
                super().upload(*self.waiting.pop(0)[1])

    def synchronize(self) -> None:
        self.wait_for(self.count)


@dataclass(frozen=True)
class Packed:
    """A packed folder and the plan of its model."""

    folder: Path
    plan: Plan

    def load(self, device: SimulatedDevice | None = None, **options: object) -> Executor:
        source = PackedFolder(self.folder, **options)  # type: ignore[arg-type]
        return executor_on(self.plan, source, ROOM, device or SimulatedDevice(runs=record_only))


def make_packed(folder: Path, model: str, flavour: Flavour) -> Packed:
    written(folder, model, flavour)
    packed = packed_to(folder, shard_bytes=SHARD)
    return Packed(packed, plan_of(load_model(packed / "model.yaml")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Never changed by a test."""
    return make_packed(tmp_path_factory.mktemp("dense"), "tiny-dense", PLAIN)


@pytest.fixture
def packed(whole: Packed, tmp_path: Path) -> Packed:
    """A copy that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in whole.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return replace(whole, folder=copy)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedfolder, "PIECE", PIECE)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def spans(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name, offset and bytes of each array of a shard."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, start, raw[8 + length + start : 8 + length + end]


def change(folder: Path, array: str) -> Path:
    """Inverts one bit in the middle of an array; the shard that holds it."""
    for path in shards(folder):
        for name, start, data in spans(path):
            if name == array:
                raw = bytearray(path.read_bytes())
                raw[8 + int.from_bytes(raw[:8], "little") + start + len(data) // 2] ^= 1
                path.write_bytes(raw)
                return path
    raise AssertionError(array)


@pytest.mark.parametrize("flavour", [PLAIN, DIVIDED], ids=str)
def test_a_shard_lies_in_memory_byte_for_byte(flavour: Flavour, tmp_path: Path) -> None:
    packed, device = make_packed(tmp_path, "tiny-moe", flavour), LateDevice()
    executor = packed.load(device)
    files = shards(packed.folder)
    assert len(files) > 2
    addresses = executor.memory.addresses.weights
    assert list(addresses) == [(weight.name, array.array) for weight, array in arrays_of(packed.plan)]
    for path, block in zip(files, device.blocks, strict=False):
        arrays = list(spans(path))
        assert block.size == sum(len(data) for _, _, data in arrays)
        for name, start, data in arrays:
            if name.startswith("padding."):
                continue
            assert block.view[start : start + len(data)] == data, name
            weight, _, array = name.rpartition(".")
            assert array == "divisor" or addresses[weight, array] == block.address + start
            assert (block.address + start) % 256 == 0
    assert executor.memory.weights.resident_bytes == sum(block.size for block in device.blocks[: len(files)])
    assert device.taken == executor.budget.gpu_bytes


def test_the_model_is_the_one_that_was_packed(whole: Packed) -> None:
    executor = whole.load(meaning_device(whole.plan, ROOM))
    stored = {name: array for path in shards(whole.folder) for name, array in load_file(path).items()}
    names = [(weight.name, array.array) for weight, array in arrays_of(whole.plan)]
    arrays = {(weight, array): stored[f"{weight}.{array}"] for weight, array in names}
    expected = executor_on(whole.plan, HostWeights(arrays), ROOM, meaning_device(whole.plan, ROOM))
    assert executor.prefill([5, 7, 11]) == expected.prefill([5, 7, 11])
    assert torch.equal(logits_of(executor), logits_of(expected))


def test_pinned_buffers_are_given_back_and_progress_reaches_the_total(whole: Packed) -> None:
    class Counting(SimulatedDevice):
        def allocate_host(self, size: int) -> Block:
            pinned.append(size)
            return super().allocate_host(size)

    device, pinned, seen = Counting(), [], []
    source = PackedFolder(whole.folder, threads=3)
    source.place(whole.plan, device, lambda done, total: seen.append((done, total)))
    assert device.pinned == [] and set(pinned) == {PIECE} and 2 <= len(pinned) <= 6 and len(pinned) % 2 == 0
    total = sum(len(data) for path in shards(whole.folder) for name, _, data in spans(path) if "padding." not in name)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_a_changed_byte_is_named_unless_nobody_checks(packed: Packed) -> None:
    device = SimulatedDevice(runs=record_only)
    path = change(packed.folder, NAME)
    words = rf"{path.name}: {NAME} was changed since packing: copy the packed folder again, or pack"
    with pytest.raises(WeightError, match=words):
        packed.load(device)
    assert device.blocks == device.pinned == [] and not device.entries
    executor = packed.load(device, is_checked=False)
    expected = next(data for name, _, data in spans(path) if name == NAME)
    found = bytearray(len(expected))
    executor.memory.read_into(found, executor.memory.addresses.weights["layers.1.mlp_down_weight", "data"])
    assert found == expected


def edit_index(folder: Path, key: str, value: object) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index[key] = value
    (folder / INDEX_FILE).write_text(json.dumps(index))


def forget_digest(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["digests"]["embed.data"]
    (folder / INDEX_FILE).write_text(json.dumps(index))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@dataclass(frozen=True)
class Damage:
    """What happened to a folder, and what is said of it."""

    label: str
    damage: Callable[[Path], object]
    says: str

    def __str__(self) -> str:
        return self.label


DAMAGES = (
    Damage(
        "missing shard", lambda folder: shards(folder)[1].unlink(), r"weights-00002-of-\d+\.safetensors cannot be read"
    ),
    Damage("truncated shard", lambda folder: truncate(shards(folder)[1]), r"weights-00002.* is truncated"),
    Damage("no index", lambda folder: (folder / INDEX_FILE).unlink(), r"is not a packed folder"),
    Damage(
        "another layout", lambda folder: edit_index(folder, "layout", "w8"), r"has layout w8 and the plan reads nvfp4"
    ),
    Damage(
        "another model",
        lambda folder: edit_index(folder, "model_digest", "0"),
        r"packed for another model \(checkpoint\)",
    ),
    Damage("unknown array", forget_digest, r"holds embed\.data, of which lynnc-weights\.json says nothing"),
)


@pytest.mark.parametrize("case", DAMAGES, ids=str)
def test_a_damaged_folder_is_refused_before_memory_is_taken(case: Damage, packed: Packed) -> None:
    case.damage(packed.folder)
    device = SimulatedDevice(runs=record_only)
    with pytest.raises(WeightError, match=case.says) as caught:
        packed.load(device)
    assert "\n" not in str(caught.value)
    assert device.blocks == device.pinned == []


def test_a_folder_of_another_model_names_both(whole: Packed) -> None:
    other = plan_of(load_model("tiny-full"))
    words = (
        r"for another model \(checkpoint\) than the plan was compiled for \(tiny-full\): compile the plan from .*yaml"
    )
    with pytest.raises(WeightError, match=words):
        executor_on(other, PackedFolder(whole.folder), ROOM, SimulatedDevice(runs=record_only))


def test_a_shard_that_shrinks_while_it_is_read_is_named(packed: Packed) -> None:
    class Shrinking(SimulatedDevice):
        def allocate(self, size: int) -> int:
            os.truncate(shards(packed.folder)[0], 20_000)
            return super().allocate(size)

    device = Shrinking(runs=record_only)
    with pytest.raises(WeightError, match=r"weights-00001.* is truncated at "):
        packed.load(device)
    assert device.blocks == device.pinned == []


def test_the_first_failure_stops_the_rest(packed: Packed) -> None:
    first = next(name for name, _, _ in spans(shards(packed.folder)[0]))
    change(packed.folder, first)
    seen: list[tuple[int, int]] = []

    def slow(done: int, total: int) -> None:
        seen.append((done, total))
        time.sleep(0.001)

    before = threading.active_count()
    with pytest.raises(WeightError, match=rf"{first} was changed"):
        PackedFolder(packed.folder, threads=2).place(packed.plan, SimulatedDevice(), slow)
    done, total = seen[-1]
    assert done < total / 2
    assert threading.active_count() == before


def test_the_package_for_digests_is_named_if_it_is_missing(whole: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packedfolder, "import_module", refuse)
    with pytest.raises(OptionError, match=r"needs the Python package xxhash: install .*\[runtime\]"):
        whole.load()
    whole.load(is_checked=False)
