"""Where the time of a decode step goes, kernel by kernel, by running parts of it.

In: an executor and the costs of a program's launches. Out: a ``KernelTime`` for each kernel. ``alone`` is the time of a
launch in a chain of only this kernel's launches; ``marginal`` is what the step gets shorter by without them. The two
differ where launches overlap. All tensors get memory of their own first, so that a part of a step reads what a whole
one left there.

Example::

    for kernel in time_kernels(executor, "decode/1", context=128, effort=Effort()):
        print(kernel.label, kernel.count, kernel.alone.median, kernel.bytes)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lynnc.bench.timing import TOKEN, Effort, Timing, repeat
from lynnc.compiler import graph_of
from lynnc.cost import costs, evaluate_formula
from lynnc.plan import Program, aligned
from lynnc.runtime.calls import calls_of
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import rows_of


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Launches of one kernel in a step. ``bytes`` are those that one launch must move, the mean over the layers."""

    label: str
    kernel: str
    count: int
    bytes: float
    alone: Timing
    marginal: float | None

    @property
    def total(self) -> float:
        """Seconds of all its launches, each as long as alone."""
        return self.count * self.alone.median


class Parts:
    """A program's launches, each reading and writing memory that no other tensor shares; ``own`` says where."""

    def __init__(self, executor: Executor, name: str, context: int) -> None:
        self.executor, self.program, self.context = executor, executor.program(name), context
        self.rows = self.program.max_rows
        self.own = self._own_memory(self.program)
        self.calls = calls_of(
            self.program,
            executor.kernels,
            executor.memory.addresses,
            self.rows,
            executor.context,
            self.own,
        )
        executor.assume(context, TOKEN)
        self.launch(self.calls)

    def _own_memory(self, program: Program) -> dict[str, int]:
        tensors = dict(self.executor.memory.addresses.of(program))
        inside = [place for place in program.tensors if place.offset is not None]
        size = sum(aligned(place.bytes) for place in inside)
        start = self.executor.device.allocate(size)
        self.executor.device.fill(start, 0, size)
        for place in inside:
            tensors[place.name] = start
            start += aligned(place.bytes)
        return tensors

    def launch(self, calls: Sequence[Call]) -> None:
        """Some of the launches once, at the context."""
        self._set_inputs()
        self.executor.device.launch(calls)
        self.executor.device.synchronize()

    def _set_inputs(self) -> None:
        self.executor.write_rows(rows_of([TOKEN] * self.rows, self.context))

    def time(self, calls: Sequence[Call], effort: Effort) -> Timing:
        """GPU time of some launches as a graph of their own."""
        graph = self.executor.device.capture([replace(calls[0], has_pdl=False), *calls[1:]])
        self._set_inputs()
        try:
            return repeat(self.executor, graph.launch, effort.repeats)
        finally:
            graph.close()


def time_kernels(
    executor: Executor, name: str, context: int, effort: Effort, with_marginal: bool = False
) -> Iterator[KernelTime]:
    """Every kernel of a program in the order of its first launch."""
    parts = Parts(executor, name, context)
    moved = bytes_of_launches(executor, name, context)
    whole = parts.time(parts.calls, effort).median if with_marginal else 0.0
    for key, own in by_kernel(parts.calls).items():
        rest = [call for call in parts.calls if call.kernel != key]
        yield KernelTime(
            label=label_of(own),
            kernel=executor.plan.kernels[key].label,
            count=len(own),
            bytes=sum(moved[call.op] for call in own) / len(own),
            alone=parts.time(own, effort).over(len(own)),
            marginal=(whole - parts.time(rest, effort).median) / len(own) if with_marginal else None,
        )


def bytes_of_launches(executor: Executor, name: str, context: int) -> dict[str, float]:
    """Bytes that each launch must move at least, by its op."""
    rows = executor.program(name).max_rows
    by_op = costs(graph_of(executor.plan, name))
    return {op: evaluate_formula(cost.bytes, rows, context) for op, cost in by_op.items()}


def by_kernel(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Launches by the key of their kernel, in the order of the first."""
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.kernel, []).append(call)
    return found


def label_of(calls: Sequence[Call]) -> str:
    """The name of a kernel's ops, with ``*`` for the layer."""
    names = dict.fromkeys(re.sub(r"layers\.\d+\.", "layers.*.", call.op) for call in calls)
    return ", ".join(names)
