"""A program with memory of its own for what some of its launches read and write, behind a context.

In: a program's step, the names of ops, and memory. Out: a ``Stage``, on which these launches can be run again and again
from what a whole step gave them. All other tensors share the workspace as in the real program: with memory of its own
for every tensor a step of a long prompt would take ten times as much.

Example::

    stage = stage_of(readback, ops, start=scratch, behind=37)
    for op in stage.walk(("layers.0.gdn_in",)):
        before = read_regions(device, stage.regions(op))
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lynnc.ir import Op
from lynnc.plan import Launch, Program, TensorPlace, aligned
from lynnc.programs import expected_rows, is_prefill, prefill_programs, program_rows
from lynnc.readback import Readback
from lynnc.runtime.calls import calls_of
from lynnc.runtime.device import Call, KernelFacts
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import PADDING_ROW, Columns, columns_of, prompt_columns, rows_of

Contents = Mapping["Region", bytearray]
"""What regions held when they were read."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a tensor or state: ``rows`` rows of ``row_bytes``."""

    name: str
    address: int
    row_bytes: int
    rows: int
    is_state: bool = False

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.row_bytes * self.rows


def read_regions(executor: Executor, regions: Sequence[Region]) -> dict[Region, bytearray]:
    """Contents of some regions."""
    found = {region: bytearray(region.bytes) for region in regions}
    for region, data in found.items():
        executor.memory.read_into(data, region.address)
    return found


def write_bytes(executor: Executor, address: int, data: bytearray) -> None:
    """Copies bytes of the host; they are in place when this returns."""
    executor.device.upload(address, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
    executor.device.synchronize()


def write_regions(executor: Executor, contents: Contents) -> None:
    """Puts contents back."""
    for region, data in contents.items():
        write_bytes(executor, region.address, data)


@dataclass(frozen=True, slots=True)
class Stage:
    """See the module's docstring. ``ops`` are those whose tensors have memory of their own, in order."""

    step: Readback
    ops: tuple[str, ...]
    columns: Columns

    @property
    def name(self) -> str:
        """The program's."""
        return self.step.program.name

    @property
    def executor(self) -> Executor:
        """Where it runs."""
        return self.step.executor

    def op(self, name: str) -> Op:
        """An op of the program's graph."""
        return next(op for op in self.step.graph.ops if op.name == name)

    def calls(self, launches: Sequence[Launch] = (), kernels: Mapping[str, KernelFacts] | None = None) -> list[Call]:
        """A whole step, ``launches`` in the place of the plan's for the same ops."""
        program, executor = with_launches(self.step.program, launches), self.executor
        known = executor.kernels if kernels is None else kernels
        addresses = executor.memory.addresses
        return list(calls_of(program, known, addresses, self.step.rows, executor.context, self.step.places))

    def walk(self, stops: Sequence[str] = ()) -> Iterator[str]:
        """A whole step of the plan's own launches, with a stop before each op of ``stops``."""
        self.executor.write_columns(self.columns)
        waiting: list[Call] = []
        for call in self.calls():
            if call.op in stops:
                self._launch(waiting)
                waiting = []
                yield call.op
            waiting.append(call)
        self._launch(waiting)

    def _launch(self, calls: Sequence[Call]) -> None:
        if calls:
            self.executor.device.launch(calls)
        self.executor.device.synchronize()

    def regions(self, op: Op) -> tuple[Region, ...]:
        """All that an op reads and writes but weights."""
        return (*self._tensors((*op.reads, *op.writes)), *self._states(op))

    def read(self, op: Op) -> tuple[Region, ...]:
        """The tensors that it reads."""
        return tuple(self._tensors(op.reads))

    def written(self, op: Op) -> tuple[Region, ...]:
        """All that it writes."""
        return (*self._tensors(op.writes), *self._states(op))

    def _tensors(self, names: Sequence[str]) -> Iterator[Region]:
        tensors = self.step.graph.tensors
        for name in dict.fromkeys(tensors[name].base or name for name in names):
            rows = int(self.step.tensor_rows(name))
            yield Region(name, self.step.address(name), tensors[name].width * tensors[name].dtype.bytes, rows)

    def _states(self, op: Op) -> Iterator[Region]:
        for name in dict.fromkeys(op.names("state")):
            state = self.executor.tensor(name)
            yield Region(name, state.address, state.bytes, 1, is_state=True)


def with_launches(program: Program, launches: Sequence[Launch]) -> Program:
    """A program with other launches for some of its ops."""
    others = {launch.op: launch for launch in launches}
    return replace(program, launches=tuple(others.get(launch.op, launch) for launch in program.launches))


def stage_of(step: Readback, ops: Sequence[str], start: int, columns: Columns) -> Stage:
    """A stage whose own tensors lie from ``start`` on, where ``own_bytes`` says how much memory it needs."""
    executor = step.executor
    places = dict(executor.memory.addresses.of(step.program))
    for place in own_places(step.program, ops):
        executor.device.fill(start, 0, place.bytes)
        places[place.name] = start
        start += aligned(place.bytes)
    return Stage(replace(step, places=places), tuple(ops), columns)


def own_places(program: Program, ops: Sequence[str]) -> list[TensorPlace]:
    """Tensors of the workspace that some launches read or write."""
    named = {arg.name for launch in program.launches if launch.op in ops for arg in launch.args if arg.kind == "tensor"}
    return [place for place in program.tensors if place.name in named and place.offset is not None]


def own_bytes(program: Program, ops: Sequence[str]) -> int:
    """Memory that a stage of these ops needs."""
    return sum(aligned(place.bytes) for place in own_places(program, ops))


def scratch_bytes(executor: Executor) -> int:
    """Memory for any two programs' launches of one kernel and problem, each with tensors of their own."""
    plan, sizes = executor.plan, defaultdict[object, list[int]](list)
    for program in plan.programs.values():
        if executor.room.programs and program.name not in executor.room.programs:
            continue
        groups = defaultdict[object, list[str]](list)
        for launch in program.launches:
            entry = plan.kernels[launch.kernel]
            groups[entry.name, tuple(sorted(entry.problem.items()))].append(launch.op)
        for key, ops in groups.items():
            sizes[key].append(own_bytes(program, ops))
    return max(sum(sorted(found)[-2:]) for found in sizes.values())


def some_tokens(executor: Executor, count: int) -> list[int]:
    """Tokens drawn at random, the same in every run: rows of one token would all choose the same experts."""
    return random.Random(0).choices(range(executor.plan.vocabulary), k=count)


def step_rows(executor: Executor, name: str, behind: int) -> int:
    """Rows of a measured step: as many as the program is made for, as far as the context reaches."""
    program = executor.program(name)
    most = min(program.max_rows, expected_rows(name)) if is_prefill(name) else program.max_rows
    return min(most, executor.context - behind - 1)


def step_columns(executor: Executor, name: str, behind: int) -> Columns:
    """Inputs of a step behind ``behind`` tokens of slot 0."""
    rows = step_rows(executor, name, behind)
    tokens = some_tokens(executor, behind + rows)[behind:]
    return prompt_columns(tokens, behind, 0, 0) if is_prefill(name) else columns_of(rows_of(tokens, behind))


def begin(executor: Executor, behind: int) -> None:
    """States of slot 0 behind ``behind`` tokens, by whatever programs there are."""
    executor.reset()
    tokens, names = some_tokens(executor, behind), executor.room.programs or tuple(executor.plan.programs)
    if tokens and prefill_programs(names):
        executor.prefill(tokens)
        return
    size = max((rows for rows in map(program_rows, names) if rows), default=1)
    for first in range(0, behind, size):
        rows = rows_of(tokens[first : first + size], first)
        executor.step([*rows, *[PADDING_ROW] * (size - len(rows))])
