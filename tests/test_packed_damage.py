"""Packed folders whose data or side files were changed: nobody reads wrong values from them without being told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, edit_tensors
from click.testing import CliRunner
from packing import DIVIDED, packed_to, with_formats, written
from safetensors.torch import load_file

from lynnc.cli.main import cli
from lynnc.errors import LynncError, WeightError
from lynnc.runtime.weights.inspection import inspect_folder
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.runtime.weights.unfinished import JOURNAL, REQUEST
from lynnc.runtime.weights.unpack import unpack
from lynnc.tensors import Format

DEEP = "[" * 200_000
HUGE = 3.4028234e38


def flip_bit(folder: Path, array: str) -> None:
    path = next(folder.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8 : 8 + length])[array]["data_offsets"]
    raw[8 + length + (start + end) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "array",
    ["embed.data", "layers.0.a_log.data", *(f"layers.1.experts_up_weight.{name}" for name in ("data", "divisor"))],
)
def test_one_wrong_bit_is_noticed_wherever_values_are_read(array: str, tmp_path: Path) -> None:
    written(tmp_path, flavour=DIVIDED)
    folder = packed_to(tmp_path)
    weight = array.rpartition(".")[0]
    open_packed(folder).check(weight)
    flip_bit(folder, array)
    packed, says = open_packed(folder), rf"safetensors: {re.escape(array)} was changed since packing"
    for read in (packed.check, packed.values, lambda name: packed.matrix(name, 0, 0)):
        with pytest.raises(WeightError, match=says):
            read(weight)
    packed.values("lm_head")
    with pytest.raises(WeightError, match=says):
        unpack(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@dataclass(frozen=True)
class Experts:
    """What the index says of the experts of layers, of which layer 0 has 6."""

    name: str
    layers: dict[str, list[int]]
    is_right: bool = False


EXPERTS = (
    Experts("right", {"0": [0, 1, 2, 4, 8, 9]}, is_right=True),
    Experts("too few", {"0": [0, 1, 2, 4, 8]}),
    Experts("twice", {"0": [0, 1, 2, 4, 4, 8]}),
    Experts("descending", {"0": [9, 8, 4, 2, 1, 0]}),
    Experts("below zero", {"0": [-1, 0, 1, 2, 3, 4]}),
    Experts("no such layer", {"4": [0, 1, 2, 4, 8, 9]}),
    Experts("no number", {"00": [0, 1, 2, 4, 8, 9]}),
)


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case.name)
def test_experts_of_the_index(case: Experts, tmp_path: Path) -> None:
    written(tmp_path)
    folder = packed_to(tmp_path)
    edit_json(folder / INDEX_FILE, lambda index: index.update(experts=case.layers))
    if case.is_right:
        assert open_packed(folder)
        return
    with pytest.raises(WeightError, match=r"the experts of layer \d+ are not those of its model"):
        open_packed(folder)


@dataclass(frozen=True)
class Text:
    """What a JSON file holds in place of what it should."""

    name: str
    content: bytes


TEXTS = (Text("deep", DEEP.encode()), Text("bytes", b"\xff\xfe"), Text("long number", b'{"a":' + b"9" * 5000 + b"}"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_broken_files_of_a_packed_folder(text: Text, name: str, tmp_path: Path) -> None:
    written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    (folder / name).write_bytes(text.content)
    with pytest.raises(WeightError, match=rf"{name}.*pack the checkpoint again"):
        unpack(folder, tmp_path / "out")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name)
@pytest.mark.parametrize("name", [REQUEST, JOURNAL])
def test_broken_files_of_an_unfinished_run(text: Text, name: str, tmp_path: Path) -> None:
    """Inspecting such a folder, and a whole one beside which it lies."""
    written(tmp_path, "tiny-full")
    partial = tmp_path / ".packed.partial"
    partial.mkdir()
    (partial / REQUEST).write_text('{"draft": {"weights": {"embed": {"arrays": [{"bytes": 4}]}}}}')
    (partial / name).write_bytes(text.content)
    with pytest.raises(LynncError):
        inspect_folder(partial)


def test_a_folder_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"cannot be read"):
        inspect_folder(tmp_path / ("x" * 300))


def with_huge_value(folder: Path, name: str) -> None:
    """A checkpoint in FP32 with one value that BF16 cannot hold."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].float()
        tensors[name].view(-1)[37] = HUGE

    edit_tensors(written(folder, "tiny-full").folder, change)


def test_values_beyond_bf16_are_not_made_infinite(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    with_huge_value(tmp_path, name)
    folder = packed_to(tmp_path, model=with_formats("tiny-full", attention_in=Format.NVFP4))
    with pytest.raises(WeightError, match=rf"^{re.escape(name)} holds a value too large for BF16: use --dtype f32"):
        unpack(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    unpack(folder, tmp_path / "exact", "f32")
    values = load_file(next((tmp_path / "exact").glob("*.safetensors")))[name]
    assert bool(values.isfinite().all()) and float(values.abs().max()) > 3.39e38


@dataclass(frozen=True)
class Nest:
    """A change of names around ``packed`` and ``out`` after which replacing ``out`` would take what is read."""

    name: str
    arrange: Callable[[Path], Path]
    """Gives the packed folder to read."""


def inside(folder: Path) -> Path:
    return (folder / "packed").rename(folder / "out" / "packed")


def by_link(folder: Path) -> Path:
    inside(folder)
    (folder / "link").symlink_to("out/packed")
    return folder / "link"


@pytest.mark.parametrize("nest", [Nest("inside", inside), Nest("by link", by_link)], ids=lambda nest: nest.name)
def test_force_does_not_take_what_is_read(nest: Nest, tmp_path: Path) -> None:
    written(tmp_path, "tiny-full")
    unpack(packed_to(tmp_path), tmp_path / "out")
    read = nest.arrange(tmp_path)
    result = CliRunner().invoke(cli, ["unpack", str(read), "-o", str(tmp_path / "out"), "--force"])
    assert result.exit_code == 2 and "will not be replaced" in result.stderr and result.stderr.count("\n") == 1
    assert open_packed(read)


def test_an_output_through_itself_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    for index, typed in enumerate(("out/../out", ".", "sub/..")):
        unpack(folder, tmp_path / "out", force=index > 0)
        (tmp_path / "out" / "left").touch()
        monkeypatch.chdir(tmp_path if "out" in typed else tmp_path / "out")
        unpack(folder, Path(typed), force=True)
        assert not (tmp_path / "out" / "left").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out", "packed"]


@pytest.mark.parametrize("size", ["inf", "nan", "1e300", "0", "-1"])
def test_sizes_of_shards_that_are_none(size: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["unpack", "packed", "-o", str(tmp_path / "out"), "--shard-size", size])
    assert result.exit_code == 2 and "--shard-size" in result.stderr and "Traceback" not in result.stderr
