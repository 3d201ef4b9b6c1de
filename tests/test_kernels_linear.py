"""Projections against the interpreter: formats, tails, norms, residuals, segments, rows that keep their bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from harness import assert_close, op_graph, pack_graph, run_both

from lynnc.ir import Fused, Graph, Op
from lynnc.ops import Add, Linear, RmsNorm
from lynnc.runtime.weights.arrays import pack_weight
from lynnc.tensors import DType, Format, Part, T, Tensor, Weight

KNOBS = {"linear": {"BLOCK_N": 64, "num_warps": 16}}
FORMATS = (Format.NVFP4, Format.NVFP4_FP16, Format.FP8, Format.BF16)


@dataclass(frozen=True)
class Case:
    """One projection: rows (None for prefill's T), columns, output columns, and what is fused around it."""

    rows: int | None
    k: int
    n: int
    norm: bool = False
    residual: bool = False
    first_row: int = 0
    f32: bool = False
    steps: int = 1

    def __str__(self) -> str:
        extras = [name for name in ("norm", "residual", "f32") if getattr(self, name)]
        return "-".join([f"{self.rows or f'T{self.steps}'}x{self.k}x{self.n}+{self.first_row}", *extras])


def projection(case: Case, fmt: Format) -> Graph:
    """A graph of the one launch that the case describes; the weight has two parts with scales of their own."""
    rows = T if case.rows is None else case.rows
    weight_rows = case.n + case.first_row
    parts = (Part("first", weight_rows // 2), Part("second", weight_rows - weight_rows // 2))
    weights = (
        Weight("w", fmt, (weight_rows, case.k), parts, "test"),
        Weight("norm_weight", Format.BF16, (case.k,), (Part("norm", case.k),), "vector"),
    )
    body: list[Op] = [RmsNorm("norm", "h", "norm_weight", "x", 1e-6, True)] if case.norm else []
    body.append(Linear("linear", "x" if case.norm else "h", "w", "y", case.first_row))
    if case.residual:
        body.append(Add("add", "r", "y", "z"))
    out = "z" if case.residual else "y"
    inputs = ("h", "r") if case.residual else ("h",)
    pattern = "LinearResidual" if case.residual else "NormLinear"
    op = body[0] if len(body) == 1 else Fused("launch", pattern, tuple(body), inputs, ("w", "norm_weight"), (), (out,))
    y_type = DType.F32 if case.f32 else DType.BF16
    return op_graph(
        op,
        tensors={
            "h": (DType.BF16, (rows, case.k)),
            "x": (DType.BF16, (rows, case.k)),
            "r": (DType.BF16, (rows, case.n)),
            "y": (y_type, (rows, case.n)),
            "z": (DType.BF16, (rows, case.n)),
        },
        weights=weights,
        rows=rows,
        inputs=inputs,
        outputs=(out,),
        program="prefill" if case.rows is None else None,
    )


def random_inputs(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = case.rows or case.steps
    inputs = {"h": (torch.randn(rows, case.k, generator=generator) * 3).bfloat16()}
    if case.residual:
        inputs["r"] = torch.randn(rows, case.n, generator=generator).bfloat16()
    return inputs


DECODE = (
    Case(1, 128, 96, norm=True),
    Case(2, 48, 70, residual=True),
    Case(1, 2048 + 16, 33, norm=True),
    Case(3, 144, 40, norm=True, first_row=24),
    Case(1, 16, 2, f32=True),
    Case(2, 4096 + 128, 64),
)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decode_projection_equals_the_reference(case: Case, fmt: Format) -> None:
    graph = projection(case, fmt)
    outcome = run_both(graph, random_inputs(case), knobs=KNOBS)
    out = graph.outputs[0]
    assert_close(outcome.kernels[out], outcome.reference[out], 4e-3, f"{fmt} {case}")


PREFILL = (
    Case(None, 144, 96, steps=17),
    Case(None, 128, 70, residual=True, steps=33),
    Case(None, 64, 33, f32=True, first_row=16, steps=1),
    Case(None, 192, 48, steps=50),
)
TILES = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64},
    {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16},
)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_prefill_projection_equals_the_reference(case: Case, fmt: Format) -> None:
    graph = projection(case, fmt)
    outcome = run_both(graph, random_inputs(case))
    out = graph.outputs[0]
    limit = 8e-3 if fmt is Format.NVFP4_FP16 else 4e-3  # tiles hold code * FP16 scale rounded to BF16
    assert_close(outcome.kernels[out], outcome.reference[out], limit, f"{fmt} {case}")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_prefill_tiles_of_every_form(tile: dict[str, int], fmt: Format) -> None:
    case = Case(None, 512, 40, residual=True, first_row=24, steps=35)
    outcome = run_both(projection(case, fmt), random_inputs(case), knobs={"gemm": {**tile, "num_stages": 2}})
    limit = 8e-3 if fmt is Format.NVFP4_FP16 else 4e-3
    assert_close(outcome.kernels["z"], outcome.reference["z"], limit, f"{fmt} {tile}")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fmt", [Format.NVFP4, Format.BF16])
def test_programs_that_take_several_tiles_in_turn(fmt: Format, rows: int) -> None:
    case = Case(rows, 64, 110, norm=True, first_row=10)  # 48 programs: 2 or 3 of 110 tiles of one row each
    knobs = {"linear": {"BLOCK_N": 1, "PROGRAMS": 48}}
    outcome = run_both(projection(case, fmt), random_inputs(case), knobs=knobs)
    assert_close(outcome.kernels["y"], outcome.reference["y"], 4e-3, str(case))


def test_the_epsilon_of_a_norm_counts() -> None:
    case = Case(1, 64, 32, norm=True)
    inputs = {"h": (random_inputs(case)["h"].float() * 1e-4).bfloat16()}  # mean square 1e-7, epsilon 1e-6
    outcome = run_both(projection(case, Format.NVFP4), inputs, knobs=KNOBS)
    assert_close(outcome.kernels["y"], outcome.reference["y"], 4e-3, "small input")


def test_activations_at_the_edge_of_the_fp16_range() -> None:
    """All activations at the row's maximum, just below a power of two, all weights at their largest code."""
    graph = projection(Case(1, 64, 32), Format.NVFP4)
    packed, values = pack_graph(graph)
    largest = torch.full((32, 64), 6.0)
    arrays = pack_weight(graph.weights["w"], lambda name: largest[:16]).arrays
    packed = {**packed, **{("w", name): array for name, array in arrays.items()}}
    h = torch.full((1, 64), 1.9921875).bfloat16()
    outcome = run_both(graph, {"h": h}, knobs=KNOBS, weights=(packed, {**values, "w": largest}))
    assert_close(outcome.kernels["y"], outcome.reference["y"], 4e-3, "largest products")


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_a_row_keeps_its_bits_whatever_the_rows(rows: int) -> None:
    case = Case(rows, 144, 40, norm=True)
    inputs = random_inputs(case)
    together = run_both(projection(case, Format.NVFP4), inputs, knobs=KNOBS).kernels["y"]
    single = projection(Case(1, 144, 40, norm=True), Format.NVFP4)
    alone = [run_both(single, {"h": inputs["h"][row : row + 1]}, knobs=KNOBS).kernels["y"] for row in range(rows)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 3e4, 1e30])
def test_activations_of_any_magnitude_keep_their_relative_error(magnitude: float) -> None:
    case = Case(1, 256, 32)
    graph = projection(case, Format.NVFP4)
    inputs = {"h": (random_inputs(case)["h"].float() * magnitude).bfloat16()}
    outcome = run_both(graph, inputs, knobs=KNOBS)
    assert_close(outcome.kernels["y"], outcome.reference["y"], 4e-3, f"magnitude {magnitude}")


def test_zero_activations_give_zero() -> None:
    outcome = run_both(projection(Case(1, 64, 32), Format.NVFP4), {"h": torch.zeros(1, 64).bfloat16()}, knobs=KNOBS)
    assert torch.equal(outcome.kernels["y"], torch.zeros(1, 32).bfloat16())


def test_infinite_activations_do_not_come_out_finite() -> None:
    x = torch.ones(1, 64).bfloat16()
    x[0, 5] = torch.inf
    packed = pack_graph(projection(Case(1, 64, 32), Format.NVFP4))
    outcome = run_both(projection(Case(1, 64, 32), Format.NVFP4), {"h": x}, knobs=KNOBS, weights=packed)
    assert not outcome.kernels["y"].isfinite().any()


def two_segments(rows: int) -> Graph:
    """NVFP4 and BF16 weights of one normed input in one launch, writing neighbouring columns."""
    weights = (
        Weight("w4", Format.NVFP4, (48, 128), (Part("q", 32), Part("k", 16)), "test"),
        Weight("w16", Format.BF16, (5, 128), (Part("a", 5),), "test"),
        Weight("norm_weight", Format.BF16, (128,), (Part("norm", 128),), "vector"),
    )
    body = (
        RmsNorm("norm", "h", "norm_weight", "x", 1e-6, False),
        Linear("first", "x", "w4", "joint.0", 0),
        Linear("second", "x", "w16", "joint.1", 0),
    )
    op = Fused("launch", "NormProjections", body, ("h",), ("w4", "w16", "norm_weight"), (), ("x", "joint.0", "joint.1"))
    graph = op_graph(
        op,
        tensors={"h": (DType.BF16, (rows, 128)), "x": (DType.BF16, (rows, 128)), "joint": (DType.BF16, (rows, 53))},
        weights=weights,
        rows=rows,
        inputs=("h",),
        outputs=("x", "joint"),
    )
    views = {
        "joint.0": Tensor("joint.0", DType.BF16, (rows, 48), "joint", 0),
        "joint.1": Tensor("joint.1", DType.BF16, (rows, 5), "joint", 48),
    }
    graph.tensors.update(views)  # type: ignore[attr-defined]
    return graph


@pytest.mark.parametrize("rows", [1, 3])
def test_two_formats_in_one_launch_and_the_normed_input_for_others(rows: int) -> None:
    inputs = {"h": torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).bfloat16()}
    outcome = run_both(two_segments(rows), inputs, knobs=KNOBS)
    assert_close(outcome.kernels["joint"][:, :48], outcome.reference["joint.0"], 4e-3, "NVFP4 segment")
    assert_close(outcome.kernels["joint"][:, 48:], outcome.reference["joint.1"], 4e-3, "BF16 segment")
    assert torch.equal(outcome.kernels["x"], outcome.reference["x"])
