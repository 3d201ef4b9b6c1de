"""``benchmarks/prompt_checks.py`` on a tiny plan and a simulated device: what passes, and what fails as it must."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from executing import executor_on, meaning_device, plan_for
from meaning import few_splits
from reference import Case

from lynnc.bench.records import setting_of
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import prompt_checks

TINY = Case("tiny-moe")
EXTENT = prompt_checks.Extent(rows=7, layers=3, long=40, behind=11, decoded=3)


@pytest.fixture(autouse=True)
def splits() -> Iterator[None]:
    with few_splits():
        yield


@pytest.fixture
def executor() -> Executor:
    plan = plan_for(TINY)
    return executor_on(plan, GeneratedWeights(0), EXTENT.room, meaning_device(plan, EXTENT.room))


def run(executor: Executor) -> dict[str, list[prompt_checks.Check]]:
    setting = setting_of(executor.plan, executor.device.facts, {}, "test")
    found: dict[str, list[prompt_checks.Check]] = {}
    for check, _ in prompt_checks.run_checks(executor, EXTENT, setting):
        found.setdefault(check.name, []).append(check)
    return found


def test_a_plan_that_is_right_passes(executor: Executor) -> None:
    found = run(executor)
    assert set(found) == {"prompt_layers_agree", "long_prompt"}
    assert all(check.is_passed for checks in found.values() for check in checks), found
    assert all(0 < max(check.worst.values()) < 1e-2 for check in found["prompt_layers_agree"])
    *short, longest = found["prompt_layers_agree"]
    assert {len(check.worst) for check in short} == {3}
    assert len(longest.worst) == len(TINY.spec.layers)
    assert found["long_prompt"][0].params["same_token"] == 1


def test_a_layer_that_goes_another_way_is_named(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = prompt_checks._hidden_states

    def disturbed(*arguments: object) -> dict[int, torch.Tensor]:
        hidden = dict(exact(*arguments))  # type: ignore[arg-type]
        last = max(hidden)
        return hidden | {last: hidden[last] * 1.02}

    monkeypatch.setattr(prompt_checks, "_hidden_states", disturbed)
    for check in run(executor)["prompt_layers_agree"]:
        wrong = [name for name, rms in check.worst.items() if rms > prompt_checks.LAYER_LIMIT]
        assert not check.is_passed and check.passed == check.of - 1 and len(wrong) == 1


def test_a_long_prompt_that_depends_on_its_cut_fails(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = executor.prefill

    def forgetful(tokens: list[int]) -> int:
        if len(tokens) == EXTENT.behind:
            executor.reset()
        return prefill(tokens)

    monkeypatch.setattr(type(executor), "prefill", lambda self, tokens: forgetful(tokens))
    monkeypatch.setattr(prompt_checks, "limit_of", lambda executor: 0.1)
    (check,) = run(executor)["long_prompt"]
    assert not check.is_passed


def test_another_token_must_have_been_nearly_chosen() -> None:
    whole = torch.tensor([3.0, 2.9, -1.0, 0.0]).double()
    ends = prompt_checks.Ends(whole, 0.1)
    ends.add("near", whole + torch.tensor([-0.1, 0.1, 0.0, 0.0]))
    ends.add("far", torch.tensor([2.0, 1.9, -1.0, 2.1]).double())
    assert ends.passed == 1
    assert ends.params == {"limit": 0.1, "same_token": 0, "largest_margin": pytest.approx(3.0 / 2.1453, abs=1e-3)}
