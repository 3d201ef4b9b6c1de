"""``benchmarks/prefill_baselines.py`` on a tiny plan and a simulated device, with the libraries on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from executing import executor_on, plan_for
from meaning import few_splits
from reference import Case
from simulated import SimulatedDevice, record_only

from lynnc.bench.timing import Timing
from lynnc.planfile import save_plan
from lynnc.runtime import Room
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import prefill_baselines
import prefill_libraries

TINY = Case("tiny-moe")
ROWS = (5, 16)
LAUNCH = 1e-6
THEIRS = Timing(4 * LAUNCH, 3 * LAUNCH, 5 * LAUNCH, 3)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """What the libraries gave; every call of them takes four launches' time."""
    outputs: list[torch.Tensor] = []

    def time_calls(calls: Sequence[Callable[[], torch.Tensor]]) -> Timing:
        outputs.append(calls[0]())
        return THEIRS

    monkeypatch.setattr(prefill_libraries, "DEVICE", "cpu")
    monkeypatch.setattr(prefill_libraries, "_time_calls", time_calls)
    prefill_libraries.expert_weights.cache_clear()
    with few_splits():
        yield outputs
    prefill_libraries.expert_weights.cache_clear()


def simulated(plan: Path, source: GeneratedWeights, room: Room) -> Executor:
    return executor_on(plan_for(TINY), source, room, SimulatedDevice(runs=record_only))


def test_every_part_has_its_time_and_its_ratio(
    called: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, output = tmp_path / "tiny.plan", tmp_path / "records.json"
    save_plan(plan_for(TINY), {}, plan)
    monkeypatch.setattr(prefill_baselines, "load", simulated)
    monkeypatch.setattr(prefill_baselines, "ROWS", ROWS)
    monkeypatch.setattr(prefill_libraries, "import_module", partial(_missing, "fla"))
    result = CliRunner().invoke(prefill_baselines.main, [str(plan), "--output", str(output)])
    assert result.exit_code == 0, result.output
    found = {}
    for record in json.loads(output.read_text()):
        found.setdefault(record["metric"], {}).setdefault(record["params"]["rows"], []).append(record["value"])
    assert found["moe_layer_us"] == {5: [4.0], 16: [4.0]}, "group, up, down and combine"
    assert found["moe_layer_whole_us"] == {5: [5.0], 16: [5.0]}
    assert found["grouped_mm_over_moe_layer"] == {5: [1.0], 16: [1.0]}
    assert found["delta_rule_us"] == {5: [2.0], 16: [2.0]} and "fla_us" not in found
    assert found["torch_flash_over_attention"] == {5: [4.0], 16: [4.0]}
    projections = found["torch_matmul_over_projection"]
    assert projections == {rows: [4.0] * len(projections[5]) for rows in ROWS}
    assert "warning: fla at 16 rows left out: ModuleNotFoundError: fla" in result.stderr
    assert all(bool(output.isfinite().all()) for output in called)
    assert CliRunner().invoke(prefill_baselines.main, [str(plan), "--output", str(output)]).exit_code != 0


def _missing(name: str, _: str) -> object:
    raise ModuleNotFoundError(name)


def test_the_experts_that_are_timed_are_those_of_a_layer(
    called: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, count, slots, width, hidden = sizes = 5, 16, 3, 32, 16
    drawn = []
    random = prefill_libraries._random
    monkeypatch.setattr(prefill_libraries, "_random", lambda *shape: drawn.append(random(*shape)) or drawn[-1])
    prefill_libraries.time_experts(sizes, with_choice=True)
    up, down = (weight.float() for weight in prefill_libraries.expert_weights(count, width, hidden))
    x, logits = drawn[-2].float(), drawn[-1].float()
    scores, chosen = logits.softmax(-1).topk(slots, -1)
    expected = torch.zeros(rows, width)
    for row in range(rows):
        for score, expert in zip(scores[row], chosen[row], strict=True):
            gate, linear = (x[row] @ up[expert]).chunk(2)
            expected[row] += score * ((torch.nn.functional.silu(gate) * linear) @ down[expert])
    assert (called[-1].float() - expected).abs().max() < 0.03 * expected.abs().max()
