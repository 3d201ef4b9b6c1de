"""Runs a loaded plan: prompts, and one captured graph for each decoded token.

In: a plan whose weights lie in GPU memory. Out: tokens. Token, position and start of a sequence live on the GPU and the
last launch of a step makes those of the next one, so decoding needs nothing of the host but the launches of one graph;
the tokens chosen are written to host memory by the GPU.

Example::

    with load("lynn.plan", "packed") as executor:
        first = executor.prefill([9707, 1879])
        tokens = [first, *executor.decode(100)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from lynnc.errors import DeviceError, OptionError, PlanError
from lynnc.plan import Plan, Program
from lynnc.programs import MOST_DECODE_ROWS, PREFILL
from lynnc.runtime.budget import Budget, Room
from lynnc.runtime.calls import KeptCalls
from lynnc.runtime.device import Call, Device, KernelFacts, StepGraph
from lynnc.runtime.memory import Memory
from lynnc.runtime.prompts import Prompts, prompt_programs
from lynnc.runtime.rows import Columns, Row, columns_of, first_rows
from lynnc.runtime.tensors import DeviceTensor, ints_of

DECODE = "decode/1"


@dataclass(slots=True)
class Executor:
    """A plan in GPU memory. ``lengths`` are the tokens of each slot's sequence whose states are kept."""

    plan: Plan
    device: Device
    memory: Memory
    kernels: Mapping[str, KernelFacts]
    room: Room
    free_before: int
    """Free memory of the GPU before anything was allocated, in bytes."""
    lengths: list[int] = field(default_factory=list)
    _graphs: dict[str, StepGraph] = field(default_factory=dict)
    _calls: KeptCalls = field(init=False)
    _prompts: Prompts = field(init=False)
    _ready: tuple[int, int] | None = None
    """Slot and position of the row that the inputs in GPU memory ask for, if it is one."""
    _lost: set[int] = field(default_factory=set)
    """Slots whose sequence was lost and not begun anew."""

    def __post_init__(self) -> None:
        self.lengths = self.lengths or [0] * self.room.slots
        self._calls = KeptCalls(self.kernels, self.memory.addresses, self.context)
        self._prompts = Prompts(self.device, self.memory, prompt_programs(self.plan, self.room), self.calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives all memory and the device back; the executor is of no use any more. No harm if that was done before."""
        self._graphs.clear()
        self._prompts.clear()
        self.device.close()

    @property
    def context(self) -> int:
        """Positions of each sequence."""
        return self.room.context

    @property
    def budget(self) -> Budget:
        """The memory that was taken, by class."""
        return self.memory.budget

    def reset(self, slot: int = 0) -> None:
        """Begins a new sequence in a slot: what the old one left is never read."""
        self.lengths[self._checked_slot(slot)] = 0
        self._lost.discard(slot)
        self._ready = None

    def prefill(self, tokens: Sequence[int], slot: int = 0) -> int:
        """Appends tokens to a slot's sequence and returns the token chosen to follow; several steps if they are many.

        ``tokens`` may also be I32 on the GPU (anything with ``__cuda_array_interface__``). OptionError if they are no
        tokens of the model or too many for the context.
        """
        if not self._prompts.programs:
            self.program(PREFILL)
        given = ints_of(tokens, self.device)
        start = self.lengths[self._checked_slot(slot)]
        self._check_room(start, len(given), slot)
        self._check_tokens(given)
        end = start + len(given)
        with self.advancing({slot: end}):
            self._prompts.run(given, start, slot)
            self.memory.keep_token(slot, end)
            self.device.synchronize()
        return self.memory.history[slot * self.context + end]

    def decode(self, count: int, slot: int = 0) -> list[int]:
        """The next ``count`` tokens of a slot's sequence, each the greedy choice."""
        first = self.enqueue(count, slot)
        self.device.synchronize()
        return self.memory.history[first : first + count].tolist()

    def stream(self, count: int, slot: int = 0) -> Iterator[int]:
        """The tokens of ``decode``, each as soon as it is chosen.

        All steps are launched at once: whoever stops early has a sequence of ``count`` more tokens all the same.
        """
        start = slot * self.context + self._checked_sequence(count, slot) + 1
        history = self.memory.history
        for index in range(start, start + count):
            history[index] = -1
        first = self.enqueue(count, slot)
        for index in range(first, first + count):
            while history[index] < 0:
                if self.device.is_idle() and history[index] < 0:
                    raise PlanError(f"{self.plan.name} chose no token: compile the plan again.")
            yield history[index]

    def enqueue(self, count: int, slot: int = 0) -> int:
        """Launches ``count`` decode steps and does not wait; where in the history their tokens will stand."""
        length = self._checked_sequence(count, slot)
        graph = self.graph(DECODE)
        if self._ready != (slot, length):
            self.device.synchronize()
            self.write_rows([Row(self.memory.history[slot * self.context + length], length, slot)])
        with self.advancing({slot: length + count}):
            for _ in range(count):
                graph.launch()
        self._ready = slot, length + count
        return slot * self.context + length + 1

    def assume(self, length: int, token: int, slot: int = 0) -> None:
        """Takes what a slot's states hold for a sequence of ``length`` tokens that ``token`` follows: for measuring, or
        after states were written from outside."""
        if length < 0:
            raise OptionError(f"A sequence has no {length} tokens: give 0 or more.")
        self._check_room(length, 0, self._checked_slot(slot))
        self._check_tokens([token])
        self.device.synchronize()
        self.lengths[slot] = length
        self._lost.discard(slot)
        self.memory.history[slot * self.context + length] = token
        self._ready = None

    def step(self, rows: Sequence[Row]) -> list[int]:
        """One decode step of given rows, and the greedy choice of each; ``tensor("logits")`` has their logits.

        Rows of one slot stand next to each other at consecutive positions and share ``start``. The slots' sequences
        then end behind their last row.
        """
        if not 1 <= len(rows) <= MOST_DECODE_ROWS:
            raise OptionError(f"A decode step has 1 to {MOST_DECODE_ROWS} rows, not {len(rows)}: give fewer.")
        program = self.program(f"decode/{len(rows)}")
        self.check_rows(rows)
        graph = self.graph(program.name)
        self.write_rows(rows)
        with self.advancing({row.slot: row.position + 1 for row in rows if row.position >= 0}):
            graph.launch()
            return self.memory.read("token", len(rows))

    @contextmanager
    def advancing(self, lengths: Mapping[int, int]) -> Iterator[None]:
        """Around the launches that take slots' sequences to new lengths.

        Until all have been started the sequences count as lost: where one fails, or Ctrl-C comes between two, the
        states are between two tokens, and nothing may go on from there.
        """
        self._ready = None
        self._lost |= lengths.keys()
        for slot in lengths:
            self.lengths[slot] = 0
        try:
            yield
        except DeviceError as error:
            slots = ", ".join(map(str, sorted(lengths)))
            raise DeviceError(
                f"{str(error).removesuffix('.')}; the sequence of slot {slots} was lost: begin anew with a prompt."
            ) from error
        for slot, length in lengths.items():
            self.lengths[slot] = length
        self._lost -= lengths.keys()

    def check_rows(self, rows: Sequence[Row]) -> None:
        """OptionError unless the rows are tokens of the model where their sequences may go on: a slot's rows side by
        side, one position after the other, from a ``start`` that its states reach."""
        self._check_tokens([row.token for row in rows])
        alive = [row for row in rows if row.position >= 0]
        for row in alive:
            self._check_room(row.position, 0, self._checked_slot(row.slot))
        for slot, first in first_rows(alive).items():
            if first.begin > self.lengths[slot]:
                self._check_kept(slot)
                raise OptionError(
                    f"Slot {slot} holds {self.lengths[slot]} tokens, so no row can start at {first.begin}: go on "
                    "where the sequence ends."
                )

    def launch(self, program: Program, rows: Sequence[Row]) -> None:
        """One step of a program launch by launch, without a graph; ``lengths`` stay as they are."""
        self.check_rows(rows)
        with self.advancing({row.slot: self.lengths[row.slot] for row in rows if row.position >= 0}):
            self._launch(program, rows)

    def _launch(self, program: Program, rows: Sequence[Row]) -> None:
        self.write_rows(rows)
        self.device.launch(self.calls(program, len(rows)))

    def graph(self, name: str) -> StepGraph:
        """The captured step of a decode program."""
        program = self.program(name)
        if name not in self._graphs:
            self._graphs[name] = self.device.capture(self.calls(program, program.max_rows))
        return self._graphs[name]

    def calls(self, program: Program, rows: int) -> tuple[Call, ...]:
        """The launches of a step with every address in place."""
        return self._calls.of(program, rows)

    def write_rows(self, rows: Sequence[Row]) -> None:
        """The inputs of a step whose launches follow; the rows are not checked."""
        self.write_columns(columns_of(rows))

    def write_columns(self, columns: Columns) -> None:
        """The same for inputs that are columns already."""
        self._ready = None
        self.memory.write_columns(columns)

    def program(self, name: str) -> Program:
        """A program of the plan; PlanError if it was not compiled, OptionError if it was not loaded."""
        found = self.plan.programs.get(name)
        if found is None:
            raise PlanError(
                f"{self.plan.name} has the programs {', '.join(self.plan.programs)}, not {name}: compile it with "
                f"--programs {','.join((*self.plan.programs, name))}."
            )
        if self.room.programs and name not in self.room.programs:
            raise OptionError(
                f"{self.plan.name} was loaded with {', '.join(self.room.programs)} alone, not {name}: add it to the "
                "programs of its room."
            )
        return found

    def tensor(self, name: str) -> DeviceTensor:
        """An input, output or state in GPU memory, without a copy: ``torch.as_tensor`` takes it."""
        return self.memory.tensor(name)

    def compare(self, tokens: Sequence[int], until: str | None = None, limit: float | None = None) -> Any:
        """Each launch of a decode step of ``tokens`` against the interpreter, up to the op ``until``.

        Gives the records of ``lynnc.compare``, which needs torch and the compiler; ``first_difference`` there finds the
        first op that differs.
        """
        return import_module("lynnc.compare").compare_step(self, tokens, until, limit)

    def _checked_slot(self, slot: int) -> int:
        if not 0 <= slot < self.room.slots:
            raise OptionError(f"There is no slot {slot}: the plan was loaded with {self.room.slots}.")
        return slot

    def _checked_sequence(self, count: int, slot: int) -> int:
        """Length of a slot's sequence, which has begun and has room for ``count`` tokens."""
        length = self.lengths[self._checked_slot(slot)]
        if count < 1:
            raise OptionError(f"{count} tokens cannot be decoded: ask for at least one.")
        self._check_kept(slot)
        if length == 0:
            raise OptionError(f"Slot {slot} holds no sequence: give it a prompt first.")
        self._check_room(length, count, slot)
        return length

    def _check_kept(self, slot: int) -> None:
        if slot in self._lost:
            raise OptionError(
                f"The sequence of slot {slot} was lost when a step failed or was stopped: begin anew with a prompt."
            )

    def _check_room(self, length: int, count: int, slot: int) -> None:
        """The sequence and the token that follows it fit the context."""
        if length + count >= self.context:
            raise OptionError(
                f"Slot {slot} holds {length} tokens and {count} more do not fit a context of {self.context}: begin a "
                "new sequence, or load the plan with a larger context."
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocabulary = self.plan.vocabulary
        if not tokens:
            raise OptionError("There are no tokens: give at least one.")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise OptionError(f"{wrong} is no token of {self.plan.model_name}: they go from 0 to {vocabulary - 1}.")
