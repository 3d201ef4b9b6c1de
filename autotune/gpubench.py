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
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lynnc.artifact import Artifact
from lynnc.autotune.baseline import Baseline, compile_baseline
from lynnc.autotune.benchmessages import CompiledKernel, KernelTask, StepTask, Task, Variant, task_text
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


class Builds:
    """The kernels of candidates, bound and asked for once each: a search asks again and again whether one is ready."""

    def __init__(self, baseline: Baseline, compiler: Compiler) -> None:
        self._baseline, self._compiler = baseline, compiler
        self._found: dict[str, tuple[Compiling, ...]] = {}

    def of(self, candidate: Candidate) -> tuple[Compiling, ...]:
        """The futures of a candidate's kernels; none if it cannot be measured."""
        key = encode(candidate)
        if key not in self._found:
            refusal = self._baseline.refusal(candidate)
            calls = () if refusal else self._baseline.bound(candidate.program, [candidate]).kernels.values()
            self._found[key] = tuple(self._compiler.start(call.source) for call in calls)
        return self._found[key]

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether a compiler is done with all of them."""
        return all(future.done() for future in self.of(candidate))


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
        found = [future.result() for future in self._builds.of(candidate)]
        return tuple(item for item in found if isinstance(item, Artifact))

    def measure(self, candidate: Candidate, repeats: int) -> Outcome:
        """Checks a candidate, if that was not done yet, and times it: seconds of one launch in a chain of them."""
        refusal = self.baseline.refusal(candidate)
        if refusal:
            return Outcome(Status.REFUSED, reason=refusal)
        bound, partner = self._bound(candidate), self.baseline.partner(candidate.program)
        others = self.baseline.bound(partner, [candidate]) if partner else None
        kernels, why = self._compiled({**bound.kernels, **(others.kernels if others else {})})
        if why:
            return Outcome(Status.NOT_COMPILED, reason=why)
        variant = Variant(candidate.program, bound.launches)
        partners = (Variant(partner, others.launches),) if others and others.launches else ()
        is_checked = encode(candidate) in self._passed
        (outcome,) = self._ask(KernelTask(variant, partners, kernels, repeats, is_checked), 1)
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

    def _bound(self, candidate: Candidate) -> BoundOps:
        return self.baseline.bound(candidate.program, [candidate])

    def _start(self, kernels: Iterable[KernelCall]) -> list[Compiling]:
        return [self._compiler.start(call.source) for call in kernels]

    def _compiled(self, kernels: Mapping[str, KernelCall]) -> tuple[tuple[CompiledKernel, ...], str]:
        """Machine code of some kernels, or why there is none."""
        found = []
        for call, future in zip(kernels.values(), self._start(kernels.values()), strict=True):
            artifact = future.result()
            if isinstance(artifact, LynncError):
                return (), str(artifact)
            if artifact.global_scratch_bytes or artifact.profile_scratch_bytes:
                return (), f"{call.entry.label} wants scratch memory in the GPU, which no launch gets"
            entry = replace(call.entry, artifact=public_facts(artifact))
            found.append(CompiledKernel(entry, str(artifact.cubin_path)))
        return tuple(found), ""

    def _step_task(self, program: str, bound: Sequence[BoundOps], repeats: int) -> StepTask | Outcome:
        kernels, why = self._compiled({key: call for one in bound for key, call in one.kernels.items()})
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


def open_gpu_bench(
    spec: ModelSpec,
    request: Request,
    store: Store,
    gpu: int = 0,
    conditions: Conditions | None = None,
    patience: Patience | None = None,
) -> GpuBench:
    """Compiles the plan of a request and loads it on a GPU with random weights.

    CompileError and the like if there is no such plan; DeviceError if the GPU does not run it. The plan is kept in a
    temporary folder until the bench is closed.
    """
    compiled, baseline = compile_baseline(spec, request, store)
    fitted = (conditions or Conditions()).fitted(compiled.plan)
    scratch = tempfile.TemporaryDirectory(prefix="lynnc-tune-")
    folder = Path(scratch.name) / "baseline.plan"
    save_plan(compiled.plan, compiled.files, folder)

    def command(connection: int) -> list[str]:
        module = [sys.executable, "-P", "-m", "lynnc.autotune.benchchild"]
        return [*module, str(connection), str(folder), str(gpu), encode(fitted)]

    child = ChildProcess(command, patience or Patience())
    bench = GpuBench(baseline, CompileAhead(store), child, scratch.cleanup)
    try:
        child.start()
    except ChildError as error:
        bench.close()
        raise DeviceError(str(error)) from error
    return bench
