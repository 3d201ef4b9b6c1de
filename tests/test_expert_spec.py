"""The experts left in each layer of a pruned checkpoint: the side file and how it meets the configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lynnc.errors import ModelError
from lynnc.hfconfig import EXPERT_SPEC, import_config, read_expert_spec, read_json

CONFIG = read_json(Path(__file__).parent / "data" / "qwen3.6-35b-a3b.config.json")


def full_experts(**changes: int) -> dict[str, int]:
    return {str(layer): 256 for layer in range(40)} | changes


def test_expert_spec_gives_the_experts_of_each_layer(tmp_path: Path) -> None:
    path = tmp_path / EXPERT_SPEC
    kept = full_experts() | {"1": 222, "39": 8}
    path.write_text(json.dumps({"hf_vanilla_compatible": False, "remaining_experts_by_layer": kept}))
    spec = import_config(CONFIG, name="m", experts=read_expert_spec(path))
    assert spec.moe
    assert spec.moe.experts == (256, 222, *(256,) * 37, 8)
    assert not spec.representative


@dataclass(frozen=True)
class BadExperts:
    case: str
    experts: Mapping[str, Any]
    layer: str
    problem: str
    advice: str


BAD_EXPERTS = (
    BadExperts("missing", {k: v for k, v in full_experts().items() if k != "7"}, "7", "is missing", "from 0 to 39"),
    BadExperts("beyond", full_experts(**{"40": 256}), "40", "none of the 40 layers", "remove it"),
    BadExperts("twice", full_experts(**{"07": 256}), "07", "none of the 40 layers", "remove it"),
    BadExperts(
        "too many", full_experts(**{"3": 257}), "3", "257 but a token selects 8 of the full model's 256", "8 to 256"
    ),
    BadExperts("too few", full_experts(**{"3": 7}), "3", "is 7 but a token selects 8", "give 8 to 256"),
    BadExperts("zero", full_experts(**{"3": 0}), "3", "is 0", "from 1 up"),
    BadExperts("bool", full_experts(**{"3": True}), "3", "true, not a whole number", "whole number"),
)


@pytest.mark.parametrize("case", BAD_EXPERTS, ids=lambda case: case.case)
def test_bad_experts(case: BadExperts) -> None:
    with pytest.raises(ModelError) as caught:
        import_config(CONFIG, name="m", experts=case.experts)
    said, _, todo = str(caught.value).rpartition("; ")
    assert said.startswith(f"{EXPERT_SPEC}: remaining_experts_by_layer.{case.layer} ")
    assert case.problem in said
    assert case.advice in todo


def test_experts_for_a_dense_model() -> None:
    text = CONFIG["text_config"]
    assert isinstance(text, dict)
    dense = text | {"model_type": "qwen3_5_text", "intermediate_size": 64}
    with pytest.raises(ModelError, match="is given for a model without experts; leave it out"):
        import_config(dense, name="m", experts={"0": 8})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "line 1 is not JSON (Expecting property name"),
        ("[" * 200_000, "the content is nested too deeply"),
        ("9" * 5000, "the content holds a number of too many digits"),
        ("[1]", "the content is a list, not an object"),
        ('{"a": 1, "a": 2}', "a is given twice; keep one of them"),
        ("{}", "remaining_experts_by_layer is missing; give the number"),
        ('{"remaining_experts_by_layer": [1]}', "remaining_experts_by_layer is a list, not an object"),
        ('{"remaining_experts_by_layer": {"0": "1"}}', "remaining_experts_by_layer.0 is the text '1', not a whole"),
        ('{"remaining_experts_by_layer": {"0": 1, "0": 2}}', "0 is given twice; keep one of them"),
    ],
)
def test_bad_json(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)
    with pytest.raises(ModelError) as caught:
        read_expert_spec(path)
    assert str(caught.value).startswith(f"{path}: {problem}")


def test_no_json_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file; check the path"):
        read_json(tmp_path / "config.json")
