import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lynnc.artifact import ARTIFACT_SCHEMA, Artifact, Parameter, digest
from lynnc.errors import CompileError, OutputError
from lynnc.store import Store, default_store_path

KEY = "ab" * 32
CUBIN, PTX = b"\x7fELF" + bytes(50_000), b"// ptx\n" * 3000


def artifact(key: str = KEY) -> Artifact:
    return Artifact(
        key=key,
        symbol="kernel",
        arch="sm_90a",
        num_warps=4,
        threads=128,
        shared_bytes=1024,
        registers=40,
        spill_bytes=0,
        global_scratch_bytes=0,
        global_scratch_align=1,
        profile_scratch_bytes=0,
        profile_scratch_align=1,
        pdl=True,
        parameters=(Parameter("x", "*bf16"), Parameter("global_scratch", "*i8", hidden=True)),
        triton="3.9.0",
        ptxas="13.4.59",
        cubin_sha256=digest(CUBIN),
        ptx_sha256=digest(PTX),
    )


def filled(folder: Path) -> tuple[Store, Artifact]:
    store = Store(folder)
    return store, store.save(artifact(), CUBIN, PTX)


def test_default_path() -> None:
    assert default_store_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/lynnc/store")
    assert default_store_path({"HOME": "/h"}) == default_store_path({"HOME": "/h", "XDG_CACHE_HOME": "relative"})
    assert default_store_path({"HOME": "/h"}) == Path("/h/.cache/lynnc/store")


def test_json_round_trip() -> None:
    values = json.loads(json.dumps(artifact().to_json()))
    assert values["schema"] == ARTIFACT_SCHEMA
    assert Artifact.from_json(values) == artifact()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 0},
        {"schema": None},
        {"extra": 1},
        {"registers": "40"},
        {"pdl": 1},
        {"parameters": [{}]},
        {"parameters": {}},
    ],
)
def test_json_of_another_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="artifact"):
        Artifact.from_json({**artifact().to_json(), **change})


def test_save_and_load(tmp_path: Path) -> None:
    store, saved = filled(tmp_path / "new" / "store")
    loaded = Store(store.root).load(KEY)
    assert loaded == saved and loaded is not None
    assert loaded.read_cubin() == CUBIN and loaded.ptx_path.read_bytes() == PTX
    assert store.load("cd" * 32) is None
    assert len(list(saved.folder.iterdir())) == 3


def test_a_cubin_that_goes_away_after_loading(tmp_path: Path) -> None:
    _, saved = filled(tmp_path)
    saved.cubin_path.unlink()
    with pytest.raises(CompileError, match="removed or changed during this command: run it again"):
        saved.read_cubin()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, become_folder, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("suffix", ["cubin", "ptx", "json"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, suffix: str, damage: Callable[[Path], None]) -> None:
    store, saved = filled(tmp_path)
    path = saved.folder / f"{KEY}.{suffix}"
    damage(path)
    if (suffix, damage) == ("json", truncate):
        path.write_text(path.read_text()[:-5])
    assert store.load(KEY) is None
    assert store.save(artifact(), CUBIN, PTX) == store.load(KEY)


def test_an_older_schema_and_a_foreign_entry_are_misses(tmp_path: Path) -> None:
    store, saved = filled(tmp_path)
    path = saved.folder / f"{KEY}.json"
    whole = path.read_text()
    for text in (
        whole.replace(f'"schema": {ARTIFACT_SCHEMA}', '"schema": 0'),
        whole.replace(KEY, "cd" * 32),
        "[]",
        "null",
        "[" * 100_000,
        "\udcff",
    ):
        path.write_text(text, errors="surrogateescape")
        assert store.load(KEY) is None
    path.write_text(whole)
    assert store.load(KEY) == saved


def test_an_unwritable_store_warns_once_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store")
    with pytest.warns(UserWarning, match=r"The store .* cannot be written \(Not a directory\).*--store") as caught:
        for key in (KEY, "cd" * 32):
            saved = store.save(artifact(key), CUBIN, PTX)
            assert store.load(key) == saved
    assert len(caught) == 1
    assert saved.read_cubin() == CUBIN


def test_a_read_only_store_is_read_without_a_warning(tmp_path: Path) -> None:
    store, saved = filled(tmp_path)
    (tmp_path / "cd").write_text("no folder")
    messages: list[str] = []
    reader = Store(store.root, warn=messages.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.load(KEY) == saved
        assert messages == []
        reader.save(artifact("cd" * 32), CUBIN, PTX)
    assert len(messages) == 1
    assert reader.load(KEY) == saved
    assert reader.load("cd" * 32) is not None


@pytest.mark.parametrize("fallback", ["file/x", None])
def test_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: str | None) -> None:
    def make_folder(prefix: str) -> str:
        if fallback is None:
            raise OSError(28, "No space left on device")
        return str(tmp_path / fallback)

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("lynnc.store.tempfile.mkdtemp", make_folder)
    with pytest.raises(OutputError, match="--store"):
        Store(tmp_path / "file", warn=lambda message: None).save(artifact(), CUBIN, PTX)


def test_a_file_system_that_refuses_to_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "replace", refuse)
    store, saved = filled(tmp_path)
    assert store.save(replace(artifact(), registers=41), CUBIN, PTX).registers == 41
    assert store.load(KEY) is not None
    assert len(list(saved.folder.iterdir())) == 3


def test_two_processes_write_one_entry(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from test_store import *\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for _ in range(150):\n"
        "    store.save(artifact(), CUBIN, PTX)\n"
        "    assert store.load(KEY).read_cubin() == CUBIN\n"
    )
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_a_hundred_look_ups_are_quick(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = [digest(bytes([index])) for index in range(100)]
    for key in keys:
        store.save(artifact(key), CUBIN, PTX)
    start = time.perf_counter()
    assert all(store.load(key) for key in keys)
    assert time.perf_counter() - start < 0.2
