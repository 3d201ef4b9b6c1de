"""Packed folders that were damaged, killed while being written, or exist; and what verifying finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from checkpoints import Flavour, edit_json, edit_tensors
from packing import DIVIDED, Stopped, pack_some, packed_to, written
from safetensors.torch import save_file

from lynnc.errors import OutputError, WeightError
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.unfinished import partial_folder
from lynnc.runtime.weights.verify import verify


@dataclass(frozen=True)
class Damage:
    """A change of one array of a packed folder, and what verifying says of it."""

    array: str
    says: str


DAMAGES = (
    Damage("layers.1.experts_up_weight.data", r"experts\.\d+\.(gate|up)_proj.*experts_up_weight\.data"),
    Damage("layers.1.experts_up_weight.scale", r"experts_up_weight\.scale"),
    Damage("layers.1.experts_down_weight.global", r"experts_down_weight\.global"),
    Damage("layers.1.experts_down_weight.divisor", r"experts_down_weight\.divisor"),
    Damage("layers.0.a_log.data", r"A_log.*a_log\.data"),
    Damage("embed.data", r"embed_tokens\.weight.*embed\.data"),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.array)
def test_verifying_finds_one_wrong_bit(damage: Damage, tmp_path: Path) -> None:
    made = written(tmp_path, flavour=DIVIDED)
    folder = packed_to(tmp_path)
    path = next(folder.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8 : 8 + length])[damage.array]["data_offsets"]
    raw[8 + length + (start + end) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightError, match=damage.says):
        verify(made.folder, folder)


def test_verifying_with_another_checkpoint(tmp_path: Path) -> None:
    made = written(tmp_path)
    folder = packed_to(tmp_path)
    edit_tensors(made.folder, lambda tensors: tensors["lm_head.weight"].neg_())
    with pytest.raises(WeightError, match=r"lm_head"):
        verify(made.folder, folder)


@dataclass(frozen=True)
class Folder:
    """A packed folder that was damaged as a whole."""

    name: str
    says: str
    change: Callable[[Path], Any]


def shorten(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


FOLDERS = (
    Folder("no index", "is not a packed folder", lambda f: (f / "lynnc-weights.json").unlink()),
    Folder("no shard", "is missing: copy", lambda f: next(f.glob("*.safetensors")).unlink()),
    Folder("short shard", r"has \d+ bytes and lynnc-weights.json says \d+", shorten),
    Folder("schema", "has schema 99", lambda f: edit_json(f / "lynnc-weights.json", lambda i: i.update(schema=99))),
    Folder("layout", "has layout old", lambda f: edit_json(f / "lynnc-weights.json", lambda i: i.update(layout="old"))),
    Folder("field", "is damaged", lambda f: edit_json(f / "lynnc-weights.json", lambda i: i.pop("weights") and None)),
    Folder(
        "other shard",
        "belongs to another packed folder",
        lambda f: edit_json(f / "lynnc-weights.json", lambda i: i["source"].update(digest="1" * 64)),
    ),
    Folder(
        "path",
        "which is not in its folder",
        lambda f: edit_json(f / "lynnc-weights.json", lambda i: i["files"].append("../secret")),
    ),
)


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_a_damaged_packed_folder_is_refused(case: Folder, tmp_path: Path) -> None:
    written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    open_packed(folder)
    case.change(folder)
    with pytest.raises(WeightError, match=case.says):
        open_packed(folder)


def test_existing_output_and_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    with pytest.raises(OutputError, match="exists already"):
        packed_to(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(OutputError, match="is not a packed folder and will not be replaced"):
        pack(PackRequest(tmp_path / "checkpoint", tmp_path / "mine", force=True))
    packed_to(tmp_path, force=True)
    assert open_packed(folder)

    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(OutputError, match=r"needs 0\.\d MB and .* has 0\.0 MB free"):
        packed_to(tmp_path, force=True)


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """SIGKILL after some weights; the second run keeps them, and the result is the same to the byte."""
    written(tmp_path)
    whole = shard_bytes(packed_to(tmp_path))
    command = [sys.executable, "-P", "-m", "lynnc.cli", "pack", "checkpoint", "-o", "again"]
    journal = partial_folder(tmp_path / "again") / "journal.jsonl"
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.is_file() or journal.read_text().count("\n") < 3):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "again").exists()
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "weights were there already" in second.stderr
    assert shard_bytes(tmp_path / "again") == whole
    assert not partial_folder(tmp_path / "again").exists()


def test_another_option_begins_anew(tmp_path: Path) -> None:
    made = written(tmp_path)

    def stop(done: int, total: int, name: str) -> None:
        if name == "layers.2.out_weight":
            raise Stopped

    with pytest.raises(Stopped):
        pack(PackRequest(made.folder, tmp_path / "packed"), stop)
    with pytest.raises(Stopped):
        pack(PackRequest(made.folder, tmp_path / "packed"), stop)
    search = pack(PackRequest(made.folder, tmp_path / "packed", search=True))
    assert search.kept_weights == 0
    verify(made.folder, tmp_path / "packed")


def move_in_the_index(folder: Path) -> None:
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update(twice()))


def twice() -> dict[str, str]:
    return {"model.embed_tokens.weight": "more.safetensors"}


def change_and_keep_the_time(folder: Path) -> None:
    path = sorted(folder.glob("model*.safetensors"))[0]
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [move_in_the_index, change_and_keep_the_time])
def test_a_changed_checkpoint_begins_anew(change: Callable[[Path], None], tmp_path: Path) -> None:
    """What was finished from other tensors must not be mixed with these."""
    made = written(tmp_path, flavour=Flavour("plain", shards=2))
    table = {"model.embed_tokens.weight": torch.zeros(384, 128, dtype=torch.bfloat16)}
    save_file(table, made.folder / "more.safetensors")
    pack_some(made.folder, tmp_path / "packed", 5)
    change(made.folder)
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    assert report.kept_weights == 0
    verify(made.folder, tmp_path / "packed")


def test_a_stopped_run_keeps_what_it_finished(tmp_path: Path) -> None:
    made = written(tmp_path)
    pack_some(made.folder, tmp_path / "packed", 5)
    journal = partial_folder(tmp_path / "packed") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"weight": "unknown", "digests": {}, "source": ""}\n\xff\n')
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    assert report.kept_weights == 5
    whole = pack(PackRequest(made.folder, tmp_path / "whole"))
    assert whole.index == report.index


def test_files_of_others_are_not_removed(tmp_path: Path) -> None:
    made = written(tmp_path, "tiny-full")
    partial = partial_folder(tmp_path / "packed")
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"thesis\.txt is no file of lynnc's, and would have to go: move it away"):
        packed_to(tmp_path)
    assert (partial / "thesis.txt").read_text() == "mine"
    assert made.folder.is_dir()


def test_what_is_read_is_never_replaced(tmp_path: Path) -> None:
    made = written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    inner = made.folder.rename(folder / "checkpoint")
    with pytest.raises(OutputError, match="which is read, and will not be replaced"):
        pack(PackRequest(inner, folder, force=True))
    assert inner.is_dir()


def test_an_output_that_goes_through_itself(tmp_path: Path) -> None:
    made = written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    pack(PackRequest(made.folder, folder / ".." / "packed", force=True))
    assert open_packed(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "packed"]


def test_a_run_that_waits_for_one_that_ends(tmp_path: Path) -> None:
    """The second opens the lock of the first, which then publishes and is gone: the second says that the folder is
    there, and touches nothing."""
    made = written(tmp_path, "tiny-full")
    second: list[BaseException] = []

    def start_second(done: int, total: int, name: str) -> None:
        if not threads and done > total // 2:
            threads.append(Thread(target=run_second))
            threads[0].start()

    def run_second() -> None:
        try:
            pack(PackRequest(made.folder, tmp_path / "packed"))
        except OutputError as error:
            second.append(error)

    threads: list[Thread] = []
    pack(PackRequest(made.folder, tmp_path / "packed"), start_second)
    threads[0].join()
    assert second and "exists already" in str(second[0])
    verify(made.folder, tmp_path / "packed")
    assert not partial_folder(tmp_path / "packed").exists()
