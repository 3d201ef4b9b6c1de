"""Model files: the shipped ones, the round trip, and one case for each thing that can be wrong."""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from lynnc.errors import ModelError
from lynnc.fields import Place
from lynnc.model import TENSOR_CLASSES, AttentionSpec, Family, GdnSpec, Mixer, MoeSpec, PrecisionSpec
from lynnc.modelfile import dump_model, load_model, parse_model, shipped_models
from lynnc.modelshape import SHAPE, from_dict
from lynnc.tensors import Format

SHIPPED = (
    "lynn-27b-a3b",
    "qwen3-30b-a3b",
    "qwen3.5-35b-a3b",
    "qwen3.5-9b",
    "qwen3.6-35b-a3b",
    "tiny-dense",
    "tiny-full",
    "tiny-moe",
)
LYNN_COUNTS = {222, 228, 231, 232, 233, 235, 236, 242, 248, 252, 254, 256}


def shipped_text(name: str) -> str:
    return files("lynnc.models").joinpath(f"{name}.yaml").read_text("utf-8")


def plain(name: str) -> Any:
    """A shipped model as plain values."""
    return yaml.safe_load(dump_model(load_model(name)))


def test_shipped_models_are_these() -> None:
    assert shipped_models() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_loads_and_round_trips(name: str) -> None:
    spec = load_model(name)
    assert spec.name == name
    assert parse_model(dump_model(spec), "again.yaml") == spec
    assert shipped_text(name).startswith("# yaml-language-server: $schema=./lynnc-model.schema.json\n")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_precision(name: str) -> None:
    precision = load_model(name).precision
    kept = {"embed", "router", "shared_gate"}
    assert {key for key in TENSOR_CLASSES if precision.format(key) is Format.BF16} == kept
    assert {precision.format(key) for key in TENSOR_CLASSES if key not in kept} == {Format.NVFP4}
    assert precision.activations == "bf16"


def test_lynn_has_9230_experts_in_a_representative_map() -> None:
    spec, base = load_model("lynn-27b-a3b"), load_model("qwen3.6-35b-a3b")
    assert spec.moe and base.moe
    assert sum(spec.moe.experts) == 9230
    assert set(spec.moe.experts) == LYNN_COUNTS
    assert spec.moe.experts[0] == 256
    assert spec.representative
    assert not base.representative
    full_moe = replace(spec.moe, experts=base.moe.experts)
    assert replace(spec, name=base.name, description=base.description, moe=full_moe, representative=False) == base


def test_tiny_moe_values() -> None:
    spec = load_model("tiny-moe")
    assert spec.layers == (Mixer.GDN, Mixer.GDN, Mixer.GDN, Mixer.FULL)
    assert spec.moe == MoeSpec((6, 5, 4, 7), top_k=2, intermediate=64, normalize_top_k=True, shared_intermediate=64)
    assert spec.gdn == GdnSpec(key_heads=2, value_heads=4, key_dim=64, value_dim=64, conv_width=4)
    assert spec.attention == AttentionSpec(4, 2, head_dim=64, rotary_dim=16, rope_theta=1e7, output_gate=True)
    assert spec.family is Family.QWEN3_5_MOE
    assert spec.norm_eps == 1e-6


def test_readme_example_loads_and_names_every_field() -> None:
    readme = (Path(__file__).parent.parent / "models" / "README.md").read_text("utf-8")
    example = readme.split("```yaml\n")[1].split("```")[0]
    spec = parse_model(example, "README.md")
    tiny = load_model("tiny-moe")
    formats = MappingProxyType({**tiny.precision.formats, "lm_head": Format.BF16})
    assert spec == replace(tiny, name="example", description="A small example", precision=PrecisionSpec(formats))
    assert all(f"{name}:" in example for name in SHAPE.fields)
    assert all(f"| `{name}` | {meaning} |" in readme for name, meaning in TENSOR_CLASSES.items())


def test_loads_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_model(replace(load_model("tiny-moe"), name="mine")))
    assert load_model(path) == load_model(str(path)) == replace(load_model("tiny-moe"), name="mine")


@dataclass(frozen=True)
class Bad:
    """``old`` of a shipped model's text becomes ``new``; the message must hold field, problem and advice."""

    case: str
    old: str
    new: str
    field: str
    problem: str
    advice: str
    model: str = "tiny-moe"


BAD = (
    Bad("unknown field", "hidden: 128", "hiden: 128", "hiden", "no known field", "write hidden instead"),
    Bad("unknown far", "hidden: 128", "hidden: 128\nqqq: 1", "qqq", "no known field", "remove it or write one of"),
    Bad("unknown nested", "top_k: 2", "topk: 2", "moe.topk", "no known field", "write top_k instead"),
    Bad("unknown number", "hidden: 128", "hidden: 128\n7: 1", "7", "no known field", "remove it"),
    Bad("tensor class", "lm_head: nvfp4", "lm_haed: nvfp4", "precision.lm_haed", "no known tensor class", "lm_head"),
    Bad("missing", "hidden: 128\n", "", "hidden", "is missing", "add it"),
    Bad("missing nested", "  top_k: 2\n", "", "moe.top_k", "is missing", "add it"),
    Bad("missing section", "norm: {eps: 1e-6, weight: shifted}\n", "", "norm", "is missing", "add it"),
    Bad("text for int", "hidden: 128", "hidden: '128'", "hidden", "'128', not a whole number", "whole number from 1"),
    Bad("float for int", "hidden: 128", "hidden: 128.0", "hidden", "128.0, not a whole number", "whole number"),
    Bad("bool for int", "hidden: 128", "hidden: true", "hidden", "true, not a whole number", "whole number"),
    Bad("bool for number", "eps: 1e-6", "eps: true", "norm.eps", "true, not a number", "number above zero"),
    Bad("text for number", "eps: 1e-6", "eps: '1e-6'", "norm.eps", "'1e-6', not a number", "number above zero"),
    Bad(
        "text for flag",
        "output_gate: true",
        "output_gate: yes",
        "attention.output_gate",
        "'yes', not a flag",
        "true or",
    ),
    Bad("int for text", "description: Tiny", "description: 5 #", "description", "is 5, not text", "quotation marks"),
    Bad("empty section", "mtp: {layers: 0}", "mtp:", "mtp", "is empty, not a mapping", "layers"),
    Bad("list for section", "mtp: {layers: 0}", "mtp: [0]", "mtp", "a list, not a mapping", "layers"),
    Bad("text for list", "[gdn, gdn, gdn, full]", "gdn", "layers.pattern", "'gdn', not a list", "such as [a, b]"),
    Bad("empty list", "[gdn, gdn, gdn, full]", "[]", "layers.pattern", "empty list", "at least one"),
    Bad("mixer", "[gdn, gdn, gdn, full]", "[gdn, gd, gdn, full]", "layers.pattern[1]", "'gd'", "write gdn"),
    Bad("family", "qwen3_5_moe", "qwen35_moe", "family", "'qwen35_moe'", "write qwen3_5_moe"),
    Bad("format", "lm_head: nvfp4", "lm_head: nvfp5", "precision.lm_head", "'nvfp5'", "write nvfp4"),
    Bad(
        "activations",
        "activations: bf16",
        "activations: int8",
        "precision.activations",
        "'int8', not bf16 or nvfp4",
        "one of these",
    ),
    Bad("norm weight", "weight: shifted", "weight: shift", "norm.weight", "'shift'", "write shifted"),
    Bad("name", "name: tiny-moe", "name: a/b", "name", "'a/b'", "letters, digits"),
    Bad("zero", "hidden: 128", "hidden: 0", "hidden", "is 0", "from 1 up"),
    Bad("huge", "vocabulary: 384", "vocabulary: 9999999999", "vocabulary", "is 9999999999", "at most 2147483647"),
    Bad("repeated", "full]}", "full], repeat: 1001}", "layers.repeat", "is 1001", "at most 1000"),
    Bad("negative", "mtp: {layers: 0}", "mtp: {layers: -1}", "mtp.layers", "is -1", "from 0 up"),
    Bad("zero number", "eps: 1e-6", "eps: 0.0", "norm.eps", "is 0.0", "finite number above zero"),
    Bad("infinite", "theta: 1e7", "theta: .inf", "attention.rope.theta", "is inf", "finite number"),
    Bad("not a number", "theta: 1e7", "theta: .nan", "attention.rope.theta", "is nan", "finite number"),
    Bad("zero experts", "[6, 5, 4, 7]", "[6, 5, 4, 0]", "moe.experts[3]", "is 0", "from 1 up"),
    Bad(
        "too few layers", "[6, 5, 4, 7]", "[6, 5, 4]", "moe.experts", "lists 3 layers but the model has 4", "one number"
    ),
    Bad(
        "too few experts",
        "[6, 5, 4, 7]",
        "[6, 5, 4, 1]",
        "moe.experts[3]",
        "layer 3 with 1, fewer than the 2",
        "at least 2",
    ),
    Bad("same too few", "[6, 5, 4, 7]", "1", "moe.experts", "layer 0 with 1, fewer than the 2", "at least 2"),
    Bad("kv heads", "kv_heads: 2", "kv_heads: 3", "attention.kv_heads", "does not divide the 4 query", "a divisor"),
    Bad("conv width", "conv_width: 4", "conv_width: 20", "gdn.conv_width", "is 20", "2 to 9"),
    Bad("head state", "key_dim: 64", "key_dim: 1024", "gdn.key_dim", "1024 x 64 values", "32,768"),
    Bad("many experts", "[6, 5, 4, 7]", "[6, 5, 4, 5000]", "moe.experts", "5,000 experts", "at most 4,096"),
    Bad("vector format", "default: nvfp4", "default: f32", "precision.default", "f32", "write one of these"),
    Bad("key heads", "key_heads: 2", "key_heads: 3", "gdn.key_heads", "does not divide the 4 value", "a divisor"),
    Bad("hidden columns", "hidden: 128", "hidden: 120", "hidden", "120 columns", "multiple of 16"),
    Bad(
        "expert columns", "  intermediate: 64", "  intermediate: 40", "moe.intermediate", "40 columns", "multiple of 16"
    ),
    Bad(
        "shared columns",
        "shared_intermediate: 64",
        "shared_intermediate: 8",
        "moe.shared_intermediate",
        "8 columns",
        "of 16",
    ),
    Bad("value columns", "value_dim: 64", "value_dim: 3", "gdn.value_dim", "12 columns", "multiple of 16"),
    Bad("head columns", "head_dim: 64", "head_dim: 18", "attention.head_dim", "72 columns", "multiple of 16"),
    Bad(
        "dense columns",
        "intermediate: 256",
        "intermediate: 7",
        "dense.intermediate",
        "7 columns",
        "of 16",
        "tiny-dense",
    ),
    Bad("odd rotary", "dims: 16", "dims: 15", "attention.rope.dims", "15 rotated", "even"),
    Bad(
        "long rotary",
        "dims: 16",
        "dims: 66",
        "attention.rope.dims",
        "66 rotated dimensions, more than the 64",
        "at most",
    ),
    Bad("both blocks", "mtp:", "dense: {intermediate: 64}\nmtp:", "dense", "stands beside moe", "keep only moe"),
    Bad("no block", "dense: {intermediate: 256}\n", "", "dense", "is missing", "feed-forward", "tiny-dense"),
    Bad("wrong block", "family: qwen3_5_moe", "family: qwen3_5", "moe", "is not what family qwen3_5 has", "give dense"),
    Bad("gdn unused", "[gdn, gdn, gdn, full]", "[full, full, full, full]", "gdn", "no layer", "remove it"),
    Bad(
        "gdn in qwen3_moe",
        "[full]",
        "[gdn]",
        "layers.pattern[0]",
        "unknown to family qwen3_moe",
        "write full",
        "tiny-full",
    ),
    Bad(
        "twice", "hidden: 128", "hidden: 128\nhidden: 128", "hidden", "given on line 5 and again on line 6", "keep one"
    ),
    Bad("twice nested", "top_k: 2", "top_k: 2\n  top_k: 3", "moe.top_k", "and again on line", "keep one of them"),
    Bad("syntax", "hidden: 128", "hidden: 128: 3", "line 5", "mapping values are not allowed", "correct it"),
    Bad("bracket", "[6, 5, 4, 7]", "[6, 5, 4, 7", "line", "cannot be read", "correct it"),
    Bad("alias", "hidden: 128", "hidden: &x 128\nvocabulary: *x\n#", "line 6", "alias", "correct it"),
    Bad("object tag", "hidden: 128", "hidden: !!python/name:os.system", "line 5", "could not determine", "correct"),
    Bad("wrong tag", "hidden: 128", "hidden: !!int abc", "the content", "be read as YAML", "correct it"),
    Bad("control character", "hidden: 128", "hidden: \x01", "the content", "be read as YAML", "correct it"),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.case)
def test_bad_file(bad: Bad, tmp_path: Path) -> None:
    text = shipped_text(bad.model)
    assert text.count(bad.old) >= 1
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace(bad.old, bad.new, 1))
    with pytest.raises(ModelError) as caught:
        load_model(path)
    check_message(str(caught.value), str(path), bad.field, bad.problem, bad.advice)


def check_message(message: str, file: str, field: str, problem: str, advice: str) -> None:
    """One sentence: ``FILE: FIELD problem; advice``."""
    assert message.startswith(f"{file}: {field} "), message
    assert "\n" not in message
    said, _, todo = message.rpartition("; ")
    assert problem in said, message
    assert advice in todo, message


def test_gdn_section_missing() -> None:
    content = plain("tiny-moe")
    del content["gdn"]
    with pytest.raises(ModelError) as caught:
        from_dict(content, Place("x.yaml"))
    check_message(str(caught.value), "x.yaml", "gdn", "is missing though layers.pattern has gdn", "give key_heads")


@pytest.mark.parametrize(
    ("name", "part", "advice"),
    [
        ("tiny-mo", "neither a shipped model", "write tiny-moe instead"),
        ("zzz", "neither a shipped model", "write one of"),
    ],
)
def test_unknown_name(name: str, part: str, advice: str) -> None:
    with pytest.raises(ModelError, match=part) as caught:
        load_model(name)
    assert advice in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    missing, folder, binary, empty = (tmp_path / f"{name}.yaml" for name in ("missing", "folder", "binary", "empty"))
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("# nothing\n")
    cases = ((missing, "no such file"), (folder, "cannot be read"), (binary, "not UTF-8"), (empty, "is empty"))
    for path, problem in cases:
        with pytest.raises(ModelError) as caught:
            load_model(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert problem in str(caught.value)
