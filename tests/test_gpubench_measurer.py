"""What the tuner's measuring process finds right and wrong, on a simulated device.

The plan's own launches run by their meaning, those of candidates in Triton's interpreter, with faults planted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection, Pipe

import harness
import pytest
from benching import (
    CONDITIONS,
    PROGRAMS,
    Bed,
    Launched,
    candidate_of,
    kernel_task,
    plan_and_baseline,
    simulated_bed,
    step_task,
)
from simulated import LAUNCH_SECONDS

from lynnc.autotune.benchchild import serve
from lynnc.autotune.benchmessages import (
    CANDIDATE,
    DONE,
    FAILED,
    PHASE,
    READY,
    SETUP,
    Said,
    said_of,
    said_text,
    task_of,
    task_text,
)
from lynnc.autotune.stage import write_bytes
from lynnc.autotune.trial import Candidate, Outcome, Status
from lynnc.bench.kernels import own_bytes
from lynnc.errors import DeviceError

GOOD = candidate_of("combine_gate", BLOCK_D=32)
"""A kernel that costs Triton's interpreter little."""
TWO_ROWS_BYTES = 2 * 2 * 4 * 64
"""What it writes in two rows: BF16 of 4 heads of 64."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Bed]:
    if harness.device() != "cpu":
        pytest.skip("the simulated device needs Triton's interpreter: run without --device cuda")
    with simulated_bed() as bed:
        yield bed


@pytest.fixture
def bed(shared: Bed) -> Iterator[Bed]:
    """The same for all tests, without what one of them planted."""
    yield shared
    shared.runner.spoil, shared.runner.candidates = None, 0
    shared.parts.clear()


def outcome(bed: Bed, candidate: Candidate, partner: str = "decode/2") -> Outcome:
    (found,) = bed.measurer.answer(kernel_task(candidate, partner)).outcomes
    return found


@pytest.mark.parametrize(
    "candidate",
    [
        GOOD,
        candidate_of("gdn_step", num_warps=2),
        candidate_of("attention_step", BLOCK_T=16),
        candidate_of("argmax", num_warps=2),
        candidate_of("embed", num_warps=2),
        candidate_of("embed", "decode/2", num_warps=2),
    ],
    ids=lambda candidate: f"{candidate.kernel}-{candidate.program}",
)
def test_a_right_candidate_is_timed(bed: Bed, candidate: Candidate) -> None:
    partner = "decode/2" if candidate.program == "decode/1" else "decode/1"
    found = outcome(bed, candidate, partner)
    assert found == Outcome(Status.TIMED, *[pytest.approx(LAUNCH_SECONDS)] * 3, repeats=2)
    assert bed.parts == [SETUP, *[CANDIDATE] * 4], "once for the check, for the chain, and for each of its runs"


def test_launches_of_a_prompt_are_checked_too(bed: Bed) -> None:
    candidate = candidate_of("embed", "prefill/16", num_warps=2)
    assert outcome(bed, candidate, "").is_timed
    bed.runner.spoil = lambda launched: fill(launched, "out", 0x3F)
    assert "with an error of" in outcome(bed, candidate, "").reason


def fill(launched: Launched, parameter: str, byte: int, count: int = 8) -> None:
    launched.bytes_of(parameter, count)[:] = bytes([byte]) * count


def flip(launched: Launched, parameter: str, at: int) -> None:
    """Changes the last bit of a BF16 value."""
    launched.bytes_of(parameter, at + 1)[at] ^= 1


def test_values_that_are_not_finite_are_wrong(bed: Bed) -> None:
    bed.runner.spoil = lambda launched: fill(launched, "out", 0xFF, 2)
    found = outcome(bed, GOOD)
    assert found.status is Status.WRONG
    assert found.reason.endswith("with values that are not finite") and "layers.3." in found.reason


def test_values_far_from_the_reference_are_wrong(bed: Bed) -> None:
    bed.runner.spoil = lambda launched: fill(launched, "out", 0x40, 64)
    found = outcome(bed, GOOD)
    assert found.status is Status.WRONG and "where 0.02 is allowed" in found.reason


def test_a_launch_that_writes_nothing_is_wrong(bed: Bed) -> None:
    """It would be right if what the plan's own kernel left were still there."""
    assert outcome(bed, GOOD).is_timed
    run_kernels = bed.runner.device.run_kernels
    bed.runner.device.run_kernels = lambda calls: None  # type: ignore[method-assign]
    try:
        assert outcome(bed, GOOD).status is Status.WRONG
    finally:
        bed.runner.device.run_kernels = run_kernels  # type: ignore[method-assign]


def test_other_bits_in_another_run_are_wrong(bed: Bed) -> None:
    bed.runner.spoil = lambda launched: flip(launched, "out", 0) if launched.before == 2 else None
    found = outcome(bed, GOOD)
    assert found.status is Status.WRONG and found.reason.endswith("in run 3 than in run 1")


def test_a_row_that_depends_on_its_neighbours_is_wrong(bed: Bed) -> None:
    def spoil(launched: Launched) -> None:
        if launched.call.grid[0] == 2:
            flip(launched, "out", TWO_ROWS_BYTES // 2)

    bed.runner.spoil = spoil
    found = outcome(bed, GOOD)
    assert found.status is Status.WRONG and "of row 1 in 2 rows than in one" in found.reason
    assert outcome(bed, GOOD, partner="").is_timed, "no other check sees it"


def test_state_that_depends_on_the_rows_is_wrong(bed: Bed) -> None:
    candidate = candidate_of("gdn_step", num_warps=2)
    launch = kernel_task(candidate).variant.launches[0]
    state = next(argument.parameter for argument in launch.args if argument.kind == "state")

    def spoil(launched: Launched) -> None:
        if launched.integer("rows") == 2:
            flip(launched, state, 0)

    bed.runner.spoil = spoil
    found = outcome(bed, candidate)
    assert found.status is Status.WRONG and "in 2 rows than row by row" in found.reason


def test_a_refused_launch_is_a_crash_and_the_next_candidate_is_measured(bed: Bed) -> None:
    def spoil(launched: Launched) -> None:
        raise DeviceError("Launching layers.3.combine failed: launch out of resources.")

    bed.runner.spoil = spoil
    said = bed.measurer.answer(kernel_task(GOOD))
    assert said.outcomes == (
        Outcome(Status.CRASHED, reason="Launching layers.3.combine failed: launch out of resources."),
    )
    assert not said.is_lost
    bed.runner.spoil = None
    assert outcome(bed, GOOD).is_timed


def test_a_gpu_that_is_lost_is_said(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise DeviceError("Running a step failed: illegal address.")

    bed.runner.spoil = lambda launched: monkeypatch.setattr(bed.executor.device, "synchronize", lost)
    said = bed.measurer.answer(kernel_task(GOOD))
    assert said.outcomes[0].status is Status.CRASHED and said.is_lost


def test_a_wrong_kernel_that_spoils_weights_is_said(bed: Bed) -> None:
    """Nothing that is measured afterwards in the same memory would mean anything."""
    candidate = candidate_of("embed", num_warps=2)
    launch = kernel_task(candidate).variant.launches[0]
    weight = next(argument for argument in launch.args if argument.kind == "weight")
    (size,) = (array.bytes for array in bed.executor.plan.weights[weight.name].arrays)
    saved: list[bytes] = []

    def spoil(launched: Launched) -> None:
        memory = launched.bytes_of(weight.parameter, size)
        saved.append(bytes(memory))
        memory[:] = bytes([0x3F]) * size
        bed.runner.meaning.values.clear()
        fill(launched, "out", 0xFF)

    bed.runner.spoil = spoil
    said = bed.measurer.answer(kernel_task(candidate))
    address = bed.executor.memory.addresses.weights[weight.name, weight.array]
    write_bytes(bed.executor, address, bytearray(saved[0]))
    bed.runner.meaning.values.clear()
    assert said.outcomes[0].status is Status.WRONG and said.is_lost


def test_a_default_that_is_wrong_is_not_the_candidates_fault(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = candidate_of("argmax", "decode/2", num_warps=2)
    run_meaning = bed.runner._run_meaning

    def spoil(call) -> None:  # type: ignore[no-untyped-def]
        run_meaning(call)
        if call.op.startswith("argmax"):
            bed.runner.device.fill(bed.executor.memory.addresses.tensors["token"], 0x11, 8)

    monkeypatch.setattr(bed.runner, "_run_meaning", spoil)
    assert outcome(bed, candidate, "").reason.startswith("the plan's own kernel is not right: argmax leaves next_token")


def test_a_candidate_that_passed_is_only_timed(bed: Bed) -> None:
    bed.runner.spoil = lambda launched: fill(launched, "out", 0xFF)
    found = bed.measurer.answer(kernel_task(GOOD, is_checked=True, repeats=4)).outcomes[0]
    assert found.is_timed and found.repeats == 4


def test_nothing_stays_of_candidates(bed: Bed) -> None:
    """Neither memory nor kernels: a tuner measures thousands."""
    outcome(bed, GOOD)
    taken, kernels = bed.runner.device.taken, set(bed.runner.device.entries)
    for blocks in (16, 64):
        outcome(bed, candidate_of("combine_gate", BLOCK_D=blocks))
    assert bed.runner.device.taken == taken
    assert set(bed.runner.device.entries) == kernels == set(bed.executor.plan.kernels)


def test_only_the_tensors_of_one_kernel_have_memory_of_their_own(bed: Bed) -> None:
    plan, device = bed.executor.plan, bed.runner.device
    beside = device.taken - bed.executor.budget.gpu_bytes - 2 * device.facts.l2_bytes
    assert 0 < beside < sum(own_bytes(program) for program in plan.programs.values()) / 2


def test_steps_are_timed_in_turns(bed: Bed) -> None:
    orders: list[str] = []
    run = bed.runner.run

    def follow(calls) -> None:  # type: ignore[no-untyped-def]
        if len(calls) == len(bed.executor.plan.programs["decode/1"].launches):
            own = bed.executor.plan.kernels
            orders.append("plan" if all(call.kernel in own for call in calls) else "candidate")
        run(calls)

    bed.runner.device.runs = follow
    try:
        first, second = bed.measurer.answer(step_task([(), (GOOD,)])).outcomes
    finally:
        bed.runner.device.runs = run
    launches = len(bed.executor.plan.programs["decode/1"].launches)
    assert first == second == Outcome(Status.TIMED, *[pytest.approx(launches * LAUNCH_SECONDS)] * 3, repeats=3)
    turns = orders[-18:]
    assert turns == [*["plan"] * 3, *["candidate"] * 6, *["plan"] * 6, *["candidate"] * 3]


def test_a_step_without_finite_logits_is_wrong_and_the_other_is_timed(bed: Bed) -> None:
    bed.runner.spoil = lambda launched: fill(launched, "out", 0xFF, 64)
    first, second = bed.measurer.answer(step_task([(), (GOOD,)])).outcomes
    assert first.is_timed
    assert second == Outcome(Status.WRONG, reason="a step of decode/1 gives logits that are not finite")


def test_prompts_are_timed_as_steps_too(bed: Bed) -> None:
    (found,) = bed.measurer.answer(step_task([()], "prefill/16")).outcomes
    assert found.is_timed


def test_conditions_fit_the_model() -> None:
    plan, _ = plan_and_baseline()
    wide = type(CONDITIONS)(behind=100_000).fitted(plan)
    room = wide.room(plan, PROGRAMS)
    assert wide.behind < plan.longest_context == room.context and room.slots == 1


def test_messages_come_back_as_they_were() -> None:
    for task in (kernel_task(GOOD, "decode/2"), step_task([(), (GOOD,)])):
        assert task_of(task_text(task)) == task
    said = Said(DONE, outcomes=(Outcome(Status.HUNG, reason="slow"), Outcome(Status.TIMED, 1.0, 0.5, 2.0, 3)))
    assert said_of(said_text(said)) == said


def said_by(connection: Connection) -> Said:
    assert connection.poll(60), "nothing was said"
    return said_of(connection.recv_bytes().decode())


def answer_of(connection: Connection) -> Said:
    said = said_by(connection)
    while said.kind == PHASE:
        said = said_by(connection)
    assert said.kind == DONE
    return said


def test_a_process_answers_until_its_gpu_is_lost(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    serving = threading.Thread(target=serve, args=(theirs, lambda: bed.executor, CONDITIONS, "cpu"), daemon=True)
    with closing(ours):
        serving.start()
        assert said_by(ours).kind == READY
        ours.send_bytes(task_text(kernel_task(GOOD)).encode())
        assert answer_of(ours).outcomes[0].is_timed
        monkeypatch.setattr("lynnc.autotune.measurer.Measurer._is_lost", lambda self: True)
        bed.runner.device.fail_at = "embed"
        ours.send_bytes(task_text(kernel_task(candidate_of("embed", num_warps=2))).encode())
        assert answer_of(ours).is_lost
        serving.join(10)
    bed.runner.device.fail_at = ""
    assert not serving.is_alive()


def test_a_process_says_why_it_cannot_start() -> None:
    def refuse():  # type: ignore[no-untyped-def]
        raise DeviceError("No CUDA driver was found on this machine: plans run where an NVIDIA GPU is.")

    ours, theirs = Pipe()
    with closing(ours):
        serve(theirs, refuse, CONDITIONS, "cpu")
        said = said_by(ours)
    assert said.kind == FAILED and said.text.startswith("No CUDA driver")
