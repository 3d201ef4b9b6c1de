"""What packing refuses, which formats it makes, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Flavour, edit_tensors, write_checkpoint
from inspecting import complaint, lynnc_cli
from packing import DIVIDED, MULTIPLIED, PLAIN, packed_to, with_formats, written
from reference import Case
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lynnc.errors import WeightError
from lynnc.ir import Format
from lynnc.runtime.weights.matrix import Fp4Matrix
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.verify import verify


@dataclass(frozen=True)
class Broken:
    """A checkpoint changed after writing, and what the message must say."""

    name: str
    says: str
    change: Callable[[dict[str, torch.Tensor]], Any]
    flavour: Flavour = PLAIN

    def __str__(self) -> str:
        return self.name


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 17] = float("nan")


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.input_layernorm.weight"][5] = float("inf")


def too_large(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.norm.weight"
    tensors[name] = tensors[name].float()
    tensors[name][1] = 3.4028e38


def nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    scale = next(name for name in tensors if name.endswith("experts.1.down_proj.weight_scale"))
    tensors[scale].view(torch.uint8)[2, 1] = 0x7F


BROKEN = (
    Broken("missing", r"lacks model\.layers\.2\.mlp\.gate\.weight", lambda t: t.pop("model.layers.2.mlp.gate.weight")),
    Broken(
        "extra",
        r"tensors that the model has no place for \(model\.layers\.0\.mlp\.extra\.weight\)",
        lambda t: t.update({"model.layers.0.mlp.extra.weight": torch.ones(2, 2)}),
    ),
    Broken("NaN", r"experts\.2\.up_proj\.weight holds nan at row 3, column 17: repair", not_a_number),
    Broken("infinity", r"input_layernorm\.weight holds inf at row 5, column 0: repair", infinite),
    Broken("beyond BF16", r"model\.norm\.weight holds a value too large for bf16", too_large),
    Broken("NaN scale", r"down_proj\.weight_scale is NaN at row 2, column 1", nan_scale, DIVIDED),
    Broken(
        "an expert short",
        "lacks expert 3 in layer 3",
        lambda t: [t.pop(f"model.layers.3.mlp.experts.3.{part}_proj.weight") for part in ("gate", "up", "down")],
    ),
    Broken("no head", "lacks lm_head.weight and the model does not tie it", lambda t: t.pop("lm_head.weight")),
)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_broken_checkpoint_is_refused(broken: Broken, tmp_path: Path) -> None:
    made = written(tmp_path, flavour=broken.flavour)
    edit_tensors(made.folder, broken.change)
    with pytest.raises(WeightError, match=broken.says) as caught:
        packed_to(tmp_path)
    assert str(caught.value).count(". ") == 0
    assert not (tmp_path / "packed").exists()


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("plain", shards=2))
    save_file({"model.more": torch.ones(2)}, made.folder / "stray.safetensors")
    with pytest.raises(WeightError, match=r"stray\.safetensors holds model\.more, which the index does not list"):
        packed_to(tmp_path)


@dataclass(frozen=True)
class Rule:
    """A model file's format for a class, and what a checkpoint makes of it."""

    flavour: Flavour
    formats: dict[str, Format]
    says: str


RULES = (
    Rule(DIVIDED, {"experts": Format.FP8}, "stored as nvfp4 and the model asks for fp8 .*write `experts: nvfp4`"),
    Rule(DIVIDED, {"attention_in": Format.BF16}, "never converted: write `attention_in: nvfp4`"),
    Rule(Flavour("lynn-v1"), {}, "stored as nvfp4-fp16 and the model asks for nvfp4 .*write `.*: nvfp4-fp16`"),
    Rule(Flavour("modelopt", fp8=("attention_in",)), {}, "stored as fp8 .*write `attention_in: fp8`"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.flavour}-{len(rule.formats)}")
def test_what_is_quantised_is_never_converted(rule: Rule, tmp_path: Path) -> None:
    written(tmp_path, flavour=rule.flavour)
    with pytest.raises(WeightError, match=rule.says):
        packed_to(tmp_path, model=with_formats("tiny-moe", **rule.formats))


def test_plain_classes_are_quantised_where_the_model_asks(tmp_path: Path) -> None:
    """A quantised checkpoint with a plain head, and a model file that wants the head in four bits."""
    written(tmp_path, flavour=MULTIPLIED)
    derived = open_packed(packed_to(tmp_path)).spec.precision.formats
    assert derived["lm_head"] is Format.BF16
    formats = {**derived, "lm_head": Format.NVFP4, "embed": Format.NVFP4_FP16}
    folder = packed_to(tmp_path, model=with_formats("tiny-moe", **formats), force=True)
    rows = {(row.tensor_class, row.format): row for row in verify(tmp_path / "checkpoint", folder).classes}
    assert rows["lm_head", "nvfp4"].rounded_tensors == 1
    assert rows["embed", "nvfp4-fp16"].rounded_tensors == 1
    assert rows["experts", "nvfp4"].exact_tensors > 20 and not rows["experts", "nvfp4"].rounded_tensors


def test_parts_keep_their_own_global_scales(tmp_path: Path) -> None:
    """Known bug: the largest of fused parts' scales for all. Here each part has another one."""
    made = written(tmp_path, "tiny-dense", DIVIDED)
    packed = open_packed(packed_to(tmp_path))
    weight = packed.weights["layers.0.mlp_up_weight"]
    stored = load_file(made.folder / "model.safetensors")
    for part, described in enumerate(weight.parts):
        matrix = packed.matrix(weight.name, part)
        assert isinstance(matrix, Fp4Matrix) and matrix.divides
        assert torch.equal(matrix.global_scale, stored[f"{described.source}_global_scale"][0])
    scales = packed.arrays(weight.name)["global"]
    assert len(set(scales.tolist())) == 2
    assert torch.equal(scales, packed.arrays(weight.name)["divisor"].reciprocal())


def test_declared_activations_are_said(tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("compressed-tensors", activations="nvfp4"))
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    assert any("declares nvfp4 activations and the model bf16" in note for note in report.notes)
    assert report.index.source.activations == "nvfp4"


def test_the_digest_is_of_contents(tmp_path: Path) -> None:
    """The same tensors in other shards under another prefix have the same one; another value has another."""
    one = write_checkpoint(tmp_path / "one", Case("tiny-moe"), Flavour("plain"))
    two = write_checkpoint(
        tmp_path / "two", Case("tiny-moe"), Flavour("plain", prefix="model.language_model.", shards=3)
    )
    three = write_checkpoint(tmp_path / "three", Case("tiny-moe"), Flavour("plain"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    edit_tensors(three.folder, change)
    digests = [
        pack(PackRequest(made.folder, tmp_path / f"packed{index}")).index.source.digest
        for index, made in enumerate((one, two, three))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_shards_hold_whole_weights_of_at_most_the_size_asked_for(tmp_path: Path) -> None:
    made = written(tmp_path)
    report = pack(PackRequest(made.folder, tmp_path / "packed", shard_bytes=40_000))
    sizes = [shard.bytes for shard in report.index.shards]
    assert len(sizes) > 3
    verify(made.folder, tmp_path / "packed")
    whole = pack(PackRequest(made.folder, tmp_path / "one"))
    assert whole.index.digests == report.index.digests


def test_scale_search_is_closer_and_says_by_how_much(tmp_path: Path) -> None:
    made = written(tmp_path)
    plain = pack(PackRequest(made.folder, tmp_path / "plain"))
    search = pack(PackRequest(made.folder, tmp_path / "search", search=True))
    assert plain.search_gain is None
    errors = []
    for name in ("plain", "search"):
        rows = {row.tensor_class: row for row in verify(made.folder, tmp_path / name).classes if row.format == "nvfp4"}
        errors.append(rows["experts"].relative_l2)
    assert errors[1] < 0.97 * errors[0]
    assert search.search_gain is not None and 0.05 < search.search_gain < 0.5


def test_the_command_line(tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("modelopt", extras=True, activations="nvfp4"))
    (made.folder / "tokenizer.json").write_text("{}")
    found = lynnc_cli("pack", made.folder, "-o", tmp_path / "packed", "--verify")
    assert found.exit_code == 0, found.output
    assert "every tensor is as it should be" in found.output
    assert "vision tower" in found.stderr and "declares nvfp4 activations" in found.stderr
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert {"config.json", "tokenizer.json", "model.yaml", "lynnc-weights.json"} <= names
    document = json.loads(lynnc_cli("pack", made.folder, "-o", tmp_path / "packed", "--verify-only", "--json").stdout)
    assert document["verification"]["bytes_read"] > 0
    with safe_open(next((tmp_path / "packed").glob("*.safetensors")), "pt") as file:
        origins = json.loads(file.metadata()["origins"])
    experts = origins["layers.0.experts_up_weight"]
    assert [part["stored"] for part in experts] == ["nvfp4", "nvfp4"]
    assert experts[0]["tensors"][0] == "model.layers.0.mlp.experts.{expert}.gate_proj.weight"


@dataclass(frozen=True)
class Typed:
    arguments: tuple[str, ...]
    says: str


TYPED = (
    Typed(("--device", "cuda:7"), "--device cuda:7: torch"),
    Typed(("--device", "tpu"), "there is no such device"),
    Typed(("--verify-only", "--force"), "--verify-only packs nothing: leave out --force"),
    Typed(("--model", "tiny-mow"), "write tiny-moe instead"),
    Typed(("--experts", "gone.json"), "there is no such file"),
)


@pytest.mark.parametrize("typed", TYPED, ids=lambda typed: " ".join(typed.arguments))
def test_what_is_typed_wrong(typed: Typed, tmp_path: Path) -> None:
    found = lynnc_cli("pack", tmp_path, "-o", tmp_path / "packed", *typed.arguments)
    assert found.exit_code == 2
    assert typed.says in complaint(found)
