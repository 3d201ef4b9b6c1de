"""The tuner's bench around the process that has the GPU: compilation, patience, crashes and restarts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from benching import DENSE, PROGRAMS, REQUEST, candidate_of, plan_and_baseline
from meaning import few_splits

from lynnc.artifact import Artifact
from lynnc.autotune.baseline import with_partners
from lynnc.autotune.benchmessages import KernelTask, Opening, StepTask, task_of
from lynnc.autotune.childprocess import ChildDiedError, ChildHungError, ChildProcess, Patience
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.gpubench import GpuBench, open_gpu_bench
from lynnc.autotune.trial import Bench, Status
from lynnc.compile import KernelSource
from lynnc.compile_ahead import CompileAhead
from lynnc.compiler import Request
from lynnc.errors import CompileError, DeviceError, LynncError
from lynnc.jsonform import encode
from lynnc.store import Store
from lynnc.target import find_target

CHILD = Path(__file__).with_name("benchchildren.py")
QUICK = Patience(start=20.0, setup=20.0, candidate=0.5)
GOOD, OTHER = candidate_of("combine_gate", BLOCK_D=32), candidate_of("embed", num_warps=2)
COMPILED = Artifact(
    *("", "kernel", "sm_90a", 4, 128, 0, 32, 0, 0, 1, 0, 1, True, (), "3.6.0", "12.8", "", ""), folder=Path("store")
)


@dataclass
class Paper:
    """A compiler that has an answer for each template: an artifact, or an error."""

    answers: Mapping[str, Artifact | LynncError] = field(default_factory=dict)
    asked: list[KernelSource] = field(default_factory=list)
    is_closed: bool = False

    def start(self, source: KernelSource) -> Future[Artifact | LynncError]:
        self.asked.append(source)
        future: Future[Artifact | LynncError] = Future()
        future.set_result(self.answers.get(source.template, replace(COMPILED, key=source.key)))
        return future

    def close(self) -> None:
        self.is_closed = True


def child_of(mode: str, patience: Patience = QUICK) -> ChildProcess:
    return ChildProcess(lambda connection: [sys.executable, str(CHILD), str(connection), mode], patience)


@pytest.fixture(autouse=True)
def splits() -> Iterator[None]:
    with few_splits():
        yield


def bench_of(mode: str = "answer", compiler: Paper | None = None, programs: tuple[str, ...] = PROGRAMS) -> GpuBench:
    _, baseline = plan_and_baseline()
    graphs = {name: graph for name, graph in baseline.graphs.items() if name in programs}
    return GpuBench(replace(baseline, graphs=graphs), compiler or Paper(), child_of(mode))


def test_a_candidate_is_timed_and_its_check_not_repeated() -> None:
    with closing(bench_of()) as bench:
        as_protocol: Bench = bench
        first, second = (as_protocol.measure(GOOD, repeats) for repeats in (3, 7))
        assert first.is_timed and (first.seconds, first.repeats) == (1.0, 3)
        assert (second.seconds, second.repeats) == (2.0, 7), "the process was not told that it is checked"
        assert bench._child.starts == 1


def test_tasks_name_what_changes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[str] = []
    ask = ChildProcess.ask
    monkeypatch.setattr(ChildProcess, "ask", lambda self, task: tasks.append(task) or ask(self, task))  # type: ignore[func-returns-value]
    with closing(bench_of()) as bench:
        bench.measure(GOOD, 1)
        bench.measure_steps("decode/2", [(), (GOOD, OTHER)], 1)
    kernel, steps = task_of(tasks[0]), task_of(tasks[-1])
    assert isinstance(kernel, KernelTask) and isinstance(steps, StepTask)
    assert [launch.op for launch in kernel.variant.launches] == ["layers.3.attention_combine"]
    assert [partner.program for partner in kernel.partners] == ["decode/2"]
    assert {item.entry.key for item in kernel.kernels} == {launch.kernel for launch in kernel.variant.launches}
    assert [[launch.op for launch in one.launches] for one in steps.variants] == [
        [],
        ["embed", "layers.3.attention_combine"],
    ]


@pytest.mark.parametrize(
    ("program", "programs", "partner"),
    [
        ("decode/1", PROGRAMS, "decode/2"),
        ("decode/2", PROGRAMS, "decode/1"),
        ("decode/2", ("decode/2",), ""),
        ("prefill/16", PROGRAMS, ""),
    ],
)
def test_rows_are_compared_where_the_plan_has_both_programs(
    program: str, programs: tuple[str, ...], partner: str
) -> None:
    bench = bench_of(programs=programs)
    assert bench.baseline.partner(program) == partner
    assert (f"{program} and {partner}" if partner else "no rows") in bench.what_is_checked(program)


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        (("decode/1",), ("decode/1", "decode/8")),
        (("decode/4", "prefill"), ("decode/4", "prefill", "decode/1", "decode/8")),
        (("decode/1", "decode/2", "decode/8"), ("decode/1", "decode/2", "decode/8")),
        (("prefill/16",), ("prefill/16",)),
    ],
)
def test_a_decode_program_gets_a_partner_that_nobody_asked_for(
    asked: tuple[str, ...], loaded: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records serve other numbers of rows all the same."""
    requests: list[Request] = []

    def compiled(spec: object, request: Request, compile_all: object) -> object:
        requests.append(request)
        raise CompileError("No registers left.")

    monkeypatch.setattr("lynnc.autotune.gpubench.compile_baseline", compiled)
    with pytest.raises(CompileError):
        open_gpu_bench(DENSE.spec, replace(REQUEST, options=replace(REQUEST.options, programs=asked)), Store(tmp_path))
    assert requests[0].options.programs == loaded == with_partners(loaded)
    assert requests[0].options.knobs == REQUEST.options.knobs


def test_a_decode_candidate_whose_rows_nobody_can_compare_is_refused() -> None:
    alone = ("decode/2", "prefill/16")
    with closing(bench_of("refuse", programs=alone)) as bench:
        found = bench.measure(replace(GOOD, program="decode/2"), 1)
        assert found.status is Status.REFUSED and "no decode program whose rows could be compared" in found.reason
    with closing(bench_of(programs=alone)) as bench:
        assert bench.measure(candidate_of("embed", "prefill/16", num_warps=2), 1).is_timed


def test_a_partner_that_does_not_launch_the_kernel_is_none() -> None:
    _, baseline = plan_and_baseline()
    choices = {name: list(found) for name, found in baseline.choices.items()}
    at = next(index for index, choice in enumerate(choices["decode/2"]) if choice.kernel.name == GOOD.kernel)
    other = choices["decode/2"][at]
    choices["decode/2"][at] = replace(other, problem={**other.problem, "heads": 99})
    changed = replace(baseline, choices={name: tuple(found) for name, found in choices.items()})
    with closing(GpuBench(changed, Paper(), child_of("refuse"))) as bench:
        found = bench.measure(GOOD, 1)
    assert found.status is Status.REFUSED
    assert found.reason == ("its rows cannot be compared: decode/2 has no launch of combine_gate for this problem")


def test_unknown_problems_and_illegal_knobs_are_refused() -> None:
    compiler = Paper()
    bench = bench_of(compiler=compiler)
    found = [
        bench.measure(candidate, 1)
        for candidate in (
            replace(GOOD, problem={**GOOD.problem, "heads": 5}),
            replace(GOOD, program="decode/4"),
            replace(GOOD, knobs={**GOOD.knobs, "BLOCK_D": 33}),
        )
    ]
    assert [outcome.status for outcome in found] == [Status.REFUSED] * 3
    assert "no launch of combine_gate" in found[0].reason and "BLOCK_D=33 is not one of" in found[2].reason
    assert not compiler.asked


def test_what_does_not_compile_is_an_outcome_and_reaches_no_gpu() -> None:
    error = CompileError("Kernel CombineGate does not compile: ptxas: too many registers.")
    bench = bench_of("refuse", Paper({"combine_gate.py.jinja": error}))
    found = bench.measure(GOOD, 1)
    assert (found.status, found.reason) == (Status.NOT_COMPILED, str(error))
    scratch = replace(COMPILED, global_scratch_bytes=64)
    found = bench_of("refuse", Paper({"combine_gate.py.jinja": scratch})).measure(GOOD, 1)
    assert found.status is Status.NOT_COMPILED and "wants scratch memory" in found.reason


def test_registers_and_spills_are_there_for_the_search() -> None:
    bench = bench_of("refuse")
    assert [(artifact.registers, artifact.spill_bytes) for artifact in bench.facts(GOOD)] == [(32, 0)]
    assert bench.facts(replace(GOOD, program="decode/4")) == ()


def test_a_candidate_that_hangs_is_killed_and_the_next_one_measured() -> None:
    hanging = Paper({"embed.py.jinja": replace(COMPILED, key="hangs")})
    with closing(bench_of(compiler=hanging)) as bench:
        began = time.monotonic()
        found = bench.measure(OTHER, 1)
        assert (found.status, found.reason) == (Status.HUNG, "the candidate took more than 0.5 s and was killed")
        assert time.monotonic() - began < 15
        assert bench.measure(GOOD, 1).is_timed
        assert bench._child.starts == 2


def test_a_crash_is_an_outcome_with_the_last_words() -> None:
    crashing = Paper({"embed.py.jinja": replace(COMPILED, key="crashes")})
    with closing(bench_of(compiler=crashing)) as bench:
        found = bench.measure(OTHER, 1)
        assert found.status is Status.CRASHED
        assert found.reason == "the measuring process was killed by SIGSEGV, its last words: CUDA_ERROR_ILLEGAL_ADDRESS"
        assert bench.measure(GOOD, 1).is_timed and bench._child.starts == 2


def test_steps_that_fail_take_no_other_with_them() -> None:
    answers = {
        "embed.py.jinja": replace(COMPILED, key="crashes"),
        "argmax.py.jinja": CompileError("No registers left."),
    }
    with closing(bench_of(compiler=Paper(answers))) as bench:
        sets = [(), (GOOD,), (GOOD, OTHER), (candidate_of("argmax", num_warps=2),)]
        found = bench.measure_steps("decode/1", sets, 5)
    statuses = [Status.TIMED, Status.TIMED, Status.CRASHED, Status.NOT_COMPILED]
    assert [outcome.status for outcome in found] == statuses
    assert [outcome.repeats for outcome in found[:2]] == [5, 5]


def test_a_process_whose_gpu_is_lost_is_started_again() -> None:
    with closing(bench_of("lost")) as bench:
        assert [bench.measure(GOOD, 1).status for _ in range(2)] == [Status.TIMED] * 2
        assert bench._child.starts == 2


def test_a_process_that_follows_another_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU may not have got its memory back from the one before."""
    monkeypatch.setattr("lynnc.autotune.childprocess.PAUSE_SECONDS", 0.0)
    modes = iter(["lost", "refuse", "refuse", "answer"])
    child = ChildProcess(lambda connection: [sys.executable, str(CHILD), str(connection), next(modes)], QUICK)
    _, baseline = plan_and_baseline()
    with closing(GpuBench(baseline, Paper(), child)) as bench:
        assert [bench.measure(GOOD, 1).status for _ in range(2)] == [Status.TIMED] * 2
        assert next(modes, "") == ""


def test_nothing_is_raised_where_the_process_does_not_start() -> None:
    with closing(bench_of("refuse")) as bench:
        found = bench.measure(GOOD, 1)
    assert (found.status, found.reason) == (Status.CRASHED, "No CUDA driver was found on this machine.")


def test_closing_ends_everything_twice_without_harm() -> None:
    compiler = Paper()
    bench = bench_of(compiler=compiler)
    bench.measure(GOOD, 1)
    process = bench._child._process
    assert process is not None
    bench.close()
    bench.close()
    assert process.poll() is not None and compiler.is_closed


@pytest.mark.parametrize(("mode", "error"), [("silent", ChildHungError), ("refuse", ChildDiedError)])
def test_a_start_has_an_end_too(mode: str, error: type[Exception]) -> None:
    child = child_of(mode, replace(QUICK, start=3.0))
    with pytest.raises(error):
        child.start()
    assert child._process is None


def test_a_process_ends_with_its_parent() -> None:
    """Whatever it is doing: the parent was killed, and nobody else would end it."""
    child = (
        "import os, threading, time; from lynnc.autotune.benchchild import watch\n"
        "threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start(); print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"process = subprocess.Popen([sys.executable, '-P', '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "process.stdout.readline(); print(process.pid, flush=True); time.sleep(3600)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    ends = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_interrupted_task_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bench_of()) as bench:
        assert bench.measure(GOOD, 1).is_timed

        def interrupted(self: ChildProcess, seconds: float, what: str) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ChildProcess, "_wait", interrupted)
            bench.measure(OTHER, 1)
        assert bench._child._process is None
        assert bench.measure(OTHER, 9).repeats == 9


def test_a_bench_whose_plan_does_not_compile_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them have begun before there is a plan."""
    begun: list[int] = []
    begin = ChildProcess.begin

    def watched(self: ChildProcess) -> None:
        begin(self)
        assert self._process is not None
        begun.append(self._process.pid)

    def compiled(*_: object) -> object:
        assert len(begun) == 1 and is_running(begun[0])
        raise CompileError("No registers left.")

    monkeypatch.setattr(ChildProcess, "begin", watched)
    monkeypatch.setattr("lynnc.autotune.gpubench.compile_baseline", compiled)
    with pytest.raises(CompileError, match="No registers left"):
        open_gpu_bench(DENSE.spec, REQUEST, Store(tmp_path))
    assert not is_running(begun[0])


def source(text: str = "    tl.store(x, tl.load(x) + BLOCK)\n", label: str = "") -> KernelSource:
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x, BLOCK: tl.constexpr):\n"
    return KernelSource("plain", head + text, (("x", "*fp32"),), (("BLOCK", 64),), find_target("sm_90"), label=label)


def test_kernels_are_compiled_ahead_once_and_their_failures_are_results(tmp_path: Path) -> None:
    good, bad = source(), source("    tl.store(y, 1)\n", "a bad one")
    with closing(CompileAhead(Store(tmp_path), jobs=1)) as ahead:
        futures = [ahead.start(item) for item in (good, bad, good)]
        artifact, error, again = (future.result(120) for future in futures)
        assert isinstance(artifact, Artifact) and artifact.registers > 0 and artifact is again
        assert isinstance(error, CompileError) and "a bad one" in str(error) and "y is not defined" in str(error)
        assert ahead.start(source(label="from the store")).result(5) == artifact


def test_a_plan_is_compiled_by_processes_that_are_there_already(tmp_path: Path) -> None:
    good, other = source(), source("    tl.store(x, 2.0)\n")
    with closing(CompileAhead(Store(tmp_path), jobs=2)) as ahead:
        ahead.warm_up()
        processes = [worker._process.pid for worker in ahead._pool._started]
        assert set(ahead.compile_all([good, other, good])) == {good.key, other.key}
        assert [worker._process.pid for worker in ahead._pool._started] == processes and len(processes) == 2
        with pytest.raises(CompileError, match="a bad one"):
            ahead.compile_all([good, source("    tl.store(y, 1)\n", "a bad one")])


def test_a_process_is_told_what_to_load_once_there_is_a_plan() -> None:
    """It is at work before that; a second one is told the same."""
    told: list[str] = []

    def greeting() -> str:
        told.append("now")
        return encode(Opening("a.plan", Conditions()))

    child = ChildProcess(lambda connection: [sys.executable, str(CHILD), str(connection), "greeted"], QUICK, greeting)
    child.begin()
    assert child._process is not None and not told
    with closing(GpuBench(plan_and_baseline()[1], Paper(), child)) as bench:
        assert bench.measure(GOOD, 1).is_timed and bench.measure(OTHER, 1).is_timed and len(told) == 1
        child.kill()
        assert bench.measure(GOOD, 1).is_timed and len(told) == 2


def test_a_compilation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with closing(CompileAhead(Store(tmp_path), jobs=1, seconds=0.01)) as ahead:
        error = ahead.start(source()).result(30)
        assert isinstance(error, CompileError) and "it took the compiler more than 0.01 s" in str(error)


def test_closing_a_compiler_ends_what_it_compiles(tmp_path: Path) -> None:
    ahead = CompileAhead(Store(tmp_path), jobs=1)
    futures = [ahead.start(source(f"    tl.store(x, {number})\n")) for number in range(3)]
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 15
    assert all(future.done() for future in futures)
    assert isinstance(futures[0].result(), CompileError)


def test_a_bench_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of("refuse")
    monkeypatch.setattr("lynnc.autotune.gpubench.ChildProcess", lambda *_: child)
    monkeypatch.setattr("lynnc.autotune.gpubench.compile_baseline", lambda *_: (_Compiled(), plan_and_baseline()[1]))
    monkeypatch.setattr("lynnc.autotune.gpubench.save_plan", lambda *_: None)
    with pytest.raises(DeviceError, match="No CUDA driver"):
        open_gpu_bench(DENSE.spec, REQUEST, Store(tmp_path))


class _Compiled:
    plan, files = plan_and_baseline()[0], {}
