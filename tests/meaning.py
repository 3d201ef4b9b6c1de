"""Runs a step by the meaning of its ops, in the memory that its launches name: a hundred times Triton's interpreter.

In: a plan, and a step's calls with the addresses that the runtime gave them. Out: the memory as a GPU leaves it. What
the kernels compute is not shown here, but everything that the runtime does is: addresses, rows and order.

Example::

    Meaning(plan, Room(slots=1, context=64)).run(executor.calls(executor.program("decode/1"), 1))
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from runners import FEW_SPLITS

from lynnc.compiler import fused_graph
from lynnc.dims import evaluate
from lynnc.fields import Place
from lynnc.interpret import run_op
from lynnc.ir import Graph, Op
from lynnc.modelshape import from_dict
from lynnc.plan import Launch, Plan, Program
from lynnc.programs import prefill_programs, program_rows
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.weights.arrays import PackedWeight, unpack_weight
from lynnc.stepvalues import TORCH_DTYPE, Run
from lynnc.tensors import DType, T

STORED = {
    "i64": torch.int64,
    "u8": torch.uint8,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}


def few_splits() -> AbstractContextManager[Any]:
    """Graphs that are built meanwhile split attention as the tests' plans do."""
    return patch.object(import_module("lynnc.passes.split_attention"), "SPLITS", FEW_SPLITS)


def memory_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The host's memory at an address as a tensor."""
    size = prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).reshape(shape)


@dataclass
class Meaning:
    """The graphs of a plan's programs; dequantised weights are kept by the address of their first array."""

    plan: Plan
    room: Room
    graphs: dict[str, Graph] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    waiting: list[tuple[Graph, Op, Launch, int]] = field(default_factory=list)
    begun_rows: int = 0
    """Rows of the step that the last launch of an embedding began."""
    executor: Executor | None = None
    """Whose launches these are: needed where some are launched that no step begins with."""

    def run(self, calls: Sequence[Call]) -> None:
        """A whole step, or the next launches of a decode step that was begun, or some of one by themselves."""
        if calls[0].op == "embed":
            waiting = self._begin(calls)
        else:
            waiting = self._find(calls[0]) if self.executor else self.waiting
        self.waiting = []
        for call, (graph, op, launch, rows) in zip(calls, waiting, strict=False):
            assert op.name == launch.op == call.op
            assert call.grid == tuple(evaluate(size, rows, self.room.context) for size in launch.grid)
            self.run_launch(graph, op, Step(launch, call, rows))
        assert len(calls) <= len(waiting)
        self.waiting = waiting[len(calls) :]

    def _begin(self, calls: Sequence[Call]) -> list[tuple[Graph, Op, Launch, int]]:
        """A step's program is found by its kernels, its rows by the first launch, the embedding."""
        rows = self.begun_rows = calls[0].grid[0]
        name = f"decode/{rows}"
        if [call.kernel for call in calls] != [launch.kernel for launch in self.launches(name)[: len(calls)]]:
            name = next(
                name for name in prefill_programs(self.plan.programs) if rows <= self.plan.programs[name].max_rows
            )
        graph = self.graph(name)
        pairs = zip(graph.ops, self.plan.programs[name].launches, strict=True)
        return [(graph, op, launch, rows) for op, launch in pairs]

    def _find(self, call: Call) -> list[tuple[Graph, Op, Launch, int]]:
        """The step that a launch is of, from there on: the one whose launch has the same arguments."""
        assert self.executor is not None, f"{call.op} begins no step"
        for name, program in self.plan.programs.items():
            rows = program_rows(name) or self.begun_rows
            calls = self.executor.calls(program, rows) if rows <= program.max_rows else ()
            if call in calls:
                pairs = zip(self.graph(name).ops, program.launches, strict=True)
                return [(self.graph(name), op, launch, rows) for op, launch in pairs][calls.index(call) :]
        raise AssertionError(f"no program launches {call}")

    def launches(self, name: str) -> tuple[Launch, ...]:
        program: Program | None = self.plan.programs.get(name)
        return program.launches if program else ()

    def graph(self, name: str) -> Graph:
        if name not in self.graphs:
            spec = from_dict(self.plan.model, Place("plan.json", "model"))
            with few_splits():
                self.graphs[name] = fused_graph(spec, name, self.plan.options.without)
        return self.graphs[name]

    def run_launch(self, graph: Graph, op: Op, step: Step) -> None:
        """Everything is read before anything is written: inputs and outputs of a decode step share memory."""
        states = {name: self.state(name, step) for name in op.names("state")}
        weights = {name: self.weight(graph, name, step) for name in op.names("weight")}
        run = Run(graph, weights, states, step.rows)
        memory = {name: step.tensor(graph, name) for name in roots(graph, (*op.reads, *op.writes))}
        run.values.update({name: tensor.clone() for name, tensor in memory.items()})
        run_op(run, op)
        for name in roots(graph, op.writes):
            memory[name].copy_(run.values[name])

    def state(self, name: str, step: Step) -> torch.Tensor:
        entry = self.plan.states[name]
        shape = (self.room.slots, *(evaluate(size, context=self.room.context) for size in entry.shape))
        return memory_at(step.address("state", name), shape, TORCH_DTYPE[DType(entry.dtype)])

    def weight(self, graph: Graph, name: str, step: Step) -> torch.Tensor:
        arrays = self.plan.weights[name].arrays
        places = {array.array: step.address("weight", name, array.array) for array in arrays}
        first = places[arrays[0].array]
        if first not in self.values:
            stored = {array.array: memory_at(places[array.array], array.shape, STORED[array.dtype]) for array in arrays}
            self.values[first] = unpack_weight(PackedWeight(graph.weights[name], stored))
        return self.values[first]


@dataclass(frozen=True)
class Step:
    """A launch of the plan and the call that was made of it."""

    launch: Launch
    call: Call
    rows: int

    def address(self, kind: str, name: str, array: str = "") -> int:
        """The one address that the call has for an argument."""
        return addresses(self.launch, self.call.values)[kind, name, array]

    def tensor(self, graph: Graph, name: str) -> torch.Tensor:
        tensor = graph.tensors[name]
        size = tensor.shape[0]
        rows = size if isinstance(size, int) else int(size.subs(T, self.rows))
        return memory_at(self.address("tensor", name), (rows, tensor.width), TORCH_DTYPE[tensor.dtype])


def addresses(launch: Launch, values: tuple[int, ...]) -> Mapping[tuple[str, str, str], int]:
    """Addresses of a launch by kind, name and array."""
    found: dict[tuple[str, str, str], int] = {}
    for argument, value in zip(launch.args, values, strict=False):
        if argument.kind in ("tensor", "state", "weight"):
            key = argument.kind, argument.name, argument.array
            assert found.setdefault(key, value) == value, f"{launch.op} has two addresses for {key}"
    return found


def roots(graph: Graph, names: Sequence[str]) -> list[str]:
    """The tensors with memory of their own behind some names."""
    return list(dict.fromkeys(graph.tensors[name].base or name for name in names))
