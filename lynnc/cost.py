"""What an op costs: bytes moved and FLOPs as formulas in T (rows) and S (context), and the time they take on a device.

In: an op of a graph. Out: a ``Cost`` of sympy expressions. Bytes are the least a launch must move: each weight, state
and activation it touches once; experts count as often as they are expected to be distinct under even routing. FLOPs
count a multiply and an add as two. All rows of a step are taken to belong to one slot and the last one to stand at
position S - 1, as in single-stream decode, speculation and prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import sympy

from lynnc import mixerops, ops, promptops
from lynnc.ir import Graph, Op, primitive_ops
from lynnc.target import Device
from lynnc.tensors import S, T

Expr: TypeAlias = sympy.Expr | int


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes by what they belong to, and FLOPs, for one launch."""

    weight_bytes: Expr
    state_bytes: Expr
    activation_bytes: Expr
    flops: Expr

    @property
    def bytes(self) -> Expr:
        """All bytes moved."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """A cost for given T and S on a device. Times are seconds; ``bound`` is memory, compute or launch."""

    bytes: float
    flops: float
    memory_s: float
    compute_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        """The larger of moving and computing, plus the launch."""
        return max(self.memory_s, self.compute_s) + self.launch_s

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def bound(self) -> str:
        """What takes the most of the time."""
        times = {"memory": self.memory_s, "compute": self.compute_s, "launch": self.launch_s}
        return max(times, key=lambda name: times[name])


def cost(graph: Graph, op: Op) -> Cost:
    """The cost of one op or launch of the graph."""
    body = primitive_ops(op)
    touched = dict.fromkeys((*op.reads, *op.writes))
    shares = _used_shares(body)
    activations = sum((_tensor_bytes(graph, name) * shares.get(name, 1) for name in touched), sympy.Integer(0))
    return Cost(
        weight_bytes=sum((_weight_bytes(graph, inner) for inner in body), sympy.Integer(0)),
        state_bytes=sum((_rule(_STATE_BYTES, inner)(graph, inner) for inner in body), sympy.Integer(0)),
        activation_bytes=activations,
        flops=sum((_rule(_FLOPS, inner)(graph, inner) for inner in body), sympy.Integer(0)),
    )


def costs(graph: Graph) -> Mapping[str, Cost]:
    """The cost of every op or launch by its name; ops of equal kind and shapes are looked at once."""
    known: dict[object, Cost] = {}
    found = {}
    for op in graph.ops:
        shapes = _shapes(graph, op)
        if shapes not in known:
            known[shapes] = cost(graph, op)
        found[op.name] = known[shapes]
    return found


def _shapes(graph: Graph, op: Op) -> object:
    tensors = (graph.tensors[name] for name in (*op.reads, *op.writes))
    weights = (graph.weights[name] for name in op.names("weight"))
    return (
        op.kind,
        tuple((tensor.shape, tensor.dtype) for tensor in tensors),
        tuple((weight.shape, weight.format, len(weight.parts)) for weight in weights),
        tuple(graph.states[name].shape for name in op.names("state")),
    )


@cache
def evaluate_formula(formula: Expr, rows: int, context: int) -> float:
    """The number that a formula gives for T = ``rows`` and S = ``context``."""
    return float(sympy.sympify(formula).subs({T: rows, S: context}))


def estimate(cost_of_op: Cost, rows: int, context: int, device: Device) -> Estimate:
    """The cost's time on a device for T = ``rows`` and S = ``context``."""
    moved = evaluate_formula(cost_of_op.bytes, rows, context)
    flops = evaluate_formula(cost_of_op.flops, rows, context)
    return Estimate(
        bytes=moved,
        flops=flops,
        memory_s=moved / device.bandwidth_bytes_per_s,
        compute_s=flops / device.flops_per_s,
        launch_s=device.launch_overhead_s,
    )


def _rows(graph: Graph, op: Any) -> Expr:
    """Rows of an op, from the first tensor it writes or reads."""
    return graph.tensors[(*op.writes, *op.reads)[0]].shape[0]


def _tensor_bytes(graph: Graph, name: str) -> Expr:
    tensor = graph.tensors[name]
    return tensor.shape[0] * tensor.width * tensor.dtype.bytes


def _used_shares(body: tuple[Op, ...]) -> Mapping[str, Expr]:
    """The share of a tensor that is touched at all: runs of split attention past the context stay untouched."""
    return {
        op.partial: sympy.Min(1, sympy.ceiling(S / op.tile) / op.splits)
        for op in body
        if isinstance(op, mixerops.AttentionPartial | mixerops.AttentionCombine)
    }


def distinct_experts(experts: int, top_k: int, rows: Expr) -> Expr:
    """Experts that ``rows`` tokens are expected to use under even routing."""
    return experts * (1 - sympy.Rational(experts - top_k, experts) ** rows)


def _weight_bytes(graph: Graph, op: Op) -> Expr:
    total: Expr = sympy.Integer(0)
    for name in op.names("weight"):
        weight = graph.weights[name]
        share = sympy.Rational(weight.bytes, max(weight.experts * weight.rows, 1))
        if isinstance(op, ops.ExpertLinear | promptops.GroupedLinear | promptops.QuantisedGroupedLinear):
            used = distinct_experts(weight.experts, int(graph.tensors[op.out].shape[1]), _rows(graph, op))
            total += used * weight.rows * share
        elif isinstance(op, promptops.PartialLinear):
            total += int(graph.tensors[op.out].shape[-1]) * share
        elif isinstance(op, ops.Linear | promptops.QuantisedLinear):
            total += graph.tensors[op.out].width * share
        elif isinstance(op, ops.Embed):
            total += _rows(graph, op) * share
        else:
            total += weight.bytes
    return total


def _none(graph: Graph, op: Any) -> Expr:
    return sympy.Integer(0)


def _attention_bytes(graph: Graph, op: Any) -> Expr:
    """The slot's keys and values once, however many rows read them."""
    return 2 * op.kv_heads * S * op.head_dim * 2


def _append_bytes(graph: Graph, op: mixerops.CacheAppend) -> Expr:
    return graph.tensors[op.k].shape[0] * 2 * op.kv_heads * op.head_dim * 2


def _delta_bytes(graph: Graph, op: mixerops.GatedDelta | promptops.DeltaScan) -> Expr:
    """A slot's state is read and written once a step."""
    return sympy.Integer(2 * op.value_heads * op.key_dim * op.value_dim * 4)


def _conv_bytes(graph: Graph, op: mixerops.CausalConv) -> Expr:
    """The inputs before the step are read, and those of the step kept as far as the ring holds them."""
    return graph.tensors[op.x].width * 2 * (op.width - 1 + sympy.Min(_rows(graph, op), op.ring))


def _linear_flops(graph: Graph, op: Any) -> Expr:
    out, columns = graph.tensors[op.out], graph.weights[op.weight].columns
    return 2 * out.shape[0] * out.width * columns


def _partial_flops(graph: Graph, op: promptops.PartialLinear) -> Expr:
    return _linear_flops(graph, op) / op.parts


def _sum_flops(graph: Graph, op: promptops.SumParts) -> Expr:
    x = graph.tensors[op.x]
    return x.shape[0] * x.width


def _attention_flops(graph: Graph, op: Any) -> Expr:
    """Row t of T sees S - T + 1 + t positions: on average S - (T - 1) / 2."""
    rows = _rows(graph, op)
    return 4 * rows * op.heads * op.head_dim * (S - sympy.Rational(1, 2) * (rows - 1))


def _delta_flops(graph: Graph, op: mixerops.GatedDelta) -> Expr:
    """Decay, prediction, update and read of the state for each row."""
    return 7 * _rows(graph, op) * op.value_heads * op.key_dim * op.value_dim


def _chunk_flops(graph: Graph, op: promptops.DeltaChunk) -> Expr:
    """Products of queries and keys with keys, and the inverse of a triangle."""
    return _rows(graph, op) * op.value_heads * op.chunk * (4 * op.key_dim + op.chunk)


def _scan_flops(graph: Graph, op: promptops.DeltaScan) -> Expr:
    """Three products with the state, two with a chunk's squares."""
    return _rows(graph, op) * op.value_heads * op.value_dim * (6 * op.key_dim + 4 * op.chunk)


def _conv_flops(graph: Graph, op: mixerops.CausalConv) -> Expr:
    return 2 * op.width * _rows(graph, op) * graph.tensors[op.x].width


def _elementwise(per_value: int) -> Callable[[Graph, Any], Expr]:
    """FLOPs of an op that does ``per_value`` for each value of its first output, or input where it has none."""

    def flops(graph: Graph, op: Op) -> Expr:
        tensor = graph.tensors[(*op.writes, *op.reads)[0]]
        return per_value * tensor.shape[0] * tensor.width

    return flops


def _rule(table: Mapping[type[Op], Callable[[Graph, Any], Expr]], op: Op) -> Callable[[Graph, Any], Expr]:
    return table.get(type(op), _none)


_STATE_BYTES: Mapping[type[Op], Callable[[Graph, Any], Expr]] = MappingProxyType(
    {
        mixerops.Attention: _attention_bytes,
        mixerops.AttentionPartial: _attention_bytes,
        mixerops.CacheAppend: _append_bytes,
        mixerops.GatedDelta: _delta_bytes,
        promptops.DeltaScan: _delta_bytes,
        mixerops.CausalConv: _conv_bytes,
    }
)

_FLOPS: Mapping[type[Op], Callable[[Graph, Any], Expr]] = MappingProxyType(
    {
        ops.Linear: _linear_flops,
        promptops.PartialLinear: _partial_flops,
        promptops.SumParts: _sum_flops,
        promptops.QuantisedLinear: _linear_flops,
        promptops.QuantiseActivations: _elementwise(32),
        ops.ExpertLinear: _linear_flops,
        promptops.GroupedLinear: _linear_flops,
        promptops.QuantisedGroupedLinear: _linear_flops,
        mixerops.Attention: _attention_flops,
        mixerops.AttentionPartial: _attention_flops,
        mixerops.GatedDelta: _delta_flops,
        promptops.DeltaChunk: _chunk_flops,
        promptops.DeltaScan: _scan_flops,
        mixerops.CausalConv: _conv_flops,
        ops.RmsNorm: _elementwise(4),
        mixerops.GatedNorm: _elementwise(8),
        mixerops.HeadNormRope: _elementwise(8),
        ops.SiluMul: _elementwise(5),
        ops.Add: _elementwise(1),
        ops.Combine: _elementwise(2),
        ops.SharedAdd: _elementwise(3),
        mixerops.OutputGate: _elementwise(4),
        mixerops.AttentionCombine: _elementwise(4),
        mixerops.DeltaGates: _elementwise(8),
    }
)
