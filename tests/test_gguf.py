"""Models of a shape for llama.cpp: hyperparameters, tensors and file, read back with the gguf package."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lynnc.build import build_graph
from lynnc.errors import LynncError, ModelError, OptionError, OutputError
from lynnc.model import Mixer, ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.peers import ggufwrite
from lynnc.runtime.peers.ggufshape import BLOCKS, gguf_model, mean_experts
from lynnc.runtime.peers.ggufwrite import write_gguf

gguf: Any = pytest.importorskip("gguf", reason="the extra `bench` is not installed")
np = pytest.importorskip("numpy")

LARGE = ("qwen3.6-35b-a3b", "qwen3-30b-a3b", "qwen3.5-9b")
TINY = ("tiny-moe", "tiny-dense", "tiny-full")


def at_width(name: str, hidden: int = 256) -> ModelSpec:
    """A tiny model whose rows are whole blocks of 256."""
    spec = load_model(name)
    moe = replace(spec.moe, intermediate=hidden) if spec.moe else None
    return replace(spec, name=f"{name}-{hidden}", hidden=hidden, moe=moe)


def written(spec: ModelSpec, folder: Path, seed: int = 1) -> Any:
    path = folder / "model.gguf"
    write_gguf(gguf_model(spec), path, seed)
    return gguf.GGUFReader(path)


SMALL = (*map(load_model, TINY), *map(at_width, TINY), replace(load_model("tiny-dense"), tied_embeddings=True))


@pytest.mark.parametrize("name", LARGE)
def test_parameters_are_those_of_our_own_graph(name: str) -> None:
    spec = load_model(name)
    ours = sum(prod(weight.shape) for weight in build_graph(spec, 1).weights.values())
    assert sum(prod(tensor.shape) for tensor in gguf_model(spec).tensors) == ours


@dataclass(frozen=True)
class Published:
    """A model's file as llama.cpp's quantiser makes it: bytes of the tensors, in GiB to two digits."""

    model: str
    gib: float


@pytest.mark.parametrize("case", [Published("qwen3.6-35b-a3b", 19.70), Published("qwen3-30b-a3b", 17.28)], ids=str)
def test_sizes_are_those_of_the_mixture(case: Published) -> None:
    assert round(gguf_model(load_model(case.model)).bytes / 2**30, 2) == case.gib


def test_types_follow_the_mixture() -> None:
    types = {tensor.name: tensor.type for tensor in gguf_model(load_model("qwen3.6-35b-a3b")).tensors}
    assert types["token_embd.weight"] == "Q4_K" and types["output.weight"] == "Q6_K"
    more = [layer for layer in range(40) if types[f"blk.{layer}.ffn_down_exps.weight"] == "Q6_K"]
    assert more == [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39]
    assert types["blk.3.attn_v.weight"] == "Q6_K" and types["blk.11.attn_v.weight"] == "Q4_K"
    assert types["blk.0.attn_qkv.weight"] == "Q6_K" and types["blk.5.attn_qkv.weight"] == "Q4_K"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ssm_conv1d.weight"] == "F32"
    narrow = {tensor.name: tensor.type for tensor in gguf_model(load_model("tiny-moe")).tensors}
    assert narrow["blk.0.ffn_up_exps.weight"] == "Q5_0" and narrow["output.weight"] == "Q8_0"
    odd = replace(load_model("tiny-moe"), hidden=80)
    assert {tensor.type for tensor in gguf_model(odd).tensors if tensor.shape[-1] == 80} <= {"F16", "F32"}


def test_blocks_are_the_librarys() -> None:
    for name, block in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == block


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_the_library_knows_every_tensor(spec: ModelSpec) -> None:
    model = gguf_model(spec)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == model.architecture)
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    found = {tensor.name.removesuffix(".weight").removesuffix(".bias") for tensor in model.tensors}
    generic = {".".join("{bid}" if part.isdigit() else part for part in name.split(".")) for name in found}
    missing = {"output"} if spec.tied_embeddings else set()
    assert generic <= known
    optional = {"blk.{bid}.ffn_gate_up_exps"} | missing
    assert known - generic <= optional


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_the_file_reads_back(spec: ModelSpec, tmp_path: Path) -> None:
    model, reader = gguf_model(spec), written(spec, tmp_path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == [tensor.name for tensor in model.tensors]
    for tensor in model.tensors:
        back = found[tensor.name]
        assert (back.tensor_type.name, back.n_bytes) == (tensor.type, tensor.bytes)
        assert tuple(int(size) for size in back.shape) == tensor.shape[::-1]
        assert back.data_offset % 32 == 0
    end = reader.tensors[-1]
    assert end.data_offset + -(-end.n_bytes // 32) * 32 == (tmp_path / "model.gguf").stat().st_size


def fields_of(reader: Any) -> Mapping[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def test_hyperparameters_read_back(tmp_path: Path) -> None:
    fields = fields_of(written(load_model("tiny-moe"), tmp_path))
    expected = {
        "general.architecture": "qwen35moe",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_K_M,
        "tokenizer.ggml.model": "no_vocab",
        "qwen35moe.vocab_size": 384,
        "qwen35moe.block_count": 4,
        "qwen35moe.full_attention_interval": 4,
        "qwen35moe.expert_count": 6,
        "qwen35moe.expert_used_count": 2,
        "qwen35moe.expert_feed_forward_length": 64,
        "qwen35moe.expert_shared_feed_forward_length": 64,
        "qwen35moe.attention.key_length": 64,
        "qwen35moe.rope.dimension_count": 16,
        "qwen35moe.rope.dimension_sections": [3, 3, 2, 0],
        "qwen35moe.ssm.group_count": 2,
        "qwen35moe.ssm.time_step_rank": 4,
        "qwen35moe.ssm.inner_size": 256,
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["qwen35moe.rope.freq_base"] == 1e7
    shape = gguf_model(load_model("qwen3.6-35b-a3b")).hyperparameters
    assert shape["rope.dimension_sections"] == (11, 11, 10, 0)


def test_keys_are_named_as_the_library_names_them() -> None:
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    keys = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    for name in (*LARGE, *TINY):
        assert {f"{{arch}}.{key}" for key in gguf_model(load_model(name)).hyperparameters} <= keys


@pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
def test_values_are_of_a_living_model(spec: ModelSpec, tmp_path: Path) -> None:
    for tensor in written(spec, tmp_path).tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float64)
        assert np.isfinite(values).all(), tensor.name
        if tensor.tensor_type.name in ggufwrite.SCALES or "ffn_gate_inp" in tensor.name:
            wanted = values.shape[-1] ** -0.5
            scatter = 5 * (values.size / 32) ** -0.5  # 32 values share random scales
            assert np.sqrt((values**2).mean()) == pytest.approx(wanted, rel=0.02 + scatter), tensor.name
            # Codes of Q5_0 are -16 to 15: their mean is no zero.
            assert abs(values.mean()) < (0.06 + scatter) * wanted, tensor.name
        if tensor.name.endswith("ssm_a"):
            assert (values < 0).all(), "a state that grows for ever"


def test_experts_differ_and_seeds_do_too(tmp_path: Path) -> None:
    first = {tensor.name: np.array(tensor.data) for tensor in written(SMALL[0], tmp_path).tensors}
    again = {tensor.name: np.array(tensor.data) for tensor in written(SMALL[0], tmp_path).tensors}
    other = {tensor.name: np.array(tensor.data) for tensor in written(SMALL[0], tmp_path, seed=2).tensors}
    experts = first["blk.0.ffn_up_exps.weight"]
    assert not np.array_equal(experts[0], experts[1])
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_small_pieces_make_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggufwrite, "PIECE", 1000)
    seen: list[tuple[int, int]] = []
    model = gguf_model(SMALL[3])
    write_gguf(model, tmp_path / "model.gguf", 1, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (model.bytes, model.bytes) and len(seen) > model.bytes // 1000
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(gguf.GGUFReader(tmp_path / "model.gguf").tensors) == len(model.tensors)


def test_pruned_layers_get_the_mean() -> None:
    spec = load_model("lynn-27b-a3b")
    assert spec.moe and mean_experts(spec.moe) == 231
    ours = sum(prod(weight.shape) for weight in build_graph(spec, 1).weights.values())
    theirs = sum(prod(tensor.shape) for tensor in gguf_model(spec).tensors)
    assert abs(theirs / ours - 1) < 0.002


@dataclass(frozen=True)
class Refused:
    """A model that llama.cpp cannot have, and what is said."""

    name: str
    spec: ModelSpec
    says: str


def refused() -> tuple[Refused, ...]:
    moe, full = load_model("tiny-moe"), load_model("tiny-full")
    assert moe.gdn and moe.moe
    irregular = (Mixer.GDN, Mixer.FULL, Mixer.FULL, Mixer.GDN)
    return (
        Refused("dimensions", replace(moe, gdn=replace(moe.gdn, value_dim=32)), "keys of 64 and values of 32 dimens"),
        Refused("layers", replace(moe, layers=irregular), "full attention at irregular layers"),
        Refused("experts", replace(moe, moe=replace(moe.moe, experts=(600,) * 4)), "600 experts a layer and llama.cpp"),
        Refused("rotation", replace(full, attention=replace(full.attention, rotary_dim=16)), "rotates 16 of 64 dimens"),
    )


@pytest.mark.parametrize("case", refused(), ids=lambda case: case.name)
def test_models_that_it_cannot_have_are_refused(case: Refused) -> None:
    with pytest.raises(ModelError, match=f"{case.says}.*: leave --peer out"):
        gguf_model(case.spec)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(OutputError, match=r"has 1\.0 GB free and the peer's model takes 21\.2 GB: make room"):
        write_gguf(gguf_model(load_model("qwen3.6-35b-a3b")), tmp_path / "model.gguf", 1)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Unwritable:
    """A path that cannot be written, and why."""

    path: str
    says: str


@pytest.mark.parametrize(
    "case", [Unwritable("/dev/full", "No space left"), Unwritable("/nowhere/model.gguf", "No such file")], ids=str
)
def test_what_cannot_be_written_is_said(case: Unwritable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggufwrite, "ROOM", -(10**9))
    with pytest.raises(OutputError, match=f"{case.says}.*choose another folder for the peer's model"):
        write_gguf(gguf_model(SMALL[0]), Path(case.path), 1)


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(ggufwrite, "import_module", refuse)
    with pytest.raises(OptionError, match=r"gguf package.*is missing: run `pip install") as caught:
        write_gguf(gguf_model(SMALL[0]), tmp_path / "model.gguf", 1)
    assert isinstance(caught.value, LynncError) and list(tmp_path.iterdir()) == []
