"""One run of the benchmark: a plan and weights onto the GPU, then every measurement that was asked for.

In: a plan folder, a source of weights and a ``Wish``. Out: the times of each step and kernel as they are measured, so
that a run which is stopped has lost nothing that it said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lynnc.bench.kernels import KernelTime, time_kernels
from lynnc.bench.prompts import PromptKernels, PromptTime, time_prompt_kernels, time_prompts
from lynnc.bench.timing import Effort, Timing, time_decode, time_generation, time_rows, timing_of
from lynnc.plan import Plan
from lynnc.programs import MOST_DECODE_ROWS, program_rows
from lynnc.runtime.budget import Room
from lynnc.runtime.executor import DECODE, Executor
from lynnc.runtime.loader import load
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import Progress, WeightSource, packed_bytes

Say = Callable[[str], None]
"""Called with what is measured next."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to measure: contexts and lengths of prompts, and with them kernels one by one and what each adds to a step;
    loading again."""

    contexts: tuple[int, ...] = (128, 4096)
    prompts: tuple[int, ...] = ()
    effort: Effort = field(default_factory=Effort)
    with_kernels: bool = True
    with_marginal: bool = False
    loads: int = 1
    programs: tuple[str, ...] = (DECODE,)

    @property
    def room(self) -> int:
        """Positions that the longest measurement needs: every launch of a step goes on by one."""
        launches = max(self.effort.steps, self.effort.repeats, self.effort.warmup)
        return max(max(self.contexts) + launches + MOST_DECODE_ROWS, *self.prompts, 0) + 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """A decode step of some rows behind a context: on the GPU alone, and for one row also with the host."""

    rows: int
    context: int
    step: Timing
    wall: Timing | None = None
    host: Timing | None = None


@dataclass(frozen=True, slots=True)
class LoadTime:
    """From nothing to an executor that is ready.

    ``is_cold`` is true where the files had been dropped from the page cache, false where they had just been read, and
    None where nobody knows: the only load of a packed folder. ``is_made`` is true for weights that no file holds.
    """

    timing: Timing
    bytes: int
    is_cold: bool | None
    is_made: bool = False

    @property
    def label(self) -> str:
        """The load in a word."""
        if self.is_made:
            return "generated"
        return {True: "cold", False: "warm", None: "first"}[self.is_cold]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by class as counted, packed bytes of the weights, and what the GPU's free memory shrank by."""

    needs: tuple[tuple[str, int, bool], ...]
    packed: int
    resident_weights: int
    taken: int


def drop_from_page_cache(folder: Path) -> None:
    """Asks the kernel to forget a folder's files, so that the next load reads the disk."""
    for path in folder.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


@dataclass(slots=True)
class Session:
    """A plan on the GPU, and what was measured while it came there."""

    executor: Executor
    memory: MemoryUse
    loads: tuple[LoadTime, ...]

    @property
    def plan(self) -> Plan:
        """The plan that is measured."""
        return self.executor.plan

    def step_times(self, wish: Wish, say: Say) -> Iterator[StepTime]:
        """Decode programs of every row count, at every context."""
        for name in wish.programs:
            rows = program_rows(name)
            if rows is None:
                continue
            for context in wish.contexts:
                say(f"{name} at context {context}")
                if name == DECODE:
                    step = time_decode(self.executor, context, wish.effort)
                    wall, host = time_generation(self.executor, context, wish.effort)
                    yield StepTime(rows, context, step, wall, host)
                else:
                    yield StepTime(rows, context, time_rows(self.executor, rows, context, wish.effort))

    def kernel_times(self, wish: Wish, say: Say) -> Iterator[KernelTime]:
        """Kernels of the one-row step at the first context."""
        for found in time_kernels(self.executor, DECODE, wish.contexts[0], wish.effort, wish.with_marginal):
            say(f"{found.label} done")
            yield found

    def prompt_times(self, wish: Wish, say: Say) -> Iterator[PromptTime]:
        """Prompts of every length."""
        return time_prompts(self.executor, wish.prompts, wish.effort, say)

    def prompt_kernels(self, wish: Wish, say: Say) -> Iterator[PromptKernels]:
        """Kernels of the last step of each prompt."""
        return time_prompt_kernels(self.executor, wish.prompts, wish.effort, say)


def open_session(plan: Path, source: WeightSource, wish: Wish, gpu: int, progress: Progress | None) -> Session:
    """Loads the plan, several times where asked for: a packed folder cold first, then from the page cache."""
    if wish.loads > 1 and isinstance(source, PackedFolder):
        drop_from_page_cache(source.folder)
    seconds = []
    for index in range(max(1, wish.loads)):
        started = time.perf_counter()
        executor = load(plan, source, Room(1, wish.room, wish.programs), gpu=gpu, progress=progress)
        seconds.append(time.perf_counter() - started)
        if index + 1 < wish.loads:
            executor.close()
    return Session(executor, _memory_use(executor), tuple(_load_times(seconds, source, packed_bytes(executor.plan))))


def _load_times(seconds: Sequence[float], source: WeightSource, size: int) -> Iterator[LoadTime]:
    """The first load of a packed folder by itself; loads of what no disk holds are all alike."""
    if not isinstance(source, PackedFolder):
        yield LoadTime(timing_of(seconds), size, is_cold=False, is_made=isinstance(source, GeneratedWeights))
        return
    yield LoadTime(timing_of(seconds[:1]), size, is_cold=True if len(seconds) > 1 else None)
    if len(seconds) > 1:
        yield LoadTime(timing_of(seconds[1:]), size, is_cold=False)


def _memory_use(executor: Executor) -> MemoryUse:
    needs = tuple((need.what, need.bytes, need.is_host) for need in executor.budget.needs)
    taken = executor.free_before - executor.device.free_bytes()
    return MemoryUse(needs, packed_bytes(executor.plan), executor.memory.weights.resident_bytes, taken)
