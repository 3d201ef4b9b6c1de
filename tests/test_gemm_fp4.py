"""4-bit activations: how rows are quantised, kernels against the interpreter and against torch, and who gets them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import assert_close, pack_graph, run_both
from test_kernels_linear import Case, projection, random_inputs

from lynnc.activations import settle_activations
from lynnc.compiler import Request, compile_model, fused_graph, lower_programs
from lynnc.ir import Fused, Graph
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.passes.quantise_activations import quantise_activations
from lynnc.plan import Options
from lynnc.render import environment
from lynnc.rowquantise import LARGEST, dequantise_rows, quantise_rows
from lynnc.store import Store
from lynnc.summary import summarize
from lynnc.target import find_target
from lynnc.tensors import Format
from lynnc.tools import Tools, find_tools

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_TARGETS = ("sm_100", "sm_103", "sm_120", "sm_121")


def nearest(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The nearest of some rising numbers; halfway the one with the even index."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    index = torch.bucketize(values, middles)
    halfway = middles[index.clamp_max(len(middles) - 1)] == values
    return numbers[torch.where(halfway & (index % 2 == 1) & (index < len(middles)), index + 1, index)]


def every_e4m3() -> torch.Tensor:
    return torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows after quantising, from the definitions of the formats and not from bits."""
    groups = x.float().unflatten(1, [-1, 16])
    row_scale = groups.abs().amax((1, 2)) / LARGEST
    row_scale = row_scale.clamp_min(2.0**-117)[:, None]
    scale = nearest(groups.abs().amax(-1) / 6 / row_scale, every_e4m3()).clamp_min(2.0**-9)
    codes = nearest((groups.abs() * (1 / (scale * row_scale))[:, :, None]).clamp_max(6), E2M1) * groups.sign()
    return (codes * scale[:, :, None]).flatten(1) * row_scale


def w4a4(spec: ModelSpec) -> ModelSpec:
    return replace(spec, precision=replace(spec.precision, activations="nvfp4"))


def quantised(case: Case) -> Graph:
    """The case's launch as the pass leaves it, for a weight whose model declares 4-bit activations."""
    graph = projection(case, Format.NVFP4)
    weights = {**graph.weights, "w": replace(graph.weights["w"], activations="nvfp4")}
    ops = tuple(replace(op, pattern="LinearResidual") if isinstance(op, Fused) else op for op in graph.ops)
    return quantise_activations(replace(graph, ops=ops, weights=weights))


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1e-3, 1.0, 3e4, 1e36])
def test_rows_are_rounded_as_the_formats_say(magnitude: float) -> None:
    x = torch.randn(7, 208, generator=torch.Generator().manual_seed(3)) * magnitude
    x = x * torch.logspace(-4, 0, 13).repeat_interleave(16)
    x[2, 16:48] = 0.0
    x[3] = 0.0
    x = x.bfloat16().float()
    rows = quantise_rows(x)
    found = dequantise_rows(rows, 208) * rows.row_scale
    assert torch.equal(found, rounded_rows(x))


def test_every_tie_goes_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x = torch.cat([ties, -ties])[None] * 448.0  # the row's scale is 1, the block's 448
    rows = quantise_rows(x)
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert float(rows.row_scale) == 1.0
    assert torch.equal(dequantise_rows(rows, 16) / 448.0, torch.cat([even, -even])[None])


def run_plain_codes(half: int) -> int:
    """The inline PTX of ``plain_codes`` on one 32-bit value, statement by statement."""
    text = environment().get_template("gemm_fp4.py.jinja").render(interpret=False, pdl=False)
    body = text.partition("def plain_codes")[2].partition("\ndef ")[0]
    registers = {"$1": half}
    statements = re.findall(r"(shl|shr|lop3)\.b32 ([$\w]+), (.+);", body)
    assert len(statements) == 12
    for op, target, operands in statements:
        values = [registers[name] if name in registers else int(name, 0) for name in operands.split(", ")]
        if op == "lop3":
            assert values[3] == 0xE2  # a where b, else c
            registers[target] = values[0] & values[1] | values[2] & ~values[1]
        else:
            registers[target] = (values[0] << values[1] if op == "shl" else values[0] >> values[1]) & 0xFFFFFFFF
    return registers["$0"]


def test_ptx_puts_codes_of_a_word_in_the_order_of_quantised_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        codes = torch.randint(0, 16, (16,), generator=generator).tolist()
        word = 0
        for e, code in enumerate(codes):  # as docs/layout.md packs them
            field, j = 32 * (e // 8) + 16 * (e % 2), e % 8 // 2
            word |= (code >> 3) << (field + (15, 12, 14, 13)[j]) | (code & 7) << (field + (9, 6, 3, 0)[j])
        plain = run_plain_codes(word & 0xFFFFFFFF) | run_plain_codes(word >> 32) << 32
        found = [plain >> 4 * (8 * (e // 8) + 4 * (e % 2) + 3 - e % 8 // 2) & 15 for e in range(16)]
        assert found == codes


CASES = (
    Case(None, 144, 96, steps=17),
    Case(None, 128, 70, residual=True, steps=33),
    Case(None, 64, 33, f32=True, first_row=16, steps=1),
    Case(None, 48, 33, steps=5),
    Case(None, 512 + 16, 40, residual=True, steps=3),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_interpreter_and_torch(case: Case) -> None:
    graph = quantised(case)
    weights = pack_graph(graph)
    inputs = random_inputs(case, seed=case.k)
    outcome = run_both(graph, inputs, weights=weights)
    for name in ("h.codes", "h.scales", "h.row_scale"):
        assert torch.equal(outcome.kernels[name], outcome.reference[name]), name
    out = graph.outputs[0]
    assert_close(outcome.kernels[out], outcome.reference[out], 1e-3, f"{case} against the interpreter")
    rows = weights[1]["w"][case.first_row : case.first_row + case.n]
    expected = rounded_rows(inputs["h"]) @ rows.T
    if case.residual:
        expected = expected.bfloat16().float() + inputs["r"].float()
    assert_close(outcome.kernels[out].float(), expected, 4e-3, f"{case} against torch")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    case = Case(None, 64, 32, steps=3)
    x = random_inputs(case)["h"]
    x[1, 5] = value
    outcome = run_both(quantised(case), {"h": x})
    for found in (outcome.kernels["y"], outcome.reference["y"]):
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()


def test_a_row_keeps_its_bits_whatever_shares_its_step() -> None:
    case = Case(None, 144, 40, steps=20)
    inputs = random_inputs(case)
    together = run_both(quantised(case), inputs).kernels["y"]
    alone = [run_both(quantised(case), {"h": inputs["h"][row : row + 1]}).kernels["y"] for row in (0, 19)]
    assert torch.equal(together[[0, 19]], torch.cat(alone))


def quantised_kinds(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops if "Quantis" in op.kind]


WITH_4_BITS = {"gemm_fp4", "grouped_up_fp4", "grouped_down_fp4", "quantise_activations"}


def test_w4a16_models_and_decode_never_get_4_bit_activations() -> None:
    for model in ("tiny-moe", "tiny-dense", "tiny-full"):
        spec = load_model(model)
        for _, low in lower_programs(spec, Request(find_target("sm_120"))).values():
            assert not {call.entry.name for call in low.kernels.values()} & WITH_4_BITS
        assert not quantised_kinds(fused_graph(w4a4(spec), "decode/4"))
        assert quantised_kinds(fused_graph(w4a4(spec), "prefill/16")) == quantised_kinds(
            fused_graph(w4a4(spec), "prefill")
        )


@pytest.mark.parametrize("fmt", [Format.NVFP4_FP16, Format.FP8, Format.BF16])
def test_only_weights_with_e4m3_scales_meet_4_bit_activations(fmt: Format) -> None:
    spec = w4a4(load_model("tiny-moe"))
    formats = {**spec.precision.formats, "gdn_out": fmt, "attention_out": fmt}
    mixed = replace(spec, precision=replace(spec.precision, formats=formats))
    names = quantised_kinds(fused_graph(mixed, "prefill"))
    assert names and not [name for name in names if "out_proj" in name or "o_proj" in name or name == "lm_head"]


def test_one_launch_quantises_a_row_for_all_its_readers() -> None:
    graph = fused_graph(w4a4(load_model("tiny-moe")), "prefill")
    quantising = [op.reads for op in graph.ops if op.kind == "QuantiseActivations"]
    assert len(quantising) == len(set(quantising))
    assert {op.kind for op in graph.ops} >= {"QuantisedLinear", "QuantisedLinearResidual"}


@pytest.mark.parametrize("target", FP4_TARGETS)
def test_a_target_with_fp4_mma_follows_the_declaration(target: str) -> None:
    settled = settle_activations(w4a4(load_model("tiny-moe")), find_target(target), ("fuse_norm",))
    assert settled.without == ("fuse_norm",) and not settled.note


def old_tools(version: str) -> Tools:
    return replace(find_tools(), triton_version=version)


def test_others_get_bf16_activations_and_a_sentence() -> None:
    spec = w4a4(load_model("tiny-moe"))
    settled = settle_activations(spec, find_target("sm_90"), ())
    assert settled.without == ("quantise_activations",)
    assert "declares nvfp4 activations; its plan has bf16 ones: sm_90 has no FP4 tensor cores" in settled.note
    old = settle_activations(spec, find_target("sm_121"), ("fuse_norm",), old_tools("3.7.1"))
    assert old.without == ("fuse_norm", "quantise_activations")
    assert "Triton 3.7.1 cannot serve sm_121 with FP4 MMA, which needs 3.8 or newer" in old.note
    assert not settle_activations(spec, find_target("sm_120"), (), old_tools("3.7.1")).note
    assert not settle_activations(load_model("tiny-moe"), find_target("sm_90"), ()).note


USED = {"tiny-dense": "QuantisedLinear", "tiny-moe": "QuantisedLinear and QuantisedGroupedLinear"}


@pytest.mark.parametrize(("model", "used"), USED.items())
def test_a_plan_says_which_activations_it_uses(model: str, used: str, kernels_of_this_run: Path) -> None:
    spec, options = w4a4(load_model(model)), Options(programs=("decode/1", "prefill/16"))
    store = Store(kernels_of_this_run)
    with_fp4 = compile_model(spec, Request(find_target("sm_121"), options=options), store)
    assert not with_fp4.note and "quantise_activations" not in with_fp4.plan.options.without
    assert summarize(with_fp4, 64).activations == f"nvfp4 in {used}, bf16 elsewhere"
    kernels = with_fp4.plan.kernels.values()
    problems = {entry.name: entry.problem for entry in kernels if entry.name in WITH_4_BITS - {"quantise_activations"}}
    assert len(problems) == (3 if "Grouped" in used else 1)
    assert all(problem["activations"] == "nvfp4" for problem in problems.values())
    assert not {entry.name for entry in kernels} & {"grouped_up", "grouped_down"}
    without = compile_model(spec, Request(find_target("sm_90"), options=options), store)
    assert "sm_90 has no FP4 tensor cores" in without.note
    assert without.plan.options.without == ("quantise_activations",)
    assert not {entry.name for entry in without.plan.kernels.values()} & WITH_4_BITS
    assert summarize(without, 64).activations == "bf16 (the model allows nvfp4)"
    assert summarize(without, 64).note == without.note and summarize(with_fp4, 64).note == ""
