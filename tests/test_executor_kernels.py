"""Steps of the runtime with the generated kernels in Triton's interpreter, and the comparison with their meaning.

A step of a tiny model costs it seconds, so prompts run by their meaning and few steps follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import harness
import pytest
import torch
from executing import executor_for, logits_of
from meaning import few_splits
from reference import FAMILIES, LIMIT, PROMPT, Case, judged
from runners import Followed, check
from simulated import SimulatedDevice

from lynnc.compare import first_difference
from lynnc.errors import OptionError
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import PADDING_ROW, Row, rows_of

DENSE = Case("tiny-dense")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    if harness.device() != "cpu":
        pytest.skip("the simulated device needs Triton's interpreter: run without --device cuda")
    with few_splits():
        yield


def after_prompt(case: Case) -> tuple[Executor, SimulatedDevice]:
    """An executor that has read the prompt and runs kernels from now on."""
    executor = executor_for(case)
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    executor.prefill(judged(case).tokens[:PROMPT])
    device.runs = device.run_kernels
    return executor, device


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_steps_give_the_logits_of_transformers_and_every_launch_agrees_with_its_meaning(case: Case) -> None:
    run = judged(case)
    executor, _ = after_prompt(case)
    chosen = executor.step([Row(run.tokens[PROMPT], PROMPT)])
    check(Followed([PROMPT], logits_of(executor), torch.tensor(chosen)), run, LIMIT, str(case))
    found = executor.compare([run.tokens[PROMPT + 1]])
    assert first_difference(found) is None
    assert [item.op for item in found if item.tensor in ("logits", "next_token")] == ["lm_head", "argmax"]
    following = Followed([PROMPT + 1], logits_of(executor), torch.tensor(executor.memory.read("token", 1)))
    check(following, run, LIMIT, str(case))


@pytest.mark.parametrize(("case", "start"), [(Case("tiny-full"), 0), (Case("tiny-moe"), PROMPT)], ids=str)
def test_a_prompt_behind_padding_gives_the_logits_of_transformers(case: Case, start: int) -> None:
    """A new one, and what is left of one: three rows of prefill/16, whose delta rule has chunks of 16 rows."""
    executor = executor_for(case)
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    if start:
        executor.prefill(judged(case).tokens[:start])
    device.runs = device.run_kernels
    chosen = executor.prefill(judged(case).tokens[start : start + 3])
    check(Followed([start + 2], logits_of(executor), torch.tensor([chosen])), judged(case), LIMIT, str(case))


def test_rows_of_a_step_have_the_bits_of_single_rows_and_padding_changes_nothing() -> None:
    tokens = judged(DENSE).tokens
    executor, _ = after_prompt(DENSE)
    states = executor.memory.save_states()
    singly = []
    for index in range(3):
        executor.step([Row(tokens[PROMPT + index], PROMPT + index)])
        singly.append(logits_of(executor))
    executor.memory.restore_states(states)
    executor.step([*rows_of(tokens[PROMPT : PROMPT + 3], PROMPT), PADDING_ROW])
    assert torch.equal(logits_of(executor, 3), torch.cat(singly))


def test_the_first_launch_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, device = after_prompt(DENSE)
    launch = device.launch

    def spoil(calls: Sequence[Call]) -> None:
        launch(calls)
        if calls[0].op == "layers.1.out_proj":
            address = executor.memory.addresses.of(executor.program("decode/1"))["layers.1.h"]
            device.fill(address, 0x40, 64)

    monkeypatch.setattr(device, "launch", spoil)
    found = executor.compare([1], until="layers.2.delta")
    wrong = first_difference(found)
    assert wrong is not None and wrong.op == "layers.1.out_proj"
    assert [item.op for item in found if not item.is_close] == ["layers.1.out_proj"]
    assert found[-1].op == "layers.2.delta"
    with pytest.raises(OptionError, match="no launch nope"):
        executor.compare([1], until="nope")
