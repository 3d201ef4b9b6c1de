"""Which format a checkpoint is in: every supported one by its metadata, everything else refused with what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointmetadata import write_json
from checkpoints import ALL_FLAVOURS, edit_json, edit_tensors, write_checkpoint
from reference import Case
from storedformats import Flavour

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import open_checkpoint
from lynnc.runtime.checkpoints.declared import Recognised, settle_activations
from lynnc.runtime.checkpoints.modulenames import ModuleNames
from lynnc.runtime.checkpoints.recognise import recognise
from lynnc.runtime.checkpoints.skipped import skip_reason
from lynnc.tensors import Format

CASE = Case("tiny-moe")
PLAIN, LYNN = Flavour("plain"), Flavour("lynn-v1", fused=True)
PACKED, W4A4 = Flavour("compressed-tensors"), Flavour("compressed-tensors", activations="nvfp4")
OPT, OPT_W4A4 = Flavour("modelopt"), Flavour("modelopt", activations="nvfp4")
OPT_FILE = Flavour("modelopt", metadata="hf_quant_config.json")
MIXED = Flavour("modelopt", fp8=("attention_in",))
MIXED_FILE = Flavour("modelopt", fp8=("attention_in",), metadata="hf_quant_config.json")
CONFIG, OPT_JSON, MANIFEST = "config.json", "hf_quant_config.json", "lynn_quant_manifest.json"


def found_in(folder: Path) -> Recognised:
    return recognise(open_checkpoint(folder))


@pytest.mark.parametrize("flavour", ALL_FLAVOURS, ids=str)
def test_kinds(flavour: Flavour, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", CASE, flavour)
    found = found_in(written.folder)
    assert str(found.kind) == flavour.kind.partition("-v")[0]
    assert found.activations == flavour.activations
    if flavour.kind in ("compressed-tensors", "modelopt"):
        stored = {fmt for fmt in written.formats.values() if fmt is not Format.BF16}
        assert set(found.declared.values()) == stored and found.ignored


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change that sets a field by its dotted path; None removes it."""

    def change(content: dict[str, Any]) -> None:
        *sections, name = path.split(".")
        for section in sections:
            content = content.setdefault(section, {})
        content[name] = value
        if value is None:
            del content[name]

    return change


@dataclass(frozen=True)
class Refusal:
    """A change of a JSON file of a flavour, and what its refusal says."""

    label: str
    flavour: Flavour
    file: str
    path: str
    value: Any
    words: str

    def __str__(self) -> str:
        return self.label


SECTION = "quantization_config"
GROUP = f"{SECTION}.config_groups.group_0"
OPT_LAYERS, LAYERS = "quantization.quantized_layers", f"{SECTION}.quantized_layers"
EIGHT_BITS = {"num_bits": 8, "type": "int", "strategy": "tensor"}
REFUSALS = (
    Refusal("awq", PLAIN, CONFIG, SECTION, {"quant_method": "awq", "bits": 4}, "the method 'awq'"),
    Refusal("gptq", PLAIN, CONFIG, SECTION, {"quant_method": "gptq", "bits": 4}, "the method 'gptq'"),
    Refusal("bitsandbytes", PLAIN, CONFIG, SECTION, {"quant_method": "bitsandbytes"}, "the method 'bitsandbytes'"),
    Refusal("mxfp4", PLAIN, CONFIG, SECTION, {"quant_method": "mxfp4"}, "the method 'mxfp4'"),
    Refusal(
        "fp8-blocks",
        PLAIN,
        CONFIG,
        SECTION,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "the method 'fp8'",
    ),
    Refusal("in-text-config", PLAIN, CONFIG, f"text_config.{SECTION}", {"quant_method": "awq"}, "the method 'awq'"),
    Refusal("no-method", PLAIN, CONFIG, SECTION, {"bits": 4}, "the method None"),
    Refusal("ct-format", PACKED, CONFIG, f"{SECTION}.format", "mixed-precision", "the format 'mixed-precision'"),
    Refusal("ct-int4", PACKED, CONFIG, f"{SECTION}.format", "pack-quantized", "the format 'pack-quantized'"),
    Refusal("ct-group-format", PACKED, CONFIG, f"{GROUP}.format", "float-quantized", "group_0 of the format 'float-q"),
    Refusal("ct-bits", PACKED, CONFIG, f"{GROUP}.weights.num_bits", 8, "weights of num_bits 8"),
    Refusal("ct-type", PACKED, CONFIG, f"{GROUP}.weights.type", "int", "weights of type 'int'"),
    Refusal("ct-strategy", PACKED, CONFIG, f"{GROUP}.weights.strategy", "group", "weights of strategy 'group'"),
    Refusal("ct-group-size", PACKED, CONFIG, f"{GROUP}.weights.group_size", 32, "weights of group_size 32"),
    Refusal("ct-zero-points", PACKED, CONFIG, f"{GROUP}.weights.symmetric", False, "weights of symmetric False"),
    Refusal("ct-order", PACKED, CONFIG, f"{GROUP}.weights.actorder", "group", "weights of actorder 'group'"),
    Refusal("ct-int8-input", PACKED, CONFIG, f"{GROUP}.input_activations", EIGHT_BITS, "activations of 8 bits, int"),
    Refusal("ct-input-group", W4A4, CONFIG, f"{GROUP}.input_activations.group_size", 32, "activations of 4 bits"),
    Refusal("ct-output", PACKED, CONFIG, f"{GROUP}.output_activations", EIGHT_BITS, "quantised output activations"),
    Refusal("ct-status", PACKED, CONFIG, f"{SECTION}.quantization_status", "frozen", "the status 'frozen'"),
    Refusal("ct-no-groups", PACKED, CONFIG, f"{SECTION}.config_groups", None, "without config_groups"),
    Refusal("ct-no-targets", PACKED, CONFIG, f"{GROUP}.targets", [], "without targets"),
    Refusal("ct-targets", PACKED, CONFIG, f"{GROUP}.targets", "Linear", "group_0.targets is no list of names"),
    Refusal("ct-ignore", PACKED, CONFIG, f"{SECTION}.ignore", {"lm_head": 1}, "ignore is no list of names"),
    Refusal("ct-sparse", PACKED, CONFIG, f"{SECTION}.sparsity_config", {"format": "sparse-24"}, "sparse weights"),
    Refusal("ct-sparse-list", PACKED, CONFIG, f"{SECTION}.sparsity_config", ["sparse-24"], "sparse weights"),
    Refusal("ct-sparse-text", PACKED, CONFIG, f"{SECTION}.sparsity_config", "sparse-24", "sparse weights"),
    Refusal("ct-sparse-other", PACKED, CONFIG, f"{SECTION}.sparsity_config", {"sparsity": 0.5}, "sparse weights"),
    Refusal("ct-rotated-list", PACKED, CONFIG, f"{SECTION}.transform_config", [{"type": "hadamard"}], "rotated"),
    Refusal("ct-rotated-text", PACKED, CONFIG, f"{SECTION}.transform_config", "hadamard", "rotated weights"),
    Refusal("ct-rotated-other", PACKED, CONFIG, f"{SECTION}.transform_config", {"R1": {"type": 1}}, "rotated"),
    Refusal("ct-input-list", W4A4, CONFIG, f"{GROUP}.input_activations.num_bits", [4], "activations of [4] bits"),
    Refusal("ct-input-object", W4A4, CONFIG, f"{GROUP}.input_activations.strategy", {"a": 1}, "by {'a': 1}"),
    Refusal("text", PLAIN, CONFIG, SECTION, "awq", "a quantization_config that is no object but 'awq'"),
    Refusal(
        "ct-rotated", PACKED, CONFIG, f"{SECTION}.transform_config", {"config_groups": {"R1": {}}}, "rotated weights"
    ),
    Refusal("opt-algorithm", OPT_FILE, OPT_JSON, "quantization.quant_algo", "W4A8_AWQ", "algorithm 'W4A8_AWQ'"),
    Refusal("opt-awq", OPT_FILE, OPT_JSON, "quantization.quant_algo", "NVFP4_AWQ", "algorithm 'NVFP4_AWQ'"),
    Refusal("opt-fp8-only", OPT_FILE, OPT_JSON, "quantization.quant_algo", "FP8", "algorithm 'FP8'"),
    Refusal("opt-list", OPT_FILE, OPT_JSON, "quantization.quant_algo", ["NVFP4"], "algorithm ['NVFP4']"),
    Refusal("opt-none", OPT_FILE, OPT_JSON, "quantization.quant_algo", None, "algorithm None"),
    Refusal("opt-group", OPT_FILE, OPT_JSON, "quantization.group_size", 32, "group_size 32 in hf_quant_config.json"),
    Refusal("opt-zero", OPT_FILE, OPT_JSON, "quantization.has_zero_point", True, "has zero points"),
    Refusal("opt-two-places", OPT, OPT_JSON, "quantization.quant_algo", "NVFP4", "contradicts itself (quant_algo is"),
    Refusal(
        "opt-config-group",
        OPT,
        CONFIG,
        f"{SECTION}.config_groups",
        {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
        "group_size 32 in config.json",
    ),
    Refusal("opt-ignore", OPT_FILE, OPT_JSON, "quantization.exclude_modules", "lm_head", "is no list of names"),
    Refusal(
        "mixed-nothing", OPT_FILE, OPT_JSON, "quantization.quant_algo", "MIXED_PRECISION", "without quantized_layers"
    ),
    Refusal("mixed-empty", MIXED_FILE, OPT_JSON, OPT_LAYERS, {"lm_head": {}}, "no quantised layer but lm_head"),
    Refusal("mixed-number", MIXED, CONFIG, LAYERS, {"a": 1}, "the layer a in quantized_layers of config.json as 1"),
    Refusal("mixed-list", MIXED, CONFIG, LAYERS, ["a"], "quantized_layers in config.json that are no object"),
    Refusal("mixed-algorithm", MIXED, CONFIG, LAYERS, {"a": {"quant_algo": ["FP8"]}}, "algorithm ['FP8']"),
    Refusal(
        "mixed-blocks",
        MIXED,
        CONFIG,
        f"{SECTION}.quantized_layers",
        {"lm_head": {"quant_algo": "FP8_PB_WO"}},
        "the layer lm_head in ModelOpt's algorithm 'FP8_PB_WO'",
    ),
    Refusal(
        "mixed-group",
        MIXED,
        CONFIG,
        f"{SECTION}.quantized_layers",
        {"lm_head": {"quant_algo": "NVFP4", "group_size": 32}},
        "group_size 32 in config.json for lm_head",
    ),
    Refusal("lynn-schema", LYNN, MANIFEST, "schema_version", "lynn-nvfp4-v9", "the unknown schema 'lynn-nvfp4-v9'"),
    Refusal("lynn-no-schema", LYNN, MANIFEST, "schema_version", None, "the unknown schema None"),
    Refusal("lynn-group", LYNN, MANIFEST, "quantization.group_size", 32, "the group_size 32"),
    Refusal("lynn-format", LYNN, MANIFEST, "quantization.format", "int4", "the format 'int4'"),
    Refusal("lynn-list", LYNN, MANIFEST, "quantization", ["int4"], "whose quantization is no object but ['int4']"),
    Refusal("lynn-nothing", LYNN, MANIFEST, "quantized_tensors", None, "without quantized_tensors"),
    Refusal(
        "two-kinds", LYNN, CONFIG, SECTION, {"quant_method": "compressed-tensors"}, "two formats at once (lynn and"
    ),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flavour], Path]:
    """A folder of each flavour, written once; a copy of its small files must be changed, not itself."""
    known: dict[Flavour, Path] = {}

    def make(flavour: Flavour) -> Path:
        if flavour not in known:
            known[flavour] = tmp_path_factory.mktemp("flavour") / "c"
            write_checkpoint(known[flavour], CASE, flavour)
        return known[flavour]

    return make


def copy_of(folder: Path, target: Path) -> Path:
    """The folder with its shards as links."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
        else:
            (target / path.name).symlink_to(path)
    return target


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_refusals(refusal: Refusal, folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(refusal.flavour), tmp_path / "c")
    found_in(folder)
    edit_json(folder / refusal.file, set_at(refusal.path, refusal.value))
    with pytest.raises(WeightError) as found:
        found_in(folder)
    assert refusal.words in str(found.value) and str(folder) in str(found.value)
    assert "NVFP4" in str(found.value), "a refusal says what is supported"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.mlp.gate.weight_packed", torch.ones(2, 2)),
        ("model.layers.0.mlp.gate.weight_scale_inv", torch.ones(2, 2)),
        ("model.layers.0.mlp.gate.qweight", torch.ones(2, 2, dtype=torch.int32)),
        ("model.layers.0.mlp.gate.code", torch.ones(2, 2, dtype=torch.uint8)),
        ("model.layers.0.mlp.gate.data", torch.ones(2, 2).to(torch.float8_e4m3fn)),
    ],
)
def test_quantised_tensors_without_metadata(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Case("tiny-full"), PLAIN).folder
    edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(WeightError) as found:
        found_in(folder)
    assert name in str(found.value) and "no metadata" in str(found.value)


def test_integers_that_no_plan_reads_are_no_quantised_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Case("tiny-full"), PLAIN).folder
    buffer = {"model.visual.position_ids": torch.arange(3)}
    edit_tensors(folder, lambda tensors: tensors.update(buffer))
    assert found_in(folder).detail == "Hugging Face, BF16"


def test_the_manifest_of_a_lynn_checkpoint_is_needed(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(LYNN), tmp_path / "c")
    (folder / MANIFEST).unlink()
    with pytest.raises(WeightError, match=r"'lynn_native' and lacks its lynn_quant_manifest\.json"):
        found_in(folder)


def test_a_side_file_that_quantises_nothing(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(PLAIN), tmp_path / "c")
    write_json(folder / OPT_JSON, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert str(found_in(folder).kind) == "plain"


def test_settings_that_say_nothing(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(PACKED), tmp_path / "c")
    before = found_in(folder)
    for sparsity, transform in (({}, {}), ([], ""), ({"format": "dense"}, {"config_groups": {}})):
        said = {"sparsity_config": sparsity, "transform_config": transform}
        edit_json(folder / CONFIG, lambda config, said=said: config[SECTION].update(said))
        assert found_in(folder) == before


def test_a_folded_lynn_checkpoint_declares_fp8_activations(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(LYNN), tmp_path / "c")
    edit_json(folder / MANIFEST, set_at("runtime_contract.inference_path_required", "w4a8"))
    assert found_in(folder).activations == "fp8"


def test_groups_of_different_activations(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    """The most exact precision goes for all, so nothing that is declared W4A16 becomes W4A4."""
    folder = copy_of(folders(W4A4), tmp_path / "c")

    def split(config: dict[str, Any]) -> None:
        groups = config[SECTION]["config_groups"]
        groups["group_1"] = {**groups["group_0"], "targets": ["re:.*down_proj"], "input_activations": None}

    edit_json(folder / CONFIG, split)
    found = found_in(folder)
    assert found.activations == "bf16" and "bf16 and nvfp4" in found.notes[0]
    assert set(found.declared) == {"Linear", "re:.*down_proj"}
    assert settle_activations(["nvfp4", "fp8", "nvfp4"])[0] == "fp8"
    assert settle_activations(["nvfp4", "nvfp4"]) == ("nvfp4", ())


@pytest.mark.parametrize("flavour", [PACKED, OPT, MIXED], ids=["compressed-tensors", "modelopt", "mixed"])
def test_a_quantised_cache_is_noted(flavour: Flavour, folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(flavour), tmp_path / "c")
    assert not any("keys and values" in note for note in found_in(folder).notes)
    edit_json(folder / CONFIG, set_at(f"{SECTION}.kv_cache_scheme", {"num_bits": 8, "type": "float"}))
    assert any("keys and values" in note for note in found_in(folder).notes)


def test_layers_that_no_plan_reads_may_be_in_any_algorithm(folders: Callable[[Flavour], Path], tmp_path: Path) -> None:
    folder = copy_of(folders(MIXED), tmp_path / "c")
    before = found_in(folder)
    extra = {"mtp.layers.0.mlp.experts": {"quant_algo": "FP8_PB_WO", "group_size": 128}}
    edit_json(folder / CONFIG, lambda config: config[SECTION]["quantized_layers"].update(extra))
    assert found_in(folder).declared == before.declared


@dataclass(frozen=True)
class Entry:
    """An entry of an ignore list, modules that it means, and modules that it does not."""

    entry: str
    means: tuple[str, ...]
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.entry


GDN, ATTENTION, MLP = "layers.0.linear_attn.", "layers.3.self_attn.", "layers.0.mlp."
ENTRIES = (
    Entry("lm_head", ("lm_head",), ("model.layers.0.mlp.gate",)),
    Entry(f"model.{GDN}in_proj_ba", (GDN + "in_proj_a", GDN + "in_proj_b"), (GDN + "in_proj_z", GDN + "in_proj_qkv")),
    Entry("*.in_proj_qkvz", (GDN + "in_proj_qkv", GDN + "in_proj_z"), (GDN + "in_proj_a",)),
    Entry("*.in_proj_qkvzba", (GDN + "in_proj_qkv", GDN + "in_proj_z", GDN + "in_proj_a", GDN + "in_proj_b")),
    Entry("*in_proj_b*", (GDN + "in_proj_b",), (GDN + "in_proj_a",)),
    Entry("re:.*in_proj_qkv", (GDN + "in_proj_qkv",), (GDN + "in_proj_z",)),
    Entry("*qkv_proj", (ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), (ATTENTION + "o_proj",)),
    Entry(f"model.language_model.{ATTENTION}k_proj", (ATTENTION + "k_proj",), (ATTENTION + "q_proj",)),
    Entry("re:.*mlp.gate$", (MLP + "gate",), (MLP + "gate_proj", MLP + "experts.3.gate_proj")),
    Entry("*.gate_up_proj", (MLP + "gate_proj", MLP + "up_proj", MLP + "experts.12.up_proj"), (MLP + "down_proj",)),
    Entry(f"model.{MLP}experts.gate_up_proj", (MLP + "experts.12.gate_proj",), (MLP + "experts.12.down_proj",)),
    Entry(f"model.{MLP}experts.*.down_proj", (MLP + "experts.12.down_proj",), (MLP + "experts.12.up_proj",)),
    Entry(f"model.{MLP}experts.7.up_proj", (MLP + "experts.7.up_proj",), (MLP + "experts.12.up_proj",)),
    Entry("model.layers.*", (MLP + "gate", ATTENTION + "k_proj", MLP + "experts.0.up_proj"), ("lm_head",)),
    Entry("model.layers.0.linear_attn*", (GDN + "in_proj_z", GDN + "out_proj"), ("layers.1.linear_attn.out_proj",)),
    Entry("model.layers.0.linear_attn", (), (GDN + "in_proj_z",)),
    Entry(r"re:model\.language_model\.layers\.0\..*", (MLP + "gate",), (ATTENTION + "k_proj",)),
)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_names_in_lists(entry: Entry, prefix: str) -> None:
    def spelled(module: str) -> str:
        return f"{prefix}{module}" if module.startswith("layers") else module

    names = ModuleNames((entry.entry,))
    assert {module: names.mean(spelled(module)) for module in (*entry.means, *entry.leaves)} == {
        **dict.fromkeys(entry.means, True),
        **dict.fromkeys(entry.leaves, False),
    }


def test_an_entry_covers_what_is_part_of_it() -> None:
    names = ModuleNames(("model.layers.0.mlp.experts", "lm_head"))
    assert names.cover("model.language_model.layers.0.mlp.experts.3.gate_proj")
    assert not names.mean("model.language_model.layers.0.mlp.experts.3.gate_proj")
    assert not names.cover("model.layers.0.mlp.shared_expert.gate_proj")


def test_fused_and_split_names_in_one_list() -> None:
    names = ModuleNames(("model.layers.0.linear_attn.in_proj_b", "model.layers.0.linear_attn.in_proj_ba"))
    assert names.mean("model.layers.0.linear_attn.in_proj_a")


def test_no_expression() -> None:
    with pytest.raises(WeightError, match=r"lists 're:\(', which is no expression"):
        ModuleNames(("re:(",))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "vision tower"),
        ("visual.merger.mlp.0.bias", "vision tower"),
        ("vision_tower.encoder.weight", "vision tower"),
        ("mtp.layers.0.mlp.experts.gate_up_proj", "MTP"),
        ("model.mtp.fc.weight", "MTP"),
        ("model.layers.0.mlp.down_proj.input_scale", "activations"),
        ("lm_head.input_global_scale", "activations"),
        ("model.layers.3.self_attn.k_proj.k_scale", "key/value cache"),
        ("model.layers.3.self_attn.v_scale", "key/value cache"),
        ("model.layers.3.self_attn.v_proj.output_scale", "key/value cache"),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", "rotary"),
        ("model.language_model.rotary_emb.inv_freq", "rotary"),
        ("model.layers.3.self_attn.k_proj.weight_scale", None),
        ("model.layers.3.self_attn.k_proj.bias", None),
        ("model.visualiser.weight", None),
        ("model.layers.0.mlp.mtp.weight", None),
        ("model.layers.0.input_scale.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_what_is_skipped(name: str, words: str | None) -> None:
    reason = skip_reason(name)
    assert reason is None if words is None else reason is not None and words in reason
