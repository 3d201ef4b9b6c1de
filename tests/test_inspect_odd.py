"""What ``lynnc inspect`` notices and refuses: changed checkpoints, damaged packed folders, runs that were killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, edit_tensors, write_checkpoint
from inspecting import MIXED, NESTED, NVFP4, PLAIN, complaint, inspected, lynnc_cli, rows
from packing import pack_some
from reference import Case

from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.runtime.weights.packedwriter import JOURNAL, REQUEST, partial_folder
from lynnc.runtime.weights.unfinished import find_unfinished


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A plain checkpoint of tiny-moe, and what it is packed to; never changed by a test."""
    folder = tmp_path_factory.mktemp("whole")
    written = write_checkpoint(folder / "checkpoint", Case("tiny-moe"), PLAIN)
    pack(PackRequest(written.folder, folder / "packed", written.spec))
    return folder


@pytest.fixture
def checkpoint(whole, tmp_path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(whole / "checkpoint", tmp_path / "checkpoint"))


@pytest.fixture
def packed(whole, tmp_path) -> Path:
    """A copy of the packed folder that a test may change."""
    return Path(shutil.copytree(whole / "packed", tmp_path / "packed"))


@dataclass(frozen=True)
class Odd:
    """What is done to the plain checkpoint of tiny-moe, and the one remark that it makes."""

    name: str
    change: Callable[[Path], object]
    said: str

    def __str__(self) -> str:
        return self.name


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda found: found.update(values))


def side_file(**counts: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "lynn_engine_variable_expert_spec.json"
        by_layer = {name.removeprefix("layer_"): count for name, count in counts.items()}
        edit_json(path, lambda found: found["remaining_experts_by_layer"].update(by_layer))

    return change


def unlist(folder: Path) -> None:
    """Writes an index that leaves out one tensor."""
    header = (folder / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]).keys() - {"__metadata__", "old.weight"}
    index = {"weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def add_and_unlist(folder: Path) -> None:
    edit_tensors(folder, lambda found: found.update({"old.weight": torch.ones(2)}))
    unlist(folder)


LAYER = "model.layers.2.mlp"
ODD = (
    Odd(
        "left over",
        tensors(lambda t: t.update({f"model.layers.{n}.extra.weight": torch.ones(4, 4) for n in range(5)})),
        "no part of the model takes model.layers.0.extra.weight, model.layers.1.extra.weight, "
        "model.layers.2.extra.weight and 2 more",
    ),
    Odd(
        "an expert too many",
        tensors(lambda t: t.update({f"{LAYER}.experts.4.up_proj.weight": torch.ones(64, 128).bfloat16()})),
        f"no part of the model takes {LAYER}.experts.4.up_proj.weight",
    ),
    Odd("no head", tensors(lambda t: t.pop("lm_head.weight")), "lacks lm_head.weight and the model does not tie it"),
    Odd(
        "experts lost",
        tensors(lambda t: [t.pop(f"{LAYER}.experts.{n}.up_proj.weight") for n in (1, 2)]),
        f"lacks {LAYER}.experts.1.up_proj.weight",
    ),
    Odd(
        "another shape",
        tensors(lambda t: t.update({f"{LAYER}.shared_expert.up_proj.weight": torch.ones(32, 128).bfloat16()})),
        f"{LAYER}.shared_expert.up_proj.weight holds [32, 128], and the model takes 8192 values of it",
    ),
    Odd(
        "side file",
        side_file(layer_1=6, layer_2=3),
        "the side file of experts says 6 in layer 1, whose router has 5 rows (2 such layers: 1-2)",
    ),
    Odd(
        "few experts",
        config(num_experts_per_tok=5),
        "layer 2: fewer experts than the 5 that each token goes to",
    ),
    Odd("side file of more layers", side_file(layer_4=6), "names layers that the model lacks: 4"),
    Odd(
        "no side file",
        lambda folder: (folder / "lynn_engine_variable_expert_spec.json").unlink(),
        "config.json says 7 experts, and routers have 4 to 7 rows",
    ),
    Odd("unlisted", add_and_unlist, "model.safetensors.index.json does not name old.weight, which the shards hold"),
    Odd("another family", config(model_type="llama"), "the model is not understood: "),
    Odd(
        "several formats",
        tensors(lambda t: t.update({f"{LAYER}.shared_expert.up_proj.weight": torch.ones(64, 128)})),
        "the class shared_expert is stored in several formats: bf16 in layers 0-3, f32 in layer 2",
    ),
    Odd(
        "two prefixes",
        tensors(lambda t: t.update({f"{NESTED}norm.weight": torch.ones(128)})),
        "holds the same tensor as",
    ),
)


@pytest.mark.parametrize("case", ODD, ids=str)
def test_what_is_odd(checkpoint, case):
    case.change(checkpoint)
    (remark,) = inspected(checkpoint)["odd"]
    assert case.said in remark
    assert f"odd: {remark}" in lynnc_cli("inspect", checkpoint).stdout


def test_several_missing_tensors_are_one_remark(checkpoint):
    edit_tensors(checkpoint, lambda t: [t.pop(f"{LAYER}.experts.{n}.up_proj.weight") for n in (1, 2, 3)])
    (remark,) = inspected(checkpoint)["odd"]
    assert remark.endswith("(and 2 more)")


def test_notes_of_the_metadata(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", Case("tiny-moe"), MIXED).folder
    for name in ("config.json", "hf_quant_config.json"):
        edit_json(
            folder / name,
            lambda found: (found.get("quantization_config") or found["quantization"]).update(
                {"kv_cache_quant_algo": "FP8"}
            ),
        )
    assert any("keys and values are declared quantised" in remark for remark in inspected(folder)["odd"])


def test_metadata_against_what_is_stored(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", Case("tiny-moe"), NVFP4).folder
    edit_json(folder / "config.json", lambda found: found["quantization_config"]["ignore"].append("re:.*down_proj"))
    (remark,) = inspected(folder)["odd"]
    assert "among the modules that are not quantised" in remark and "more)" in remark


def test_a_tied_head_is_skipped(checkpoint):
    config(tie_word_embeddings=True)(checkpoint)
    found = inspected(checkpoint)
    (skipped,) = found["skipped"]
    assert skipped["tensors"] == 1 and skipped["bytes"] == 2 * 384 * 128 and "embedding table" in skipped["reason"]
    assert not [row for row in found["classes"] if row["tensor_class"] == "lm_head"]


def test_a_format_that_is_not_read_is_still_counted(checkpoint):
    config(quantization_config={"quant_method": "awq", "bits": 4})(checkpoint)
    result = lynnc_cli("inspect", checkpoint)
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("lynnc: warning: this checkpoint cannot be packed: ") and "'awq'" in line
    found = inspected(checkpoint)
    assert "'awq'" in found["refused"] and found["model"]["family"] == "qwen3_5_moe"
    by_type = {key[1]: value for key, value in rows(found).items()}
    assert by_type["f32"] == (3, 12, 48) and by_type["bf16"][2] == 2 * by_type["bf16"][1]
    assert sum(count for count, _, _ in by_type.values()) == 130


# Packed folders


PACKED_ODD = (
    Odd(
        "placeholders",
        lambda folder: edit_json(folder / INDEX_FILE, lambda index: index["digests"].update({"embed.data": "0" * 32})),
        "digests are placeholders (of embed.data)",
    ),
    Odd(
        "another layout",
        lambda folder: edit_json(folder / INDEX_FILE, lambda index: index.update(layout="old-1")),
        "the layout is old-1 and this lynnc reads nvfp4-w64-1",
    ),
    Odd("changed model", lambda folder: (folder / "model.yaml").write_text("name: other"), "model.yaml was changed"),
    Odd(
        "no tokenizer",
        lambda folder: edit_json(folder / INDEX_FILE, lambda index: index["files"].append("t.json")),
        "t.json is listed and missing",
    ),
    Odd("no shard", lambda folder: next(folder.glob("*.safetensors")).unlink(), "cannot be read"),
    Odd("truncated", lambda folder: cut(next(folder.glob("*.safetensors"))), "is truncated"),
    Odd(
        "other weights",
        lambda folder: edit_json(folder / INDEX_FILE, lambda index: index["model"].update(vocabulary=400)),
        "lists other weights than its model has",
    ),
    Odd(
        "other size",
        lambda folder: edit_json(folder / INDEX_FILE, lambda index: index["shards"][0].update(bytes=5)),
        "bytes and lynnc-weights.json says 5",
    ),
)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


@pytest.mark.parametrize("case", PACKED_ODD, ids=str)
def test_what_is_odd_of_a_packed_folder(packed, case):
    case.change(packed)
    (remark,) = inspected(packed)["odd"]
    assert case.said in remark


def interrupted(checkpoint: Path, packed: Path, weights: int) -> Path:
    """Leaves what a run that was killed after some weights leaves."""
    pack_some(checkpoint, packed, weights, force=True)
    return partial_folder(packed)


def test_a_run_that_was_killed(checkpoint, tmp_path):
    partial = interrupted(checkpoint, tmp_path / "packed", 3)
    found = find_unfinished(tmp_path / "packed")
    assert found and found.folder == partial and (found.weights, found.weights_in_all) == (3, 53)
    assert 0 < found.bytes < found.bytes_in_all
    line = complaint(lynnc_cli("inspect", tmp_path / "packed"))
    assert "3 of 53 weights" in line and "goes on where it stopped" in line
    assert complaint(lynnc_cli("inspect", partial)) == line
    with (partial / JOURNAL).open("a") as journal:
        journal.write('{"weight": "lay')
    assert "3 of 53 weights" in complaint(lynnc_cli("inspect", tmp_path / "packed"))
    (partial / REQUEST).write_text("{")
    assert "name the folder of a checkpoint" in complaint(lynnc_cli("inspect", tmp_path / "packed"))


def test_a_run_beside_a_packed_folder(checkpoint, packed):
    interrupted(checkpoint, packed, 2)
    (remark,) = inspected(packed)["odd"]
    assert "2 of 53 weights" in remark


# Refusals


def test_neither_checkpoint_nor_packed(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert "holds no *.safetensors but no weights at all" in complaint(lynnc_cli("inspect", tmp_path))
    assert "does not exist" in complaint(lynnc_cli("inspect", tmp_path / "nowhere"))
    assert "is a file" in complaint(lynnc_cli("inspect", tmp_path / "notes.txt"))
    assert complaint(lynnc_cli("inspect", "/"))
    (tmp_path / INDEX_FILE).write_text("{")
    assert "cannot be read" in complaint(lynnc_cli("inspect", tmp_path))


def test_a_truncated_checkpoint(checkpoint):
    cut(checkpoint / "model.safetensors")
    assert "is truncated" in complaint(lynnc_cli("inspect", checkpoint))
