"""What can be tuned in a model: each kernel's problems, with the launches that one choice of knobs decides.

In: a model, programs, a device. Out: ``Task`` values, those first where most of a step's time must go. A record knows
kernel and problem but no program, so a problem that several programs share is one task: it is measured in the first of
them, decode before prompts and long prompts before short ones. Decode programs of 1 to 8 rows have the same problems
and share every choice: their kernels are measured with one row, and choices confirmed in the steps of all of them.

Example::

    for task in tasks_of(load_model("qwen3.6-35b-a3b"), Wanted(find_device("h200"))):
        print(task.name, task.launches, task.share)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from lynnc.compiler import Request, fused_graph, settle
from lynnc.cost import Cost, Estimate, costs, estimate
from lynnc.errors import OptionError
from lynnc.ir import Graph, Op
from lynnc.kernels.kernel import Kernel, Knobs, Problem
from lynnc.kernels.table import KERNELS, kernel_for
from lynnc.model import ModelSpec
from lynnc.plan import Options
from lynnc.programs import expected_rows, is_prefill, prefill_programs, program_rows
from lynnc.target import Device

DECODE = "decode/1"
DECODE_WEIGHT = 0.5
"""Part of the effort for decode where prompts are tuned too; the programs for prompts share the rest."""


Key = tuple[str, tuple[tuple[str, str], ...]]
"""Kernel and problem, as a record knows them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to tune for: a device, programs, kernels (all if empty), and the context behind which decode stands."""

    device: Device
    programs: tuple[str, ...] = field(default_factory=lambda: Options().programs)
    kernels: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    context: int = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel's problem, where it is measured (``program``), and every wanted program that uses it.

    ``op`` is the launch of ``graph`` that costs most; ``estimate`` is the roofline's, the mean of ``launches`` of a
    step; ``share`` is the part of the whole effort that this task's expected time deserves.
    """

    program: str
    kernel: Kernel
    problem: Problem
    graph: Graph = field(repr=False)
    op: Op = field(repr=False)
    cost: Cost = field(repr=False)
    estimate: Estimate
    launches: int
    programs: tuple[str, ...]
    share: float = 0.0

    @property
    def name(self) -> str:
        """Kernel and problem in one line."""
        facts = " ".join(f"{name}={value}" for name, value in sorted(self.problem.items()))
        return f"{self.kernel.name} [{facts}]"

    @property
    def key(self) -> Key:
        """Kernel and problem, as a record knows them."""
        return key_of(self.kernel, self.problem)

    @property
    def rows(self) -> int:
        """Rows of the step that is measured."""
        return rows_of(self.program)

    @property
    def step_seconds(self) -> float:
        """What the roofline gives all its launches in a step."""
        return self.launches * self.estimate.seconds

    def default(self, device: Device) -> Knobs:
        """The knobs that are taken where nothing was measured."""
        return dict(self.kernel.default(self.problem, device.target))


def key_of(kernel: Kernel, problem: Problem) -> Key:
    """Kernel and problem as a record knows them."""
    return key_of_names(kernel.name, problem)


def key_of_names(kernel: str, problem: Problem) -> Key:
    """The same from a kernel's name."""
    return kernel, tuple(sorted((name, str(value)) for name, value in problem.items()))


def rows_of(program: str) -> int:
    """Rows of a step of a program, the most it takes where it runs prompts."""
    return program_rows(program) or expected_rows(program)


def measured_programs(programs: Iterable[str]) -> tuple[str, ...]:
    """The programs in which kernels are measured, in the order in which they claim shared problems."""
    names = tuple(dict.fromkeys(programs))
    decode = (DECODE,) if any(not is_prefill(name) for name in names) else ()
    return decode + tuple(reversed(prefill_programs(names)))


def confirmed_programs(program: str, programs: Iterable[str]) -> tuple[str, ...]:
    """The programs whose steps have the launches of one in which kernels are measured: of decode all that there are."""
    if program != DECODE:
        return (program,)
    return tuple(dict.fromkeys((DECODE, *sorted(name for name in programs if not is_prefill(name)))))


def tasks_of(spec: ModelSpec, wanted: Wanted) -> tuple[Task, ...]:
    """Every task, the largest share first; OptionError where a kernel is unknown or in none of the programs."""
    _check_kernels(wanted.kernels)
    request = Request(wanted.device.target, wanted.device, Options(without=wanted.without))
    without = settle(spec, request)[0].options.without
    programs = measured_programs(wanted.programs)
    found: dict[Key, Task] = {}
    for program in programs:
        steps = confirmed_programs(program, wanted.programs)
        for task in tasks_of_program(fused_graph(spec, program, without), wanted.device, wanted.context):
            known = found.get(task.key, replace(task, programs=()))
            found[task.key] = replace(known, programs=(*known.programs, *steps))
    shared = _with_shares(found.values(), programs)
    chosen = tuple(task for task in shared if not wanted.kernels or task.kernel.name in wanted.kernels)
    _check_found(wanted.kernels, chosen, programs)
    return tuple(sorted(chosen, key=lambda task: (-task.share, task.name)))


def tasks_of_program(graph: Graph, device: Device, context: int) -> Iterable[Task]:
    """The tasks of one program, each its own, without shares."""
    formulas, rows = costs(graph), rows_of(graph.program)
    groups: dict[Key, list[tuple[Kernel, Problem, Op]]] = {}
    for op in graph.ops:
        kernel = kernel_for(graph, op)
        problem = kernel.problem(graph, op)
        groups.setdefault(key_of(kernel, problem), []).append((kernel, problem, op))
    known: dict[Cost, Estimate] = {}
    for launches in groups.values():
        for _, _, op in launches:
            formula = formulas[op.name]
            if formula not in known:
                known[formula] = estimate(formula, rows, max(context, rows), device)
        estimates = [known[formulas[op.name]] for _, _, op in launches]
        kernel, problem, op = max(launches, key=lambda launch: known[formulas[launch[2].name]].seconds)
        yield Task(
            program=graph.program,
            kernel=kernel,
            problem=problem,
            graph=graph,
            op=op,
            cost=formulas[op.name],
            estimate=_mean(estimates),
            launches=len(launches),
            programs=(graph.program,),
        )


def _mean(estimates: list[Estimate]) -> Estimate:
    return Estimate(
        bytes=fmean(one.bytes for one in estimates),
        flops=fmean(one.flops for one in estimates),
        memory_s=fmean(one.memory_s for one in estimates),
        compute_s=fmean(one.compute_s for one in estimates),
        launch_s=estimates[0].launch_s,
    )


def _with_shares(tasks: Iterable[Task], programs: tuple[str, ...]) -> tuple[Task, ...]:
    """Each task's part of its program's step, times the weight of the program."""
    listed, weights = tuple(tasks), _weights(programs)
    steps = {name: sum(task.step_seconds for task in listed if task.program == name) for name in programs}
    return tuple(
        replace(task, share=weights[task.program] * task.step_seconds / steps[task.program]) for task in listed
    )


def _weights(programs: tuple[str, ...]) -> Mapping[str, float]:
    prompts = [name for name in programs if name != DECODE]
    if len(prompts) == len(programs):
        return {name: 1 / len(programs) for name in programs}
    rest = (1 - DECODE_WEIGHT) / len(prompts) if prompts else 0.0
    return {name: rest for name in prompts} | {DECODE: DECODE_WEIGHT if prompts else 1.0}


def _check_kernels(names: Iterable[str]) -> None:
    known = [kernel.name for kernel in KERNELS]
    for name in names:
        if name not in known:
            raise OptionError(f"--kernels: there is no kernel {name}; choose of {', '.join(known)}.")


def _check_found(names: tuple[str, ...], tasks: tuple[Task, ...], programs: tuple[str, ...]) -> None:
    for name in names:
        if all(task.kernel.name != name for task in tasks):
            raise OptionError(f"--kernels {name}: {', '.join(programs)} of this model do not launch it; leave it out.")
