"""Which problems a model has, where they are measured, and where a budget goes."""

from __future__ import annotations

import pytest
from tuning import DEVICE, tasks

from lynnc.autotune.bounds import identity, least_bound, lower_bound
from lynnc.autotune.problems import Wanted, measured_programs, tasks_of, tasks_of_program
from lynnc.compiler import fused_graph
from lynnc.errors import OptionError
from lynnc.kernels.table import KERNELS, kernel_for
from lynnc.modelfile import load_model

ALL = ("decode/1", "decode/2", "decode/8", "prefill/16", "prefill/512", "prefill")


def test_decode_programs_are_one_and_long_prompts_come_before_short_ones():
    assert measured_programs(ALL) == ("decode/1", "prefill", "prefill/512", "prefill/16")
    assert measured_programs(("decode/8",)) == ("decode/1",)
    assert measured_programs(("prefill/64",)) == ("prefill/64",)


def test_a_decode_task_is_confirmed_in_every_decode_program_that_was_asked_for():
    found = {task.kernel.name: task for task in tasks(programs=ALL)}
    assert found["gdn_step"].program == "decode/1"
    assert found["gdn_step"].programs == ("decode/1", "decode/2", "decode/8")
    assert found["argmax"].programs[:3] == ("decode/1", "decode/2", "decode/8")
    (alone,) = tasks("gdn_step", programs=("decode/4",))
    assert (alone.program, alone.programs) == ("decode/1", ("decode/1", "decode/4"))


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "tiny-moe", "tiny-dense"])
def test_decode_programs_have_the_same_problems(model):
    """So one choice serves them all, and none is in a program of more rows alone."""
    spec = load_model(model)
    one, *others = (
        {task.key for task in tasks_of_program(fused_graph(spec, f"decode/{rows}"), DEVICE, 1024)}
        for rows in (1, 2, 4, 8)
    )
    assert one and all(other == one for other in others)


def test_every_launch_belongs_to_one_task():
    model = load_model("qwen3.6-35b-a3b")
    found = tasks_of(model, Wanted(DEVICE, ("decode/1",)))
    graph = fused_graph(model, "decode/1")
    assert sum(task.launches for task in found) == len(graph.ops)
    assert {task.kernel.name for task in found} == {kernel_for(graph, op).name for op in graph.ops}


def test_the_largest_share_comes_first_and_shares_make_a_whole():
    found = tasks_of(load_model("qwen3.6-35b-a3b"), Wanted(DEVICE, ALL))
    shares = [task.share for task in found]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
    assert found[0].kernel.name == "experts_up" and found[0].program == "decode/1"
    assert sum(task.share for task in found if task.program == "decode/1") == pytest.approx(0.5)


def test_a_problem_that_programs_share_is_one_task():
    found = {task.kernel.name: task for task in tasks(programs=ALL)}
    assert found["argmax"].program == "decode/1" and set(found["argmax"].programs) > {"prefill", "prefill/16"}
    assert found["rms_norm"].program == "prefill" and found["rms_norm"].programs == (
        "prefill",
        "prefill/512",
        "prefill/16",
    )
    gemms = [task for task in tasks("gemm", programs=ALL) if task.problem["n"] == 776]
    assert sorted(int(task.problem["rows"]) for task in gemms) == [16, 512, 2048]


def test_kernels_that_are_unknown_or_not_launched_are_refused():
    with pytest.raises(OptionError, match="no kernel lineal"):
        tasks("lineal")
    with pytest.raises(OptionError, match="--kernels gemm: decode/1 of this model do not launch it"):
        tasks("gemm")


def test_few_programs_cannot_be_as_fast_as_the_roofline():
    (task,) = (task for task in tasks("linear", model="qwen3.6-35b-a3b") if task.problem["n"] == 248320)
    default = task.default(DEVICE)
    bound = least_bound(task, DEVICE, 1024)
    assert lower_bound(task, default, DEVICE, 1024) == pytest.approx(bound)
    fewer = {**default, "PROGRAMS": 48}  # each multiprocessor could draw four shares of the bandwidth
    assert lower_bound(task, fewer, DEVICE, 1024) == pytest.approx(bound)
    (small,) = (task for task in tasks("linear", model="qwen3.6-35b-a3b") if task.problem["n"] == 2048)
    few = {**small.default(DEVICE), "BLOCK_N": 256}  # 8 programs on 132 multiprocessors
    assert lower_bound(small, few, DEVICE, 1024) > 4 * least_bound(small, DEVICE, 1024)


def test_knobs_that_make_the_same_kernel_have_one_identity():
    (task,) = tasks("embed")
    default = task.default(DEVICE)  # 128 columns: wider blocks change nothing
    assert identity(task, default) == identity(task, {**default, "BLOCK_D": 4096})
    assert identity(task, default) != identity(task, {**default, "num_warps": 1})


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b", "tiny-moe", "tiny-dense", "qwen3.5-9b"])
def test_defaults_are_legal(model):
    for task in tasks_of(load_model(model), Wanted(DEVICE, ALL)):
        assert task.kernel.refusal(task.problem, task.default(DEVICE), DEVICE.target) is None, task.name


def test_spaces_refuse_what_cannot_be_held():
    kernels = {kernel.name: kernel for kernel in KERNELS}
    problem = {"formats": "nvfp4", "k": 4096, "n": 4096, "norm": 0, "residual": 0}
    knobs = {"BLOCK_N": 8, "BLOCK_K": 4096, "PROGRAMS": 0, "num_warps": 8, "num_stages": 1, "maxnreg": 0}
    linear, target = kernels["linear"], DEVICE.target
    assert linear.refusal(problem, knobs, target) is None
    assert "512 threads of 168 registers" in str(
        linear.refusal(problem, {**knobs, "num_warps": 16, "maxnreg": 168}, target)
    )
    assert "weights a thread are more than 512" in str(linear.refusal(problem, {**knobs, "BLOCK_N": 64}, target))
    wide = {**problem, "formats": "bf16"}
    assert "fill 256 registers" in str(linear.refusal(wide, {**knobs, "BLOCK_K": 16384, "BLOCK_N": 32}, target))
    gemm = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 2, "num_stages": 2}
    rows = {**problem, "rows": 2048}
    assert "take 256 registers" in str(kernels["gemm"].refusal(rows, gemm, target))
    assert "shared memory" in str(kernels["gemm"].refusal(rows, {**gemm, "BLOCK_K": 1024}, target))
    grouped = {"format": "nvfp4", "k": 2048, "n": 1024, "order": "natural", "shared": 1, "slots": 8, "tile": 64}
    tiles = {"BLOCK_N": 64, "BLOCK_K": 512, "SWAP": 1, "num_warps": 4, "num_stages": 5}
    assert "shared memory" in str(kernels["grouped_up"].refusal(grouped, tiles, target))
    sums = {**tiles, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 1, "num_warps": 1}
    assert "take 512 registers" in str(kernels["grouped_up"].refusal(grouped, sums, target))
