"""The tuner's bench on a GPU: a few candidates of kernels of lynn-mini, good ones and broken ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lynnc.artifact import Artifact
from lynnc.autotune.childprocess import Patience
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.gpubench import GpuBench, open_gpu_bench
from lynnc.autotune.trial import Candidate, Status
from lynnc.compile import KernelSource
from lynnc.compiler import Request
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.runtime.cudadevice import open_device
from lynnc.store import Store
from lynnc.target import find_target

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[1] / "models" / "lynn-mini" / "model.yaml"
PROGRAMS = ("decode/1", "decode/4", "prefill/64")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuBench]:
    with closing(open_device()) as device:
        target = find_target(str(device.facts.capability))
    request = Request(target, options=Options(programs=PROGRAMS))
    store, patience = Store(tmp_path_factory.mktemp("store")), Patience(candidate=5.0)
    conditions = Conditions(behind=101, behind_prompt=13)
    with closing(open_gpu_bench(load_model(str(MODEL)), request, store, 0, conditions, patience)) as found:
        yield found


def candidates_of(bench: GpuBench, program: str) -> list[Candidate]:
    """Every kernel and problem of a program with the plan's own knobs."""
    found: list[Candidate] = []
    for choice in bench.baseline.choices[program]:
        candidate = Candidate(program, choice.kernel.name, choice.problem, choice.knobs)
        if candidate not in found:
            found.append(candidate)
    return found


def other_knobs(bench: GpuBench, candidate: Candidate) -> Candidate:
    """The same with another number of warps that is legal."""
    for warps in (1, 2, 4, 8, 16):
        changed = replace(candidate, knobs={**candidate.knobs, "num_warps": warps})
        if warps != candidate.knobs["num_warps"] and not bench.baseline.refusal(changed):
            return changed
    return candidate


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_default_is_right_and_timed(bench: GpuBench, program: str) -> None:
    for candidate in candidates_of(bench, program):
        found = bench.measure(candidate, 3)
        assert found.is_timed, f"{candidate.kernel} {dict(candidate.problem)}: {found.reason}"
        assert 0 < found.least <= found.seconds <= found.greatest < 1e-2


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_knobs_have_an_outcome(bench: GpuBench, program: str) -> None:
    changed = [other_knobs(bench, candidate) for candidate in candidates_of(bench, program)]
    bench.prepare(changed)
    for candidate in changed:
        found = bench.measure(candidate, 3)
        assert found.is_timed or found.reason, candidate
        assert found.status not in (Status.HUNG, Status.CRASHED), f"{candidate.kernel}: {found.reason}"


def test_a_small_kernel_is_tuned(bench: GpuBench) -> None:
    default = next(item for item in candidates_of(bench, "decode/1") if item.kernel == "linear")
    tried = [replace(default, knobs={**default.knobs, "BLOCK_N": block}) for block in (4, 8, 16, 32)]
    found = [bench.measure(candidate, 5) for candidate in tried]
    assert all(outcome.is_timed for outcome in found), [outcome.reason for outcome in found]
    best = min(range(len(tried)), key=lambda index: found[index].seconds)
    steps = bench.measure_steps("decode/1", [[], [default], [tried[best]]], 7)
    assert all(step.is_timed for step in steps)
    own, same = steps[0], steps[1]
    assert same.seconds == pytest.approx(own.seconds, rel=0.1), "the same knobs, in turns"
    assert bench.facts(tried[best])[0].registers > 0


def test_steps_of_every_program_are_timed(bench: GpuBench) -> None:
    for program in PROGRAMS:
        (found,) = bench.measure_steps(program, [[]], 3)
        assert found.is_timed, found.reason


BROKEN = {
    "hangs": ("    while tl.load(position) >= 0:\n        tl.debug_barrier()\n", Status.HUNG),
    "crashes": ("    tl.store(position + (1 << 40), 1)\n", Status.CRASHED),
    "nothing": ("    pass\n", Status.WRONG),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_kernels_are_outcomes_and_the_next_candidate_is_measured(
    bench: GpuBench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a candidate's kernel gets another body, of the same parameters."""
    default = next(item for item in candidates_of(bench, "decode/1") if "position" in parameters(bench, item))
    candidate = other_knobs(bench, default)
    assert candidate != default
    bench._passed.clear()
    body, status = BROKEN[fault]
    compiler = bench._compiler
    start = compiler.start

    def broken(source: KernelSource):  # type: ignore[no-untyped-def]
        names = [*(name for name, _ in source.signature), *(f"{name}: tl.constexpr" for name, _ in source.constants)]
        head = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel({', '.join(names)}):\n"
        future = start(replace(source, text=head + body, pdl=False))
        assert isinstance(future.result(), Artifact), future.result()
        return future

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "start", broken)
        found = bench.measure(candidate, 1)
    assert found.status is status, found
    began = time.monotonic()
    assert bench.measure(default, 1).is_timed
    assert time.monotonic() - began < 60


def parameters(bench: GpuBench, candidate: Candidate) -> list[str]:
    """Names of a kernel's arguments."""
    return [arg.parameter for arg in bench.baseline.bound(candidate.program, [candidate]).launches[0].args]
