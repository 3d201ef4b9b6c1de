"""Formulas, groups and ceilings: against the compiled programs' own costs and against figures worked out by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
from click.testing import CliRunner

from lynnc.build import build_graph
from lynnc.cli.main import cli
from lynnc.cost import cost, costs
from lynnc.errors import OptionError
from lynnc.explain import DECODE_ROWS, Question, ceilings, explain_step, merge_shapes, without_launches
from lynnc.modelfile import dump_model, load_model, shipped_models
from lynnc.passes import run_passes
from lynnc.passes.split_attention import SPLITS
from lynnc.target import find_device
from lynnc.tensors import Format, S, T
from lynnc.tools import find_tools

H200 = find_device("h200")
PARTS = ("weight_bytes", "state_bytes", "activation_bytes", "flops")


def packed_everywhere():
    """Qwen3.6-35B-A3B with every matrix that a token uses in NVFP4."""
    spec = load_model("qwen3.6-35b-a3b")
    formats = {name: Format.NVFP4 for name in spec.precision.formats}
    return replace(spec, precision=replace(spec.precision, formats=formats))


def test_bytes_of_a_decoded_token_are_those_worked_out_by_hand():
    limit = ceilings(packed_everywhere(), Question(H200, context=1))[0]
    assert limit.weight_bytes == pytest.approx(1.66e9, rel=0.01)
    assert limit.state_bytes == pytest.approx(0.126e9, rel=0.03)  # the published figure leaves the convolution out


def test_key_value_cache_grows_with_the_context():
    short, long = (ceilings(load_model("qwen3.6-35b-a3b"), Question(H200, context=s))[0] for s in (1000, 2000))
    assert long.state_bytes - short.state_bytes == 1000 * 10 * 2 * 2 * 256 * 2


def test_ceiling_of_35b_on_h200_is_near_the_bandwidth_limit():
    limit = ceilings(packed_everywhere(), Question(H200, context=1))[0]
    assert without_launches(limit).tokens_per_s == pytest.approx(2530, rel=0.02)
    assert limit.tokens_per_s < without_launches(limit).tokens_per_s


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense", "tiny-full"])
@pytest.mark.parametrize("without", [(), ("fuse_norm", "split_attention", "fuse_experts_up", "fuse_gdn")])
@pytest.mark.parametrize("rows", DECODE_ROWS)
def test_symbolic_step_equals_the_program_that_is_compiled(model, without, rows):
    spec, context = load_model(model), 100
    graph = run_passes(build_graph(spec, rows), without)
    limit = ceilings(spec, Question(H200, context, without))[DECODE_ROWS.index(rows)]
    expected = [cost(graph, op) for op in graph.ops]
    assert limit.launches == len(graph.ops)
    for part in PARTS:
        total = sum(sympy.sympify(getattr(each, part)).subs({T: rows, S: context}) for each in expected)
        assert getattr(limit, part) == pytest.approx(float(total)), part


@pytest.mark.parametrize("model", shipped_models())
@pytest.mark.parametrize("rows", [1, T])
def test_costs_of_equal_shapes_are_equal(model, rows):
    graph = run_passes(build_graph(load_model(model), rows))
    found = costs(graph)
    assert all(found[op.name] == cost(graph, op) for op in graph.ops)


def test_groups_add_up_to_the_step():
    step = explain_step(load_model("lynn-27b-a3b"), "decode/1", Question(H200))
    merged = merge_shapes(step.groups)
    for groups in (step.groups, merged):
        assert sum(group.count for group in groups) == step.ceiling.launches
        assert sum(group.count * group.estimate.bytes for group in groups) == pytest.approx(step.ceiling.bytes)
    assert len(merged) < len(step.groups)
    assert {group.shapes for group in merged if group.kind == "ExpertsUp"} == {12}


def test_prefill_of_a_chunk_reads_the_cache_once_and_all_rows_see_what_came_before():
    spec = load_model("tiny-full")
    step = explain_step(spec, "prefill", Question(H200, context=300), rows=100)
    attention = next(group for group in step.groups if group.kind == "Attention")
    heads, kv_heads, dim = spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim
    assert attention.cost.state_bytes == 2 * kv_heads * dim * 2 * S
    assert attention.estimate.flops == 4 * heads * dim * sum(range(201, 301))


def test_a_program_for_prompts_has_its_most_rows():
    spec = load_model("tiny-moe")
    for program, rows in (("prefill/16", 16), ("prefill/64", 64), ("prefill", 300)):
        step = explain_step(spec, program, Question(H200, context=1), rows=300)
        assert (step.ceiling.program, step.ceiling.rows, step.ceiling.context) == (program, rows, rows)


@pytest.mark.parametrize("rows", [16, 512])
def test_experts_of_a_prompt_are_read_once_however_many_rows_choose_them(rows):
    """By hand: E experts of which each row leaves out E - k, gate and up and down of 512 x 2048 in 4.5 bits;
    the shared expert, of the same size, is in the same launches."""
    step = explain_step(packed_everywhere(), f"prefill/{rows}", Question(H200))
    experts = [group for group in step.groups if "expert" in group.name and group.cost.weight_bytes.has(T)]
    hit = 256 * (1 - (1 - 8 / 256) ** rows)
    total = sum(float(group.count * group.cost.weight_bytes.subs(T, rows)) for group in experts)
    assert total == pytest.approx(40 * (hit + 1) * 3 * 512 * 2048 * 4.5 / 8, rel=0.001)
    assert hit == pytest.approx({16: 101.96, 512: 256.0}[rows], rel=0.001)


def test_context_is_at_least_the_rows():
    limits = ceilings(load_model("tiny-moe"), Question(H200, context=1))
    assert [limit.context for limit in limits] == [1, 2, 4, 8, 16, 64, 512, 2048]


def test_split_attention_pays_only_for_runs_that_the_context_has():
    spec = load_model("tiny-full")
    whole = 32 * SPLITS  # a tile of positions for every run
    short, full, longer = (ceilings(spec, Question(H200, context=s))[0] for s in (32, whole, 2 * whole))
    assert short.activation_bytes < full.activation_bytes == longer.activation_bytes


@pytest.mark.parametrize("program", ["decode/0", "decode/9", "decode/x", "decode", "", "Prefill"])
def test_unknown_program_is_refused(program):
    with pytest.raises(OptionError, match="no program"):
        explain_step(load_model("tiny-moe"), program, Question(H200))


def test_speed():
    start = time.process_time()
    ceilings(load_model("lynn-27b-a3b"), Question(H200))
    assert time.process_time() - start < 3


@pytest.fixture
def declaring(tmp_path: Path) -> Path:
    """The file of a model that declares 4-bit activations."""
    spec = load_model("tiny-moe")
    path = tmp_path / "declaring.yaml"
    path.write_text(dump_model(replace(spec, precision=replace(spec.precision, activations="nvfp4"))))
    return path


@pytest.mark.parametrize("command", [("explain",), ("show",), ("show", "--stage", "choices")], ids="-".join)
def test_a_declaration_that_is_not_followed_is_said(
    command: tuple[str, ...], declaring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stderr(device: str) -> str:
        words = [command[0], str(declaring), *command[1:], "--program", "prefill/16", "--device", device]
        result = CliRunner().invoke(cli, words)
        has_them = any(name in result.stdout for name in ("Quantised", "gemm_fp4 ["))
        assert result.exit_code == 0 and has_them is (not result.stderr)
        return result.stderr

    assert "warning" in stderr("h200") and "its plan has bf16 ones: sm_90 has no FP4" in stderr("h200")
    assert stderr("r6000") == ""
    monkeypatch.setattr("lynnc.activations.find_tools", lambda: replace(find_tools(), triton_version="3.7.1"))
    assert "its plan has bf16 ones: Triton 3.7.1 cannot serve sm_121 with FP4 MMA" in stderr("spark")


def test_json_has_the_note(declaring: Path) -> None:
    def note(device: str) -> str:
        result = CliRunner().invoke(cli, ["explain", str(declaring), "--device", device, "--json"])
        return str(json.loads(result.stdout)["note"])

    assert "its plan has bf16 ones" in note("h200") and note("r6000") == ""
