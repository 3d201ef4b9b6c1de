"""Attention blocks as launch graphs, steps of rows for them, and the check of kernels against the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from harness import assert_close, run_both
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from lynnc.interpret import new_states
from lynnc.ir import Graph, Op, Stage
from lynnc.mixerops import Attention, AttentionCombine, AttentionPartial, CacheAppend, HeadNormRope, OutputGate
from lynnc.passes.fuse_append import fuse_append
from lynnc.passes.fuse_attention import fuse_attention
from lynnc.passes.fuse_output_gate import fuse_output_gate
from lynnc.tensors import DType, Format, Part, S, State, T, Tensor, Weight

BF16_LIMIT, F32_LIMIT = 2.5e-3, 5e-5
PROMPT_LIMIT = 1e-2
"""Attention of many rows rounds its weights to BF16 before it multiplies, as ``transformers`` does: RMS 2e-3, and one
unit in the last place of the few values that are far larger than the others."""


@dataclass(frozen=True)
class Shape:
    """One attention block."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    theta: float = 1e7
    gate: bool = True
    shifted: bool = True
    splits: int = 4
    tile: int = 16

    @property
    def q_stride(self) -> int:
        return self.head_dim * (2 if self.gate else 1)

    @property
    def width(self) -> int:
        return self.heads * self.q_stride + 2 * self.kv_heads * self.head_dim


SMALL = Shape()
LINE = Shape(heads=2, kv_heads=1, splits=3)
REAL = Shape(heads=16, kv_heads=2, head_dim=256, rotary_dim=64, splits=64, tile=32)


def _tensors(shape: Shape, rows) -> dict[str, Tensor]:
    q, kv = shape.heads * shape.q_stride, shape.kv_heads * shape.head_dim
    heads = (rows, shape.heads, shape.head_dim)
    found = (
        Tensor("position", DType.I32, (rows, 1)),
        Tensor("slot", DType.I32, (rows, 1)),
        Tensor("qkv", DType.BF16, (rows, q + 2 * kv)),
        Tensor("q", DType.BF16, (rows, q), "qkv", 0),
        Tensor("k", DType.BF16, (rows, kv), "qkv", q),
        Tensor("v", DType.BF16, (rows, kv), "qkv", q + kv),
        Tensor("q_rotated", DType.BF16, heads),
        Tensor("k_rotated", DType.BF16, (rows, shape.kv_heads, shape.head_dim)),
        Tensor("attended", DType.BF16, heads),
        Tensor("gated", DType.BF16, heads),
        Tensor("partial", DType.F32, (rows, shape.heads, shape.splits, shape.head_dim + 2)),
    )
    return {tensor.name: tensor for tensor in found}


def _norm_ops(shape: Shape) -> tuple[Op, ...]:
    common = {
        "head_dim": shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "theta": shape.theta,
        "eps": 1e-6,
        "shifted": shape.shifted,
    }
    return (
        HeadNormRope(
            "q_rope", "q", "position", "q_norm", "q_rotated", heads=shape.heads, head_stride=shape.q_stride, **common
        ),
        HeadNormRope(
            "k_rope", "k", "position", "k_norm", "k_rotated", heads=shape.kv_heads, head_stride=shape.head_dim, **common
        ),
        CacheAppend(
            "append", "k_rotated", "v", "position", "slot", "k_cache", "v_cache", shape.kv_heads, shape.head_dim
        ),
    )


def _attention_ops(shape: Shape, split: bool) -> tuple[Op, ...]:
    reads = ("q_rotated", "position", "slot", "k_cache", "v_cache")
    facts = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    gate = OutputGate(
        "gate", "attended", "q", "gated", shape.heads, shape.head_dim, stride=shape.q_stride, offset=shape.head_dim
    )
    gates = (gate,) if shape.gate else ()
    if not split:
        return (Attention("attention", *reads, "attended", *facts), *gates)
    return (
        AttentionPartial("attention_partial", *reads, "partial", *facts, splits=shape.splits, tile=shape.tile),
        AttentionCombine(
            "combine", "partial", "position", "attended", shape.heads, shape.head_dim, shape.splits, shape.tile
        ),
        *gates,
    )


def graph_of(shape: Shape, rows=1, *, split: bool = True, fused: bool = True) -> Graph:
    """An attention block between its joint projection ``qkv`` and its output, as a launch graph."""
    names = ("q_norm", "k_norm")
    cache = (shape.kv_heads, S, shape.head_dim)
    output = "gated" if shape.gate else "attended"
    graph = Graph(
        model="test",
        program="prefill" if rows == T else f"decode/{rows}",
        stage=Stage.FUSED,
        rows=rows,
        ops=(*_norm_ops(shape), *_attention_ops(shape, split)),
        tensors=_tensors(shape, rows),
        weights={n: Weight(n, Format.BF16, (shape.head_dim,), (Part(n, shape.head_dim),), "vector") for n in names},
        states={n: State(n, DType.BF16, cache) for n in ("k_cache", "v_cache")},
        inputs=("position", "slot", "qkv"),
        outputs=(output, "partial") if split else (output,),
    )
    graph = graph.with_ops(graph.ops)
    return fuse_output_gate(fuse_append(fuse_attention(graph))) if fused else graph


@dataclass(frozen=True)
class Step:
    """Rows of one step: position (negative: padding) and slot of each."""

    name: str
    positions: tuple[int, ...]
    slots: tuple[int, ...] = ()
    shape: Shape = LINE

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """The step's inputs; rows of q, k and v depend on slot and position alone."""
        slots = self.slots or (0,) * len(self.positions)
        rows = [_row(self.shape, slot, at, seed) for slot, at in zip(slots, self.positions, strict=True)]
        column = {"position": self.positions, "slot": slots}
        found = {name: torch.tensor(values, dtype=torch.int32)[:, None] for name, values in column.items()}
        return {**found, "qkv": torch.stack(rows)}


def _row(shape: Shape, slot: int, position: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + slot * 10_007 + position + 1)
    return torch.randn(shape.width, generator=generator).bfloat16()


def new_caches(shape: Shape, slots: int, context: int) -> dict[str, torch.Tensor]:
    """Full caches: what stands at and after a row's position is stale and must not matter."""
    states = new_states(graph_of(shape), slots, context)
    for index, state in enumerate(states.values()):
        state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(index)))
    return states


def written(partial: torch.Tensor, step: Step, row: int) -> torch.Tensor:
    """The non-empty runs of a row's partial results."""
    tiles = step.positions[row] // step.shape.tile + 1
    run = -(-tiles // step.shape.splits)
    return partial[row, :, : -(-tiles // run)]


def check(step: Step, graph: Graph, context: int = 320, knobs: Mapping[str, Mapping[str, int]] = MappingProxyType({})):
    """Runs a step both ways and compares all that real rows leave."""
    slots = max(step.slots or (0,)) + 1
    caches = new_caches(step.shape, slots, context)
    found = run_both(graph, step.inputs(), states=caches, slots=slots, context=context, knobs=knobs)
    limit = BF16_LIMIT if "partial" in graph.outputs else PROMPT_LIMIT
    real = [row for row, position in enumerate(step.positions) if position >= 0]
    for name in ("gated", "attended"):
        if name in graph.outputs:
            assert found.kernels[name].isfinite().all()
            assert_close(found.kernels[name][real].float(), found.reference[name][real].float(), limit, name)
    if "partial" in graph.outputs:
        for row in real:
            pair = (written(values["partial"], step, row) for values in (found.kernels, found.reference))
            assert_close(*pair, F32_LIMIT, f"partial of row {row}")
    for name, state in found.kernel_states.items():
        assert_close(state.float(), found.reference_states[name].float(), BF16_LIMIT / 10, name)
    return found


def library_config(shape: Shape) -> Qwen3_5MoeTextConfig:
    """The same block for ``transformers``."""
    return Qwen3_5MoeTextConfig(
        hidden_size=shape.heads * shape.head_dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_section": [3, 3, 2],
        },
    )
