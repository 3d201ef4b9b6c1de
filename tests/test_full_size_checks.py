"""``benchmarks/checks.py`` on a tiny plan and a simulated device: what it passes, and that it fails where it must."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import harness
import pytest
from click.testing import CliRunner
from executing import executor_on, meaning_device, plan_for
from meaning import few_splits
from reference import Case
from simulated import SimulatedDevice

from lynnc.plan import Plan
from lynnc.planfile import load_plan, save_plan
from lynnc.programs import MOST_DECODE_ROWS
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "checks.py"
TINY = Case("tiny-dense")
PROMPT = 5
PARTS = {
    "repeats_equal": 3,
    "graph_equals_launches": 4,
    "graph_equals_launches_last_logits": 1,
    "launches_agree": 24,
    "prompt_launches_agree": 47,
    "pieces_agree": 3,
}
"""Of how many each check is that the meaning of a step passes, where rows of a step differ in their last bits."""


@pytest.fixture(autouse=True)
def splits() -> Iterator[None]:
    with few_splits():
        yield


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = util.spec_from_file_location("full_size_checks", SCRIPT)
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def extent(checks: ModuleType) -> Any:
    return checks.Extent(prompt=PROMPT, repeats=3, decoded=4, given=4, longest=20, before=3, pieces=(1, 5, 9))


def loaded(plan: Plan | None = None) -> tuple[Executor, SimulatedDevice]:
    plan, room = plan or plan_for(TINY), Room(1, 64)
    device = meaning_device(plan, room)
    return executor_on(plan, GeneratedWeights(0), room, device), device


def test_a_plan_that_is_right_passes(checks: ModuleType, extent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ROWS", ())
    found = list(checks.run_checks(loaded()[0], extent))
    assert {check.name: check.of for check in found} == PARTS
    assert all(check.is_passed for check in found), [*map(str, found)]
    worst = next(check.worst for check in found if check.name == "launches_agree")
    assert set(worst) >= {"embed", "delta", "attention_partial", "mlp_down", "lm_head", "argmax"}


def test_rows_of_kernels_have_the_bits_of_single_rows(
    checks: ModuleType, extent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harness.device() != "cpu":
        pytest.skip("the simulated device needs Triton's interpreter: run without --device cuda")
    executor, device = loaded()
    meaning = device.runs
    device.runs = lambda calls: (meaning if calls[0].grid[0] > MOST_DECODE_ROWS else device.run_kernels)(calls)
    monkeypatch.setattr(checks, "ROWS", (2, 8))
    found = list(checks.check_rows(executor, replace(extent, given=2)))
    assert [*map(str, found)] == ["passed  rows_equal_single_rows: 2 of 2, rows 2"], "the plan has no steps of 8"


@dataclass(frozen=True)
class Spoiled:
    """What spoils the first bytes of a tensor when its op has run so often, and the check that must fail then."""

    op: str
    time: int
    tensor: str
    bytes: int
    fails: str
    program: str = "decode/1"


SPOILED = (
    Spoiled("lm_head", 3, "logits", 4, "repeats_equal"),
    Spoiled("argmax", 6, "next_token", 1, "graph_equals_launches"),
    Spoiled("lm_head", 11, "logits", 4, "graph_equals_launches_last_logits"),
    Spoiled("layers.1.mlp_down", 16, "h.2", 2, "launches_agree"),
    Spoiled("layers.1.mlp_down", 17, "h.2", 2, "prompt_launches_agree", "prefill/16"),
    Spoiled("lm_head", 26, "logits", 400, "pieces_agree"),
)
"""Steps: three repeats, four of the graph, the same launch by launch, four single rows, and the compared one; two
prompts that are compared; the tokens of a prompt one by one. Prompts that run as a whole do not count."""


@pytest.mark.parametrize("case", SPOILED, ids=lambda case: case.fails)
def test_what_is_wrong_once_is_found(
    checks: ModuleType, extent: Any, case: Spoiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ROWS", ())
    executor, device = loaded()
    spoil(executor, device, case)
    failed = [check.name for check in checks.run_checks(executor, extent) if not check.is_passed]
    assert failed[:1] == [case.fails]


def spoil(executor: Executor, device: SimulatedDevice, case: Spoiled) -> None:
    runs, seen = device.runs, 0
    address = executor.memory.addresses.of(executor.program(case.program))[case.tensor]

    def run(calls: Sequence[Call]) -> None:
        nonlocal seen
        runs(calls)
        is_prompt = calls[0].op == "embed" and calls[0].grid[0] > MOST_DECODE_ROWS
        if not is_prompt and any(call.op == case.op for call in calls):
            seen += 1
            if seen == case.time:
                device.fill(address, 0x40, case.bytes)

    device.runs = run


def test_the_script_writes_a_record_of_each_and_fails_with_them(
    checks: ModuleType, extent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, output = tmp_path / "tiny.plan", tmp_path / "records.json"
    save_plan(plan_for(TINY), {}, plan)
    asked = []

    def load(folder: Path, source: GeneratedWeights, room: Room, debug: bool = False) -> Executor:
        asked.append((folder, source, debug))
        return loaded(replace(plan_for(TINY), digest=load_plan(folder).digest))[0]

    monkeypatch.setattr(checks, "load", load)
    monkeypatch.setattr(checks, "Extent", lambda compare_seconds: replace(extent, compare_seconds=compare_seconds))
    command = [str(plan), "--output", str(output), "--compare-seconds", "60"]
    result = CliRunner().invoke(checks.main, command)
    assert asked == [(plan, GeneratedWeights(0), False), (plan, GeneratedWeights(0), True)]
    failed = "rows_equal_single_rows, rows_equal_single_rows"
    assert (result.exit_code, result.stderr) == (1, f"Error: {failed} failed.\n"), "meaning has no such bits"
    records = json.loads(output.read_text())
    values = {record["metric"]: (record["value"], record["params"].get("of")) for record in records}
    assert values["debug_equals_graph"] == (extent.decoded, extent.decoded)
    assert {name: values[name] for name in PARTS} == {name: (count, count) for name, count in PARTS.items()}
    assert {"passed", "of the interpreter's RMS"} == {record["unit"] for record in records}
    for record in records:
        assert record["params"]["plan_digest"] and record["device"]["name"] == "simulated GPU"
        assert {"torch", "lynnc", "triton"} <= record["versions"].keys()
        assert record["command"] == f"python benchmarks/checks.py {plan} --compare-seconds 60"
    monkeypatch.setattr(checks, "ROWS", ())
    assert CliRunner().invoke(checks.main, [*command, "--force"]).exit_code == 0
    assert CliRunner().invoke(checks.main, command).exit_code != 0, "the file exists"


def test_no_further_launch_is_compared_when_the_time_is_over(checks: ModuleType, extent: Any) -> None:
    check = checks.check_launches(loaded()[0], replace(extent, compare_seconds=0))
    assert (check.passed, check.of, check.params["launches"]) == (1, 1, 24)
