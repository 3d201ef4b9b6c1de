"""Measures candidates on a GPU: compiled in processes on the CPU, checked and timed in a process that may die.

In: a model, what to compile for, a kernel store and the number of a GPU. Out: a ``Bench``. Whatever a candidate does is
an outcome: refused, not compiled, wrong, crashed, hung or timed.

Example::

    with closing(open_gpu_bench(spec, Request(device.target, device, Options(programs=("decode/1",))), store)) as bench:
        bench.prepare(candidates)
        outcomes = [bench.measure(candidate, repeats=5) for candidate in candidates]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from lynnc.artifact import Artifact
from lynnc.autotune.baseline import Baseline, compile_baseline, with_partners
from lynnc.autotune.benchmessages import CompiledKernel, KernelTask, Opening, StepTask, Task, Variant, task_text
from lynnc.autotune.childprocess import ChildError, ChildHungError, ChildProcess, Patience
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.trial import Candidate, Outcome, Status
from lynnc.compile import KernelSource
from lynnc.compile_ahead import CompileAhead
from lynnc.compiler import Request, public_facts
from lynnc.errors import DeviceError, LynncError
from lynnc.jsonform import encode
from lynnc.lower import BoundOps, KernelCall
from lynnc.model import ModelSpec
from lynnc.planfile import save_plan
from lynnc.store import Store

Compiling = Future[Artifact | LynncError]


class Compiler(Protocol):
    """Compiles kernels beside other work, as ``CompileAhead`` does."""

    def start(self, source: KernelSource) -> Compiling:
        """The future of a kernel; an error is its result."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """A candidate's launches in its program and, if there are any, in the partner of that; futures of their kernels.

    ``refusal`` says why it cannot be measured, and then there is nothing else.
    """

    refusal: str
    variants: tuple[Variant, ...] = ()
    kernels: Mapping[str, KernelCall] = field(default_factory=dict)
    futures: tuple[Compiling, ...] = ()


class Builds:
    """The kernels of candidates, bound and asked for once each: a search asks again and again whether one is ready."""

    def __init__(self, baseline: Baseline, compiler: Compiler) -> None:
        self._baseline, self._compiler = baseline, compiler
        self._found: dict[str, Build] = {}

    def of(self, candidate: Candidate) -> Build:
        """What a candidate launches; its kernels are being compiled."""
        key = encode(candidate)
        if key not in self._found:
            refusal = self._baseline.refusal(candidate)
            self._found[key] = Build(refusal) if refusal else self._bound(candidate)
        return self._found[key]

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether a compiler is done with all of them."""
        return all(future.done() for future in self.of(candidate).futures)

    def _bound(self, candidate: Candidate) -> Build:
        partner = self._baseline.partner(candidate.program)
        names = (candidate.program, partner) if partner else (candidate.program,)
        sides = [(name, self._baseline.bound(name, [candidate])) for name in names]
        kernels = {key: call for _, bound in sides for key, call in bound.kernels.items()}
        return Build(
            "",
            tuple(Variant(name, bound.launches) for name, bound in sides if bound.launches),
            kernels,
            tuple(self._compiler.start(call.source) for call in kernels.values()),
        )


class GpuBench:
    """See ``lynnc.autotune.trial.Bench``. ``finish`` is called at the end."""

    def __init__(
        self, baseline: Baseline, compiler: Compiler, child: ChildProcess, finish: Callable[[], None] = lambda: None
    ) -> None:
        self.baseline, self._compiler, self._child, self._finish = baseline, compiler, child, finish
        self._builds = Builds(baseline, compiler)
        self._passed: set[str] = set()
        """Candidates, as text, that were found right."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts to compile candidates that will be measured soon; returns at once."""
        for candidate in candidates:
            self._builds.of(candidate)

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether ``measure`` would wait for no compiler."""
        return self._builds.is_ready(candidate)

    def facts(self, candidate: Candidate) -> tuple[Artifact, ...]:
        """Registers, spills and shared memory of the machine code of a candidate that compiles; waits for it."""
        found = [future.result() for future in self._builds.of(candidate).futures]
        return tuple(item for item in found if isinstance(item, Artifact))

    def measure(self, candidate: Candidate, repeats: int) -> Outcome:
        """Checks a candidate, if that was not done yet, and times it: seconds of one launch in a chain of them.

        One of decode whose rows cannot be compared with those of another program is refused.
        """
        build = self._builds.of(candidate)
        why = build.refusal or self.baseline.unchecked(candidate)
        if why:
            return Outcome(Status.REFUSED, reason=why)
        kernels, why = _compiled(build.kernels, build.futures)
        if why:
            return Outcome(Status.NOT_COMPILED, reason=why)
        variant, *partners = build.variants
        is_checked = encode(candidate) in self._passed
        (outcome,) = self._ask(KernelTask(variant, tuple(partners), kernels, repeats, is_checked), 1)
        if outcome.is_timed:
            self._passed.add(encode(candidate))
        return outcome

    def measure_steps(self, program: str, choices: Sequence[Sequence[Candidate]], repeats: int) -> Sequence[Outcome]:
        """Seconds of whole steps of a program, one for each set of choices, taken in turns; other kernels keep theirs.

        Each set runs alone first, so that one which fails takes no other with it.
        """
        bound = [self.baseline.bound(program, candidates) for candidates in choices]
        tasks = [self._step_task(program, [one], 1) for one in bound]
        outcomes = [task if isinstance(task, Outcome) else self._ask(task, 1)[0] for task in tasks]
        right = [index for index, outcome in enumerate(outcomes) if outcome.is_timed]
        if right:
            together = self._step_task(program, [bound[index] for index in right], repeats)
            assert not isinstance(together, Outcome), "each of them has been compiled"
            for index, outcome in zip(right, self._ask(together, len(right)), strict=True):
                outcomes[index] = outcome
        return outcomes

    def what_is_checked(self, program: str) -> str:
        """In words, for reports."""
        partner = self.baseline.partner(program)
        rows = f"each row's bits in {program} and {partner}" if partner else "no rows: the plan has no partner for them"
        return f"finite values, the reference, the same bits in three runs, {rows}"

    def close(self) -> None:
        """Ends child processes."""
        self._child.kill()
        self._compiler.close()
        self._finish()

    def _step_task(self, program: str, bound: Sequence[BoundOps], repeats: int) -> StepTask | Outcome:
        calls = {key: call for one in bound for key, call in one.kernels.items()}
        kernels, why = _compiled(calls, [self._compiler.start(call.source) for call in calls.values()])
        if why:
            return Outcome(Status.NOT_COMPILED, reason=why)
        return StepTask(program, tuple(Variant(program, one.launches) for one in bound), kernels, repeats)

    def _ask(self, task: Task, count: int) -> Sequence[Outcome]:
        try:
            return self._child.ask(task_text(task)).outcomes
        except ChildHungError as error:
            return [Outcome(Status.HUNG, reason=str(error))] * count
        except ChildError as error:
            return [Outcome(Status.CRASHED, reason=str(error))] * count


def _compiled(
    kernels: Mapping[str, KernelCall], futures: Iterable[Compiling]
) -> tuple[tuple[CompiledKernel, ...], str]:
    """Machine code of some kernels, or why there is none."""
    found = []
    for call, future in zip(kernels.values(), futures, strict=True):
        artifact = future.result()
        if isinstance(artifact, LynncError):
            return (), str(artifact)
        if artifact.global_scratch_bytes or artifact.profile_scratch_bytes:
            return (), f"{call.entry.label} wants scratch memory in the GPU, which no launch gets"
        entry = replace(call.entry, artifact=public_facts(artifact))
        found.append(CompiledKernel(entry, str(artifact.cubin_path)))
    return tuple(found), ""


def open_gpu_bench(
    spec: ModelSpec,
    request: Request,
    store: Store,
    gpu: int = 0,
    conditions: Conditions | None = None,
    patience: Patience | None = None,
) -> GpuBench:
    """Compiles the plan of a request and loads it on a GPU with random weights, decode programs with partners whose
    rows have to have the same bits, also where these were not asked for.

    CompileError and the like if there is no such plan; DeviceError if the GPU does not run it. The plan is kept in a
    temporary folder until the bench is closed. All processes start at once: what they import takes as long as the
    graphs of the plan.
    """
    with ExitStack() as undo:
        scratch = tempfile.TemporaryDirectory(prefix="lynnc-tune-")
        undo.callback(scratch.cleanup)
        folder, openings = Path(scratch.name) / "baseline.plan", list[Opening]()
        child = ChildProcess(
            lambda connection: [sys.executable, "-P", "-m", "lynnc.autotune.benchchild", str(connection), str(gpu)],
            patience or Patience(),
            lambda: encode(openings[0]),
        )
        undo.callback(child.kill)
        compiler = undo.enter_context(closing(CompileAhead(store)))
        try:
            child.begin()
            compiler.warm_up()
            programs = with_partners(request.options.programs)
            request = replace(request, options=replace(request.options, programs=programs))
            compiled, baseline = compile_baseline(spec, request, compiler.compile_all)
            save_plan(compiled.plan, compiled.files, folder)
            openings.append(Opening(str(folder), (conditions or Conditions()).fitted(compiled.plan)))
            child.start()
        except ChildError as error:
            raise DeviceError(str(error)) from error
        undo.pop_all()
        return GpuBench(baseline, compiler, child, scratch.cleanup)
