"""Unpacked checkpoints: values, names and configuration as ``transformers`` loads them, and every way to fail."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoints import Flavour, Written, edit_json, write_checkpoint
from click.testing import CliRunner, Result
from reference import Case, Reference, judge_tokens
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lynnc.cli.main import cli
from lynnc.errors import OptionError, OutputError
from lynnc.modelfile import dump_model, load_model
from lynnc.runtime.weights.inspection import inspect_folder
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.runtime.weights.textconfig import differences, text_config
from lynnc.runtime.weights.unpack import ORIGIN_FILE, unpack
from lynnc.tensors import Format

NESTED = "model.language_model."
TOKENS = (3, 141, 59, 26, 53, 58, 97, 93, 23, 84)
MIXED = ("attention_in", "attention_out", "gdn_in", "gdn_out")


@dataclass(frozen=True)
class Trip:
    """A checkpoint to pack and unpack; ``experts`` are those of each layer, where the model has any."""

    model: str
    flavour: Flavour
    experts: int | None = None
    tied: bool = False
    formats: tuple[tuple[str, Format], ...] = ()

    def __str__(self) -> str:
        return f"{self.model}-{self.flavour}{'-tied' if self.tied else ''}"


LOADED = (
    Trip("tiny-moe", Flavour("modelopt", fp8=MIXED, prefix=NESTED, extras=True, shards=2), experts=5),
    Trip("tiny-moe", Flavour("lynn-v1", fused=True), experts=7),
    Trip("tiny-dense", Flavour("compressed-tensors", prefix=NESTED, extras=True)),
    Trip("tiny-dense", Flavour("compressed-tensors"), tied=True),
    Trip("tiny-full", Flavour("compressed-tensors", kept=("embed", "router")), experts=6),
)
"""Quantised, so that packing keeps every value and the checkpoint's own decoding is the judge."""
UNEVEN = Trip("tiny-moe", Flavour("compressed-tensors"))
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Trial:
    """A checkpoint with its values, and the folder it was packed to."""

    written: Written
    packed: Path


def lynnc_cli(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def complaint(result: Result) -> str:
    """The one line on standard error of a command that failed as it should."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lynnc: ") and result.stdout == ""
    return lines[0]


def model_file(folder: Path, trip: Trip) -> str:
    """A model file of the trip's experts."""
    spec = load_model(trip.model)
    if trip.experts and spec.moe:
        spec = replace(spec, moe=replace(spec.moe, experts=(trip.experts,) * len(spec.layers)))
    path = folder / f"{trip.model}-{trip.experts}.yaml"
    path.write_text(dump_model(spec))
    return str(path)


def make_trial(folder: Path, trip: Trip) -> Trial:
    folder.mkdir(exist_ok=True)
    case = Case(model_file(folder, trip), formats=trip.formats, tied=trip.tied)
    written = write_checkpoint(folder / "checkpoint", case, trip.flavour)
    (written.folder / "tokenizer.json").write_text('{"version": "1.0"}')
    pack(PackRequest(written.folder, folder / "packed", written.spec))
    return Trial(written, folder / "packed")


@pytest.fixture(scope="session")
def trials(tmp_path_factory) -> Callable[[Trip], Trial]:
    """Makes each trial once; never changed by a test."""
    made: dict[Trip, Trial] = {}

    def get(trip: Trip) -> Trial:
        if trip not in made:
            made[trip] = make_trial(tmp_path_factory.mktemp("trial"), trip)
        return made[trip]

    return get


@pytest.fixture(scope="session")
def uneven(trials) -> Trial:
    return trials(UNEVEN)


@pytest.fixture
def packed(uneven, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(uneven.packed, tmp_path / "packed"))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, as the index places them."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {shard: load_file(folder / shard) for shard in set(weight_map.values())}
    assert sum(map(len, shards.values())) == len(weight_map)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def part_values(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a name of the graph in an unpacked checkpoint, whether experts are fused or not."""
    name = name.replace(NESTED, "model.")
    if name in tensors:
        return tensors[name]
    block, _, end = name.partition(".experts.")
    expert, part, _ = end.split(".")
    if part == "down_proj":
        return tensors[f"{block}.experts.down_proj"][int(expert)]
    return tensors[f"{block}.experts.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj"]


# Values, names, configuration


@pytest.mark.parametrize("trip", LOADED, ids=str)
def test_transformers_loads_it_and_computes_the_same(trials, tmp_path, trip):
    trial = trials(trip)
    result = lynnc_cli("unpack", trial.packed, "-o", tmp_path / "out", "--dtype", "f32")
    assert result.exit_code == 0 and result.stderr == "", (result.output, result.exception)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert {name: set(found) for name, found in info.items()} == {name: set() for name in info}
    judge = trial.written.model
    assert type(model) is type(judge) and model.dtype is torch.float32
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(judge.named_parameters()).keys()
    for name, expected in judge.named_parameters():
        assert torch.equal(parameters[name], expected), name
    reference = Reference(trial.written.spec, judge, {}, {})
    expected = judge_tokens(reference, list(TOKENS))
    found = judge_tokens(replace(reference, model=model.eval()), list(TOKENS))
    assert expected.logits.std() > 0.1 and torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("trip", (*LOADED, UNEVEN), ids=str)
def test_bf16_rounds_each_value_once(trials, tmp_path, trip):
    trial = trials(trip)
    unpack(trial.packed, tmp_path / "out")
    tensors = read_all(tmp_path / "out")
    for name, values in trial.written.values.items():
        found = part_values(tensors, name)
        kept = name.endswith((".A_log", ".dt_bias"))
        assert found.dtype is (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(found.flatten(), values.to(found.dtype).flatten()), name
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(v.numel() for v in trial.written.values.values())


def test_values_are_those_that_the_packed_folder_stands_for(tmp_path):
    """What packing quantised, with every kind of scale."""
    formats = (("experts", Format.NVFP4_FP16), ("attention_in", Format.FP8))
    trial = make_trial(tmp_path / "trial", Trip("tiny-moe", Flavour("plain"), 5, formats=formats))
    unpack(trial.packed, tmp_path / "out", "f32")
    packed, tensors = open_packed(trial.packed), read_all(tmp_path / "out")
    for weight in packed.weights.values():
        values = packed.values(weight.name)
        for expert in range(weight.experts):
            rows = (values[expert] if len(weight.shape) == 3 else values).split([p.rows for p in weight.parts])
            for part, expected in zip(weight.parts, rows, strict=True):
                found = part_values(tensors, part.source.format(expert=expert))
                assert torch.equal(found.flatten(), expected.flatten()), part.source


def test_shapes_and_names_are_those_of_published_checkpoints(trials, tmp_path):
    unpack(trials(LOADED[0]).packed, tmp_path / "moe")
    moe = {name: tuple(tensor.shape) for name, tensor in read_all(tmp_path / "moe").items()}
    assert moe["model.layers.0.mlp.experts.gate_up_proj"] == (5, 128, 128)
    assert moe["model.layers.0.mlp.experts.down_proj"] == (5, 128, 64)
    assert moe["model.layers.0.linear_attn.conv1d.weight"] == (512, 1, 4)
    assert moe["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 128)
    assert moe["model.layers.0.linear_attn.A_log"] == (4,)
    assert not [name for name in moe if "language_model" in name or "visual" in name or "mtp" in name]
    unpack(trials(LOADED[4]).packed, tmp_path / "full")
    full = {name: tuple(tensor.shape) for name, tensor in read_all(tmp_path / "full").items()}
    assert full["model.layers.2.mlp.experts.5.up_proj.weight"] == (64, 128)


def test_layers_with_different_experts(uneven, tmp_path):
    out, counts = tmp_path / "out", {"0": 6, "1": 5, "2": 4, "3": 7}
    result = lynnc_cli("unpack", uneven.packed, "-o", out, "--dtype", "f32")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line == "lynnc: warning: layers have 4 to 7 experts, which transformers cannot load; lynnc pack can"
    side = json.loads((out / "lynn_engine_variable_expert_spec.json").read_text())
    assert side == {"hf_vanilla_compatible": False, "remaining_experts_by_layer": counts}
    assert json.loads((out / "config.json").read_text())["num_experts"] == 7
    tensors = read_all(out)
    for layer, count in counts.items():
        assert tensors[f"model.layers.{layer}.mlp.experts.down_proj"].shape[0] == count
        assert tensors[f"model.layers.{layer}.mlp.gate.weight"].shape[0] == count
    report = pack(PackRequest(out, tmp_path / "again"))
    assert report.spec.moe and report.spec.moe.experts == (6, 5, 4, 7)
    again, first = open_packed(tmp_path / "again"), open_packed(uneven.packed)
    assert torch.equal(
        again.values("layers.2.logits_shared_gate_weight"), first.values("layers.2.logits_shared_gate_weight")
    )


@pytest.mark.parametrize("trip", (*LOADED, UNEVEN), ids=str)
def test_inspect_finds_nothing_odd_in_it(trials, tmp_path, trip):
    unpack(trials(trip).packed, tmp_path / "out")
    found = inspect_folder(tmp_path / "out")
    assert found.odd == () and found.skipped == () and found.refused is None
    assert found.model and found.model.family is trials(trip).written.spec.family


def test_even_experts_need_no_side_file(trials, tmp_path):
    unpack(trials(LOADED[0]).packed, tmp_path / "out")
    assert not (tmp_path / "out" / "lynn_engine_variable_expert_spec.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_experts"] == 5


def test_tied_embeddings_are_one_tensor(trials, tmp_path):
    unpack(trials(LOADED[3]).packed, tmp_path / "out")
    assert HEAD not in read_all(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_tied_embeddings_in_two_formats_are_written_apart(tmp_path):
    formats = (("embed", Format.BF16), ("lm_head", Format.NVFP4))
    trial = make_trial(tmp_path / "trial", Trip("tiny-dense", Flavour("plain"), tied=True, formats=formats))
    report = unpack(trial.packed, tmp_path / "out", "f32")
    (note,) = report.notes
    assert "packed as bf16 and nvfp4" in note and "untied" in note
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    tensors, packed = read_all(tmp_path / "out"), open_packed(trial.packed)
    assert torch.equal(tensors[EMBED], packed.values("embed"))
    assert torch.equal(tensors[HEAD], packed.values("lm_head")) and not torch.equal(tensors[HEAD], tensors[EMBED])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, tensors[HEAD])


def test_the_configuration_is_that_of_the_text_model():
    spec = load_model("tiny-moe")
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 128,
        "num_experts": 256,
        "num_local_experts": 256,
        "mtp_num_hidden_layers": 1,
        "bos_token_id": 7,
        "eos_token_id": None,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "modelopt"},
    }
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "eos_token_id": [8, 9],
        "rope_theta": 1,
        "vision_config": {"depth": 27},
        "image_token_id": 5,
        "quantization_config": {"quant_method": "modelopt"},
        "text_config": text,
    }
    expected = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 128,
        "num_experts": 7,
        "mtp_num_hidden_layers": 0,
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    assert text_config(whole, spec, "bfloat16", is_tied=False) == expected
    flat = {**text, "model_type": "qwen3_5_moe", "eos_token_id": [8, 9], "vision_config": {}, "image_token_id": 5}
    assert text_config(flat, spec, "bfloat16", is_tied=False) == expected
    assert text["num_experts"] == 256


def test_a_configuration_unlike_the_packed_model_is_said(uneven, tmp_path):
    packed = open_packed(uneven.packed)
    config = json.loads((uneven.packed / "config.json").read_text())
    ours = text_config(config, packed.spec, "bfloat16", is_tied=False)
    assert list(differences(ours, packed.spec)) == []
    (eps,) = differences({**ours, "rms_norm_eps": 1e-5}, packed.spec)
    assert eps == "config.json and the packed model differ in norm_eps: 1e-05 and 1e-06"
    (family,) = differences({**ours, "model_type": "llama"}, packed.spec)
    assert "not one that lynnc understands" in family and "model_type" in family


# The folder


def test_shards_stay_below_the_limit(uneven, tmp_path):
    limit = 300_000
    report = unpack(uneven.packed, tmp_path / "out", shard_bytes=limit)
    sizes: dict[str, list[int]] = {}
    for shard in report.shards:
        assert (tmp_path / "out" / shard).stat().st_mode & 0o777 == 0o644
        with safe_open(tmp_path / "out" / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            sizes[shard] = [tensor.nbytes for tensor in load_file(tmp_path / "out" / shard).values()]
    assert len(sizes) > 4 and all(sum(found) <= limit or len(found) == 1 for found in sizes.values())
    assert len(sizes) <= 2 * report.bytes / limit + 1  # two neighbours are more than the limit
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values())) == report.bytes
    assert sorted(sizes) == [f"model-{n:05}-of-{len(sizes):05}.safetensors" for n in range(1, len(sizes) + 1)]


def test_files_of_the_folder(uneven, tmp_path):
    unpack(uneven.packed, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "lynn_engine_variable_expert_spec.json",
        ORIGIN_FILE,
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    origin = json.loads((tmp_path / "out" / ORIGIN_FILE).read_text())
    index = open_packed(uneven.packed).index
    assert origin["source"]["digest"] == index.source.digest and origin["model"]["digest"] == index.model_digest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_equal_folders_become_equal_bytes(uneven, tmp_path):
    for name in ("one", "two"):
        unpack(uneven.packed, tmp_path / name)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_json(uneven, tmp_path):
    result = lynnc_cli("unpack", uneven.packed, "-o", tmp_path / "out", "--shard-size", "0.0004", "--json")
    document = json.loads(result.stdout)
    tensors = read_all(tmp_path / "out")
    assert document["tensors"] == len(tensors)
    assert document["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert document["dtype"] == "bf16" and document["transformers_loads"] is False
    assert len(document["shards"]) > 3 and len(document["notes"]) == 1


def test_progress_ends_with_everything(uneven, tmp_path):
    calls: list[tuple[int, int, str]] = []
    report = unpack(uneven.packed, tmp_path / "out", on_progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[0] == 0 and calls[-1] == (report.bytes, report.bytes, "")
    assert len(calls) == report.tensors + 1


# Refusals


def test_an_output_that_exists_is_replaced_only_if_it_was_unpacked(uneven, tmp_path):
    out = tmp_path / "out"
    unpack(uneven.packed, out, "f32")
    (out / "left").touch()
    assert "exists already" in complaint(lynnc_cli("unpack", uneven.packed, "-o", out))
    assert (out / "left").exists()
    assert lynnc_cli("unpack", uneven.packed, "-o", out, "--force").exit_code == 0
    assert not (out / "left").exists() and read_all(out)[EMBED].dtype is torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["checkpoint", "packed"])
def test_neither_checkpoint_nor_packed_folder_is_replaced(uneven, name):
    folder = uneven.packed.with_name(name)
    before = sorted(folder.iterdir())
    assert "will not be replaced" in complaint(lynnc_cli("unpack", uneven.packed, "-o", folder, "--force"))
    assert sorted(folder.iterdir()) == before


def test_no_room_is_said_before_the_work(uneven, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    line = complaint(lynnc_cli("unpack", uneven.packed, "-o", tmp_path / "out"))
    assert "make room" in line and "0.0 GB free" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [100_000, 20])
def test_a_disk_that_fills_up_leaves_nothing(uneven, tmp_path, limit):
    """A limit on the size of files stands for a full disk: in a shard, or in the first small file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OutputError, match=r"out cannot be written \(.*File too large.*\): choose another --output"):
            unpack(uneven.packed, tmp_path / "out", shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(uneven, tmp_path):
    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(uneven.packed, tmp_path / "out", shard_bytes=100_000, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_output_below_a_file(uneven, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in complaint(lynnc_cli("unpack", uneven.packed, "-o", tmp_path / "file" / "out"))


def test_an_output_that_appears_meanwhile_stays(uneven, tmp_path):
    def interfere(done: int, total: int, name: str) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(OutputError, match="exists already"):
        unpack(uneven.packed, tmp_path / "out", on_progress=interfere)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@dataclass(frozen=True)
class Damage:
    """What happens to a packed folder, and what is said of it."""

    name: str
    change: Callable[[Path], object]
    said: str

    def __str__(self) -> str:
        return self.name


def list_file(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX_FILE, lambda index: index["files"].append(name))


DAMAGES = (
    Damage("no index", lambda folder: (folder / INDEX_FILE).unlink(), "is not a packed folder"),
    Damage("no config", lambda folder: (folder / "config.json").unlink(), "config.json"),
    Damage("broken config", lambda folder: (folder / "config.json").write_text("{"), "config.json: line 1 is not JSON"),
    Damage("no tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), "lacks its file tokenizer.json"),
    Damage("file elsewhere", list_file("../checkpoint/config.json"), "which is not in its folder"),
    Damage("no shard", lambda folder: next(folder.glob("*.safetensors")).unlink(), "is missing"),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_packed_folder(packed, tmp_path, damage):
    damage.change(packed)
    line = complaint(lynnc_cli("unpack", packed, "-o", tmp_path / "out"))
    assert damage.said in line
    assert "pack the checkpoint again" in line or "name one that `lynnc pack` made" in line
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_an_unknown_type(uneven, tmp_path):
    with pytest.raises(OptionError, match="bf16 or f32"):
        unpack(uneven.packed, tmp_path / "out", "f16")
    assert "--dtype" in lynnc_cli("unpack", uneven.packed, "-o", tmp_path / "out", "--dtype", "f16").stderr
