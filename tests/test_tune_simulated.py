"""Ranking without a device: machine code read, times predicted, and how two rankings are compared."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tuning import tasks

from lynnc.artifact import Artifact
from lynnc.autotune.gpubench import Builds
from lynnc.autotune.predict import PASS_SECONDS, Build, paired, predict, rank_correlation, resident_blocks
from lynnc.autotune.problems import Wanted, tasks_of
from lynnc.autotune.sass import LoopMix, mix_of, parse
from lynnc.autotune.search import candidate_of
from lynnc.autotune.simulatedbench import open_simulated_bench, predicted_and_measured
from lynnc.autotune.sweep import Tried
from lynnc.autotune.trial import Outcome, Status
from lynnc.compiler import Request
from lynnc.errors import CompileError
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.store import Store
from lynnc.target import find_device

LISTING = """
        Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                  /* 0x0000df00ff017b82 */
                                                                            /* 0x000ff00000000800 */
        /*0010*/              @!P0 EXIT ;                                   /* 0x000000000000094d */
        /*0020*/                   LDG.E.128 R12, desc[UR18][R32.64] ;      /* 0x00000012200c7981 */
        /*0030*/              @!P1 LDG.E R16, desc[UR18][R30.64] ;          /* 0x000000121e109981 */
        /*0040*/                   LDG.E.64 R18, desc[UR18][R30.64+0x8] ;   /* 0x000000121e109981 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;    /* 0x000000121e109981 */
        /*0060*/               @P3 BRA 0x30 ;                               /* 0xffffffe9090c7547 */
        /*0070*/                   NOP ;                                    /* 0x0000000000007918 */
        /*0080*/               @P2 BRA 0x20 ;                               /* 0xffffffe9090c7547 */
        /*0090*/                   EXIT ;                                   /* 0x000000000000794d */
        /*00a0*/                   BRA 0xa0;                                /* 0xfffffffc00fc7947 */
"""
ARTIFACT = Artifact(
    key="k",
    symbol="kernel",
    arch="sm_90a",
    num_warps=4,
    threads=128,
    shared_bytes=0,
    registers=64,
    spill_bytes=0,
    global_scratch_bytes=0,
    global_scratch_align=1,
    profile_scratch_bytes=0,
    profile_scratch_align=1,
    pdl=True,
    parameters=(),
    triton="3.9.0",
    ptxas="13.4",
    cubin_sha256="",
    ptx_sha256="",
)
MIX = LoopMix(instructions=100, load_bytes=64, products=0, is_loop=True)
H200 = find_device("h200")


@pytest.fixture(scope="module")
def task():
    (found,) = (task for task in tasks("linear", model="qwen3.6-35b-a3b") if task.problem["n"] == 12352)
    return found


def test_a_listing_is_read_with_its_innermost_loop():
    code = parse(LISTING)
    assert [line.kind for line in code].count("LDG") == 3 and code[-1].target == 0xA0
    assert mix_of(code) == LoopMix(instructions=4, load_bytes=12, products=1, is_loop=True)
    assert mix_of(code[:6]) == LoopMix(instructions=6, load_bytes=28, products=1, is_loop=False)


def test_a_multiprocessor_holds_as_many_blocks_as_its_scarcest_resource_allows():
    assert resident_blocks(ARTIFACT, H200) == 8  # 65,536 registers by 64 times 128
    assert resident_blocks(replace(ARTIFACT, registers=20), H200) == 16  # 2,048 threads
    assert resident_blocks(replace(ARTIFACT, shared_bytes=100_000), H200) == 2
    assert resident_blocks(replace(ARTIFACT, registers=20), find_device("spark")) == 12
    assert resident_blocks(replace(ARTIFACT, threads=1024, registers=128), H200) == 0


def seconds(task, artifact=ARTIFACT, mix=MIX, programs=396):
    return predict(task, task.default(H200), Build(artifact, mix, programs), H200).seconds


def test_what_wastes_a_gpu_takes_longer(task):
    usual = seconds(task)
    assert usual >= task.estimate.memory_s
    assert seconds(task, programs=66) > usual  # half of the multiprocessors idle
    assert seconds(task, replace(ARTIFACT, spill_bytes=400)) > usual
    assert seconds(task, mix=replace(MIX, load_bytes=4)) > usual  # too few bytes in flight
    assert seconds(task, mix=replace(MIX, instructions=4000)) > usual
    assert seconds(task, replace(ARTIFACT, registers=255), replace(MIX, load_bytes=8)) > seconds(
        task, mix=replace(MIX, load_bytes=8)
    )


def test_passes_that_follow_each_other_wait_for_their_loads_unless_several_are_under_way(task):
    """What made gemm's smallest blocks look fastest: 32 passes of little work each."""
    knobs = {**task.default(H200), "BLOCK_K": 64, "num_stages": 1}
    mix = LoopMix(instructions=20, load_bytes=64, products=8, is_loop=True)
    waits = [
        predict(task, {**knobs, **changed}, Build(ARTIFACT, mix, programs=132), H200).wait_s
        for changed in ({}, {"num_stages": 4}, {"BLOCK_K": 2048})
    ]
    assert waits == pytest.approx([32 * PASS_SECONDS, 8 * PASS_SECONDS, PASS_SECONDS])


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 90)]) == pytest.approx(1)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert rank_correlation([(1, 2), (2, 1), (3, 4), (4, 3)]) == pytest.approx(0.6)
    assert rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(3**0.5 / 2)  # ties share their place
    assert rank_correlation([(1, 1)]) is None and rank_correlation([(1, 1), (1, 2)]) is None


def test_only_what_has_both_times_is_paired():
    def timed(value: float) -> Outcome:
        return Outcome(Status.TIMED, value, value, value, 1)

    predicted = {"a": timed(1), "b": timed(2), "c": Outcome(Status.NOT_COMPILED)}
    measured = {"a": timed(10), "c": timed(30), "d": timed(40)}
    assert paired(predicted, measured) == ((1, 10),)


def test_candidates_for_a_device_that_is_not_here_are_compiled_and_ranked(tmp_path: Path):
    spark, model = find_device("spark"), load_model("tiny-moe")
    found = tasks_of(model, Wanted(spark, ("decode/1",), ("embed",)))
    request = Request(spark.target, spark, Options(programs=("decode/1",)))
    (task,) = found
    default = task.default(spark)
    narrow = candidate_of(task, {**default, "num_warps": 1})
    with closing(open_simulated_bench(model, request, Store(tmp_path), found, 1024)) as bench:
        bench.prepare([candidate_of(task, default), narrow])
        first, second = bench.measure(candidate_of(task, default), 5), bench.measure(narrow, 5)
        assert first.is_timed and second.is_timed and first == bench.measure(candidate_of(task, default), 20)
        assert first.seconds > task.estimate.launch_s
        (step,) = bench.measure_steps("decode/1", [[narrow]], 3)
        assert step.seconds == pytest.approx(second.seconds)
        illegal = bench.measure(candidate_of(task, {**default, "num_warps": 3}), 1)
        assert illegal.status is Status.REFUSED and "num_warps=3" in illegal.reason
        tried = [
            Tried(0, default, replace(first, seconds=5e-6), "default"),
            Tried(1, narrow.knobs, replace(second, seconds=4e-6), "sampler"),
            Tried(2, narrow.knobs, Outcome(Status.WRONG), "sampler"),
        ]
        pairs = predicted_and_measured(task, tried, bench)
        assert [measured for _, measured in pairs] == [5e-6, 4e-6]
        assert pairs[0][0] == first.seconds


def test_steps_of_more_rows_are_predicted_by_their_own_bytes(tmp_path: Path):
    spark, model, programs = find_device("spark"), load_model("tiny-moe"), ("decode/1", "decode/8")
    found = tasks_of(model, Wanted(spark, programs, ("experts_up",)))
    request = Request(spark.target, spark, Options(programs=programs))
    (task,) = found
    candidate = candidate_of(task, task.default(spark))
    with closing(open_simulated_bench(model, request, Store(tmp_path), found, 1024)) as bench:
        one, eight = (
            bench.measure_steps(program, [[replace(candidate, program=program)]], 3)[0] for program in programs
        )
    assert one.is_timed and eight.seconds > one.seconds


def test_what_does_not_compile_is_an_outcome(tmp_path: Path):
    class Failing:
        def start(self, source):
            return self

        def result(self):
            return CompileError("ptxas gave up")

        def close(self):
            """Nothing runs."""

    spark, model = find_device("spark"), load_model("tiny-moe")
    found = tasks_of(model, Wanted(spark, ("decode/1",), ("embed",)))
    request = Request(spark.target, spark, Options(programs=("decode/1",)))
    with closing(open_simulated_bench(model, request, Store(tmp_path), found, 1024)) as bench:
        bench._compiler.close()
        bench._compiler = Failing()
        bench._builds = Builds(bench._baseline, bench._compiler)
        outcome = bench.measure(candidate_of(found[0], found[0].default(spark)), 1)
    assert outcome == Outcome(Status.NOT_COMPILED, reason="ptxas gave up")
