"""Where the time of a step goes, kernel by kernel, by running parts of it.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lynnc.bench.timing import TOKEN, Effort, Timing, repeat
from lynnc.compiler import graph_of
from lynnc.cost import costs, evaluate_formula
from lynnc.plan import Program, aligned
from lynnc.runtime.calls import calls_of
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Columns, columns_of, rows_of
from lynnc.target import Device


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Launches of one kernel in a step. ``bytes`` and ``flops`` are those of one launch at least, the mean over the
    layers."""

    label: str
    kernel: str
    count: int
    bytes: float
    flops: float
    alone: Timing
    marginal: float | None

    @property
    def total(self) -> float:
        """Seconds of all its launches, each as long as alone."""
        return self.count * self.alone.median

    def limit(self, device: Device) -> tuple[str, float]:
        """What binds a launch at most, memory or tensor cores, and the seconds that it takes at that limit."""
        limits = {"memory": self.bytes / device.bandwidth_bytes_per_s, "tensor": self.flops / device.flops_per_s}
        name = max(limits, key=lambda limit: limits[limit])
        return name, limits[name]


def own_bytes(program: Program) -> int:
    """Bytes that a program's tensors take if none shares memory with another."""
    return sum(aligned(place.bytes) for place in program.tensors if place.offset is not None)


class Parts:
    """A program's launches, each reading and writing memory that no other tensor shares; ``own`` says where.

    ``columns`` are the inputs, as many rows of one sequence behind ``context`` tokens as the program has if not given;
    ``scratch`` is memory for all tensors, allocated if not given.
    """

    def __init__(
        self, executor: Executor, name: str, context: int, columns: Columns | None = None, scratch: int | None = None
    ) -> None:
        self.executor, self.program = executor, executor.program(name)
        self.columns = columns or columns_of(rows_of([TOKEN] * self.program.max_rows, context))
        self.rows = len(self.columns["token"])
        self.own = self._own_memory(scratch)
        addresses = executor.memory.addresses
        self.calls = calls_of(self.program, executor.kernels, addresses, self.rows, executor.context, self.own)
        executor.assume(context, TOKEN)
        self.launch(self.calls)

    def _own_memory(self, scratch: int | None) -> dict[str, int]:
        device, size = self.executor.device, own_bytes(self.program)
        tensors = dict(self.executor.memory.addresses.of(self.program))
        start = device.allocate(size) if scratch is None else scratch
        device.fill(start, 0, size)
        for place in self.program.tensors:
            if place.offset is not None:
                tensors[place.name] = start
                start += aligned(place.bytes)
        return tensors

    def launch(self, calls: Sequence[Call]) -> None:
        """Some of the launches once, at the context."""
        self._set_inputs()
        self.executor.device.launch(calls)
        self.executor.device.synchronize()

    def _set_inputs(self) -> None:
        self.executor.write_columns(self.columns)

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
    """Every kernel of a decode program in the order of its first launch, behind ``context`` tokens."""
    parts = Parts(executor, name, context)
    yield from kernel_times(parts, (parts.rows, context), effort, with_marginal)


def kernel_times(
    parts: Parts, costed: tuple[int, int], effort: Effort, with_marginal: bool = False
) -> Iterator[KernelTime]:
    """Every kernel of a step; ``costed`` are T and S of what it must move and compute, padding left out."""
    executor = parts.executor
    needs = needs_of_launches(executor, parts.program.name, *costed)
    whole = parts.time(parts.calls, effort).median if with_marginal else 0.0
    for key, own in by_kernel(parts.calls).items():
        rest = [call for call in parts.calls if call.kernel != key]
        yield KernelTime(
            label=label_of(own),
            kernel=executor.plan.kernels[key].label,
            count=len(own),
            bytes=fmean(needs[call.op].bytes for call in own),
            flops=fmean(needs[call.op].flops for call in own),
            alone=parts.time(own, effort).over(len(own)),
            marginal=(whole - parts.time(rest, effort).median) / len(own) if with_marginal else None,
        )


@dataclass(frozen=True, slots=True)
class Need:
    """What a launch must move and compute at least."""

    bytes: float
    flops: float


def needs_of_launches(executor: Executor, name: str, rows: int, context: int) -> Mapping[str, Need]:
    """Bytes and FLOPs of each launch by its op, for T = ``rows`` and S = ``context``."""
    by_op = costs(graph_of(executor.plan, name))
    return {
        op: Need(evaluate_formula(cost.bytes, rows, context), evaluate_formula(cost.flops, rows, context))
        for op, cost in by_op.items()
    }


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
