"""Collects a graph's tables while ``lynnc.build`` writes a model down layer by layer.

In: a ``ModelSpec`` and the rows of the step. Out: ops, tensors, weights and states by name; weights follow the model's
precision rules, and projections of one input that have one format share a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from lynnc.ir import Op
from lynnc.model import ModelSpec
from lynnc.ops import Linear
from lynnc.tensors import Dim, DType, Format, Part, State, Tensor, Weight


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix that multiplies the layer's normed input."""

    name: str
    tensor_class: str
    source: str
    rows: int


@dataclass(slots=True)
class Builder:
    """The tables of a graph under construction."""

    spec: ModelSpec
    rows: Dim
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def tensor(self, name: str, dtype: DType, *columns: int, rows: Dim | None = None) -> str:
        """An activation of the step's rows, or of ``rows``."""
        self.tensors[name] = Tensor(name, dtype, (self.rows if rows is None else rows, *columns))
        return name

    def state(self, name: str, dtype: DType, *shape: Dim) -> str:
        """A state of that shape for each slot."""
        self.states[name] = State(name, dtype, shape)
        return name

    def vector(self, name: str, source: str, length: int, fmt: Format = Format.BF16) -> str:
        """A norm, bias or gate vector: never quantised."""
        self.weights[name] = Weight(name, fmt, (length,), (Part(source, length),), "vector")
        return name

    def matrix(self, name: str, tensor_class: str, columns: int, parts: Mapping[str, int], experts: int = 0) -> str:
        """A matrix of ``parts`` (checkpoint name to rows) in the format the model's rule for the class asks for."""
        rows = sum(parts.values())
        shape = (experts, rows, columns) if experts else (rows, columns)
        named = tuple(Part(source, count) for source, count in parts.items())
        precision = self.spec.precision
        fmt = precision.format(tensor_class)
        activations = precision.activations if fmt is Format.NVFP4 else "bf16"
        self.weights[name] = Weight(name, fmt, shape, named, tensor_class, activations)
        return name

    def add(self, op: Op) -> None:
        """The next op in execution order."""
        self.ops.append(op)

    def linears(self, prefix: str, x: str, projections: tuple[Projection, ...], dtype: DType) -> tuple[str, ...]:
        """Linear ops that read the same x; neighbours of one format share one weight, so they can become one launch."""
        outs = []
        for _, group in groupby(projections, lambda p: self.spec.precision.format(p.tensor_class)):
            shared = tuple(group)
            weight = f"{prefix}.{'_'.join(p.name for p in shared)}_weight"
            self.matrix(weight, shared[0].tensor_class, self.spec.hidden, {p.source: p.rows for p in shared})
            first_row = 0
            for projection in shared:
                out = self.tensor(f"{prefix}.{projection.name}", dtype, projection.rows)
                self.add(Linear(name=f"{out}_proj", x=x, weight=weight, out=out, first_row=first_row))
                first_row += projection.rows
                outs.append(out)
        return tuple(outs)

    def source(self, layer: int, rest: str) -> str:
        """Checkpoint name of a tensor of one layer."""
        return f"{self.spec.tensor_prefix}layers.{layer}.{rest}"
