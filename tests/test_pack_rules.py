"""What packing refuses, which formats it makes, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Flavour, edit_json, edit_tensors, write_checkpoint
from inspecting import complaint, lynnc_cli
from packing import DIVIDED, MULTIPLIED, PLAIN, packed_to, with_formats, written
from reference import Case
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lynnc.errors import WeightError
from lynnc.runtime.weights.matrix import Fp4Matrix, decode
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.quantise import quantise_nvfp4
from lynnc.runtime.weights.unfinished import partial_folder
from lynnc.runtime.weights.verify import verify
from lynnc.tensors import Format


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


def resized(name: str, rows: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """So many rows of a tensor, repeated if it has fewer."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.cat([tensors[name]] * 2)[:rows].clone()

    return change


K, FLAT = "model.layers.3.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"

BROKEN = (
    Broken("missing", r"lacks model\.layers\.2\.mlp\.gate\.weight", lambda t: t.pop("model.layers.2.mlp.gate.weight")),
    Broken(
        "extra",
        r"tensors that the model has no place for \(model\.layers\.0\.mlp\.extra\.weight\)",
        lambda t: t.update({"model.layers.0.mlp.extra.weight": torch.ones(2, 2)}),
    ),
    Broken("NaN", r"experts\.2\.up_proj\.weight holds nan at row 3, column 17: repair", not_a_number),
    Broken("infinity", r"input_layernorm\.weight holds inf at row 5, column 0: repair", infinite),
    Broken("beyond BF16", r"model\.norm\.weight holds 3\.4\d+e\+38 at row 1, column 0, too large for bf16", too_large),
    Broken("NaN scale", r"down_proj\.weight_scale is NaN at row 2, column 1", nan_scale, DIVIDED),
    Broken(
        "an expert short",
        "lacks expert 3 in layer 3",
        lambda t: [t.pop(f"model.layers.3.mlp.experts.3.{part}_proj.weight") for part in ("gate", "up", "down")],
    ),
    Broken("a row short", r"k_proj\.weight holds a matrix of 127 x 128 where .* needs 128 x 128", resized(K, 127)),
    Broken("a row more", r"k_proj\.weight holds a matrix of 129 x 128 where .* needs 128 x 128", resized(K, 129)),
    Broken("a longer vector", r"layers\.0\.input_layernorm\.weight holds a matrix of 129 x 1", resized(FLAT, 129)),
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


def test_a_class_has_one_format(tmp_path: Path) -> None:
    """A projection in FP8 beside others in NVFP4, declared as it is stored."""
    flavour = Flavour("modelopt", fp8=("attention_in",), metadata="config.json")
    made, other = written(tmp_path, flavour=flavour), written(tmp_path / "other", flavour=MULTIPLIED)
    packed_to(tmp_path)
    stored = load_file(other.folder / "model.safetensors")
    edit_tensors(made.folder, lambda t: t.update({name: stored[name] for name in stored if name.startswith(K)}))
    entry = {K.removesuffix(".weight"): {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    edit_json(made.folder / "config.json", lambda c: c["quantization_config"]["quantized_layers"].update(entry))
    with pytest.raises(WeightError, match="the class attention_in as fp8 and nvfp4, but a class has one format"):
        packed_to(tmp_path, force=True)


def test_a_projection_that_the_checkpoint_keeps_plain(tmp_path: Path) -> None:
    """It is quantised like the rest of its class, and said; its scale multiplies, beside others that divide."""
    made = written(tmp_path, flavour=DIVIDED)
    plain = made.values[K].bfloat16()

    def keep_plain(tensors: dict[str, torch.Tensor]) -> None:
        for end in ("packed", "scale", "global_scale"):
            del tensors[f"{K}_{end}"]
        tensors[K] = plain

    edit_tensors(made.folder, keep_plain)
    ignored = K.removesuffix(".weight")
    edit_json(made.folder / "config.json", lambda c: c["quantization_config"]["ignore"].append(ignored))
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    said = f"attention_in: 1 tensors that the checkpoint keeps plain are quantised, such as {K}"
    assert [note for note in report.notes if note.startswith("attention_in: ")] == [said]
    packed = open_packed(tmp_path / "packed")
    weight = packed.weights["layers.3.q_k_v_weight"]
    names = [part.source.replace("model.language_model.", "model.") for part in weight.parts]
    parts = packed.values(weight.name).split([part.rows for part in weight.parts])
    alone = quantise_nvfp4(plain, Format.NVFP4)
    for index, (name, values) in enumerate(zip(names, parts, strict=True)):
        expected = decode(alone) if name == K else made.values[name]
        matrix = packed.matrix(weight.name, index)
        assert isinstance(matrix, Fp4Matrix) and matrix.divides == (name != K)
        assert torch.equal(values, expected) and torch.equal(decode(matrix), expected), name
        assert (values - made.values[name]).norm() < 0.13 * made.values[name].norm()
    verify(made.folder, packed.folder)


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
    assert any("declares nvfp4 activations: prompts run with them" in note for note in report.notes)
    assert report.index.source.activations == "nvfp4"
    spec = open_packed(tmp_path / "packed").spec
    assert spec.precision.activations == "nvfp4"
    asked = replace(spec, precision=replace(spec.precision, activations="bf16"))
    report = pack(PackRequest(made.folder, tmp_path / "asked", model=asked))
    assert any("declares nvfp4 activations and the model bf16" in note for note in report.notes)
    assert open_packed(tmp_path / "asked").spec.precision.activations == "bf16"


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_weights_without_4_bit_activations_never_get_them(activations: str, tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("compressed-tensors"))
    if activations == "fp8":
        declared = {"num_bits": 8, "type": "float", "strategy": "token"}
        edit_json(made.folder / "config.json", lambda c: _groups(c)[0].update(input_activations=declared))
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    assert report.index.source.activations == activations
    assert open_packed(tmp_path / "packed").spec.precision.activations == "bf16"


def _groups(config: dict) -> list[dict]:
    return list(config["quantization_config"]["config_groups"].values())


def test_what_the_metadata_says_is_passed_on(tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("modelopt", fp8=("attention_in",), metadata="config.json"))
    edit_json(made.folder / "config.json", lambda c: c["quantization_config"].update(kv_cache_quant_algo="FP8"))
    notes = pack(PackRequest(made.folder, tmp_path / "packed")).notes
    for words in ("FP8 layers declare FP8 activations", "keys and values are declared quantised"):
        assert sum(words in note for note in notes) == 1, notes


def test_a_head_unlike_the_embeddings_that_it_is_tied_to(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "checkpoint", Case("tiny-dense", tied=True), PLAIN)
    table = made.values["model.embed_tokens.weight"].bfloat16()
    edit_tensors(made.folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    packed_to(tmp_path)
    edit_tensors(made.folder, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1))
    with pytest.raises(WeightError, match=r"lm_head\.weight differs from .*embed_tokens\.weight"):
        packed_to(tmp_path, force=True)


def test_verifying_notices_what_rounds_to_the_same_bits(tmp_path: Path) -> None:
    made = written(tmp_path, flavour=Flavour("plain", torch.float32))
    router = "model.layers.1.mlp.gate.weight"
    edit_tensors(made.folder, lambda tensors: tensors[router][0, 0].fill_(1.0))
    folder = packed_to(tmp_path)
    verify(made.folder, folder)
    edit_tensors(made.folder, lambda tensors: tensors[router][0, 0].fill_(1.0 + 2.0**-12))
    with pytest.raises(WeightError, match="was packed from another checkpoint than"):
        verify(made.folder, folder)


@pytest.mark.parametrize("field", ["shape", "format", "parts"])
def test_an_index_with_other_weights_than_its_model(field: str, tmp_path: Path) -> None:
    written(tmp_path, "tiny-full")
    folder = packed_to(tmp_path)
    other = {"shape": [64, 128], "format": "fp8", "parts": [{"rows": 384, "source": "other.weight"}]}[field]

    def change(index: dict[str, Any]) -> None:
        assert index["weights"]["lm_head"][field] != other
        index["weights"]["lm_head"][field] = other

    open_packed(folder)
    edit_json(folder / "lynnc-weights.json", change)
    with pytest.raises(WeightError, match="lists other weights than its model has"):
        open_packed(folder)


def test_the_files_of_a_packed_folder(tmp_path: Path) -> None:
    made = written(tmp_path)
    (made.folder / "tokenizer.json").write_text("{}")
    (made.folder / "README.md").write_text("of the checkpoint")
    names = {"config.json", "tokenizer.json", "model.yaml", "lynnc-weights.json", "weights-00001-of-00001.safetensors"}
    for force in (False, True):
        assert {path.name for path in packed_to(tmp_path, force=force).iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "packed"}


def test_the_bytes_that_a_second_run_reads(tmp_path: Path) -> None:
    made = written(tmp_path)
    journal = partial_folder(tmp_path / "packed") / "journal.jsonl"

    class Stopped(Exception):
        pass

    def stop(done: int, total: int, name: str) -> None:
        if journal.read_text().count("\n") == 2:
            raise Stopped

    with pytest.raises(Stopped):
        pack(PackRequest(made.folder, tmp_path / "packed"), stop)
    kept = {json.loads(line)["weight"] for line in journal.read_text().splitlines()}
    sizes = {name: tensor.nbytes for name, tensor in load_file(made.folder / "model.safetensors").items()}
    report = pack(PackRequest(made.folder, tmp_path / "packed"))
    there = sum(sizes[name] for weight in kept for origin in report.index.origins[weight] for name in origin.tensors)
    assert report.kept_weights == len(kept) == 2 and there > 0
    assert report.bytes_read == sum(sizes.values()) - there
    assert pack(PackRequest(made.folder, tmp_path / "whole")).bytes_read == sum(sizes.values())


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
    assert len(report.index.shards) > 3
    for shard in report.index.shards:
        arrays = load_file(tmp_path / "packed" / shard.name)
        weights = {name.rpartition(".")[0] for name in arrays if not name.startswith("padding.")}
        assert len(weights) == 1 or sum(tensor.nbytes for tensor in arrays.values()) <= 40_000, weights
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
