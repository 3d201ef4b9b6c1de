"""The whole runtime on a simulated device: tokens against ``transformers``, and the rules of its memory and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from executing import HostWeights, executor_for, follow_executor, logits_of, plan_for
from reference import FAMILIES, LIMIT, PROMPT, Case, judge, judged, make
from runners import CONTEXT, check
from simulated import SimulatedDevice

from lynnc.compare import first_difference
from lynnc.errors import DeviceError, OptionError, PlanError, WeightError
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import check_architecture, prepare
from lynnc.runtime.loading.weightsource import BorrowedWeights, packed_bytes
from lynnc.runtime.rows import PADDING_ROW, Row, rows_of

TINY = Case("tiny-moe")
FEW = 6
"""Decode steps that are enough to see a sequence go on: a step costs the interpreter seconds."""


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
    run = judge(make(case), steps=FEW)
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


def test_rows_of_a_step_have_the_bits_of_single_rows_and_padding_changes_nothing(executor: Executor) -> None:
    tokens = judged(TINY).tokens
    executor.prefill(tokens[:PROMPT])
    singly = []
    for index in range(3):
        executor.step([Row(tokens[PROMPT + index], PROMPT + index)])
        singly.append(logits_of(executor))
    executor.reset()
    executor.prefill(tokens[:PROMPT])
    executor.step([*rows_of(tokens[PROMPT : PROMPT + 3], PROMPT), PADDING_ROW])
    assert torch.equal(logits_of(executor, 3), torch.cat(singly))
    assert executor.lengths[0] == PROMPT + 3


def test_launches_one_by_one_are_the_graph(executor: Executor) -> None:
    tokens = judged(TINY).tokens
    executor.prefill(tokens[:PROMPT])
    state = executor.tensor("history").read()
    executor.launch(executor.program("decode/1"), [Row(tokens[PROMPT], PROMPT)])
    logits = logits_of(executor)
    executor.step([Row(tokens[PROMPT], PROMPT)])
    assert executor.tensor("history").read()[: PROMPT + 1] == state[: PROMPT + 1]
    assert logits_of(executor).argmax() == logits.argmax()


def test_only_the_first_launch_of_a_step_waits_for_the_step_before(executor: Executor) -> None:
    program = executor.program("decode/1")
    flags = [call.has_pdl for call in executor.calls(program, 1)]
    assert flags == [False] + [True] * (len(flags) - 1)


def test_weights_exist_once_and_nothing_is_taken_that_was_not_counted() -> None:
    device = SimulatedDevice()
    executor = executor_for(TINY, device=device)
    assert device.taken == executor.budget.gpu_bytes
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


def test_a_failed_launch_names_its_op_and_a_failed_load_leaves_nothing() -> None:
    device = SimulatedDevice()
    executor = executor_for(TINY, device=device)
    device.fail_at = "layers.2.experts_up"
    with pytest.raises(DeviceError, match=r"layers\.2\.experts_up"):
        executor.launch(executor.program("decode/1"), [Row(1, 0)])
    executor.close()
    assert device.taken == 0 and not device.pinned
    plan, broken = plan_for(TINY), dict(make(TINY).packed)
    del broken["final_norm_weight", "data"]
    with pytest.raises(KeyError):
        prepare(plan, dict.fromkeys(plan.kernels, b""), HostWeights(broken), device)
    assert device.taken == 0 and not device.pinned


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
    device = SimulatedDevice()
    arrays, plan = lent(device), plan_for(TINY)
    before = device.taken
    executor = prepare(plan, dict.fromkeys(plan.kernels, b""), BorrowedWeights(arrays), device, Room(1, CONTEXT))
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
        prepare(plan, dict.fromkeys(plan.kernels, b""), BorrowedWeights(arrays), device, Room(1, CONTEXT))


def test_a_plan_for_another_gpu_names_both() -> None:
    plan = plan_for(TINY)
    check_architecture(plan, SimulatedDevice(capability=90).facts)
    with pytest.raises(PlanError, match=r"is for sm_90a and simulated GPU is sm_120: run `lynnc compile tiny-moe"):
        check_architecture(plan, SimulatedDevice(capability=120).facts)


def test_every_launch_of_a_step_agrees_with_the_interpreter(executor: Executor) -> None:
    executor.prefill(judged(TINY).tokens[:PROMPT])
    found = executor.compare(judged(TINY).tokens[PROMPT : PROMPT + 2])
    assert first_difference(found) is None
    assert [item.op for item in found if item.tensor in ("logits", "next_token")] == ["lm_head", "argmax"]


def test_the_first_launch_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    executor = executor_for(TINY, device=device)
    executor.prefill(judged(TINY).tokens[:PROMPT])
    launch = device.launch

    def spoil(calls: Sequence[Call]) -> None:
        launch(calls)
        if calls[0].op == "layers.1.out_proj":
            address = executor.memory.addresses.of(executor.program("decode/1"))["layers.1.h"]
            device.fill(address, 0x40, 64)

    monkeypatch.setattr(device, "launch", spoil)
    found = executor.compare([1], until="layers.2.gdn_step")
    wrong = first_difference(found)
    assert wrong is not None and wrong.op == "layers.1.out_proj"
    assert [item.op for item in found if not item.is_close] == ["layers.1.out_proj"]
    assert found[-1].op == "layers.2.gdn_step"
    with pytest.raises(OptionError, match="no launch nope"):
        executor.compare([1], until="nope")
