"""Graphs of a mixture of experts in every shape that has broken one, shared by the tests of its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from harness import Outcome, assert_close, op_graph
from torch import nn
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lynnc.ir import Graph, Op
from lynnc.ops import Add, Combine, ExpertLinear, Linear, SharedAdd, SiluMul, TopK
from lynnc.passes.fuse_experts_down import fuse_experts_down
from lynnc.passes.fuse_experts_up import fuse_experts_up
from lynnc.tensors import Dim, DType, Format, Part, T, Tensor, Weight

FORMATS = (Format.NVFP4, Format.NVFP4_FP16, Format.FP8, Format.BF16)
FUSED = ("experts_up", "experts_down", "expert_linear", "gate_up", "linear")
KNOBS = {name: {"BLOCK_N": 128, "num_warps": 16} for name in FUSED}


@dataclass(frozen=True)
class Case:
    """A mixture of experts: hidden size, experts, slots, intermediate sizes (0: no shared expert) and formats."""

    name: str
    hidden: int = 64
    experts: int = 6
    k: int = 2
    size: int = 48
    shared: int = 0
    normalize: bool = True
    routed_format: Format = Format.NVFP4
    shared_format: Format = Format.NVFP4

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("shared", shared=48),
    Case("no-shared"),
    Case("nvfp4+fp8-narrow-shared", shared=16, shared_format=Format.FP8),
    Case("fp16-scales+bf16-wide-shared", shared=80, routed_format=Format.NVFP4_FP16, shared_format=Format.BF16),
    Case("fp8+fp16-scales", shared=48, routed_format=Format.FP8, shared_format=Format.NVFP4_FP16),
    Case("bf16", shared=48, routed_format=Format.BF16, shared_format=Format.BF16),
    Case("columns-not-a-power-of-two", hidden=144, size=144, experts=5, k=4, shared=144, normalize=False),
    Case("three-slots-of-240", hidden=48, size=240, experts=7, k=3, normalize=False),
    Case("more-columns-than-a-warp-holds", hidden=1056, experts=3, size=16, shared=16),
    Case("one-expert", experts=1, k=1, shared=16),
    Case("eight-of-eight", experts=8, k=8, size=16, shared=16),
)
ROUTED = [replace(CASES[0], name=f"{fmt}", routed_format=fmt, shared_format=fmt) for fmt in FORMATS]


def moe_graph(case: Case, rows: int | None, layers: tuple[int, ...] = ()) -> Graph:
    """The model-stage ops from logits and normed input to the residual; one layer for each count in ``layers``."""
    ops: list[Op] = []
    tensors: dict[str, Tensor] = {}
    weights: list[Weight] = []
    inputs, outputs = [], []
    for index, experts in enumerate(layers or (case.experts,)):
        layer = _Layer(replace(case, experts=experts), f"l{index}." if layers else "", T if rows is None else rows)
        ops += layer.ops()
        tensors.update({tensor.name: tensor for tensor in layer.tensors()})
        weights += layer.weights()
        inputs += [layer.name(name) for name in ("y", "router", "h")]
        outputs.append(layer.name("out"))
    graph = op_graph(
        *ops,
        tensors={},
        weights=tuple(weights),
        rows=T if rows is None else rows,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        program="prefill" if rows is None else f"decode/{rows}",
    )
    return replace(graph, tensors=tensors)


@dataclass(frozen=True)
class _Layer:
    case: Case
    prefix: str
    rows: Dim

    def name(self, name: str) -> str:
        return self.prefix + name

    def tensors(self) -> list[Tensor]:
        c, n = self.case, self.name
        shapes = {
            "y": (DType.BF16, c.hidden),
            "router": (DType.F32, c.experts + 1),
            "h": (DType.BF16, c.hidden),
            "ids": (DType.I32, c.k),
            "scores": (DType.F32, c.k),
            "gate_up": (DType.BF16, c.k, 2 * c.size),
            "act": (DType.BF16, c.k, c.size),
            "experts_out": (DType.F32, c.k, c.hidden),
            "sum": (DType.F32, c.hidden),
            "out": (DType.BF16, c.hidden),
        }
        if c.shared:
            shapes |= {
                "shared_gate_up": (DType.BF16, 2 * c.shared),
                "shared_act": (DType.BF16, c.shared),
                "shared_out": (DType.F32, c.hidden),
                "mlp": (DType.BF16, c.hidden),
            }
        found = [Tensor(n(name), dtype, (self.rows, *shape)) for name, (dtype, *shape) in shapes.items()]
        logits = Tensor(n("logits"), DType.F32, (self.rows, c.experts), n("router"), 0)
        return [*found, logits, Tensor(n("gate"), DType.F32, (self.rows, 1), n("router"), c.experts)]

    def weights(self) -> list[Weight]:
        c, n = self.case, self.name
        gate_up = tuple(Part(f"{{expert}}.{name}", c.size) for name in ("gate", "up"))
        up = Weight(n("up"), c.routed_format, (c.experts, 2 * c.size, c.hidden), gate_up, "experts")
        part = Part("{expert}.down", c.hidden)
        down = Weight(n("down"), c.routed_format, (c.experts, c.hidden, c.size), (part,), "experts")
        if not c.shared:
            return [up, down]
        parts = tuple(Part(name, c.shared) for name in ("gate", "up"))
        shared_up = Weight(n("shared_up"), c.shared_format, (2 * c.shared, c.hidden), parts, "shared_expert")
        down_part = (Part("down", c.hidden),)
        shared_down = Weight(n("shared_down"), c.shared_format, (c.hidden, c.shared), down_part, "shared_expert")
        return [up, down, shared_up, shared_down]

    def ops(self) -> list[Op]:
        c, n = self.case, self.name
        shared_up, shared_down = [], []
        if c.shared:
            shared_up = [
                Linear(n("shared_up"), n("y"), n("shared_up"), n("shared_gate_up"), 0),
                SiluMul(n("shared_silu"), n("shared_gate_up"), n("shared_act")),
            ]
            shared_down = [
                Linear(n("shared_down"), n("shared_act"), n("shared_down"), n("shared_out"), 0),
                SharedAdd(n("shared_add"), n("sum"), n("shared_out"), n("gate"), n("mlp")),
            ]
        return [
            TopK(n("top_k"), n("logits"), n("ids"), n("scores"), c.experts, c.k, c.normalize),
            ExpertLinear(n("up"), n("y"), n("ids"), n("up"), n("gate_up")),
            SiluMul(n("silu"), n("gate_up"), n("act")),
            *shared_up,
            ExpertLinear(n("down"), n("act"), n("ids"), n("down"), n("experts_out")),
            Combine(n("combine"), n("experts_out"), n("scores"), n("sum")),
            *shared_down,
            Add(n("add"), n("h"), n("mlp") if c.shared else n("sum"), n("out")),
        ]


def fused(graph: Graph) -> Graph:
    return keep_all(fuse_experts_down(fuse_experts_up(graph)))


def keep_all(graph: Graph) -> Graph:
    """The same graph with every written tensor as an output, so that none gives its memory to another."""
    return replace(graph, outputs=tuple(dict.fromkeys(name for op in graph.ops for name in op.writes)))


def inputs_of(case: Case, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "y": torch.randn(rows, case.hidden, generator=generator).bfloat16(),
        "router": torch.randn(rows, case.experts + 1, generator=generator) * 2,
        "h": torch.randn(rows, case.hidden, generator=generator).bfloat16(),
    }


def router_rows(experts: int) -> dict[str, torch.Tensor]:
    """Rows of logits that have broken routers: ties, NaN, infinities."""
    generator = torch.Generator().manual_seed(experts)
    plain = torch.randn(experts, generator=generator) * 3
    some = torch.arange(experts) % 3 == 0
    return {
        "plain": plain,
        "ties": (plain / 3).round(),
        "equal": torch.full((experts,), 1.5),
        "nan": torch.full((experts,), math.nan),
        "some-nan": torch.where(some, math.nan, plain),
        "some-minus-infinity": torch.where(some, -math.inf, plain),
        "minus-infinity": torch.full((experts,), -math.inf),
        "plus-infinity": torch.where(torch.arange(experts) == experts // 2, math.inf, plain),
        "rising": torch.arange(experts).float() / experts,
        "far-apart": plain * 40,
    }


LIMITS = {
    "experts_out": 6e-3,
    "shared_out": 6e-3,
    "scores": 1e-6,
    "gate_up": 3e-3,
    "act": 1.2e-2,
    "shared_act": 1e-2,
    "out": 8e-3,
}
"""RMS limits where more than one BF16 rounding may fall to the other side."""


def compare(found: Outcome, names: tuple[str, ...]) -> None:
    """Ids are equal, the rest within its limit."""
    for name in names:
        ours, expected = found.kernels[name], found.reference[name]
        if expected.dtype is torch.int32:
            assert torch.equal(ours, expected), name
        else:
            assert_close(ours, expected, LIMITS.get(name.rpartition(".")[2], 4e-3), name)


def published_block(case: Case, values: dict[str, torch.Tensor]) -> nn.Module:
    """The family's own block with our dequantised weights in FP32."""
    sizes = {
        "hidden_size": case.hidden,
        "num_experts": case.experts,
        "num_experts_per_tok": case.k,
        "moe_intermediate_size": case.size,
    }
    if case.shared:
        config = Qwen3_5MoeTextConfig(**sizes, shared_expert_intermediate_size=case.shared)
        block = Qwen3_5MoeSparseMoeBlock(config)
    else:
        config = Qwen3MoeConfig(**sizes, norm_topk_prob=case.normalize)
        block = Qwen3MoeSparseMoeBlock(config)
    config._experts_implementation = "eager"
    weights = {"experts.gate_up_proj": values["up"], "experts.down_proj": values["down"]}
    if case.shared:
        gate, up = values["shared_up"].chunk(2)
        weights |= {"shared_expert.gate_proj.weight": gate, "shared_expert.up_proj.weight": up}
        weights["shared_expert.down_proj.weight"] = values["shared_down"]
    own = block.state_dict()
    generator = torch.Generator().manual_seed(1)
    for name in set(own) - set(weights):  # the router and the shared gate, whose output is our input
        weights[name] = torch.randn(own[name].shape, generator=generator) * 0.3
    block.load_state_dict(weights)
    return block
