"""What the tests of the tuner's bench share: a measurer on a simulated device, and tasks for it.

The plan's own launches run by the meaning of their ops, those of candidates in Triton's interpreter, and ``spoil`` may
change what a candidate's launch has left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from executing import PREFILL_ROWS, SIMULATOR_KNOBS
from meaning import Meaning, Step, few_splits
from reference import Case
from simulated import SimulatedDevice

from lynnc.autotune.baseline import Baseline, baseline_of
from lynnc.autotune.benchmessages import CompiledKernel, KernelTask, StepTask, Variant
from lynnc.autotune.conditions import Conditions, Pace
from lynnc.autotune.measurer import Measurer
from lynnc.autotune.trial import Candidate
from lynnc.compiler import Request, assemble_plan, lower_programs
from lynnc.dims import evaluate
from lynnc.plan import Argument, Launch, Options, Plan
from lynnc.programs import program_rows
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import prepare
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.target import find_target

DENSE = Case("tiny-dense")
PROGRAMS = ("decode/1", "decode/2", "prefill/16")
CONDITIONS = Conditions(behind=5, behind_prompt=3, pace=Pace(most=2, most_steps=2))
REQUEST = Request(
    find_target("sm_90"), options=Options(knobs=SIMULATOR_KNOBS, prefill_rows=PREFILL_ROWS, programs=PROGRAMS)
)

Spoil = Callable[["Launched"], None]


@cache
def plan_and_baseline() -> tuple[Plan, Baseline]:
    """A plan whose kernels have no machine code."""
    with few_splits():
        lowered = lower_programs(DENSE.spec, REQUEST)
        baseline = baseline_of(DENSE.spec, REQUEST, {name: graph for name, (graph, _) in lowered.items()})
    kernels = {key: call.entry for _, low in lowered.values() for key, call in low.kernels.items()}
    return assemble_plan(DENSE.spec, REQUEST, lowered, kernels, {}), baseline


def candidate_of(kernel: str, program: str = "decode/1", **knobs: int) -> Candidate:
    """The first problem of a kernel in a program, with some of the plan's knobs changed."""
    _, baseline = plan_and_baseline()
    choice = next(choice for choice in baseline.choices[program] if choice.kernel.name == kernel)
    return Candidate(program, kernel, choice.problem, {**choice.knobs, **knobs})


def variant_of(candidate: Candidate, program: str) -> tuple[Variant, tuple[CompiledKernel, ...]]:
    """Its launches in a program, and their kernels without machine code."""
    _, baseline = plan_and_baseline()
    with few_splits():
        bound = baseline.bound(program, [candidate])
    return Variant(program, bound.launches), tuple(CompiledKernel(call.entry, "") for call in bound.kernels.values())


def kernel_task(candidate: Candidate, partner: str = "", repeats: int = 2, is_checked: bool = False) -> KernelTask:
    """A candidate's task, its rows compared with those of a partner program if there is one."""
    variant, kernels = variant_of(candidate, candidate.program)
    others = [variant_of(candidate, partner)] if partner else []
    wanted = {kernel.entry.key: kernel for kernel in (*kernels, *(kernel for _, some in others for kernel in some))}
    return KernelTask(variant, tuple(other for other, _ in others), tuple(wanted.values()), repeats, is_checked)


def step_task(sets: Sequence[Sequence[Candidate]], program: str = "decode/1", repeats: int = 3) -> StepTask:
    """Whole steps, each with at most one candidate."""
    found = [variant_of(some[0], program) if some else (Variant(program, ()), ()) for some in sets]
    kernels = {kernel.entry.key: kernel for _, some in found for kernel in some}
    return StepTask(program, tuple(variant for variant, _ in found), tuple(kernels.values()), repeats)


@dataclass(frozen=True)
class Launched:
    """A candidate's launch that has just run: how many there were before it, and what it wrote."""

    call: Call
    before: int
    launch: Launch

    def integer(self, parameter: str) -> int:
        """An argument that is no address."""
        return self.call.values[[argument.parameter for argument in self.launch.args].index(parameter)]

    def bytes_of(self, parameter: str, count: int) -> memoryview:
        """The first bytes of an argument's memory."""
        index = [argument.parameter for argument in self.launch.args].index(parameter)
        return memoryview((ctypes.c_char * count).from_address(self.call.values[index])).cast("B")


@dataclass
class Runner:
    """The calls of a bench on a simulated device."""

    device: SimulatedDevice
    meaning: Meaning
    spoil: Spoil | None = None
    candidates: int = 0

    def run(self, calls: Sequence[Call]) -> None:
        own = self.meaning.plan.kernels
        if len(calls) > 1 and not any(call.kernel in own for call in calls):
            return  # a chain that is timed: nobody looks at what it leaves
        for call in calls:
            if call.kernel in self.meaning.plan.kernels:
                self._run_meaning(call)
                continue
            self.device.run_kernels([call])
            if self.spoil:
                launch = next(launch for _, launch in self._launches(call.op))
                self.spoil(Launched(call, self.candidates, launch))
            self.candidates += 1

    def _launches(self, op: str) -> Iterator[tuple[str, Launch]]:
        for name, program in self.meaning.plan.programs.items():
            yield from ((name, launch) for launch in program.launches if launch.op == op)

    def _run_meaning(self, call: Call) -> None:
        name, launch, rows = next(self._fitting(call))
        graph = self.meaning.graph(name)
        op = next(op for op in graph.ops if op.name == call.op)
        self.meaning.run_launch(graph, op, Step(launch, call, rows))

    def _fitting(self, call: Call) -> Iterator[tuple[str, Launch, int]]:
        """Programs and rows whose launch has the kernel, the grid and the integers of a call."""
        context = self.meaning.room.context
        for name, launch in self._launches(call.op):
            for rows in [program_rows(name)] if program_rows(name) else range(1, 17):
                assert rows is not None
                is_grid = call.grid == tuple(evaluate(size, rows, context) for size in launch.grid)
                if launch.kernel == call.kernel and is_grid and _has_integers(launch.args, call, rows, context):
                    yield name, launch, rows


def _has_integers(arguments: Sequence[Argument], call: Call, rows: int, context: int) -> bool:
    pairs = zip(arguments, call.values, strict=False)  # hidden parameters stand behind
    return all(evaluate(arg.value, rows, context) == value for arg, value in pairs if arg.kind == "value")


@dataclass
class Bed:
    """A measurer, what runs its calls, and which parts of tasks it said."""

    measurer: Measurer
    runner: Runner
    parts: list[str]

    @property
    def executor(self) -> Executor:
        return self.measurer.executor


@contextmanager
def simulated_bed() -> Iterator[Bed]:
    """A measurer of the tiny model."""
    plan, _ = plan_and_baseline()
    room, device = CONDITIONS.room(plan, PROGRAMS), SimulatedDevice()
    runner = Runner(device, Meaning(plan, room))
    device.runs = runner.run
    with few_splits():
        executor = prepare(plan, dict.fromkeys(plan.kernels, b""), GeneratedWeights(0), device, room)
        parts: list[str] = []
        yield Bed(Measurer(executor, CONDITIONS, parts.append), runner, parts)
