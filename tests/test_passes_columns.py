"""Which columns stand in the order of lanes, which projections are summed by parts; neither changes a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from harness import assert_close, op_graph, pack_graph

from lynnc.columnorder import ColumnOrder
from lynnc.compiler import fused_graph
from lynnc.interpret import interpret
from lynnc.ir import Graph, Op
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.ops import Add, Linear, RmsNorm
from lynnc.passes.order_columns import order_columns
from lynnc.passes.split_columns import parts_of, split_columns
from lynnc.promptops import PartialLinear
from lynnc.tensors import DType, Format, Part, T, Tensor, Weight
from lynnc.verify import verify

LAYERS_QWEN = 40


def with_formats(model: str, **formats: Format) -> ModelSpec:
    spec = load_model(model)
    return replace(spec, precision=replace(spec.precision, formats={**spec.precision.formats, **formats}))


def in_lanes(graph: Graph) -> Counter[str]:
    """How many tensors of each name, without its layer, stand in the order of lanes."""
    ordered = [name for name, tensor in graph.tensors.items() if tensor.order is ColumnOrder.LANES]
    return Counter(name.rpartition(".")[2] for name in ordered)


def test_what_is_ordered_in_the_large_model() -> None:
    graph = fused_graph(load_model("qwen3.6-35b-a3b"), "prefill")
    names = ("x", "gated", "y_lanes", "experts_act", "shared_act")
    assert in_lanes(graph) == dict.fromkeys(names, LAYERS_QWEN)
    assert not in_lanes(fused_graph(load_model("qwen3.6-35b-a3b"), "decode/1"))


def test_a_norm_that_a_router_reads_too_gets_a_second_copy() -> None:
    graph = fused_graph(load_model("qwen3.6-35b-a3b"), "prefill")
    kinds = Counter(op.kind for op in graph.ops)
    assert (kinds["RmsNormTwice"], kinds["RmsNorm"]) == (LAYERS_QWEN, LAYERS_QWEN + 1)
    readers = {name: {op.kind for op in graph.ops if f"layers.0.{name}" in op.reads} for name in ("y", "y_lanes")}
    assert readers == {"y": {"Linear"}, "y_lanes": {"GroupedUp"}}


@dataclass(frozen=True)
class Natural:
    """A model in which tensors of some names stay in natural order."""

    name: str
    spec: ModelSpec
    tensors: frozenset[str]

    def __str__(self) -> str:
        return self.name


TINY = load_model("tiny-moe")
WIDE = replace(TINY, hidden=192)
STAY = (
    Natural("heads-of-64", TINY, frozenset({"gated", "experts_act", "shared_act"})),
    Natural("192-columns", WIDE, frozenset({"x", "y", "y_lanes"})),
    Natural("fp8-projections", with_formats("qwen3-30b-a3b", attention_in=Format.FP8), frozenset({"x"})),
    Natural("bf16-output", with_formats("qwen3-30b-a3b", attention_out=Format.BF16), frozenset({"attended"})),
    Natural("fp8-experts", with_formats("qwen3-30b-a3b", experts=Format.FP8), frozenset({"y_lanes", "experts_act"})),
)


@pytest.mark.parametrize("case", STAY, ids=str)
def test_what_stays_in_natural_order(case: Natural) -> None:
    assert not case.tensors & in_lanes(fused_graph(case.spec, "prefill")).keys()


@pytest.mark.parametrize(("model", "name"), [("qwen3.5-9b", "mlp_act"), ("qwen3-30b-a3b", "attended")])
def test_every_packed_projection_of_other_families_reads_the_order_of_lanes(model: str, name: str) -> None:
    graph = fused_graph(load_model(model), "prefill")
    assert in_lanes(graph)[name] == len(load_model(model).layers)
    natural = [op.name for op in graph.ops if op.kind == "LinearResidual" and op.reads[0] not in graph.inputs]
    assert all(graph.tensors[op.reads[0]].order is ColumnOrder.LANES for op in graph.ops if op.name in natural)


def block(rows: int = 128, columns: int = 1024, program: str = "prefill/16", norm: bool = True) -> Graph:
    """A norm, a packed and a plain projection of it, the packed one's sum with the residual, and what norms that."""
    every = (
        Weight("first", Format.BF16, (columns,), (Part("first", columns),), "vector"),
        Weight("second", Format.BF16, (rows,), (Part("second", rows),), "vector"),
        Weight("packed", Format.NVFP4, (rows, columns), (Part("up", rows // 2), Part("low", rows // 2)), "mlp"),
        Weight("plain", Format.BF16, (32, columns), (Part("plain", 32),), "router"),
        Weight("last", Format.NVFP4, (64, rows), (Part("last", 64),), "mlp"),
    )
    ops: list[Op] = [
        RmsNorm("norm", "h", "first", "x", 1e-6, True),
        Linear("plain", "x", "plain", "logits", 0),
        Linear("packed", "x", "packed", "change", 0),
        Add("add", "r", "change", "sum"),
    ]
    if norm:
        ops += [RmsNorm("norm2", "sum", "second", "y", 1e-6, False), Linear("last", "y", "last", "out", 0)]
    shapes = {"h": columns, "x": columns, "logits": 32, "change": rows, "r": rows, "sum": rows, "y": rows, "out": 64}
    used = {name for op in ops for name in op.names("weight")}
    return op_graph(
        *ops,
        tensors={name: (DType.BF16, (T, width)) for name, width in shapes.items()},
        weights=tuple(weight for weight in every if weight.name in used),
        rows=T,
        inputs=("h", "r"),
        outputs=("logits", "sum", *(("out",) if norm else ())),
        program=program,
    )


def with_reader(graph: Graph, x: Tensor) -> Graph:
    """The graph with a projection of BF16 weights that reads ``x`` too."""
    weight = Weight("also", Format.BF16, (32, x.width), (Part("also", 32),), "router")
    out = Tensor("logits2", DType.BF16, (T, 32))
    graph = replace(graph, weights={**graph.weights, "also": weight}, outputs=(*graph.outputs, out.name))
    return graph.with_ops((*graph.ops, Linear("also", x.name, "also", out.name, 0)), x, out)


def inputs_of(graph: Graph, count: int = 5) -> Mapping[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    widths = {name: graph.tensors[name].width for name in graph.inputs}
    found = {name: torch.randn(count, width, generator=generator).bfloat16() for name, width in widths.items()}
    return {**found, "token": torch.zeros(count, 1, dtype=torch.int32)}


def outputs_of(graph: Graph) -> dict[str, torch.Tensor]:
    found = interpret(graph, pack_graph(graph)[1], {}, inputs_of(graph))
    return {name: found[name] for name in graph.outputs}


def test_an_order_changes_no_bit() -> None:
    graph = block()
    ordered = verify(order_columns(graph))
    assert in_lanes(ordered) == {"x_lanes": 1, "y": 1}
    expected = outputs_of(graph)
    for name, values in outputs_of(ordered).items():
        assert torch.equal(values, expected[name]), name


def test_outputs_and_what_has_views_stay() -> None:
    graph = replace(block(), outputs=("logits", "sum", "out", "x", "y"))
    assert order_columns(graph) == graph
    graph = with_reader(block(), Tensor("part", DType.BF16, (T, 64), "y", 64))
    assert "y" not in in_lanes(verify(order_columns(graph)))


def test_a_second_copy_of_a_sum_by_parts() -> None:
    """Both passes: the launch that sums parts writes its norm twice where readers differ."""
    graph = block()
    graph = with_reader(graph, graph.tensors["y"])
    changed = verify(order_columns(verify(split_columns(graph))))
    assert [op.writes for op in changed.ops if op.kind == "SumPartsNorm"] == [("sum", "y", "y_lanes")]
    expected = outputs_of(graph)
    for name, values in outputs_of(changed).items():
        assert_close(values.float(), expected[name].float(), 2e-3, name)


@pytest.mark.parametrize("norm", [True, False])
def test_parts_give_the_same_sums(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynnc.interpret.bf16", lambda x: x)
    graph = block(norm=norm)
    wide = {name: replace(tensor, dtype=DType.F32) for name, tensor in graph.tensors.items()}
    graph = replace(graph, tensors=wide)
    split = verify(split_columns(graph))
    assert [op.kind for op in split.ops if op.kind.startswith("Sum")] == ["SumPartsNorm" if norm else "SumPartsAdd"]
    expected = outputs_of(graph)
    for name, values in outputs_of(split).items():
        assert_close(values, expected[name], 1e-6, name)


def split_names(graph: Graph) -> dict[str, int]:
    """Parts of each projection, by its name without the layer; all layers alike."""
    return {op.name.rpartition(".")[2]: op.parts for op in graph.ops if isinstance(op, PartialLinear)}


@pytest.mark.parametrize("program", ["prefill/16", "prefill/64"])
def test_which_projections_are_split(program: str) -> None:
    assert split_names(fused_graph(load_model("qwen3.6-35b-a3b"), program)) == {"out_proj": 4}
    assert split_names(fused_graph(load_model("qwen3.5-9b"), program)) == {"out_proj": 2, "mlp_down": 2}
    assert split_names(block(program=program)) == {} != split_names(split_columns(block(program=program)))


@pytest.mark.parametrize("program", ["prefill/65", "prefill", "decode/1", "decode/8"])
def test_other_programs_are_left_alone(program: str) -> None:
    graph = block(program=program)
    assert split_columns(graph) is graph


def test_weights_for_4_bit_activations_are_left_alone() -> None:
    graph = block()
    weight = replace(graph.weights["packed"], activations="nvfp4")
    assert not split_names(split_columns(replace(graph, weights={**graph.weights, "packed": weight})))


def test_parts_are_whole_blocks_and_fill_a_gpu_at_most() -> None:
    assert {size: parts_of(*size) for size in ((2048, 4096), (2048, 512), (8192, 4096), (64, 8192))} == {
        (2048, 4096): 4,
        (2048, 512): 1,
        (8192, 4096): 1,
        (64, 8192): 16,
    }
    assert [parts_of(64, columns) for columns in (1024, 1023, 1024 + 128, 1024 + 256, 3072)] == [2, 1, 1, 2, 4]
