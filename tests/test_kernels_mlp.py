"""Gate and up projections with their activation, with and without the norm before them, against the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from harness import assert_close, op_graph, pack_graph, run_both

from lynnc.ir import Graph, Op
from lynnc.ops import Linear, RmsNorm, SiluMul
from lynnc.passes.fuse_gate_up import fuse_gate_up
from lynnc.passes.fuse_norm import fuse_norm
from lynnc.tensors import DType, Format, Part, Weight

KNOBS = {"gate_up": {"BLOCK_N": 32}}


@dataclass(frozen=True)
class Case:
    """A gated block: rows, columns, intermediate size, weight format, and the norm before it (stored or not)."""

    name: str
    rows: int = 2
    hidden: int = 64
    size: int = 48
    format: Format = Format.NVFP4
    norm: bool = False
    shifted: bool = True
    stored: bool = False

    def __str__(self) -> str:
        return self.name


CASES = (
    *(Case(f"{fmt}", format=fmt) for fmt in (Format.NVFP4, Format.NVFP4_FP16, Format.FP8, Format.BF16)),
    *(Case(f"{fmt}-norm", format=fmt, norm=True) for fmt in (Format.NVFP4, Format.FP8)),
    Case("norm-stored", norm=True, stored=True),
    Case("plain-norm-of-144-columns", hidden=144, size=24, norm=True, shifted=False),
    Case("several-blocks", rows=1, hidden=2064, size=16, format=Format.BF16, norm=True, stored=True),
)


def gated_graph(case: Case) -> Graph:
    rows = case.rows
    weights = (
        Weight("w", case.format, (2 * case.size, case.hidden), (Part("gate", case.size), Part("up", case.size)), "mlp"),
        Weight("norm_weight", Format.BF16, (case.hidden,), (Part("norm", case.hidden),), "vector"),
    )
    x = "y" if case.norm else "h"
    body: list[Op] = [Linear("up", x, "w", "gate_up", 0), SiluMul("silu", "gate_up", "act")]
    if case.norm:
        body.insert(0, RmsNorm("norm", "h", "norm_weight", "y", 1e-6, case.shifted))
    graph = op_graph(
        *body,
        tensors={
            "h": (DType.BF16, (rows, case.hidden)),
            "y": (DType.BF16, (rows, case.hidden)),
            "gate_up": (DType.BF16, (rows, 2 * case.size)),
            "act": (DType.BF16, (rows, case.size)),
        },
        weights=weights,
        rows=rows,
        inputs=("h",),
        outputs=("act", "y") if case.stored else ("act",),
    )
    graph = fuse_norm(fuse_gate_up(graph))
    assert [op.kind for op in graph.ops] == ["NormGateUp" if case.norm else "GateUp"]
    return graph


def hidden(case: Case) -> torch.Tensor:
    return torch.randn(case.rows, case.hidden, generator=torch.Generator().manual_seed(2)).bfloat16() * 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_blocks_match_the_interpreter(case: Case) -> None:
    graph = gated_graph(case)
    found = run_both(graph, {"h": hidden(case)}, knobs=KNOBS)
    assert_close(found.kernels["act"], found.reference["act"], 1e-2, "act")
    if case.stored:
        assert_close(found.kernels["y"], found.reference["y"], 2e-3, "y")


def test_the_epsilon_of_the_norm_counts() -> None:
    case = Case("small", norm=True)
    found = run_both(gated_graph(case), {"h": (hidden(case).float() * 1e-4).bfloat16()}, knobs=KNOBS)
    assert_close(found.kernels["act"], found.reference["act"], 1e-2, "act of a small input")


@pytest.mark.parametrize("norm", [False, True])
def test_a_row_has_the_same_bits_among_others(norm: bool) -> None:
    case = Case("rows", rows=4, norm=norm)
    four, one = gated_graph(case), gated_graph(replace(case, rows=1))
    weights, h = pack_graph(four), hidden(case)
    together = run_both(four, {"h": h}, knobs=KNOBS, weights=weights).kernels["act"]
    for row in range(4):
        alone = run_both(one, {"h": h[row : row + 1]}, knobs=KNOBS, weights=weights).kernels["act"]
        assert torch.equal(together[row], alone[0]), row
