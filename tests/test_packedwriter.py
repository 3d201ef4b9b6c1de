"""Shards that are written array by array: places, alignment, what survives a kill, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lynnc.errors import OutputError
from lynnc.layout import LAYOUT
from lynnc.runtime.weights.packedindex import (
    ALIGNMENT,
    PackedIndex,
    ShardEntry,
    SourceEntry,
    place_arrays,
    shard_header,
    shard_metadata,
)
from lynnc.runtime.weights.packedwriter import Finished, PackedWriter
from lynnc.runtime.weights.unfinished import partial_folder
from lynnc.tensors import Format, Part, Weight

NARROW = Weight("gate", Format.BF16, (1, 48), (Part("a", 1),), "shared_gate")
WIDE = Weight("experts", Format.NVFP4, (3, 6, 32), (Part("b.{expert}", 2), Part("c.{expert}", 4)), "experts")
WEIGHTS = (NARROW, WIDE)
DIVIDED = frozenset({"experts"})


def contents(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "gate.data": torch.randn(1, 48, generator=generator).bfloat16(),
        "experts.data": torch.randint(-(2**62), 2**62, (3, 6, 2), generator=generator),
        "experts.scale": torch.randint(0, 126, (3, 6, 2), generator=generator).to(torch.uint8),
        "experts.global": torch.rand(3, 3, generator=generator),
        "experts.divisor": torch.rand(3, 3, generator=generator),
    }


def layouts(shard_bytes: int = 1 << 20):
    return place_arrays(WEIGHTS, DIVIDED, shard_bytes)


def draft(shard_bytes: int = 1 << 20) -> PackedIndex:
    index = PackedIndex(
        lynnc="0",
        layout=LAYOUT,
        model={"name": "m"},
        model_digest="0" * 64,
        source=SourceEntry("plain", "", "bf16", "0" * 64),
        experts={},
        weights={},
        origins={"gate": (), "experts": ()},
        shards=(),
        digests={name: "0" * 32 for name in contents()},
        skipped={},
        files=(),
    )
    entries = [
        ShardEntry(item.name, len(shard_header(item, shard_metadata(index, item))) + item.bytes)
        for item in layouts(shard_bytes)
    ]
    return replace(index, shards=tuple(entries))


def opened(folder: Path, request: str = "same", shard_bytes: int = 1 << 20, force: bool = False) -> PackedWriter:
    return PackedWriter.open(folder, layouts(shard_bytes), draft(shard_bytes), request, force)


def write(writer: PackedWriter, weight: Weight, tensors: dict[str, torch.Tensor]) -> None:
    written = {}
    for name, tensor in tensors.items():
        if name.split(".")[0] == weight.name:
            rows = tensor.nbytes // len(tensor)
            pieces = [writer.array(name).write(rows * index, row) for index, row in reversed([*enumerate(tensor)])]
            written[name] = sum(pieces)  # a row or an expert at a time, the last one first
    writer.finish(Finished(weight.name, {}, "read"), written)


def publish(writer: PackedWriter, shard_bytes: int = 1 << 20) -> PackedIndex:
    digests = {name: value for entry in writer.finished.values() for name, value in entry.digests.items()}
    index = replace(draft(shard_bytes), digests=digests)
    writer.publish(index, {}, {"model.yaml": "name: m\n"})
    return index


@pytest.mark.parametrize("shard_bytes", [1, 1 << 20], ids=["a shard for each weight", "one shard"])
def test_safetensors_reads_what_was_written(tmp_path: Path, shard_bytes: int) -> None:
    tensors = contents()
    with opened(tmp_path / "out", shard_bytes=shard_bytes) as writer:
        for weight in WEIGHTS:
            write(writer, weight, tensors)
        index = publish(writer, shard_bytes)
    assert not partial_folder(tmp_path / "out").exists()
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [(path.name, path.stat().st_size) for path in shards] == [(s.name, s.bytes) for s in index.shards]
    found = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert {name for name in found if not name.startswith("padding.")} == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert len(shards) == (2 if shard_bytes == 1 else 1)


def test_every_array_starts_at_a_multiple_of_256_bytes(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as writer:
        for weight in WEIGHTS:
            write(writer, weight, contents())
        publish(writer)
    path = next((tmp_path / "out").glob("*.safetensors"))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % ALIGNMENT == 0
    starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name in contents()}
    assert len(starts) == len(contents())
    assert all(start % ALIGNMENT == 0 for start in starts.values())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["layout"] == LAYOUT
    assert set(json.loads(metadata["digests"])) == set(contents())


def test_a_second_run_keeps_what_the_first_finished(tmp_path: Path) -> None:
    tensors = contents()
    with opened(tmp_path / "out") as writer:
        write(writer, NARROW, tensors)
        writer.array("experts.data").write(0, tensors["experts.data"][0])  # killed in the middle of a weight
    assert not (tmp_path / "out").exists()
    with opened(tmp_path / "out") as writer:
        assert list(writer.finished) == ["gate"]
        write(writer, WIDE, tensors)
        publish(writer)
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def damage_data(partial: Path) -> None:
    path = next(partial.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    start = len(shard_header(layouts()[0], shard_metadata(draft(), layouts()[0])))
    raw[start + 5] ^= 1
    path.write_bytes(raw)


def damage_journal(partial: Path) -> None:
    path = partial / "journal.jsonl"
    path.write_text(path.read_text()[:-20])


def remove_shard(partial: Path) -> None:
    next(partial.glob("*.safetensors")).unlink()


def shorten_shard(partial: Path) -> None:
    path = next(partial.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:600])


def unknown_array(partial: Path) -> None:
    path = partial / "journal.jsonl"
    path.write_text(path.read_text().replace("gate.data", "gone.data"))


@pytest.mark.parametrize("damage", [damage_data, damage_journal, remove_shard, shorten_shard, unknown_array])
def test_what_cannot_be_trusted_is_written_again(tmp_path: Path, damage) -> None:
    with opened(tmp_path / "out") as writer:
        write(writer, NARROW, contents())
    damage(partial_folder(tmp_path / "out"))
    with opened(tmp_path / "out") as writer:
        assert not writer.finished


def test_another_request_begins_anew(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as writer:
        write(writer, NARROW, contents())
    with opened(tmp_path / "out", request="other") as writer:
        assert not writer.finished


def test_two_processes_do_not_write_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynnc.runtime.weights.packedwriter.LOCK_SECONDS", 0.1)
    with opened(tmp_path / "out"), pytest.raises(OutputError, match="being written by another process"):
        opened(tmp_path / "out")
    opened(tmp_path / "out").close()


def test_an_existing_folder_is_replaced_only_by_force(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as writer:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        for weight in WEIGHTS:
            write(writer, weight, contents())
        with pytest.raises(OutputError, match="exists already"):
            publish(writer)
    with pytest.raises(OutputError, match="exists already"):
        opened(tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()
    with opened(tmp_path / "out", force=True) as writer:
        assert set(writer.finished) == {"gate", "experts"}
        publish(writer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (tmp_path / "out" / "mine").exists()
    assert not (tmp_path / "out" / "lock").exists()


@dataclass(frozen=True)
class Misuse:
    name: str
    written: dict[str, int]


MISUSES = (Misuse("too few", {"experts.data": 32}), Misuse("nothing", {}))


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.name)
def test_a_weight_is_filled(tmp_path: Path, case: Misuse) -> None:
    with opened(tmp_path / "out") as writer, pytest.raises(ValueError, match="not filled"):
        writer.finish(Finished("experts", {}, ""), case.written)


@pytest.mark.parametrize("offset", [-32, 16, 288])
def test_an_array_is_not_left(tmp_path: Path, offset: int) -> None:
    with opened(tmp_path / "out") as writer, pytest.raises(ValueError, match="not within an array of 288"):
        writer.array("experts.data").write(offset, contents()["experts.data"])


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "out") as writer:
        write(writer, NARROW, contents())

        def no_space(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", no_space)
            with pytest.raises(OutputError, match=r"No space left on device.*same command again"):
                writer.array("experts.data").write(0, contents()["experts.data"][0])
    with opened(tmp_path / "out") as writer:
        assert list(writer.finished) == ["gate"]
