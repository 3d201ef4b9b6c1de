"""Checks and times candidates on an executor: what a bench's child process does.

In: tasks, each with launches and compiled kernels. Out: outcomes. All launches but those of the candidate are the
plan's own, and so is the memory: no knob changes the size of a tensor, so a candidate brings nothing but its kernels.

Example::

    measurer = Measurer(executor, Conditions())
    measurer.answer(task).outcomes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from lynnc.autotune.benchmessages import CANDIDATE, DONE, SETUP, CompiledKernel, KernelTask, Said, StepTask, Task
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.launchcheck import Probe, RowPair, fault_of, is_usual, probes_of, row_fault, row_pair
from lynnc.autotune.launchtime import Timer
from lynnc.autotune.stage import (
    Stage,
    begin,
    own_bytes,
    scratch_bytes,
    stage_of,
    step_columns,
    step_rows,
    with_launches,
)
from lynnc.autotune.trial import Outcome, Status
from lynnc.bench.timing import Timing
from lynnc.cost import cost, evaluate_formula
from lynnc.errors import DeviceError, PlanError
from lynnc.plan import Launch, Program
from lynnc.programs import is_prefill
from lynnc.readback import Readback, readback_of
from lynnc.runtime.calls import calls_of
from lynnc.runtime.device import Call, KernelFacts
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Columns

KEPT_BYTES = 2 << 30
"""Of references in the host's memory: those of a long prompt's kernel take some hundred MB."""
FLUSHED_CACHES = 2
"""L2 caches' worth of memory that is overwritten before a run."""
REFERENCE_SHARE = 8
"""Free memory of the GPU over the FP32 weights of a launch from which on its reference is computed there."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a kernel's launches in a program are checked by; no pair where no row is compared with a step of its own."""

    probes: tuple[Probe, ...]
    pair: RowPair | None

    @property
    def bytes(self) -> int:
        """What its probes hold."""
        return sum(len(data) for probe in self.probes for data in (*probe.before.values(), *probe.usual.values()))


Group = tuple[tuple[str, tuple[str, ...]], ...]
"""A program and its ops of one kernel and problem, then, if there is one, its partner with the same ops."""


class Measurer:
    """``say`` is told which part of a task begins; ``torch_device`` is where torch has the GPU, if it has."""

    def __init__(
        self,
        executor: Executor,
        conditions: Conditions,
        say: Callable[[str], None] = lambda part: None,
        torch_device: str = "cpu",
    ) -> None:
        self.executor, self.conditions, self.say, self.torch_device = executor, conditions, say, torch_device
        device = executor.device
        flush_bytes = FLUSHED_CACHES * device.facts.l2_bytes
        flush = device.allocate(flush_bytes)
        self._timer = Timer(executor, flush, flush_bytes, conditions.pace, lambda: self.say(CANDIDATE))
        self._scratch = device.allocate(scratch_bytes(executor))
        self._steps: dict[str, Readback] = {}
        self._references: OrderedDict[Group, Reference] = OrderedDict()
        self._staged: tuple[Group, Stage] | None = None
        self._states: dict[int, dict[str, bytearray]] = {}
        """States of the slot behind so many tokens."""

    def answer(self, task: Task) -> Said:
        """The outcomes of a task; nothing but our own mistakes is raised."""
        count = 1 if isinstance(task, KernelTask) else len(task.variants)
        self.say(SETUP)
        try:
            with self._loaded(task.kernels) as kernels:
                if isinstance(task, StepTask):
                    return Said(DONE, outcomes=tuple(self._measure_steps(task, kernels)))
                outcome, is_spoilt = self._measure(task, kernels)
                return Said(DONE, outcomes=(outcome,), is_lost=is_spoilt)
        except (DeviceError, PlanError) as error:
            self._staged = None
            outcome = Outcome(Status.CRASHED, reason=str(error))
            return Said(DONE, outcomes=(outcome,) * count, is_lost=self._is_lost())

    def _measure(self, task: KernelTask, kernels: Mapping[str, KernelFacts]) -> tuple[Outcome, bool]:
        """An outcome, and whether what lies in the GPU's memory was spoilt."""
        stage = self._stage(_group(task))
        if not task.is_checked:
            reference = self._reference(_group(task), stage)
            unfit = next((probe.fault for probe in reference.probes if probe.fault), "")
            if unfit:
                return Outcome(Status.WRONG, reason=f"the plan's own kernel is not right: {unfit}"), False
            self.say(CANDIDATE)
            fault = self._fault(task, kernels, stage, reference)
            if fault:
                is_spoilt = not all(is_usual(stage, probe) for probe in reference.probes)
                self._staged = None  # wrong values are nothing to time others with
                return Outcome(Status.WRONG, reason=fault), is_spoilt
        self.say(CANDIDATE)
        chain = [call for call in stage.calls(task.variant.launches, kernels) if call.op in stage.ops]
        return timed(self._timer.chain(chain, stage.columns, task.repeats, self._cold_calls(stage))), False

    def _fault(self, task: KernelTask, kernels: Mapping[str, KernelFacts], stage: Stage, reference: Reference) -> str:
        calls = {call.op: call for call in stage.calls(task.variant.launches, kernels)}
        for probe in reference.probes:
            fault = fault_of(stage, probe, calls[probe.op.name])
            if fault:
                return fault
        pair = reference.pair
        if pair is None:
            return ""
        launches = {variant.program: variant.launches for variant in (task.variant, *task.partners)}
        wide, single = (
            next(call for call in side.calls(launches[side.name], kernels) if call.op == pair.op.name)
            for side in (pair.wide, pair.single)
        )
        return row_fault(pair, wide, single)

    def _stage(self, group: Group) -> Stage:
        """The stage of a group's first program, with the values that a whole step leaves."""
        if self._staged is None or self._staged[0] != group:
            self._staged = None
            (name, ops), *_ = group
            stage = stage_of(self._step(name), ops, self._scratch, self._columns(name))
            self._begin(name)
            list(stage.walk())
            self._staged = group, stage
        return self._staged[1]

    def _reference(self, group: Group, stage: Stage) -> Reference:
        if group not in self._references:
            try:
                probes = self._probes(stage, self._reference_device(stage))
            except torch.OutOfMemoryError:
                probes = self._probes(stage, "cpu")
            self._references[group] = Reference(probes, self._pair(group, stage))
            while len(self._references) > 1 and sum(one.bytes for one in self._references.values()) > KEPT_BYTES:
                self._references.popitem(last=False)
        self._references.move_to_end(group)
        return self._references[group]

    def _probes(self, stage: Stage, device: str) -> tuple[Probe, ...]:
        self._begin(stage.name)
        try:
            return tuple(probes_of(stage, _probed(stage), device))
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the memory is the runtime's

    def _pair(self, group: Group, stage: Stage) -> RowPair | None:
        """The first op in the program of the stage and in its partner, behind whose memory the partner's lies."""
        if len(group) == 1:
            return None
        name, ops = group[1]
        start = self._scratch + own_bytes(stage.step.program, stage.ops)
        partner = stage_of(self._step(name), ops, start, self._columns(name))
        single, wide = sorted((stage, partner), key=lambda side: side.step.rows)
        self._begin(wide.name)
        return row_pair(wide, single, ops[0])

    def _measure_steps(self, task: StepTask, kernels: Mapping[str, KernelFacts]) -> Iterator[Outcome]:
        """Steps on the workspace that all programs share, as they are in use."""
        executor, name = self.executor, task.program
        program, columns = executor.program(name), self._columns(name)
        self._staged = None
        self._begin(name)
        self.say(CANDIDATE)
        with ExitStack() as undo:
            graphs, faults = [], []
            for variant in task.variants:
                graph = self._timer.capture(self._whole(program, variant.launches, kernels))
                undo.callback(graph.close)
                executor.write_columns(columns)
                graph.launch()
                graphs.append(graph)
                faults.append(self._step_fault(program))
            right = [graph for graph, fault in zip(graphs, faults, strict=True) if not fault]
            most = 1 if is_prefill(name) else executor.context - self.conditions.before(name) - program.max_rows - 1
            timings = iter(self._timer.steps(right, columns, task.repeats, most))
        for fault in faults:
            yield Outcome(Status.WRONG, reason=fault) if fault else timed(next(timings))

    def _whole(self, program: Program, launches: Sequence[Launch], kernels: Mapping[str, KernelFacts]) -> list[Call]:
        addresses, rows = self.executor.memory.addresses, len(self._columns(program.name)["token"])
        return list(calls_of(with_launches(program, launches), kernels, addresses, rows, self.executor.context))

    def _step_fault(self, program: Program) -> str:
        """What is wrong with the logits of the last step, if it has such."""
        if "logits" not in program.outputs:
            return ""
        values = torch.frombuffer(self.executor.tensor("logits").read(), dtype=torch.float32)
        rows = 1 if is_prefill(program.name) else program.max_rows
        is_finite = bool(values[: rows * self.executor.plan.vocabulary].isfinite().all())
        return "" if is_finite else f"a step of {program.name} gives logits that are not finite"

    @contextmanager
    def _loaded(self, wanted: Sequence[CompiledKernel]) -> Iterator[Mapping[str, KernelFacts]]:
        """All kernels with some that the plan has not; these are forgotten afterwards."""
        device, kernels = self.executor.device, dict(self.executor.kernels)
        with ExitStack() as undo:
            for kernel in wanted:
                key = kernel.entry.key
                if key not in kernels:
                    kernels[key] = device.load_kernel(
                        kernel.entry, Path(kernel.cubin).read_bytes() if kernel.cubin else b""
                    )
                    undo.callback(self._unload, key)
            yield kernels

    def _unload(self, key: str) -> None:
        with suppress(DeviceError):  # a lost GPU has forgotten it, and why it was lost is known already
            self.executor.device.unload_kernel(key)

    def _begin(self, name: str) -> None:
        """The slot's states behind the tokens before a step of a program: the same ones every time."""
        behind = self.conditions.before(name)
        if behind in self._states:
            self.executor.memory.restore_states(self._states[behind])
        else:
            begin(self.executor, behind)
            self._states[behind] = self.executor.memory.save_states()

    def _cold_calls(self, stage: Stage) -> int:
        """Launches of a stage after which the cache holds nothing that a next pass reads first; 0 if it always does."""
        graph, behind, moved = stage.step.graph, self.conditions.before(stage.name), 0.0
        for count, op in enumerate(stage.ops, start=1):
            found = cost(graph, stage.op(op))
            moved += evaluate_formula(found.weight_bytes + found.state_bytes, stage.step.rows, behind)
            if moved > self._timer.flush_bytes:
                return count
        return 0

    def _step(self, name: str) -> Readback:
        if name not in self._steps:
            rows = step_rows(self.executor, name, self.conditions.before(name))
            self._steps[name] = readback_of(self.executor, name, rows)
        return self._steps[name]

    def _columns(self, name: str) -> Columns:
        return step_columns(self.executor, name, self.conditions.before(name))

    def _reference_device(self, stage: Stage) -> str:
        """Where torch computes: the GPU if it has room for the largest weights of a launch in FP32, several times."""
        graph = stage.step.graph
        sizes = [
            sum(4 * prod(graph.weights[name].shape) for name in stage.op(op).names("weight")) for op in _probed(stage)
        ]
        return self.torch_device if REFERENCE_SHARE * max(sizes) < self.executor.device.free_bytes() else "cpu"

    def _is_lost(self) -> bool:
        """Whether the GPU takes no more work from this process."""
        try:
            self.executor.device.synchronize()
        except DeviceError:
            return True
        return False


def timed(timing: Timing) -> Outcome:
    """The outcome of a measurement."""
    return Outcome(Status.TIMED, timing.median, timing.least, timing.greatest, timing.runs)


def _group(task: KernelTask) -> Group:
    sides = (task.variant, *task.partners)
    return tuple((variant.program, tuple(launch.op for launch in variant.launches)) for variant in sides)


def _probed(stage: Stage) -> tuple[str, ...]:
    """Of each machine code of the plan among the stage's ops, the first launch and the last: two layers."""
    found: dict[str, list[str]] = {}
    for launch in stage.step.program.launches:
        if launch.op in stage.ops:
            found.setdefault(launch.kernel, []).append(launch.op)
    return tuple(dict.fromkeys(op for ops in found.values() for op in (ops[0], ops[-1])))
