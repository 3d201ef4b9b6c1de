"""The whole runtime on a simulated device: tokens against ``transformers``, and the rules of its memory and errors.

Steps run by their meaning (``meaning.py``); ``test_executor_kernels.py`` runs a few with the generated kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from executing import (
    HostWeights,
    executor_for,
    executor_on,
    follow_executor,
    logits_of,
    meaning_device,
    plan_for,
)
from reference import FAMILIES, LIMIT, PROMPT, Case, judged, make
from runners import CONTEXT, check
from simulated import SimulatedDevice, record_only

from lynnc.errors import DeviceError, OptionError, PlanError, WeightError
from lynnc.plan import Plan
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Device
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import check_architecture
from lynnc.runtime.loading.weightsource import BorrowedWeights, PlacedWeights, Progress, arrays_of, packed_bytes
from lynnc.runtime.rows import PADDING_ROW, Row, rows_of

TINY = Case("tiny-moe")
FEW = 6
"""Decode steps that are enough to see a sequence go on."""


@pytest.fixture(scope="module")
def executor() -> Executor:
    return executor_for(TINY, slots=2)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "executor" in request.fixturenames:
        executor = request.getfixturevalue("executor")
        executor.reset(0)
        executor.reset(1)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_a_prompt_and_decode_steps_give_the_logits_of_transformers(case: Case) -> None:
    run = judged(case)
    found = follow_executor(executor_for(case), run.tokens, PROMPT)
    check(found, run, LIMIT, str(case))


def test_decoding_feeds_itself_as_steps_of_the_same_tokens_do(executor: Executor) -> None:
    prompt = judged(TINY).tokens[:PROMPT]
    first = executor.prefill(prompt)
    tokens = [first, *executor.decode(FEW)]
    logits = logits_of(executor)
    executor.reset()
    assert executor.prefill(prompt) == first
    chosen = [executor.step([Row(token, PROMPT + index)])[0] for index, token in enumerate(tokens[:-1])]
    assert chosen == tokens[1:]
    assert torch.equal(logits_of(executor), logits)
    assert executor.lengths == [PROMPT + FEW, 0]


def test_a_streamed_sequence_is_the_decoded_one_and_slots_do_not_touch(executor: Executor) -> None:
    prompts = judged(TINY).tokens[:PROMPT], judged(TINY).tokens[3:8]
    alone = []
    for slot, prompt in enumerate(prompts):
        alone.append([executor.prefill(prompt, slot), *executor.decode(4, slot)])
        executor.reset(slot)
    mixed = [[executor.prefill(prompt, slot)] for slot, prompt in enumerate(prompts)]
    for _ in range(2):
        for slot in (0, 1):
            mixed[slot] += executor.stream(2, slot)
    assert mixed == alone


def test_a_prompt_in_pieces_is_the_whole_prompt(executor: Executor) -> None:
    prompt = judged(TINY).tokens[:PROMPT]
    first, logits = executor.prefill(prompt), logits_of(executor)
    executor.reset()
    executor.prefill(prompt[:4])
    assert executor.prefill(prompt[4:]) == first
    assert torch.allclose(logits_of(executor), logits, atol=0.05)


def test_rows_of_a_step_are_single_rows_and_padding_changes_nothing(executor: Executor) -> None:
    tokens = judged(TINY).tokens
    executor.prefill(tokens[:PROMPT])
    singly, chosen = [], []
    for index in range(3):
        chosen += executor.step([Row(tokens[PROMPT + index], PROMPT + index)])
        singly.append(logits_of(executor))
    executor.reset()
    executor.prefill(tokens[:PROMPT])
    assert executor.step([*rows_of(tokens[PROMPT : PROMPT + 3], PROMPT), PADDING_ROW])[:3] == chosen
    assert torch.allclose(logits_of(executor, 3), torch.cat(singly), atol=0.05)
    assert executor.lengths == [PROMPT + 3, 0]


def test_launches_one_by_one_are_the_graph(executor: Executor) -> None:
    tokens = judged(TINY).tokens
    executor.prefill(tokens[:PROMPT])
    states, row = executor.memory.save_states(), Row(tokens[PROMPT], PROMPT)
    executor.launch(executor.program("decode/1"), [row])
    logits, after = logits_of(executor), executor.memory.save_states()
    executor.memory.restore_states(states)
    executor.step([row])
    assert torch.equal(logits_of(executor), logits)
    assert executor.memory.save_states() == after != states


def test_a_prompt_may_lie_on_the_gpu(executor: Executor) -> None:
    prompt = judged(TINY).tokens[:4]
    first = executor.prefill(prompt)
    executor.reset()
    values = torch.tensor(prompt, dtype=torch.int32)
    address = executor.device.allocate(values.nbytes)
    executor.device.upload(address, values.data_ptr(), values.nbytes)
    assert executor.prefill(Lent(address, "<i4", (4,))) == first  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="must be dense I32, not <i8"):
        executor.prefill(Lent(address, "<i8", (2,)))  # type: ignore[arg-type]


def test_what_states_hold_may_come_from_outside(executor: Executor) -> None:
    tokens = judged(TINY).tokens
    first = executor.prefill(tokens[:PROMPT])
    states = executor.memory.save_states()
    expected = executor.decode(3)
    executor.reset()
    executor.prefill(tokens[3:8])
    executor.memory.restore_states(states)
    executor.assume(PROMPT, first)
    assert executor.decode(3) == expected


def test_only_the_first_launch_of_a_step_waits_for_the_step_before(executor: Executor) -> None:
    program = executor.program("decode/1")
    flags = [call.has_pdl for call in executor.calls(program, 1)]
    assert flags == [False] + [True] * (len(flags) - 1)


def test_weights_exist_once_and_nothing_is_taken_that_was_not_counted() -> None:
    executor = executor_for(TINY)
    device = executor.device
    assert isinstance(device, SimulatedDevice) and device.taken == executor.budget.gpu_bytes
    weights = sum(need.bytes for need in executor.budget.needs if need.what == "weights")
    assert weights == packed_bytes(executor.plan)
    embed = make(TINY).packed["embed", "data"].contiguous().view(torch.uint8).flatten().numpy().tobytes()
    memory = b"".join(block.view.tobytes() for block in [*device.blocks, *device.pinned])
    assert memory.count(embed) == 1
    executor.prefill(judged(TINY).tokens[:3])
    executor.decode(1)
    assert device.taken == executor.budget.gpu_bytes


@dataclass(frozen=True)
class Refused:
    """A call that must be refused, and words of its message."""

    label: str
    error: type[Exception]
    words: str

    def __str__(self) -> str:
        return self.label


REFUSED = (
    Refused("no prompt", OptionError, "holds no sequence"),
    Refused("no such slot", OptionError, "no slot 2"),
    Refused("no such token", OptionError, "384 is no token"),
    Refused("no tokens", OptionError, "no tokens"),
    Refused("too long", OptionError, "do not fit a context of 64"),
    Refused("too many rows", OptionError, "1 to 8 rows, not 9"),
    Refused("program not compiled", PlanError, "not decode/3"),
    Refused("no such tensor", OptionError, "no input, output or state 'x'"),
)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_is_refused_before_anything_runs(executor: Executor, case: Refused) -> None:
    calls = {
        "no prompt": lambda: executor.decode(1),
        "no such slot": lambda: executor.prefill([1], slot=2),
        "no such token": lambda: executor.prefill([1, 384]),
        "no tokens": lambda: executor.prefill([]),
        "too long": lambda: executor.prefill([1] * CONTEXT),
        "too many rows": lambda: executor.step([PADDING_ROW] * 9),
        "program not compiled": lambda: executor.step([PADDING_ROW] * 3),
        "no such tensor": lambda: executor.tensor("x"),
    }
    assert isinstance(executor.device, SimulatedDevice)
    launched = len(executor.device.launched)
    with pytest.raises(case.error, match=case.words):
        calls[case.label]()
    assert len(executor.device.launched) == launched


def test_a_refused_stream_leaves_other_slots_alone(executor: Executor) -> None:
    prompt = judged(TINY).tokens[:4]
    first = executor.prefill(prompt, slot=1)
    expected = executor.decode(2, slot=1)
    executor.reset(1)
    assert executor.prefill(prompt, slot=1) == first
    executor.prefill(prompt)
    with pytest.raises(OptionError, match="do not fit"):
        next(executor.stream(CONTEXT))
    with pytest.raises(OptionError, match="no slot 2"):
        next(executor.stream(1, slot=2))
    assert executor.decode(2, slot=1) == expected


def test_only_what_was_loaded_can_be_run_and_lent() -> None:
    plan, room = plan_for(TINY), Room(1, CONTEXT, programs=("decode/1",))
    device = SimulatedDevice(runs=record_only)
    executor = executor_on(plan, HostWeights(make(TINY).packed), room, device)
    used = {launch.kernel for launch in plan.programs["decode/1"].launches}
    assert set(device.entries) == used
    assert executor.tensor("logits").shape == (1, 384)
    assert device.taken == executor.budget.gpu_bytes < executor_for(TINY).budget.gpu_bytes
    with pytest.raises(OptionError, match=r"was loaded with decode/1 alone, not prefill: add it"):
        executor.prefill([1])
    with pytest.raises(PlanError, match="has no program decode/3: it has decode/1"):
        executor_on(plan, HostWeights(make(TINY).packed), Room(1, CONTEXT, ("decode/3",)), device)


def test_a_sequence_ends_where_the_context_does() -> None:
    executor = executor_for(TINY, context=PROMPT + 3)
    executor.prefill(judged(TINY).tokens[:PROMPT])
    assert len(executor.decode(2)) == 2
    with pytest.raises(OptionError, match=f"holds {PROMPT + 2} tokens and 1 more do not fit a context of {PROMPT + 3}"):
        executor.decode(1)


def test_too_little_memory_is_said_before_any_is_taken() -> None:
    device = SimulatedDevice(memory_bytes=200 << 20)
    with pytest.raises(DeviceError, match=r"needs 0\.\d+ GiB .*weights 0\.00.* has 0\.20 of 0\.20 GiB free"):
        executor_for(TINY, slots=64, context=512, device=device)
    assert device.blocks == device.pinned == []


@dataclass(frozen=True)
class Larger:
    """Weights that take more memory than they have packed bytes."""

    share: float

    def resident_bytes(self, plan: Plan) -> int:
        return int(self.share * packed_bytes(plan))

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        start = device.allocate(self.resident_bytes(plan))
        return PlacedWeights({(weight.name, array.array): start for weight, array in arrays_of(plan)}, 0)


def test_weights_that_take_more_memory_than_they_have_bytes_are_refused_with_numbers() -> None:
    plan, room = plan_for(TINY), Room(1, CONTEXT)
    device, packed = SimulatedDevice(runs=record_only), packed_bytes(plan_for(TINY))
    with pytest.raises(PlanError, match=rf"would take {int(1.04 * packed)} bytes for {packed} packed ones: pack the"):
        executor_on(plan, Larger(1.04), room, device)
    assert device.blocks == device.pinned == []
    executor = executor_on(plan, Larger(1.03), room, device)
    beside = sum(need.bytes for need in executor.budget.needs if need.what != "weights" and not need.is_host)
    assert device.taken == int(1.03 * packed) + beside == executor.budget.gpu_bytes


def test_a_failed_launch_names_its_op_and_a_failed_load_leaves_nothing() -> None:
    device = SimulatedDevice(runs=record_only)
    executor = executor_for(TINY, device=device)
    device.fail_at = "layers.2.experts_up"
    with pytest.raises(DeviceError, match=r"layers\.2\.experts_up"):
        executor.launch(executor.program("decode/1"), [Row(1, 0)])
    executor.close()
    assert device.taken == 0 and not device.pinned
    plan, broken = plan_for(TINY), dict(make(TINY).packed)
    del broken["final_norm_weight", "data"]
    with pytest.raises(KeyError):
        executor_on(plan, HostWeights(broken), Room(1, CONTEXT), device)
    assert device.taken == 0 and not device.pinned and not device.entries


class Lent:
    """An array with a CUDA array interface."""

    def __init__(self, address: int, typestr: str, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "typestr": typestr,
            "shape": shape,
            "strides": None,
            "version": 3,
        }


TYPESTR = {torch.int64: "<i8", torch.uint8: "|u1", torch.bfloat16: "<i2", torch.float32: "<f4", torch.float16: "<f2"}


def lent(device: SimulatedDevice) -> dict[tuple[str, str], Lent]:
    found = {}
    for key, array in make(TINY).packed.items():
        size = array.numel() * array.element_size()
        address = device.allocate(size)
        device.upload(address, array.contiguous().data_ptr(), size)
        found[key] = Lent(address, TYPESTR[array.dtype], tuple(array.shape))
    return found


def test_arrays_of_another_owner_are_used_where_they_lie() -> None:
    plan, room = plan_for(TINY), Room(1, CONTEXT)
    device = meaning_device(plan, room)
    arrays = lent(device)
    before = device.taken
    executor = executor_on(plan, BorrowedWeights(arrays), room, device)
    assert device.taken - before == executor.budget.gpu_bytes < packed_bytes(plan)
    expected = executor_for(TINY)
    prompt = judged(TINY).tokens[:4]
    assert executor.prefill(prompt) == expected.prefill(prompt)
    assert torch.equal(logits_of(executor), logits_of(expected))


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        (("embed", "data"), {"typestr": "<f4"}, "embed.data is <f4"),
        (("lm_head", "data"), {"shape": (4, 4)}, "lm_head.data is <i8"),
        (("lm_head", "scale"), {"strides": (64, 1)}, "needs it dense"),
        (("final_norm_weight", "data"), {"data": (8, False)}, "no multiple of 16"),
        (("final_norm_weight", "data"), None, "lack final_norm_weight.data"),
    ],
)
def test_arrays_that_are_not_the_plans_are_named(key: tuple[str, str], change: dict | None, words: str) -> None:
    device = SimulatedDevice()
    arrays, plan = lent(device), plan_for(TINY)
    if change is None:
        del arrays[key]
    else:
        arrays[key].__cuda_array_interface__.update(change)
    with pytest.raises(WeightError, match=words):
        executor_on(plan, BorrowedWeights(arrays), Room(1, CONTEXT), device)


def test_a_plan_for_another_gpu_names_both() -> None:
    plan = plan_for(TINY)
    check_architecture(plan, SimulatedDevice(capability=90).facts)
    with pytest.raises(PlanError, match=r"is for sm_90a and simulated GPU is sm_120: run `lynnc compile tiny-moe"):
        check_architecture(plan, SimulatedDevice(capability=120).facts)


WRONG_ROWS = (
    ([Row(1, 0), Row(1, 2)], "not side by side"),
    ([Row(1, 1, start=0), Row(1, 0, start=0)], "not side by side"),
    ([Row(1, 0, slot=0), Row(1, 0, slot=1), Row(1, 1, slot=0, start=0)], "not side by side"),
    ([Row(1, 3)], "holds 0 tokens, so no row can start at 3"),
    ([Row(1, 64), PADDING_ROW], "do not fit a context"),
)


@pytest.mark.parametrize(("rows", "words"), WRONG_ROWS)
def test_rows_that_read_what_nothing_wrote_are_refused(executor: Executor, rows: list[Row], words: str) -> None:
    rows = [*rows, *[PADDING_ROW] * ({1: 0, 2: 0, 3: 1}[len(rows)])]
    with pytest.raises(OptionError, match=words):
        executor.step(rows)
    assert executor.lengths == [0, 0]


@pytest.mark.parametrize("count", [0, -3])
def test_fewer_tokens_than_one_are_refused(executor: Executor, count: int) -> None:
    executor.assume(5, 1)
    with pytest.raises(OptionError, match=f"{count} tokens cannot be decoded"):
        executor.decode(count)
    assert executor.lengths[0] == 5
    with pytest.raises(OptionError, match="no -1 tokens"):
        executor.assume(-1, 1)
