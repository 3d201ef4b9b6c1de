"""Weights out of checkpoints: exactly the values that each format stands for, and every tensor accounted for."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    ALL_FLAVOURS,
    INDEX,
    Written,
    class_by_name,
    edit_json,
    edit_tensors,
    write_checkpoint,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Case, make_reference
from safetensors.torch import save_file
from storedformats import CODES, E4M3, GROUP, Flavour, Tensors

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import open_checkpoint
from lynnc.runtime.checkpoints.declared import Recognised, SourceKind
from lynnc.runtime.checkpoints.located import Located, read_matrix
from lynnc.runtime.checkpoints.source import Source, open_source
from lynnc.runtime.checkpoints.stored import catalogue, check_stored
from lynnc.runtime.checkpoints.tensorclasses import tensor_class
from lynnc.runtime.checkpoints.tensorreader import TensorReader
from lynnc.runtime.weights.matrix import Fp4Matrix, decode

MOE, DENSE, FULL = Case("tiny-moe"), Case("tiny-dense"), Case("tiny-full")
MANIFEST = "lynn_quant_manifest.json"
Q, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.experts.2.down_proj.weight"
FUSED_DOWN = "model.layers.1.mlp.experts.down_proj"
FP8 = Flavour("modelopt", fp8=("attention_in",), metadata="hf_quant_config.json")


def opened(written: Written, **changes: Any) -> Source:
    return open_source(written.folder, replace(written.spec, **changes))


@pytest.mark.parametrize("case", [MOE, DENSE, FULL], ids=str)
@pytest.mark.parametrize("flavour", ALL_FLAVOURS, ids=str)
def test_values_are_those_of_the_format(case: Case, flavour: Flavour, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", case, flavour)
    used: set[str] = set()
    with closing(opened(written)) as source:
        for name, values in written.values.items():
            located = source.locate(name)
            matrix = source.read(located)
            assert located.format is written.formats[name] and set(located.tensors) == set(written.tensors[name])
            assert (located.rows, located.columns) == (len(values), values.shape[-1] if values.dim() > 1 else 1)
            assert torch.equal(decode(matrix), values.reshape(located.rows, located.columns)), name
            used |= set(located.tensors)
        assert used.isdisjoint(source.skipped()) and set(source.skipped()) == written.skipped
        assert used | written.skipped == set(source.checkpoint.tensors) and not source.checkpoint.unlisted
        if case.spec.moe:
            assert tuple(source.experts(layer) for layer in range(len(case.spec.layers))) == case.spec.moe.experts
        found = source.formats_by_class()
        assert source.is_quantised == (flavour.kind != "plain")
    classes = class_by_name(case.spec)
    assert found == {
        tensor_class: {fmt for name, fmt in written.formats.items() if classes[name] == tensor_class}
        for tensor_class in set(classes.values()) - {"vector"}
    }


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("stored", ["model.", "model.language_model.", "language_model.model."])
def test_prefixes_of_model_and_checkpoint(prefix: str, stored: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", DENSE, Flavour(prefix=stored))
    with closing(opened(written, tensor_prefix=prefix)) as source:
        located = source.locate(f"{prefix}layers.0.mlp.up_proj.weight")
        assert located.tensors == (f"{stored}layers.0.mlp.up_proj.weight",)
        assert torch.equal(decode(source.read(located)), written.values["model.layers.0.mlp.up_proj.weight"])
        assert source.locate("lm_head.weight").tensors == ("lm_head.weight",)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model."])
def test_the_head_may_have_a_prefix(prefix: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", DENSE)
    edit_tensors(
        written.folder, lambda tensors: tensors.update({f"{prefix}lm_head.weight": tensors.pop("lm_head.weight")})
    )
    with closing(opened(written)) as source:
        located = source.locate("lm_head.weight")
        assert located.tensors == (f"{prefix}lm_head.weight",)
        assert torch.equal(decode(source.read(located)), written.values["lm_head.weight"])
        assert "lm_head" in source.formats_by_class()


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_experts_with_and_without_suffix(suffix: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", FULL, Flavour(fused=True))

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[f"{name}{suffix}"] = tensors.pop(name)

    edit_tensors(written.folder, rename)
    with closing(opened(written)) as source:
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.4.{part}_proj.weight"
            assert torch.equal(decode(source.read(source.locate(name))), written.values[name])


def test_what_transformers_itself_writes(tmp_path: Path) -> None:
    """The tensors' names and layouts are those of the library, not those of our own writer."""
    for case in (MOE, DENSE, FULL):
        model, lookup = make_reference(case.spec, case.seed)
        folder = tmp_path / case.model
        model.save_pretrained(folder)
        with closing(open_source(folder, case.spec)) as source:
            used = set()
            for name in class_by_name(case.spec):
                located = source.locate(name)
                used |= set(located.tensors)
                assert torch.equal(decode(source.read(located)).reshape(lookup(name).shape), lookup(name)), name
            assert used | set(source.skipped()) == set(source.checkpoint.tensors)


def test_what_a_matrix_costs(tmp_path: Path) -> None:
    """Bytes as the formats' descriptions give them, of an expert's part and of whole tensors."""
    name = "model.layers.0.mlp.experts.1.up_proj.weight"  # [64, 128]
    expected = {
        Flavour(fused=True): ("BF16", 64 * 128 * 2),
        Flavour(dtype=torch.float32): ("F32", 64 * 128 * 4),
        Flavour("lynn-v1", fused=True): ("nvfp4-fp16", 64 * 64 + 64 * 8 * 2 + 4),
        Flavour("compressed-tensors"): ("nvfp4", 64 * 64 + 64 * 8 + 4),
        Flavour("modelopt", fp8=("experts",)): ("fp8", 64 * 128 + 4),
    }
    for number, (flavour, (stored, size)) in enumerate(expected.items()):
        written = write_checkpoint(tmp_path / str(number), FULL, flavour)
        located = opened(written).locate(name)
        assert (located.stored, located.bytes, located.rows, located.columns) == (stored, size, 64, 128)
        assert located.divides == (flavour.kind in ("lynn-v1", "compressed-tensors"))


def test_locating_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_checkpoint(tmp_path / "c", MOE, Flavour("modelopt", extras=True))
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("data was read"))
    source = opened(written)
    for name in written.values:
        source.locate(name)
    source.experts(0), source.skipped(), source.notes(), source.formats_by_class()


SHAPES = [(rows, GROUP * groups) for rows in (1, 3, 16) for groups in (1, 2, 5)]
QUANTISED = ["compressed-tensors", "modelopt", "lynn"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SHAPES), st.integers(0, 2**31), st.sampled_from(QUANTISED))
def test_all_codes_and_scales(tmp_path: Path, shape: tuple[int, int], seed: int, kind: str) -> None:
    """Any codes, and any scales but NaN, of either sign in E4M3, decode as the format's formula says."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator)
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    bits = torch.randint(0, 127, (rows, columns // GROUP), generator=generator)
    sign = torch.randint(0, 2, bits.shape, generator=generator)
    scales, values = (bits + 128 * sign).to(torch.uint8).view(torch.float8_e4m3fn), E4M3[bits] * (1 - 2 * sign)
    single = torch.rand((), generator=generator) + 0.01
    key = "model.layers.0.mlp.up_proj.weight"
    if kind == "compressed-tensors":
        tensors = {f"{key}_packed": pairs, f"{key}_scale": scales, f"{key}_global_scale": single.reshape(1)}
        block = values / single
    elif kind == "modelopt":
        tensors, block = {key: pairs, f"{key}_scale": scales, f"{key}_scale_2": single}, values * single
    else:
        tensors = {f"{key}.packed": pairs, f"{key}.scale": E4M3[bits].half(), f"{key}.global_scale": single}
        block = E4M3[bits] / single
    found = decode(read_only(tmp_path, tensors, SourceKind(kind), key, shape))
    assert torch.equal(found, CODES[codes] * block.repeat_interleave(GROUP, -1))


def read_only(folder: Path, tensors: Tensors, kind: SourceKind, key: str, shape: tuple[int, int]) -> Fp4Matrix:
    """One matrix of a folder that holds nothing else."""
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    entry = {"packed_key": f"{key}.packed", "scale_key": f"{key}.scale", "global_scale_key": f"{key}.global_scale"}
    manifest = {"quantized_tensors": {key: {**entry, "original_shape": list(shape)}}}
    checkpoint = replace(open_checkpoint(folder), side_files={MANIFEST: manifest})
    stored = catalogue(checkpoint, Recognised(kind, "", "bf16"))[key]
    check_stored(checkpoint, stored)
    with TensorReader(checkpoint) as reader:
        located = Located(key, key, stored.tensors, stored.format, "U8", *shape, divides=stored.divides)
        matrix = read_matrix(reader, stored, located)
    assert isinstance(matrix, Fp4Matrix)
    return matrix


def test_classes_of_names() -> None:
    for case in (MOE, DENSE, FULL):
        for name, expected in class_by_name(case.spec).items():
            found = tensor_class(name.removeprefix("model."))
            assert found == (None if expected == "vector" else expected), name
    assert tensor_class("layers.0.mlp.experts.gate_up_proj") == "experts"
    assert tensor_class("layers.0.mlp.experts.down_proj.weight") == "experts"


def test_notes_of_differences(tmp_path: Path) -> None:
    """Declared quantised and stored plain, or the reverse: both are read as stored, and told."""
    written = write_checkpoint(tmp_path / "a", FULL, Flavour("compressed-tensors", kept=("embed", "router", "lm_head")))
    assert opened(written).notes() == ()
    edit_json(written.folder / "config.json", lambda c: c["quantization_config"]["ignore"].remove("lm_head"))
    assert opened(written).notes() == ("lm_head: 1 modules are declared quantised but stored plain, such as lm_head",)
    mixed = write_checkpoint(tmp_path / "b", FULL, FP8)
    edit_json(
        mixed.folder / "hf_quant_config.json",
        lambda c: [c["quantization"]["quantized_layers"].pop(f"model.layers.{n}.mlp.experts") for n in (0, 1)],
    )
    source = opened(mixed)
    assert any("experts: 42 modules are stored quantised but not declared" in note for note in source.notes())
    assert torch.equal(decode(source.read(source.locate(DOWN))), mixed.values[DOWN])


def test_lynn_names_come_from_the_manifest_alone(tmp_path: Path) -> None:
    """Whatever the tensors are called, the manifest's words count; without it nothing is found by its looks."""
    written = write_checkpoint(tmp_path / "c", FULL, Flavour("lynn-v0", fused=True))
    names: dict[str, str] = {}

    def rename(tensors: Tensors) -> None:
        for number, name in enumerate([name for name in tensors if name.endswith(("_packed", "_scale"))]):
            names[name] = f"blob{number}"
            tensors[names[name]] = tensors.pop(name)

    def follow(manifest: dict[str, Any]) -> None:
        for entry in manifest["quantized_tensors"].values():
            entry.update({key: names[name] for key, name in entry.items() if isinstance(name, str) and name in names})

    edit_tensors(written.folder, rename)
    edit_json(written.folder / MANIFEST, follow)
    with closing(opened(written)) as source:
        located = source.locate(DOWN)
        assert all(name.startswith("blob") for name in located.tensors)
        assert torch.equal(decode(source.read(located)), written.values[DOWN])
    edit_json(
        written.folder / "lynn_quant_manifest.json", lambda m: m["quantized_tensors"][FUSED_DOWN].pop("scale_key")
    )
    with pytest.raises(WeightError, match=rf"manifest\.json does not describe {FUSED_DOWN} in full"):
        opened(written)


def test_an_index_that_leaves_a_tensor_out(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", FULL, Flavour(shards=2))
    edit_json(written.folder / INDEX, lambda index: index["weight_map"].pop(Q))
    source = opened(written)
    assert list(source.checkpoint.unlisted) == [Q]
    with pytest.raises(WeightError, match=f"lacks {Q}"):
        source.locate(Q)


def test_closing_and_reading_again(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", DENSE)
    source = opened(written)
    name = "model.norm.weight"
    first = decode(source.read(source.locate(name)))
    source.close()
    source.close()
    assert torch.equal(decode(source.read(source.locate(name))), first)
