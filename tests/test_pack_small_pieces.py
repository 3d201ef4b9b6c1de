"""Loops over windows and pieces, with pieces so small that tiny tensors take several, the last one not full."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoints import edit_tensors, write_checkpoint
from packing import DIVIDED, PLAIN, pack_some, packed_to, written
from reference import Case
from safetensors.torch import load_file

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints import source as source_module
from lynnc.runtime.checkpoints.source import open_source
from lynnc.runtime.weights import comparison, packedwriter, texttensors
from lynnc.runtime.weights.comparison import compare
from lynnc.runtime.weights.matrix import PlainMatrix
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.unfinished import partial_folder
from lynnc.runtime.weights.unpack import unpack
from lynnc.runtime.weights.verify import verify

ROWS, COLUMNS = 11, 32
WINDOWS = pytest.mark.parametrize("values", [1, 3 * COLUMNS, 3 * COLUMNS + 1, ROWS * COLUMNS])


@WINDOWS
@pytest.mark.parametrize("row", [0, 2, 3, ROWS - 1])
def test_comparing_sees_every_row_once(values: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "VALUES", values)
    expected = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = expected.clone()
    found[row, 7] += 1
    assert compare(PlainMatrix(expected), PlainMatrix(expected.clone()))[0]
    is_exact, sums = compare(PlainMatrix(expected), PlainMatrix(found))
    a, b = expected.double(), found.double()
    assert not is_exact and sums.elements == ROWS * COLUMNS
    totals = (sums.squares, sums.found_squares, sums.products, sums.error)
    wanted = tuple(map(float, ((a * a).sum(), (b * b).sum(), (a * b).sum(), ((a - b) ** 2).sum())))
    assert totals == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("values", [1, 200])
def test_verifying_row_by_row_says_the_same(values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(tmp_path, "tiny-full")
    whole = verify(made.folder, packed_to(tmp_path))
    monkeypatch.setattr(comparison, "VALUES", values)
    pieces = verify(made.folder, tmp_path / "packed")
    for one, other in zip(whole.classes, pieces.classes, strict=True):
        assert (one.tensor_class, one.exact_elements, one.rounded_elements, one.worst) == (
            other.tensor_class,
            other.exact_elements,
            other.rounded_elements,
            other.worst,
        )
        assert (one.cosine, one.relative_l2) == pytest.approx((other.cosine, other.relative_l2), rel=1e-12)


def test_digests_are_of_all_bytes_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedwriter, "READ_BYTES", 1000)
    written(tmp_path, "tiny-full", DIVIDED)
    packed = open_packed(packed_to(tmp_path))
    checked = 0
    for shard in packed.index.shards:
        for name, values in load_file(packed.folder / shard.name).items():
            if name in packed.index.digests:
                raw = values.contiguous().view(torch.uint8).numpy().tobytes()
                assert packed.index.digests[name] == xxhash.xxh3_128_hexdigest(raw), name
                checked += len(raw) % 1000 != 0 and len(raw) > 1000
    assert checked > 5


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_wrong_byte_anywhere_in_a_finished_array(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first piece that is read, too: the array is written again."""
    made = written(tmp_path, "tiny-full")
    whole = {path.name: path.read_bytes() for path in packed_to(tmp_path).iterdir()}
    monkeypatch.setattr(packedwriter, "READ_BYTES", 999)
    pack_some(made.folder, tmp_path / "again", 1)
    partial = partial_folder(tmp_path / "again")
    table = made.values["model.embed_tokens.weight"].bfloat16().view(torch.uint8).numpy().tobytes()
    path = next(partial.glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    start = raw.find(table)
    assert start > 0 and '"embed"' in (partial / "journal.jsonl").read_text()
    raw[start + place % len(table)] ^= 1
    path.write_bytes(raw)
    report = pack(PackRequest(made.folder, tmp_path / "again"))
    assert report.kept_weights == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == whole


HEADERS = pytest.param(0, id="headers")


@pytest.mark.parametrize("first", [pytest.param(1, id="arrays"), HEADERS])
def test_writes_that_the_system_cuts_short(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write, from byte ``first`` of a file on, may take fewer bytes than it was given; the rest must follow."""
    made = written(tmp_path, "tiny-full")
    whole = {path.name: path.read_bytes() for path in packed_to(tmp_path).iterdir()}
    full = os.pwrite

    def cut_short(file: int, data: memoryview, offset: int) -> int:
        return full(file, data[:7] if offset >= first else data, offset)

    monkeypatch.setattr("os.pwrite", cut_short)
    pack(PackRequest(made.folder, tmp_path / "again"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == whole


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_tied_tables_are_compared_to_the_last_row(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_COMPARED_ROWS", rows)
    made = write_checkpoint(tmp_path / "checkpoint", Case("tiny-dense", tied=True), PLAIN)
    table = made.values["model.embed_tokens.weight"].bfloat16()
    edit_tensors(made.folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    with closing(open_source(made.folder, made.spec)) as source:
        source.check_tied()
    for row in (0, 5, len(table) - 1):
        other = table.clone()
        other[row, -1] += 1
        edit_tensors(made.folder, lambda tensors, other=other: tensors.update({"lm_head.weight": other}))
        with (
            closing(open_source(made.folder, made.spec)) as source,
            pytest.raises(WeightError, match=r"lm_head\.weight differs"),
        ):
            source.check_tied()


@pytest.mark.parametrize("values", [1, 1000])
def test_unpacking_row_by_row(values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(tmp_path, "tiny-dense", DIVIDED)
    packed_to(tmp_path)
    monkeypatch.setattr(texttensors, "WINDOW", values)
    unpack(tmp_path / "packed", tmp_path / "out", "f32")
    found = {n: t for path in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(path).items()}
    assert len(found) == len(made.values)
    for name, expected in made.values.items():
        tensor = found[name.replace("model.language_model.", "model.")]
        assert torch.equal(tensor.flatten(), expected.flatten().float()), name
