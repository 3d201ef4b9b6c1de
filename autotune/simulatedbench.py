"""A bench without a device: candidates are compiled for it, and their times predicted from what the compiler made.

In: a baseline, a compiler, tasks, a device. Out: a ``Bench`` whose times rank candidates; records of it say so. Nothing
runs, so nothing is found wrong here: whoever has the device should tune on it.

Example::

    with closing(open_simulated_bench(spec, request, store, tasks)) as bench:
        bench.measure(candidate, repeats=1).seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lynnc.artifact import Artifact
from lynnc.autotune.baseline import Baseline, baseline_of
from lynnc.autotune.bounds import programs_of
from lynnc.autotune.gpubench import Builds, Compiler
from lynnc.autotune.predict import Build, Prediction, paired, predict
from lynnc.autotune.problems import Key, Task, key_of_names, tasks_of_program
from lynnc.autotune.sass import loop_mix
from lynnc.autotune.sweep import Tried
from lynnc.autotune.trial import Candidate, Outcome, Status
from lynnc.compile_ahead import CompileAhead
from lynnc.compiler import Request, fused_graph, settle
from lynnc.errors import LynncError
from lynnc.model import ModelSpec
from lynnc.store import Store
from lynnc.target import Device
from lynnc.tools import find_tools


class SimulatedBench:
    """See ``lynnc.autotune.trial.Bench``."""

    def __init__(
        self, baseline: Baseline, compiler: Compiler, tasks: Sequence[Task], device: Device, context: int
    ) -> None:
        self._baseline, self._compiler, self._device, self._context = baseline, compiler, device, context
        self._tasks: Mapping[Key, Task] = {task.key: task for task in tasks}
        self._elsewhere: dict[str, Mapping[Key, Task]] = {}
        """The same problems in programs of more rows, by program: for whole steps."""
        self._builds = Builds(baseline, compiler)
        self._known: dict[str, Outcome] = {}
        tool = find_tools().program("cuobjdump")
        self._cuobjdump = tool.path if tool else Path("cuobjdump")

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts to compile candidates that will be asked for soon."""
        for candidate in candidates:
            self._builds.of(candidate)

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether its kernels are compiled, or cannot be."""
        return self._builds.is_ready(candidate)

    def measure(self, candidate: Candidate, repeats: int) -> Outcome:
        """The predicted time of a launch; the same however often it is asked for."""
        name = name_of(candidate)
        if name not in self._known:
            self._known[name] = self._outcome(candidate)
        return self._known[name]

    def measure_steps(self, program: str, choices: Sequence[Sequence[Candidate]], repeats: int) -> Sequence[Outcome]:
        """Sums of predicted launches, of the tuned kernels alone."""
        return [self._step(candidates) for candidates in choices]

    def close(self) -> None:
        """Ends compiler processes."""
        self._compiler.close()

    def _outcome(self, candidate: Candidate) -> Outcome:
        refusal = self._baseline.refusal(candidate)
        if refusal:
            return Outcome(Status.REFUSED, reason=refusal)
        try:
            seconds = self._prediction(candidate).seconds
        except LynncError as error:
            return Outcome(Status.NOT_COMPILED, reason=str(error))
        return Outcome(Status.TIMED, seconds, seconds, seconds, 1)

    def _prediction(self, candidate: Candidate) -> Prediction:
        """Of the kernel that the candidate becomes; where layers differ, of the one that is slowest."""
        task = self._task(candidate)
        binding = task.kernel.bind(task.graph, task.op, candidate.knobs)
        programs = programs_of(task, binding, self._context)
        found = []
        for future in self._builds.of(candidate).futures:
            artifact = future.result()
            if not isinstance(artifact, Artifact):
                raise artifact
            mix = loop_mix(artifact.cubin_path, self._cuobjdump)
            found.append(predict(task, candidate.knobs, Build(artifact, mix, programs), self._device))
        return max(found, key=lambda prediction: prediction.seconds)

    def _step(self, candidates: Sequence[Candidate]) -> Outcome:
        total = 0.0
        for candidate in candidates:
            outcome = self.measure(candidate, 1)
            if not outcome.is_timed:
                return outcome
            total += self._task(candidate).launches * outcome.seconds
        return Outcome(Status.TIMED, total, total, total, 1)

    def _task(self, candidate: Candidate) -> Task:
        key, program = key_of_names(candidate.kernel, candidate.problem), candidate.program
        if self._tasks[key].program == program:
            return self._tasks[key]
        if program not in self._elsewhere:
            found = tasks_of_program(self._baseline.graphs[program], self._device, self._context)
            self._elsewhere[program] = {task.key: task for task in found}
        return self._elsewhere[program][key]


def open_simulated_bench(
    spec: ModelSpec, request: Request, store: Store, tasks: Sequence[Task], context: int
) -> SimulatedBench:
    """A bench that compiles for the device of a request, which must have one."""
    device = request.device
    assert device is not None, "a device is simulated, not an architecture"
    settled = settle(spec, request)[0].options
    graphs = {name: fused_graph(spec, name, settled.without) for name in settled.programs}
    baseline = baseline_of(spec, request, graphs)
    return SimulatedBench(baseline, CompileAhead(store), tasks, device, context)


def name_of(candidate: Candidate) -> str:
    """Tells candidates apart."""
    facts = (candidate.program, candidate.kernel, sorted(candidate.problem.items()), sorted(candidate.knobs.items()))
    return repr(facts)


def predicted_and_measured(
    task: Task, tried: Sequence[Tried], bench: SimulatedBench
) -> tuple[tuple[float, float], ...]:
    """Pairs of seconds for the candidates of a study on a real device, to see how far the prediction can be trusted.

    ``bench`` simulates the device that measured; ``rank_correlation`` says how alike the two sort.
    """
    candidates = {
        str(one.number): Candidate(task.program, task.kernel.name, task.problem, one.knobs)
        for one in tried
        if one.outcome.is_timed
    }
    bench.prepare(list(candidates.values()))
    predicted = {name: bench.measure(candidate, 1) for name, candidate in candidates.items()}
    return paired(predicted, {str(one.number): one.outcome for one in tried})
