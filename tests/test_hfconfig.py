"""Published configurations: the real one, the classes of ``transformers``, pruned experts, and what is refused."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynnc.errors import ModelError
from lynnc.fields import Place, word
from lynnc.hfconfig import import_config
from lynnc.model import DenseSpec, Family, Mixer, MoeSpec
from lynnc.modelfile import dump_model, load_model, model_name_from, parse_model

REAL = Path(__file__).parent / "data" / "qwen3.6-35b-a3b.config.json"
Config = dict[str, Any]


def nested() -> Config:
    config: Config = json.loads(REAL.read_text("utf-8"))
    return config


def flat() -> Config:
    text: Config = nested()["text_config"]
    return text


def dense() -> Config:
    changes = {"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4}
    layers = {"num_hidden_layers": 32, "layer_types": flat()["layer_types"][:32]}
    gone = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {name: value for name, value in flat().items() if name not in gone} | changes | layers


def qwen3_moe() -> Config:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


@dataclass(frozen=True)
class Import:
    """A configuration that must give a shipped model, apart from its description."""

    model: str
    config: Callable[[], Config]


IMPORTS = (
    Import("qwen3.6-35b-a3b", nested),
    Import("qwen3.5-9b", lambda: {"model_type": "qwen3_5", "text_config": dense()}),
    Import("qwen3-30b-a3b", qwen3_moe),
)


@pytest.mark.parametrize("case", IMPORTS, ids=lambda case: case.model)
def test_config_equals_the_shipped_model(case: Import) -> None:
    shipped = load_model(case.model)
    spec = import_config(case.config(), name=case.model)
    assert spec.description == "imported from config.json"
    assert replace(spec, description=shipped.description) == shipped
    assert parse_model(dump_model(spec), "x.yaml") == spec


def test_flat_config_has_the_text_model_prefix() -> None:
    spec = import_config(flat(), name="m")
    assert spec == replace(import_config(nested(), name="m"), tensor_prefix="model.")


def test_rope_parameters_win_over_the_top_level_theta() -> None:
    assert nested()["rope_theta"] == 1_000_000
    assert import_config(nested(), name="m").attention.rope_theta == 10_000_000


def test_former_rope_fields() -> None:
    config = flat()
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None}
    attention = import_config(config, name="m").attention
    assert (attention.rope_theta, attention.rotary_dim) == (5e5, 128)


def test_full_attention_interval_serves_without_layer_types() -> None:
    config = flat() | {"full_attention_interval": 2}
    del config["layer_types"]
    assert import_config(config, name="m").layers == (Mixer.GDN, Mixer.FULL) * 20


def test_head_dim_is_a_share_of_hidden_where_it_is_not_given() -> None:
    config = qwen3_moe()
    del config["head_dim"]
    assert import_config(config, name="m").attention.head_dim == 64


def test_top_k_scores_as_the_family_reads_them() -> None:
    moe = import_config(qwen3_moe() | {"norm_topk_prob": False}, name="m").moe
    assert moe and not moe.normalize_top_k
    moe = import_config(flat() | {"norm_topk_prob": False}, name="m").moe
    assert moe and moe.normalize_top_k


def test_configurations_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e7}
    moe = transformers.Qwen3_5MoeTextConfig(rope_parameters=dict(rope)).to_dict()
    plain = transformers.Qwen3_5TextConfig(rope_parameters=dict(rope)).to_dict()
    full = transformers.Qwen3MoeConfig(rope_parameters=dict(rope)).to_dict()
    assert "num_local_experts" in full
    spec = import_config(moe, name="m")
    assert spec.moe == MoeSpec((256,) * 40, 8, 512, normalize_top_k=True, shared_intermediate=512)
    assert spec.attention.rotary_dim == 64
    assert import_config(plain, name="m").dense == DenseSpec(12288)
    spec = import_config(full, name="m")
    assert spec.moe == MoeSpec((128,) * 24, 8, 768, normalize_top_k=False, shared_intermediate=0)
    assert spec.attention.rotary_dim == spec.attention.head_dim == 64
    assert spec.family is Family.QWEN3_MOE


@dataclass(frozen=True)
class Refused:
    """A change to a configuration; the message must hold field, problem and advice."""

    case: str
    config: Callable[[], Config]
    changes: Mapping[str, object]
    field: str
    problem: str
    advice: str


GONE = object()
REFUSED = (
    Refused("bias", flat, {"attention_bias": True}, "attention_bias", "is true", "attention_bias false"),
    Refused("act", flat, {"hidden_act": "gelu"}, "hidden_act", '"gelu", which lynnc', 'hidden_act "silu"'),
    Refused("window", qwen3_moe, {"use_sliding_window": True}, "use_sliding_window", "is true", "false"),
    Refused("mlp layers", qwen3_moe, {"mlp_only_layers": [0]}, "mlp_only_layers", "is [0]", "mlp_only_layers []"),
    Refused("sparse", qwen3_moe, {"decoder_sparse_step": 2}, "decoder_sparse_step", "is 2", "step 1"),
    Refused("mtp embed", flat, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings", "true", "false"),
    Refused("no gate", flat, {"attn_output_gate": False}, "attn_output_gate", "is false", "attn_output_gate true"),
    Refused("gate", qwen3_moe, {"attn_output_gate": True}, "attn_output_gate", "is true", "attn_output_gate false"),
    Refused("type", flat, {"model_type": "llama"}, "model_type", "'llama', not qwen3_5_moe or", "write one of these"),
    Refused("no type", flat, {"model_type": GONE}, "model_type", "is missing", "as one of qwen3_5_moe"),
    Refused("yarn", flat, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type", "'yarn'", "default"),
    Refused("old yarn", qwen3_moe, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.type", "'yarn'", "default RoPE"),
    Refused("no theta", flat, {"rope_parameters": GONE}, "rope_parameters.rope_theta", "is missing", "add it"),
    Refused("rope text", flat, {"rope_parameters": "x"}, "rope_parameters", "'x', not an object", "an object"),
    Refused("zero theta", flat, {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta", "is 0", "above"),
    Refused(
        "rotary",
        qwen3_moe,
        {"partial_rotary_factor": 2},
        "rope_parameters.partial",
        "256 rotated dimensions, more than the 128",
        "at most",
    ),
    Refused("missing", flat, {"hidden_size": GONE}, "hidden_size", "is missing", "add it"),
    Refused("null", flat, {"num_experts": None}, "num_experts", "is missing", "add it"),
    Refused("no shared", flat, {"shared_expert_intermediate_size": GONE}, "shared_expert_inter", "missing", "add it"),
    Refused("no layers", flat, {"num_hidden_layers": GONE}, "num_hidden_layers", "is missing", "add it"),
    Refused("no types", flat, {"layer_types": GONE, "full_attention_interval": GONE}, "full_at", "missing", "add"),
    Refused("text", flat, {"hidden_size": "2048"}, "hidden_size", "'2048', not a whole number", "whole number"),
    Refused("bool", flat, {"num_key_value_heads": True}, "num_key_value_heads", "is true, not a whole", "whole number"),
    Refused("zero", flat, {"vocab_size": 0}, "vocab_size", "is 0", "from 1 up"),
    Refused("heads", flat, {"num_key_value_heads": 3}, "num_key_value_heads", "does not divide the 16", "divisor"),
    Refused("columns", dense, {"intermediate_size": 100}, "intermediate_size", "100 columns", "multiple of 16"),
    Refused("few experts", flat, {"num_experts": 4}, "num_experts", "with 4, fewer than the 8", "at least 8"),
    Refused(
        "depth", flat, {"num_hidden_layers": 39}, "layer_types", "lists 40 layers but num_hidden_layers is 39", "agree"
    ),
    Refused("mixer", flat, {"layer_types": ["x"]}, "layer_types[0]", "'x'", "write one of these"),
    Refused(
        "sliding", qwen3_moe, {"layer_types": ["sliding_attention"] * 48}, "layer_types[0]", "'sliding_att", "full_at"
    ),
    Refused("tied", flat, {"tie_word_embeddings": "no"}, "tie_word_embeddings", "'no', not a flag", "true or false"),
)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.case)
def test_refused(case: Refused) -> None:
    config = {name: value for name, value in {**case.config(), **case.changes}.items() if value is not GONE}
    with pytest.raises(ModelError) as caught:
        import_config(config, name="m", file="mine/config.json")
    check_message(str(caught.value), "mine/config.json", case.field, case.problem, case.advice)


def check_message(message: str, file: str, field: str, problem: str, advice: str) -> None:
    """One sentence: ``FILE: FIELD problem; advice``."""
    assert message.startswith(f"{file}: {field}"), message
    assert "\n" not in message
    said, _, todo = message.rpartition("; ")
    assert problem in said, message
    assert advice in todo, message


def test_nested_fields_are_named_in_full() -> None:
    config = nested()
    config["text_config"]["num_key_value_heads"] = 3
    with pytest.raises(ModelError, match=r"config\.json: text_config\.num_key_value_heads is 3"):
        import_config(config, name="m")
    config["text_config"] = []
    with pytest.raises(ModelError, match=r"config\.json: text_config is a list, not an object"):
        import_config(config, name="m")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen3.6-35B_A3B", "Qwen3.6-35B_A3B"),
        ("my model (2)", "my-model-2"),
        ("a+b", "a-b"),
        ("_x", "x"),
        ("-._x\n", "x"),
        ("Ünïcode", "n-code"),
        ("模型", "model"),
        ("", "model"),
    ],
)
def test_a_name_from_any_text(text: str, name: str) -> None:
    assert model_name_from(text) == name
    assert import_config(flat(), name=model_name_from(text)).name == name


@given(st.text())
def test_every_text_gives_a_name(text: str) -> None:
    assert word(model_name_from(text), Place("x")) == model_name_from(model_name_from(text))


def test_contradictions_between_the_levels() -> None:
    config = nested() | {"tie_word_embeddings": True}
    with pytest.raises(
        ModelError, match=r"text_config\.tie_word_embeddings is false, unlike tie_word_embeddings; make"
    ):
        import_config(config, name="m")
    config = nested() | {"model_type": "qwen3_5"}
    with pytest.raises(ModelError, match=r"text_config\.model_type is the text 'qwen3_5_moe_text', unlike model_type"):
        import_config(config, name="m")


@pytest.mark.parametrize("junk", [None, True, -1, 3.5, "x", [], {}], ids=str)
def test_junk_in_any_field_is_a_spec_or_a_model_error(junk: object) -> None:
    for make in (flat, dense, qwen3_moe):
        for name in make():
            config = copy.deepcopy(make()) | {name: junk}
            try:
                import_config(config, name="m")
            except ModelError as error:
                assert str(error).startswith("config.json: ")
