"""Times of prompts on a GPU: until the first token is known, and of the GPU alone.

In: an executor, lengths of prompts and how often to measure. Out: a ``PromptTime`` for each length. Tokens are drawn at
random, another prompt in every run: rows of one token would all choose the same experts, and read a fraction of the
weights that a text does.

Example::

    for prompt in time_prompts(executor, (16, 2048), Effort(), print):
        prompt.length / prompt.first_token.median                # tokens a second
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lynnc.bench.kernels import KernelTime, Parts, kernel_times, own_bytes
from lynnc.bench.timing import Effort, Timing, timing_of
from lynnc.runtime.device import StepGraph
from lynnc.runtime.executor import Executor
from lynnc.runtime.prompts import Piece, pieces_of, prompt_programs
from lynnc.runtime.rows import Columns, prompt_columns

WARM_RUNS = 2
"""Runs before those that count: the first of a size starts its launches, the second captures them."""


@dataclass(frozen=True, slots=True)
class PromptTime:
    """A prompt of ``length`` tokens in an empty slot.

    ``first_token`` is wall time from the call until the token that follows is known, ``gpu`` the time of its steps on
    the GPU, each as one graph. ``steps`` says programs with rows, and how many of each. ``first_use`` is the wall time
    in seconds of the first prompt of that length. ``memory`` is what the programs' workspace, inputs and outputs take,
    and ``shrank`` by how much the GPU's free memory went down since the first prompt of all, both in bytes.
    """

    length: int
    steps: str
    first_token: Timing
    gpu: Timing
    first_use: float
    memory: int
    shrank: int


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Kernels of the last step of a prompt of ``length`` tokens: ``rows`` of its tokens and perhaps padding."""

    length: int
    program: str
    rows: int
    kernels: tuple[KernelTime, ...]


def time_prompts(
    executor: Executor, lengths: Sequence[int], effort: Effort, say: Callable[[str], None]
) -> Iterator[PromptTime]:
    """Every length in turn; the executor's sequence in slot 0 is gone afterwards."""
    needs = {need.what: need.bytes for need in executor.budget.needs}
    memory = needs.get("workspace", 0) + needs.get("inputs and outputs", 0)
    free = executor.device.free_bytes()
    for length in lengths:
        say(f"a prompt of {length} tokens")
        walls = [_wall(executor, _tokens(executor, length, run)) for run in range(WARM_RUNS + effort.repeats)]
        shrank = free - executor.device.free_bytes()
        gpu = _time_on_gpu(executor, length, effort)
        yield PromptTime(
            length, _steps_text(_pieces(executor, length)), timing_of(walls[WARM_RUNS:]), gpu, walls[0], memory, shrank
        )
    executor.reset()


def _tokens(executor: Executor, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(executor.plan.vocabulary), k=length)


def _wall(executor: Executor, tokens: Sequence[int]) -> float:
    executor.reset()
    started = time.perf_counter()
    executor.prefill(tokens)
    return time.perf_counter() - started


def _pieces(executor: Executor, length: int) -> list[Piece]:
    return list(pieces_of(length, prompt_programs(executor.plan, executor.room)))


def _steps_text(pieces: Sequence[Piece]) -> str:
    counts = Counter(f"{piece.program.name} of {piece.rows} rows" for piece in pieces)
    return ", ".join(f"{count} x {step}" for step, count in counts.items())


def _columns(tokens: Sequence[int], piece: Piece) -> Columns:
    return prompt_columns(tokens[piece.first : piece.first + piece.count], piece.first, 0, piece.padding)


def _time_on_gpu(executor: Executor, length: int, effort: Effort) -> Timing:
    """Prompts back to back, so that the GPU never waits for the host; the first one is not counted."""
    device, pieces = executor.device, _pieces(executor, length)
    graphs: dict[tuple[str, int], StepGraph] = {}
    for piece in pieces:
        key = piece.program.name, piece.rows
        graphs[key] = graphs.get(key) or device.capture(executor.calls(piece.program, piece.rows))
    executor.reset()
    marks = []
    for run in range(effort.repeats + 1):
        tokens, first = _tokens(executor, length, run), device.mark()
        for piece in pieces:
            executor.write_columns(_columns(tokens, piece))
            graphs[piece.program.name, piece.rows].launch()
        marks.append((first, device.mark()))
    seconds = [device.seconds_between(*pair) for pair in marks]
    for graph in graphs.values():
        graph.close()
    return timing_of(seconds[1:])


def time_prompt_kernels(
    executor: Executor, lengths: Sequence[int], effort: Effort, say: Callable[[str], None]
) -> Iterator[PromptKernels]:
    """Each kernel of the last step of prompts, in a chain of its own launches."""
    last = {length: _pieces(executor, length)[-1] for length in lengths}
    scratch = executor.device.allocate(max((own_bytes(piece.program) for piece in last.values()), default=0))
    for length, piece in last.items():
        columns = _columns(_tokens(executor, length, 0), piece)
        parts = Parts(executor, piece.program.name, piece.first, columns, scratch)
        kernels = []
        for kernel in kernel_times(parts, (piece.count, length), effort):
            say(f"{kernel.label} of a prompt of {length} tokens done")
            kernels.append(kernel)
        yield PromptKernels(length, piece.program.name, piece.count, tuple(kernels))
