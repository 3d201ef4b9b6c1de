"""A compiled plan with its weights in GPU memory, as an engine.

In: a plan folder and a packed folder, or an executor. Out: an ``Engine``. Every row of a decode step gives logits, so
tokens go through decode programs, up to eight in a step; ``begin`` and ``decode`` are the fast way where no more is
needed than what follows a prompt.

Example::

    engine = open_compiled(Path("lynn-mini.sm_90.plan"), Path("models/lynn-mini"))
    engine.append([1, 2, 3])[-1].argmax()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lynnc.compiler import model_of
from lynnc.engines.engine import Trace
from lynnc.engines.interpreted import check_tokens
from lynnc.engines.optrace import OpOutput, Reading, entry_of_section, ops_of_section, outputs_of
from lynnc.errors import PlanError
from lynnc.ir import primitive_ops
from lynnc.model import ModelSpec
from lynnc.planfile import load_plan
from lynnc.programs import prefill_programs, program_rows
from lynnc.readback import Readback, readback_of
from lynnc.runtime.budget import DEFAULT_CONTEXT, Room
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import load
from lynnc.runtime.loading.weightsource import Progress
from lynnc.runtime.rows import PADDING_ROW, Row, rows_of

STREAMED = 32
"""Tokens whose steps are launched at once: what is decoded in vain, at most, behind a token that ends the text."""


@dataclass(slots=True)
class Compiled:
    """An engine over slot 0 of an executor, which it owns."""

    executor: Executor
    spec: ModelSpec
    label: str
    context: int
    _steps: dict[int, Readback] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.executor.lengths[0]

    @property
    def memory_bytes(self) -> int:
        """GPU memory that is held: weights, states, workspace, inputs and outputs."""
        return sum(need.bytes for need in self.executor.budget.needs if not need.is_host)

    def reset(self) -> None:
        """Begins a new sequence: what an old one left is never read."""
        self.executor.reset()

    def close(self) -> None:
        """Gives the GPU's memory back."""
        self.executor.close()

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends tokens; FP32 logits [n, vocabulary]. OptionError if they do not fit the context or the model."""
        found = []
        for rows, count in self._pieces(tokens):
            self.executor.step(rows)
            found.append(self._logits(count))
        return torch.cat(found)

    def trace(self, tokens: Sequence[int]) -> Trace:
        """The same with the residual stream after each layer, launch by launch."""
        steps = [self._traced(rows, count) for rows, count in self._pieces(tokens)]
        return Trace(torch.cat([step.logits for step in steps]), torch.cat([step.hidden for step in steps], dim=1))

    def trace_ops(self, section: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> tuple[OpOutput, ...]:
        """Appends tokens to the launches of one section alone, which start from ``hidden`` [n, hidden] instead of what
        the section before would leave; see ``lynnc.engines.optrace``. What a launch keeps to itself is not seen."""
        found: list[OpOutput] = []
        first = 0
        for rows, count in self._pieces(tokens):
            entry = None if hidden is None else hidden[first : first + count]
            found += self._traced_section(section, rows, entry, count)
            first += count
        return tuple(found)

    def begin(self, prompt: Sequence[int]) -> torch.Tensor:
        """Appends tokens by the prefill program, if there is one; FP32 logits [vocabulary] of what follows the last."""
        if not prefill_programs(self._programs):
            return self.append(prompt)[-1]
        check_tokens(self.spec, prompt, self.length, self.context)
        self.executor.prefill(prompt)
        return self._logits(1)[0]

    def decode(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Appends a prompt and gives ``count`` greedy tokens, each as soon as it is chosen on the GPU. The sequence may
        go on for up to ``STREAMED`` tokens behind the last one that was taken."""
        self.begin(prompt)
        yield self.executor.memory.history[self.length]
        while count > 1:
            piece = min(count - 1, STREAMED)
            yield from self.executor.stream(piece)
            count -= piece

    @property
    def _programs(self) -> tuple[str, ...]:
        return self.executor.room.programs or tuple(self.executor.plan.programs)

    def _pieces(self, tokens: Sequence[int]) -> Iterator[tuple[list[Row], int]]:
        """Rows of each step, and how many of them are no padding: steps of the largest program, at the end of the
        smallest that holds what is left."""
        check_tokens(self.spec, tokens, self.length, self.context)
        sizes = sorted(rows for rows in map(program_rows, self._programs) if rows is not None)
        if not sizes:
            raise PlanError(f"{self.executor.plan.name} has no decode program: compile it with --programs decode/8.")
        first = 0
        while first < len(tokens):
            size = next((size for size in sizes if size >= len(tokens) - first), sizes[-1])
            piece = tokens[first : first + size]
            yield [*rows_of(piece, self.length), *[PADDING_ROW] * (size - len(piece))], len(piece)
            first += size

    def _logits(self, count: int) -> torch.Tensor:
        """Logits [count, vocabulary] of the first rows of the last step."""
        shape = count, self.spec.vocabulary
        values = replace(self.executor.tensor("logits"), shape=shape).read()
        return torch.frombuffer(values, dtype=torch.float32).reshape(shape)

    def _traced(self, rows: Sequence[Row], count: int) -> Trace:
        """One step with a stop behind each launch that writes the stream: later ones may use its memory again."""
        executor, step = self.executor, self._step(len(rows))
        wanted = [f"h.{layer}" for layer in range(len(self.spec.layers) + 1)]
        hidden: dict[str, torch.Tensor] = {}
        waiting = []
        executor.check_rows(rows)
        executor.write_rows(rows)
        with executor.advancing({0: self.length + count}):
            for op, call in zip(step.graph.ops, executor.calls(step.program, step.rows), strict=True):
                waiting.append(call)
                written = [name for name in wanted if name in op.writes]
                if written or op is step.graph.ops[-1]:
                    executor.device.launch(waiting)
                    hidden |= {name: step.tensor(name)[:count].float() for name in written}
                    waiting = []
        return Trace(self._logits(count), torch.stack([hidden[name] for name in wanted]))

    def _traced_section(
        self, section: str, rows: Sequence[Row], entry: torch.Tensor | None, count: int
    ) -> list[OpOutput]:
        """What the launches of a section leave in one step, each read before the next one."""
        executor, step = self.executor, self._step(len(rows))
        length = self.length + count
        calls = {call.op: call for call in executor.calls(step.program, step.rows)}
        reading = Reading(
            step.graph, lambda name: step.tensor(name)[:count], lambda name: step.state(name)[0, :, :length]
        )
        found: list[OpOutput] = []
        executor.check_rows(rows)
        executor.write_rows(rows)
        with executor.advancing({0: length}):
            if entry is not None:
                step.write(entry_of_section(section, len(self.spec.layers)), entry)
            for op in ops_of_section(step.graph, section):
                executor.device.launch([calls[op.name]])
                found += (out for inner in primitive_ops(op) for out in outputs_of(reading, op, inner, op.writes))
        return found

    def _step(self, rows: int) -> Readback:
        if rows not in self._steps:
            self._steps[rows] = readback_of(self.executor, f"decode/{rows}", rows)
        return self._steps[rows]


def compiled_engine(executor: Executor) -> Compiled:
    """An engine over an executor of one slot."""
    plan = executor.plan
    spec = model_of(plan)
    label = f"{spec.name}, compiled for {plan.target}, on {executor.device.facts.name}"
    return Compiled(executor, spec, label, executor.context)


def open_compiled(
    plan_folder: Path,
    weights_folder: Path,
    context: int | None = None,
    *,
    gpu: int = 0,
    progress: Progress | None = None,
) -> Compiled:
    """A plan of `lynnc compile` with the weights of a packed folder on a GPU; errors as of ``lynnc.runtime.load``."""
    most = load_plan(plan_folder).longest_context
    room = Room(1, context or min(most, DEFAULT_CONTEXT))
    return compiled_engine(load(plan_folder, weights_folder, room, gpu=gpu, progress=progress))
