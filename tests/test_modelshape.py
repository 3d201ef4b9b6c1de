"""The schema and the loader agree; what is dumped loads to the same; junk is refused and breaks nothing."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.errors import ModelError
from lynnc.fields import REQUIRED, Field, Place, Section
from lynnc.model import (
    TENSOR_CLASSES,
    AttentionSpec,
    DenseSpec,
    Family,
    GdnSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    PrecisionSpec,
)
from lynnc.modelfile import dump_model, load_model, parse_model, shipped_models
from lynnc.modelshape import MATRIX_FORMATS, SHAPE, from_dict
from lynnc.tensors import Format

SCHEMA: dict[str, Any] = json.loads(files("lynnc.models").joinpath("lynnc-model.schema.json").read_text("utf-8"))


def shipped_text(name: str) -> str:
    return files("lynnc.models").joinpath(f"{name}.yaml").read_text("utf-8")


def plain(name: str) -> Any:
    """The content of a shipped file as plain values."""
    return yaml.safe_load(
        shipped_text(name).replace("1e-6", "1.0e-6").replace("1e7", "1.0e+7").replace("1e6", "1.0e+6")
    )


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_model_fits_the_schema(name: str) -> None:
    jsonschema.validate(plain(name), SCHEMA, cls=jsonschema.Draft202012Validator)


def test_left_out_fields_have_defaults() -> None:
    content = plain("tiny-moe")
    for name in ("description", "tied_embeddings", "mtp", "tensor_prefix"):
        del content[name]
    content["precision"] = {"default": "fp8"}
    spec = from_dict(content, Place("x.yaml"))
    assert (spec.description, spec.tied_embeddings, spec.mtp_layers, spec.representative) == ("", False, 0, False)
    assert spec.tensor_prefix == "model.language_model."
    assert spec.precision.format("lm_head") is Format.FP8
    assert spec.precision.format("router") is Format.BF16


def test_one_number_of_experts_serves_every_layer() -> None:
    spec = load_model("tiny-full")
    assert spec.moe
    assert spec.moe.experts == (7, 7, 7)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-6", 1e-6), ("1E-06", 1e-6), ("1.0e-6", 1e-6), (".000001", 1e-6), ("1", 1.0), ("+1e+2", 100.0)],
)
def test_numbers_in_every_form(written: str, value: float) -> None:
    text = shipped_text("tiny-moe").replace("eps: 1e-6", f"eps: {written}")
    assert parse_model(text, "x.yaml").norm_eps == value


def test_a_decimal_with_a_leading_zero_is_decimal() -> None:
    assert parse_model(shipped_text("tiny-moe").replace("context: 512", "context: 0512"), "x.yaml").max_context == 512


def sections(part: Section, schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Section, dict[str, Any]]]:
    yield path, part, schema
    for name, inner in part.fields.items():
        if isinstance(inner, Section):
            yield from sections(inner, schema["properties"][name], f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize(("path", "part", "schema"), list(sections(SHAPE, SCHEMA)), ids=lambda value: str(value)[:20])
def test_schema_has_the_fields_of_the_loader(path: str, part: Section, schema: dict[str, Any]) -> None:
    assert set(schema["properties"]) == set(part.fields)
    assert schema["additionalProperties"] is False
    assert set(schema.get("required", [])) == {name for name, one in part.fields.items() if one.default is REQUIRED}
    for name, one in part.fields.items():
        assert schema["properties"][name]["description"], f"{path}.{name}"
        default = schema["properties"][name].get("default")
        if isinstance(one, Field) and one.default not in (REQUIRED, None):
            assert default == one.default, f"{path}.{name}"


@dataclass(frozen=True)
class SchemaCase:
    case: str
    edit: Callable[[dict[str, Any]], object]


SCHEMA_CASES = (
    SchemaCase("unknown", lambda c: c.update(hiden=1)),
    SchemaCase("unknown nested", lambda c: c["attention"]["rope"].update(base=1)),
    SchemaCase("tensor class", lambda c: c["precision"].update(lm_haed="bf16")),
    SchemaCase("format", lambda c: c["precision"].update(lm_head="int4")),
    SchemaCase("text for int", lambda c: c.update(hidden="128")),
    SchemaCase("bool for int", lambda c: c.update(hidden=True)),
    SchemaCase("columns", lambda c: c.update(hidden=120)),
    SchemaCase("odd rotary", lambda c: c["attention"]["rope"].update(dims=15)),
    SchemaCase("both blocks", lambda c: c.update(dense={"intermediate": 64})),
    SchemaCase("no block", lambda c: c.pop("moe")),
    SchemaCase("experts", lambda c: c["moe"].update(experts=[6, 5, 4, 0])),
    SchemaCase("pattern", lambda c: c["layers"].update(pattern=[])),
    SchemaCase("name", lambda c: c.update(name="a b")),
)


@pytest.mark.parametrize("case", SCHEMA_CASES, ids=lambda case: case.case)
def test_schema_and_loader_refuse_the_same(case: SchemaCase) -> None:
    content = plain("tiny-moe")
    case.edit(content)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, SCHEMA)
    with pytest.raises(ModelError):
        from_dict(content, Place("x.yaml"))


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from(list(Family)))
    mixers = [Mixer.FULL] if family is Family.QWEN3_MOE else list(Mixer)
    layers = tuple(draw(st.lists(st.sampled_from(mixers), min_size=1, max_size=4)) * draw(st.integers(1, 5)))
    small = st.integers(1, 6)
    kv_heads, key_heads, top_k = draw(small), draw(small), draw(small)
    head_dim = 16 * draw(small)
    number = st.floats(1e-12, 1e12)
    experts = st.lists(st.integers(top_k, 400), min_size=len(layers), max_size=len(layers)).map(tuple)
    moe = MoeSpec(draw(experts), top_k, 16 * draw(small), draw(st.booleans()), 16 * draw(st.integers(0, 3)))
    formats = {name: draw(st.sampled_from(MATRIX_FORMATS)) for name in TENSOR_CLASSES}
    return ModelSpec(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
        description=draw(
            st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(["yes", "1e-6", "010", "~"])
        ),
        family=family,
        hidden=16 * draw(small),
        vocabulary=draw(small),
        layers=layers,
        max_context=draw(st.integers(1, 2**31 - 1)),
        norm_eps=draw(number),
        norm_shifted=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        attention=AttentionSpec(
            kv_heads * draw(small), kv_heads, head_dim, 2 * draw(st.integers(1, 8)), draw(number), draw(st.booleans())
        ),
        gdn=GdnSpec(key_heads, key_heads * draw(small), draw(small), 16, draw(st.integers(2, 6)))
        if Mixer.GDN in layers
        else None,
        moe=None if family is Family.QWEN3_5 else moe,
        dense=DenseSpec(16 * draw(small)) if family is Family.QWEN3_5 else None,
        mtp_layers=draw(st.integers(0, 2)),
        precision=PrecisionSpec(MappingProxyType(formats), draw(st.sampled_from(["bf16", "nvfp4"]))),
        tensor_prefix=draw(st.sampled_from(["", "model.", "model.language_model."])),
        representative=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(specs())
def test_dump_and_load_give_the_spec_back(spec: ModelSpec) -> None:
    text = dump_model(spec)
    assert parse_model(text, "x.yaml") == spec
    assert dump_model(parse_model(text, "x.yaml")) == text


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


SCALARS: st.SearchStrategy[object] = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JUNK = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(SCALARS, SCALARS, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(leaves(plain("tiny-moe")))), JUNK)
def test_junk_anywhere_is_a_model_or_a_model_error(path: tuple[Any, ...], junk: object) -> None:
    content = {"root": copy.deepcopy(plain("tiny-moe"))}
    inner: Any = content
    full = ("root", *path)
    for key in full[:-1]:
        inner = inner[key]
    inner[full[-1]] = junk
    try:
        from_dict(content["root"], Place("x.yaml"))
    except ModelError as error:
        assert str(error).startswith("x.yaml: ")
        assert "; " in str(error)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model(text, "x.yaml")
    assert "\n" not in str(caught.value)
