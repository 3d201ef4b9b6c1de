"""Checkpoint folders: what is found in them, what is refused and in which words, and reading parts of tensors."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointmetadata import write_json
from checkpoints import INDEX, edit_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lynnc.errors import LynncError, WeightError
from lynnc.hfconfig import EXPERT_SPEC
from lynnc.runtime.checkpoints.checkpoint import MODELOPT_FILE, open_checkpoint
from lynnc.runtime.checkpoints.tensorreader import TensorReader

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
"""Names that the file format gives to types."""


def folder_of(path: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> Path:
    """A folder with these shards, and an index if there is a map."""
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", {"model_type": "qwen3_moe"})
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if weight_map is not None:
        write_json(path / INDEX, {"weight_map": weight_map})
    return path


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    """A shard with a header that safetensors would not write: an object, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


TWO_SHARDS = {"a.safetensors": {"x": ones(2, 3)}, "b.safetensors": {"y": ones(4, dtype=torch.float32)}}
BOTH = {"x": "a.safetensors", "y": "b.safetensors"}


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of(tmp_path, TWO_SHARDS))
    assert checkpoint.config == {"model_type": "qwen3_moe"}
    assert sorted(checkpoint.tensors) == ["x", "y"]
    x = checkpoint.tensors["x"]
    assert (x.dtype, x.shape, x.shard, x.bytes) == ("BF16", (2, 3), "a.safetensors", 12)
    assert checkpoint.tensors["y"].bytes == 16
    assert [(shard.name, shard.bytes) for shard in checkpoint.shards] == [
        (name, (tmp_path / name).stat().st_size) for name in TWO_SHARDS
    ]
    assert not checkpoint.unlisted and not checkpoint.side_files and checkpoint.expert_counts is None


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(NAMES)), st.lists(st.integers(0, 5), max_size=4)), max_size=5))
def test_headers_agree_with_safetensors(tmp_path: Path, wanted: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = {f"t{number}": torch.zeros(shape).to(dtype) for number, (dtype, shape) in enumerate(wanted)}
    folder_of(tmp_path, {"model.safetensors": tensors})
    found = open_checkpoint(tmp_path).tensors
    assert {name: (tensor.dtype, list(tensor.shape), tensor.bytes) for name, tensor in found.items()} == {
        name: (NAMES[t.dtype], list(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_shard_cut_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    folder_of(tmp_path, TWO_SHARDS, BOTH)
    whole = (tmp_path / "b.safetensors").read_bytes()
    kept = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "b.safetensors").write_bytes(whole[:kept])
    with pytest.raises(WeightError, match=r"b\.safetensors is truncated") as found:
        open_checkpoint(tmp_path)
    assert str(kept) in str(found.value)


def test_metadata_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    folder_of(tmp_path, TWO_SHARDS)
    program = (
        "import sys; from pathlib import Path; from lynnc.runtime.checkpoints.checkpoint import open_checkpoint; "
        "from lynnc.runtime.checkpoints.recognise import recognise; "
        "print(recognise(open_checkpoint(Path(sys.argv[1]))).detail, {'torch', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Hugging Face, BF16 and F32 set()"


@pytest.mark.parametrize(("listed", "stale"), [("b", "a"), ("a", "b"), ("b", "c"), ("a", "c")])
def test_the_index_wins_over_a_second_copy(listed: str, stale: str, tmp_path: Path) -> None:
    """Whether the copy that is not meant lies in an earlier or a later shard."""
    shards: dict[str, dict[str, torch.Tensor]] = {
        f"{name}.safetensors": {f"x{name}": ones(2, 3)} for name in sorted({listed, stale, "a"})
    }
    places = {f"x{file[0]}": file for file in shards} | {"y": f"{listed}.safetensors"}
    shards[f"{stale}.safetensors"]["y"] = ones(9)
    shards[f"{listed}.safetensors"]["y"] = ones(4)
    checkpoint = open_checkpoint(folder_of(tmp_path, shards, places))
    assert checkpoint.tensors["y"].shard == f"{listed}.safetensors" and checkpoint.tensors["y"].shape == (4,)
    assert not checkpoint.unlisted
    with TensorReader(checkpoint) as reader:
        assert reader.read("y").shape == (4,)


def test_tensors_that_the_index_leaves_out_are_told(tmp_path: Path) -> None:
    shards = {**TWO_SHARDS, "c.safetensors": {"z": ones(1)}}
    shards["a.safetensors"] = {"x": ones(2, 3), "w": ones(1)}
    checkpoint = open_checkpoint(folder_of(tmp_path, shards, BOTH))
    assert checkpoint.unlisted == {"w": "a.safetensors", "z": "c.safetensors"}
    assert sorted(checkpoint.tensors) == ["x", "y"]


def test_a_shard_may_be_a_link(tmp_path: Path) -> None:
    """Download caches keep contents in one place and link to them."""
    folder = folder_of(tmp_path / "snapshot", TWO_SHARDS, BOTH)
    (folder / "a.safetensors").rename(tmp_path / "blob")
    (folder / "a.safetensors").symlink_to(tmp_path / "blob")
    assert open_checkpoint(folder).tensors["x"].shape == (2, 3)


def test_experts_of_the_side_file(tmp_path: Path) -> None:
    folder_of(tmp_path, TWO_SHARDS)
    side = {"hf_vanilla_compatible": False, "remaining_experts_by_layer": {"0": 6, "1": 5}}
    write_json(tmp_path / "lynn_engine_variable_expert_spec.json", side)
    assert open_checkpoint(tmp_path).expert_counts == {"0": 6, "1": 5}


def test_the_header_digest_tells_shards_apart(tmp_path: Path) -> None:
    digests = set()
    for number, tensors in enumerate(({"x": ones(2, 3)}, {"x": ones(3, 2)}, {"y": ones(2, 3)})):
        checkpoint = open_checkpoint(folder_of(tmp_path / str(number), {"model.safetensors": tensors}))
        digests.add(checkpoint.shards[0].header_digest)
    assert len(digests) == 3


@dataclass(frozen=True)
class Bad:
    """A change of a folder of two shards and an index, and what its refusal says."""

    label: str
    change: Callable[[Path], object]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.label


def entry(dtype: str = "BF16", shape: Any = (2, 3), offsets: Any = (0, 12)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw(header: Any, size: int = 12) -> Callable[[Path], object]:
    return lambda folder: write_raw(folder / "a.safetensors", header, bytes(size))


def remap(**weight_map: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / INDEX, lambda index: index["weight_map"].update(weight_map))


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"x": ones(1)}, folder / "b.safetensors")


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


DEEP, LONG = b"[" * 200_000, b"9" * 5000
BAD = (
    Bad("deep-header", raw(DEEP), ("a.safetensors is damaged", "not JSON")),
    Bad("long-number", raw(b'{"x": ' + LONG + b"}"), ("a.safetensors is damaged", "not JSON")),
    Bad("huge", raw({"x": entry("U8", (10**4000,), (0, 10**4000))}), ("entry of x is not understood",)),
    Bad("pipe", instead("a.safetensors", os.mkfifo), ("a.safetensors is no regular file",)),
    Bad("other-pipe", lambda f: os.mkfifo(f / "c.safetensors"), ("c.safetensors is no regular file",)),
    Bad("shard-folder", instead("a.safetensors", Path.mkdir), ("a.safetensors is no regular file",)),
    Bad("config-pipe", instead("config.json", os.mkfifo), ("config.json is no regular file",)),
    Bad("index-folder", instead(INDEX, Path.mkdir), (f"{INDEX} is no regular file",)),
    Bad("opt-folder", lambda f: (f / MODELOPT_FILE).mkdir(), (f"{MODELOPT_FILE} is no regular file",)),
    Bad("experts-folder", lambda f: (f / EXPERT_SPEC).mkdir(), (f"{EXPERT_SPEC} is no regular file",)),
    Bad("long-name", remap(x=f"{'a' * 300}.safetensors"), ("cannot be read (File name too long)",)),
    Bad("deep-config", lambda f: (f / "config.json").write_bytes(DEEP), ("config.json", "nested too deeply")),
    Bad("long-config", lambda f: (f / "config.json").write_bytes(LONG), ("config.json", "too many digits")),
    Bad("missing-shard", lambda f: (f / "b.safetensors").unlink(), ("lacks the shard b.safetensors", "holds y")),
    Bad("missing-tensor", remap(z="a.safetensors"), ("a.safetensors lacks z", INDEX)),
    Bad("twice-without-index", without_index, ("holds x twice", "a.safetensors and b.safetensors", "remove")),
    Bad("outside", remap(x="../a.safetensors"), ("places x", "outside of the folder")),
    Bad("absolute", remap(x="/a.safetensors"), ("places x", "outside of the folder")),
    Bad("backslash", remap(x="..\\a.safetensors"), ("places x", "no *.safetensors file")),
    Bad("no-text", remap(x=3), ("places x in 3", "no *.safetensors file")),
    Bad("another-type", remap(x="a.bin"), ("places x in 'a.bin'", "no *.safetensors file")),
    Bad("empty-index", lambda f: write_json(f / INDEX, {"weight_map": {}}), (INDEX, "holds no weight_map")),
    Bad("index-no-json", lambda f: (f / INDEX).write_text("{"), (INDEX, "is not JSON")),
    Bad("config-missing", lambda f: (f / "config.json").unlink(), ("config.json",)),
    Bad("config-list", lambda f: write_json(f / "config.json", []), ("config.json", "not an object")),
    Bad("longer", lambda f: (f / "a.safetensors").open("ab").write(b"x"), ("a.safetensors is damaged", "describes")),
    Bad("empty-file", lambda f: (f / "a.safetensors").write_bytes(b""), ("a.safetensors is truncated", "0 bytes")),
    Bad("zip", lambda f: (f / "a.safetensors").write_bytes(b"PK\3\4" * 99), ("a.safetensors is no safetensors file",)),
    Bad("no-json", raw(b"{x"), ("a.safetensors is damaged", "not JSON")),
    Bad("not-utf8", raw(b"\xff\xfe{"), ("a.safetensors is damaged", "not JSON")),
    Bad("list", raw([]), ("a.safetensors is damaged", "not an object")),
    Bad("named-twice", raw(b'{"x": {}, "x": {}}'), ("a.safetensors is damaged", "names x twice")),
    Bad("no-offsets", raw({"x": {"dtype": "BF16", "shape": [6]}}), ("entry of x is not understood",)),
    Bad("negative", raw({"x": entry(shape=(-2, -3))}), ("entry of x is not understood",)),
    Bad("backwards", raw({"x": entry(offsets=(12, 0))}), ("entry of x is not understood",)),
    Bad("unknown-type", raw({"x": entry("F7")}), ("a.safetensors holds x with the unknown type F7",)),
    Bad("wrong-size", raw({"x": entry("F32")}), ("x of type F32 and shape [2, 3] has 12 bytes",)),
    Bad("gap", raw({"x": entry(offsets=(4, 16))}, 16), ("the data of x leaves a gap",)),
    Bad("overlap", raw({"x": entry(), "v": entry(offsets=(6, 18))}, 18), ("the data of v overlaps",)),
)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_refusals(bad: Bad, tmp_path: Path) -> None:
    folder_of(tmp_path, TWO_SHARDS, BOTH)
    open_checkpoint(tmp_path)
    bad.change(tmp_path)
    with pytest.raises(WeightError) as found:
        open_checkpoint(tmp_path)
    for word in bad.words:
        assert word in str(found.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "holds no *.safetensors but no weights at all"),
        (("config.json", "pytorch_model.bin"), "holds no *.safetensors but pytorch_model.bin"),
        (("model.gguf",), "holds no *.safetensors but model.gguf"),
        ((".hidden.safetensors",), "holds no *.safetensors but no weights at all"),
    ],
)
def test_folders_without_a_checkpoint(files: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(WeightError) as found:
        open_checkpoint(tmp_path)
    assert words in str(found.value) and str(tmp_path) in str(found.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match="is a file"):
        open_checkpoint(tmp_path / "file")
    with pytest.raises(WeightError, match="does not exist"):
        open_checkpoint(tmp_path / "file" / "below")
    with pytest.raises(WeightError, match=r"cannot be read \(File name too long\)"):
        open_checkpoint(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_without_the_right_to_read_it(mode: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", TWO_SHARDS)
    folder.chmod(mode)
    try:
        with pytest.raises(WeightError, match=r"cannot be read \(Permission denied\)"):
            open_checkpoint(folder)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("index", [(), (3,), (3, slice(1, 4)), (slice(2, 5),), (slice(0, 8), slice(0, 1))], ids=str)
def test_parts_equal_slices_of_the_whole(index: tuple[int | slice, ...], tmp_path: Path) -> None:
    values = torch.arange(8 * 6 * 4).reshape(8, 6, 4).bfloat16()
    checkpoint = open_checkpoint(folder_of(tmp_path, {"model.safetensors": {"x": values}}))
    with TensorReader(checkpoint) as reader:
        assert torch.equal(reader.read("x", index), values[index])


def file_pages() -> int:
    """Bytes of mapped files that this process holds in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the files of Linux")
def test_a_part_costs_its_own_bytes_and_close_gives_them_back(tmp_path: Path) -> None:
    size = 4 << 20
    values = torch.ones(16, size, dtype=torch.uint8)
    checkpoint = open_checkpoint(folder_of(tmp_path, {"model.safetensors": {"x": values}}))
    reader = TensorReader(checkpoint)
    reader.read("x", (0, slice(0, 16)))
    before = file_pages()
    part = reader.read("x", (7,))
    assert int(part.sum()) == size
    assert file_pages() - before < 2 * size
    whole = reader.read("x")
    assert int(whole.sum()) == 16 * size
    assert file_pages() - before > 12 * size
    del part, whole
    reader.close()
    assert file_pages() - before < 2 * size
    assert int(reader.read("x", (1,)).sum()) == size


def test_a_shard_that_went_away(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of(tmp_path, TWO_SHARDS, BOTH))
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(LynncError, match=r"a\.safetensors cannot be read at x"), TensorReader(checkpoint) as reader:
        reader.read("x")
