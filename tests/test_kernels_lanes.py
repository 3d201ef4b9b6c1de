"""Kernels of prompts whose activations stand in the order of lanes, and sums by parts, against the interpreter."""

from __future__ import annotations

from dataclasses import replace

import harness
import pytest
import torch
from attention_graphs import Shape, Step, check, graph_of
from harness import Outcome, assert_close, in_lanes, op_graph, run_both

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.ir import Graph, Op
from lynnc.mixerops import GatedNorm
from lynnc.ops import Add, Linear, RmsNorm, SiluMul
from lynnc.passes.fuse_residual import fuse_residual
from lynnc.passes.order_columns import order_columns
from lynnc.passes.split_columns import split_columns
from lynnc.records import Records
from lynnc.tensors import DType, Format, Part, T, Weight

PACKED = (Format.NVFP4, Format.NVFP4_FP16)
SMALL = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 2, "num_stages": 1}
"""Tiles of a weight whose rows are two matrix instructions of each warp."""
WIDE = {**SMALL, "BLOCK_K": 256}
"""Two blocks of columns a pass, of which the second may reach past the last column."""


def limit_of(fmt: Format) -> float:
    return 8e-3 if fmt is Format.NVFP4_FP16 else 4e-3  # tiles hold code * FP16 scale rounded to BF16


def random_inputs(graph: Graph, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(graph.ops))
    shapes = {name: graph.tensors[name].shape[1:] for name in graph.inputs}
    return {name: torch.randn(rows, *map(int, shape), generator=generator).bfloat16() for name, shape in shapes.items()}


def run(graph: Graph, rows: int, **knobs: dict[str, int]) -> Outcome:
    return run_both(graph, random_inputs(graph, rows), knobs=knobs)


def projection(fmt: Format, columns: int, rows: int = 80, first_row: int = 24) -> Graph:
    """A projection of ``h`` and its residual; the weight's two parts have unlike scales."""
    count = rows + first_row
    weight = Weight("w", fmt, (count, columns), (Part("one", count // 2), Part("two", count - count // 2)), "test")
    graph = op_graph(
        Linear("linear", "h", "w", "y", first_row),
        Add("add", "r", "y", "z"),
        tensors={"h": (DType.BF16, (T, columns)), **{name: (DType.BF16, (T, rows)) for name in "ryz"}},
        weights=(weight,),
        rows=T,
        inputs=("h", "r"),
        outputs=("z",),
        program="prefill",
    )
    return in_lanes(fuse_residual(graph), "h")


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("columns", [256, 384])
@pytest.mark.parametrize("knobs", [{}, SMALL, WIDE], ids=["default", "small", "wide"])
def test_projection(fmt: Format, columns: int, knobs: dict[str, int]) -> None:
    graph = projection(fmt, columns)
    found = run(graph, 37, gemm=knobs)
    assert_close(found.kernels["z"], found.reference["z"], limit_of(fmt), f"{fmt} {columns}")


def test_tiles_that_do_not_fit_lanes_are_refused_with_the_reason() -> None:
    graph = projection(Format.NVFP4, 256)
    for knobs in ({**SMALL, "BLOCK_K": 64}, {**SMALL, "num_warps": 8}):
        with pytest.raises(OptionError, match="order of lanes need BLOCK_K a multiple of 128 and BLOCK_N of"):
            choose_all(graph, harness.TARGET, Records(), {"gemm": knobs})


def chain(fmt: Format, columns: int, rows: int, norm: bool = True) -> Graph:
    """A projection that is added to the residual stream, and the norm of the sum for a router and for a projection."""
    weights = [Weight("w", fmt, (rows, columns), (Part("one", rows // 2), Part("two", rows - rows // 2)), "test")]
    ops: list[Op] = [Linear("linear", "h", "w", "y", 0), Add("add", "r", "y", "z")]
    if norm:
        ops += [
            RmsNorm("norm", "z", "norm", "n", 1e-6, True),
            Linear("router", "n", "plain", "logits", 0),
            Linear("next", "n", "packed", "out", 0),
        ]
        weights += [
            Weight("norm", Format.BF16, (rows,), (Part("norm", rows),), "vector"),
            Weight("plain", Format.BF16, (16, rows), (Part("plain", 16),), "router"),
            Weight("packed", fmt, (48, rows), (Part("packed", 48),), "test"),
        ]
    widths = {"h": columns, "r": rows, "y": rows, "z": rows, "n": rows, "logits": 16, "out": 48}
    return op_graph(
        *ops,
        tensors={name: (DType.BF16, (T, width)) for name, width in widths.items()},
        weights=tuple(weights),
        rows=T,
        inputs=("h", "r"),
        outputs=("z", "logits", "out") if norm else ("z",),
        program="prefill/16",
    )


@pytest.mark.parametrize("fmt", [*PACKED, Format.FP8, Format.BF16])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "add"])
def test_sums_by_parts(fmt: Format, norm: bool) -> None:
    graph = order_columns(split_columns(chain(fmt, 1024, 256, norm)))
    kinds = [op.kind for op in graph.ops]
    assert kinds[:2] == ["PartialLinear", "SumPartsNorm" if norm else "SumPartsAdd"]
    if fmt.is_packed:
        assert not norm or "n_lanes" in graph.ops[1].writes
        graph = in_lanes(graph, "h")
    found = run(graph, 11)
    for name in graph.outputs:
        assert_close(found.kernels[name], found.reference[name], limit_of(fmt), name)


@pytest.mark.parametrize("knobs", [SMALL, WIDE], ids=["small", "wide"])
def test_four_parts_in_small_tiles(knobs: dict[str, int]) -> None:
    graph = in_lanes(split_columns(chain(Format.NVFP4, 2048, 144, norm=False)), "h")
    assert [graph.tensors[name].shape[1] for name in graph.ops[0].writes] == [4]
    found = run(graph, 13, gemm=knobs)
    assert_close(found.kernels["z"], found.reference["z"], 4e-3, "four parts")


def test_blocks_that_reach_into_the_next_part_are_refused() -> None:
    graph = split_columns(chain(Format.BF16, 1024, 64, norm=False))
    with pytest.raises(OptionError, match="does not divide the 512 columns of a part"):
        choose_all(graph, harness.TARGET, Records(), {"gemm": {"BLOCK_M": 16, "BLOCK_K": 1024, "num_stages": 1}})


@pytest.mark.parametrize("width", [128, 384, 2048])
def test_a_norm_writes_both_orders(width: int) -> None:
    """Each with the same bits, those of the one in the order of lanes at the places of that order."""
    graph = order_columns(replace(chain(Format.NVFP4, 128, width), program="prefill"))
    twice = next(op for op in graph.ops if op.kind == "RmsNormTwice")
    alone = replace(graph, inputs=("z",), outputs=("n", "n_lanes")).with_ops((twice,))
    found = run(alone, 5)
    assert_close(found.kernels["n"], found.reference["n"], 4e-3, "natural")
    assert torch.equal(found.kernels["n"], found.kernels["n_lanes"])
    only = in_lanes(replace(alone, outputs=("n",)).with_ops(twice.body[:1]), "n")  # type: ignore[attr-defined]
    assert torch.equal(run(only, 5).kernels["n"], found.kernels["n"])


def gated_norm(head_dim: int, heads: int) -> Graph:
    return op_graph(
        GatedNorm("norm", "x", "z", "w", "out", 1e-6),
        tensors={
            "x": (DType.BF16, (T, heads, head_dim)),
            "z": (DType.BF16, (T, heads * head_dim)),
            "out": (DType.BF16, (T, heads * head_dim)),
        },
        weights=(Weight("w", Format.BF16, (head_dim,), (Part("w", head_dim),), "vector"),),
        rows=T,
        inputs=("x", "z"),
        outputs=("out",),
        program="prefill",
    )


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 3), (256, 2), (384, 1)])
def test_gated_norm(head_dim: int, heads: int) -> None:
    natural = gated_norm(head_dim, heads)
    found = run(in_lanes(natural, "out"), 4, gated_norm={"BLOCK_HEADS": 2})
    assert_close(found.kernels["out"], found.reference["out"], 4e-3, "gated norm")
    expected = run(natural, 4).kernels["out"]
    assert_close(found.kernels["out"], expected, 1e-3, "in natural order")


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize("head_dim", [128, 384])
def test_attention(gate: bool, head_dim: int) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=head_dim, gate=gate)
    graph = in_lanes(graph_of(shape, T, split=False), "gated" if gate else "attended")
    knobs = {"attention": {"BLOCK_ROWS": 8, "TILE": 16, "num_warps": 4, "num_stages": 1}}
    check(Step("lanes", tuple(range(20, 37)), shape=shape), graph, context=64, knobs=knobs)


@pytest.mark.parametrize(("slots", "size"), [(1, 384), (2, 128)])
def test_activation_of_a_dense_block(slots: int, size: int) -> None:
    act = (DType.BF16, (T, slots, size) if slots > 1 else (T, size))
    gate_up = (DType.BF16, (T, slots, 2 * size) if slots > 1 else (T, 2 * size))
    graph = op_graph(
        SiluMul("act", "x", "out"),
        tensors={"x": gate_up, "out": act},
        rows=T,
        inputs=("x",),
        outputs=("out",),
        program="prefill",
    )
    found = run(in_lanes(graph, "out"), 3, silu_mul={"BLOCK": 256})
    assert_close(found.kernels["out"], found.reference["out"], 4e-3, "activation")
    assert torch.equal(found.kernels["out"], run(graph, 3, silu_mul={"BLOCK": 256}).kernels["out"])
