"""The intermediate representation: what an op is, and the graph that holds ops.

Grammar
-------
::

    graph   := stage, tensors, weights, states, ops          # ops in execution order
    tensor  := name : dtype [rows, columns...]               # an activation; rows may be the symbol T
             | name = base[:, start : start + columns]       # a view of columns of another tensor
             | ... in the order of lanes                     # how its columns stand in memory (lynnc/columnorder.py)
    weight  := name : format [experts?, rows, columns]       # constant for the plan, packed by parts
    state   := name : dtype [per slot shape]                 # lives between steps; the context S may appear
    op      := Kind(reads..., weights..., states...) -> writes
    op      := Fused(kind, body)                             # one launch; its meaning is its body's

Tensors, weights and states are the records of ``lynnc/tensors.py``. Each kind of op is a dataclass in ``lynnc/ops.py``,
``lynnc/mixerops.py`` or ``lynnc/promptops.py`` and states which of its fields name tensors it reads or writes, weights
or states, so passes, the verifier and the printer need no table beside it. The stages are ``model`` (one op for each
mathematical step) and ``fused`` (one op for each kernel launch). ``str(graph)`` is stable text: golden tests and
``lynnc show`` print it.

Example::

    RmsNorm(h -> x, weight=layers.0.input_norm, eps=1e-06, shifted=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any

from lynnc.tensors import Dim, State, Tensor, Weight


class Stage(StrEnum):
    """How far a graph has come: one op for each step of the model, or for each kernel launch."""

    MODEL = "model"
    FUSED = "fused"


def _named(role: str) -> Any:
    return field(metadata={"role": role})


def read_field() -> Any:
    """A field that names a tensor the op reads."""
    return _named("read")


def write_field() -> Any:
    """A field that names a tensor the op writes."""
    return _named("write")


def weight_field() -> Any:
    """A field that names a weight."""
    return _named("weight")


def state_field() -> Any:
    """A field that names a state, which the op may read and write."""
    return _named("state")


@cache
def _fields_of(kind: type, role: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.metadata.get("role") == role)


@dataclass(frozen=True, slots=True)
class Op:
    """One step. ``name`` is unique in the graph and starts with the layer: ``layers.3.attention``."""

    name: str

    def names(self, role: str) -> tuple[str, ...]:
        """Names in the fields of ``role`` (read, write, weight, state), in field order."""
        found: list[str] = []
        kind: type = type(self)
        for name in _fields_of(kind, role):
            value = getattr(self, name)
            if isinstance(value, str):
                found.append(value)
            else:
                found.extend(value)
        return tuple(found)

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that the op reads, in field order."""
        return self.names("read")

    @property
    def writes(self) -> tuple[str, ...]:
        """Tensors that the op writes, in field order."""
        return self.names("write")

    @property
    def kind(self) -> str:
        """What the op is called in text: its class, or the pattern of a fused one."""
        return type(self).__name__

    def __str__(self) -> str:
        attributes = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if "role" not in item.metadata and item.name != "name"
        ]
        arguments = [*self.reads, *self.names("weight"), *(f"&{name}" for name in self.names("state")), *attributes]
        return f"{self.kind}({', '.join(arguments)}) -> {', '.join(self.writes) or '()'}"


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """One launch that computes ``body``; tensors written and read only inside need no memory."""

    pattern: str
    body: tuple[Op, ...]
    inputs: tuple[str, ...] = read_field()
    used_weights: tuple[str, ...] = weight_field()
    used_states: tuple[str, ...] = state_field()
    outputs: tuple[str, ...] = write_field()

    @property
    def kind(self) -> str:
        """The pattern."""
        return self.pattern

    def __str__(self) -> str:
        lines = [f"{self.pattern}({', '.join(self.inputs)}) -> {', '.join(self.outputs)} {{"]
        lines += [f"    {op}" for op in self.body]
        return "\n".join([*lines, "}"])


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in execution order with the tables of what they name. ``inputs`` and ``outputs`` name tensors."""

    model: str
    program: str
    stage: Stage
    rows: Dim
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, Weight]
    states: Mapping[str, State]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def with_ops(self, ops: tuple[Op, ...], *new_tensors: Tensor) -> Graph:
        """The same graph with other ops; tensors that no op names any more are dropped."""
        tensors = {**self.tensors, **{tensor.name: tensor for tensor in new_tensors}}
        named = set(self.inputs) | set(self.outputs)
        for op in walk(ops):
            named.update(op.reads, op.writes)
        while bases := {tensors[name].base for name in named} - named - {None}:
            named.update(base for base in bases if base)
        kept = {name: tensor for name, tensor in tensors.items() if name in named}
        return replace(self, ops=ops, tensors=kept)

    def __str__(self) -> str:
        lines = [f"graph {self.model} {self.program} stage={self.stage} rows={self.rows}"]
        lines += [f"  input {self.tensors[name]}" for name in self.inputs]
        for op in self.ops:
            lines.append(f"  {op.name}:")
            lines += [f"    {line}" for line in str(op).splitlines()]
        lines += [f"  output {self.tensors[name]}" for name in self.outputs]
        return "\n".join(lines) + "\n"


def walk(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Every op, and the ops inside each fused one."""
    for op in ops:
        yield op
        if isinstance(op, Fused):
            yield from walk(op.body)


def primitive_ops(op: Op) -> tuple[Op, ...]:
    """The body of a fused op, or the op itself."""
    return op.body if isinstance(op, Fused) else (op,)
