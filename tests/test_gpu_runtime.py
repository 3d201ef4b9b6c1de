"""The runtime on a GPU: compiled plans against ``transformers``, and bits that must be the same: ``--device cuda``.

Tiny models are compiled for the GPU that is there. The judge computes on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from executing import HostWeights, follow_executor, logits_of
from packing import packed_to, written
from reference import FAMILIES, LIMIT, PROMPT, Case, judged, make
from runners import CONTEXT, check
from safetensors.torch import load_file

import lynnc.runtime
from lynnc.cli.main import cli
from lynnc.compare import first_difference
from lynnc.compiler import Request, compile_model
from lynnc.errors import DeviceError, PlanError
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.planfile import save_plan
from lynnc.runtime.budget import RESERVE, Room
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.weightsource import arrays_of
from lynnc.runtime.random.fillbits import fill_array
from lynnc.runtime.random.randomweights import random_weights
from lynnc.runtime.rows import PADDING_ROW, Row, rows_of
from lynnc.store import Store
from lynnc.target import TARGETS, find_target

pytestmark = pytest.mark.gpu

TINY = Case("tiny-moe")
ROOM = Room(2, CONTEXT)
REPEATS = 200
ROWS = (2, 4, 8)
SLACK = 64 << 20
"""Bytes that the driver may keep of what it was given back."""


def capability() -> int:
    """Of the GPU that is there."""
    with closing(open_device()) as device:
        return device.facts.capability


@dataclass
class Plans:
    """Plan folders for the GPU that is there, each compiled when it is first asked for."""

    folder: Path

    def of(self, case: Case) -> Path:
        path = self.folder / f"{case}.plan"
        if not path.exists():
            target = find_target(str(capability()))
            compiled = compile_model(case.spec, Request(target, options=Options()), Store(self.folder / "store"))
            save_plan(compiled.plan, compiled.files, path)
        return path

    def load(self, case: Case, room: Room = ROOM, debug: bool = False) -> Executor:
        return lynnc.runtime.load(self.of(case), HostWeights(make(case).packed), room, debug=debug)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return Plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def loaded(request: pytest.FixtureRequest, plans: Plans) -> Iterator[tuple[Case, Executor]]:
    """Each family's model, for all tests that only run it."""
    with plans.load(request.param) as executor:
        yield request.param, executor


@pytest.fixture
def running(loaded: tuple[Case, Executor]) -> tuple[Case, Executor]:
    """The same after the judge's prompt, in slot 0."""
    case, executor = loaded
    executor.reset(0)
    executor.reset(1)
    executor.prefill(judged(case).tokens[:PROMPT])
    return case, executor


def test_tokens_and_logits_are_those_of_transformers(loaded: tuple[Case, Executor]) -> None:
    case, executor = loaded
    run = judged(case)
    executor.reset()
    check(follow_executor(executor, run.tokens, PROMPT), run, LIMIT, str(case))


def test_a_graph_has_the_bits_of_single_launches(running: tuple[Case, Executor]) -> None:
    case, executor = running
    states, row = executor.memory.save_states(), Row(judged(case).tokens[PROMPT], PROMPT)
    executor.launch(executor.program("decode/1"), [row])
    logits, after = logits_of(executor), executor.memory.save_states()
    executor.memory.restore_states(states)
    executor.step([row])
    assert torch.equal(logits_of(executor), logits)
    assert executor.memory.save_states() == after


@pytest.mark.parametrize("length", [1, 16, 17, 40, 63])
def test_a_prompt_has_the_same_bits_launched_captured_and_replayed(loaded: tuple[Case, Executor], length: int) -> None:
    case, executor = loaded
    tokens, found = (judged(case).tokens * 2)[:length], []
    for _ in range(4):
        executor.reset()
        chosen = executor.prefill(tokens)
        found.append((chosen, logits_of(executor).numpy().tobytes(), executor.memory.save_states()))
    assert all(item == found[0] for item in found)


def test_a_step_has_the_same_bits_every_time(running: tuple[Case, Executor]) -> None:
    case, executor = running
    states, row = executor.memory.save_states(), Row(judged(case).tokens[PROMPT], PROMPT)
    found = []
    for _ in range(REPEATS):
        executor.memory.restore_states(states)
        chosen = executor.step([row])
        found.append((chosen, logits_of(executor).numpy().tobytes(), executor.memory.save_states()))
    assert all(item == found[0] for item in found)


def test_rows_of_a_step_have_the_bits_of_single_rows(running: tuple[Case, Executor]) -> None:
    case, executor = running
    tokens, states = judged(case).tokens, executor.memory.save_states()
    singly, after = [], []
    for index in range(max(ROWS)):
        executor.step([Row(tokens[PROMPT + index], PROMPT + index)])
        singly.append(logits_of(executor))
        after.append(executor.memory.save_states())
    for count in ROWS:
        executor.memory.restore_states(states)
        executor.step(rows_of(tokens[PROMPT : PROMPT + count], PROMPT))
        assert torch.equal(logits_of(executor, count), torch.cat(singly[:count])), f"decode/{count}"
        assert executor.memory.save_states() == after[count - 1], f"decode/{count}"
    executor.memory.restore_states(states)
    executor.step([*rows_of(tokens[PROMPT : PROMPT + 3], PROMPT), PADDING_ROW])
    assert torch.equal(logits_of(executor, 3), torch.cat(singly[:3]))
    assert executor.memory.save_states() == after[2], "a padding row has stored something"


def test_slots_and_streams_give_what_decoding_gives(running: tuple[Case, Executor]) -> None:
    case, executor = running
    prompts = judged(case).tokens[:PROMPT], judged(case).tokens[3:8]
    alone = []
    for slot, prompt in enumerate(prompts):
        executor.reset(slot)
        alone.append([executor.prefill(prompt, slot), *executor.decode(12, slot)])
        executor.reset(slot)
    mixed = [[executor.prefill(prompt, slot)] for slot, prompt in enumerate(prompts)]
    for _ in range(3):
        for slot in (0, 1):
            mixed[slot] += executor.stream(4, slot)
    assert mixed == alone


def test_every_launch_agrees_with_its_meaning(running: tuple[Case, Executor]) -> None:
    case, executor = running
    for count in (1, 4):
        found = executor.compare(judged(case).tokens[PROMPT : PROMPT + count])
        assert first_difference(found) is None, f"decode/{count}"
        assert found[-1].op.startswith("argmax")


def test_torch_shares_the_memory_of_outputs(running: tuple[Case, Executor]) -> None:
    case, executor = running
    lent = executor.tensor("logits")
    shared = torch.as_tensor(lent, device="cuda")
    assert shared.data_ptr() == lent.address and tuple(shared.shape) == lent.shape
    for index in (0, 1):
        executor.step([Row(judged(case).tokens[PROMPT + index], PROMPT + index)])
        assert torch.equal(shared[:1].cpu(), logits_of(executor))


def test_a_prompt_may_be_a_tensor_on_the_gpu(running: tuple[Case, Executor]) -> None:
    case, executor = running
    first = executor.prefill(judged(case).tokens[3:8], slot=1)
    executor.reset(1)
    prompt = torch.tensor(judged(case).tokens[3:8], dtype=torch.int32, device="cuda")
    assert executor.prefill(prompt, slot=1) == first  # type: ignore[arg-type]


def test_weights_of_torch_are_used_where_they_lie_and_stay_its_own(plans: Plans) -> None:
    packed = make(TINY).packed
    # The array interface has no name for BF16.
    arrays = {key: (a.view(torch.int16) if a.dtype is torch.bfloat16 else a).cuda() for key, a in packed.items()}
    torch.cuda.synchronize()
    with plans.load(TINY) as executor, lynnc.runtime.load(plans.of(TINY), arrays, ROOM) as borrower:
        names = [(weight.name, array.array) for weight, array in arrays_of(borrower.plan)]
        assert borrower.memory.addresses.weights == {name: arrays[name].data_ptr() for name in names}
        assert all(need.what != "weights" for need in borrower.budget.needs)
        prompt = judged(TINY).tokens[:PROMPT]
        assert borrower.prefill(prompt) == executor.prefill(prompt)
        assert torch.equal(logits_of(borrower), logits_of(executor))
    for key, array in arrays.items():
        assert torch.equal(array.cpu().view(packed[key].dtype), packed[key].contiguous()), key


def test_memory_is_what_was_counted_and_is_given_back(plans: Plans) -> None:
    with closing(open_device()) as device:
        executor = plans.load(TINY, Room(4, 256))
        taken = executor.free_before - device.free_bytes()
        assert taken <= executor.budget.gpu_bytes + RESERVE
        executor.prefill([1, 2, 3])
        executor.decode(5)
        executor.close()
        executor.close()
        assert device.free_bytes() >= executor.free_before - SLACK


def test_a_closed_device_leaves_torch_and_other_executors_alone(plans: Plans) -> None:
    values = torch.arange(1000, device="cuda")
    with plans.load(TINY) as kept:
        first = kept.prefill([1, 2, 3])
        plans.load(TINY).close()
        kept.reset()
        assert kept.prefill([1, 2, 3]) == first
    assert int(values.sum().item()) == 499_500
    with plans.load(TINY) as again:
        assert again.prefill([1, 2, 3]) == first


def test_random_weights_have_the_bits_of_numpy(plans: Plans) -> None:
    with lynnc.runtime.load(plans.of(TINY), GeneratedWeights(seed=9), ROOM) as executor:
        for fill in random_weights(executor.plan):
            values = fill_array(fill, 9)
            found = bytearray(values.nbytes)
            executor.memory.read_into(found, executor.memory.addresses.weights[fill.weight, fill.array])
            assert found == values.tobytes(), f"{fill.weight}.{fill.array}"
        executor.prefill([1, 2, 3])
        assert logits_of(executor).isfinite().all()


def test_a_packed_folder_is_loaded_byte_for_byte(tmp_path: Path) -> None:
    written(tmp_path, "tiny-dense")
    folder = packed_to(tmp_path, shard_bytes=120_000)
    spec = load_model(folder / "model.yaml")
    target = find_target(str(capability()))
    request = Request(target, options=Options(programs=("decode/1", "prefill")))
    compiled = compile_model(spec, request, Store(tmp_path / "store"))
    save_plan(compiled.plan, compiled.files, tmp_path / "dense.plan")
    with lynnc.runtime.load(tmp_path / "dense.plan", folder, Room(1, CONTEXT)) as executor:
        stored = {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}
        for (weight, array), address in executor.memory.addresses.weights.items():
            values = stored[f"{weight}.{array}"].contiguous().view(torch.uint8).flatten()
            found = bytearray(values.numel())
            executor.memory.read_into(found, address)
            assert found == values.numpy().tobytes(), f"{weight}.{array}"
        executor.prefill([5, 7, 11])
        assert len(executor.decode(3)) == 3


def test_a_plan_for_another_gpu_names_both(plans: Plans, tmp_path: Path) -> None:
    number = capability()
    other = next(target for target in TARGETS.values() if f"sm_{number}" != target.name)
    request = Request(other, options=Options(programs=("decode/1",)))
    compiled = compile_model(Case("tiny-full").spec, request, Store(plans.folder / "store"))
    save_plan(compiled.plan, compiled.files, tmp_path / "other.plan")
    with pytest.raises(PlanError, match=rf"is for {compiled.plan.arch} and .* is sm_{number}: run `lynnc compile"):
        lynnc.runtime.load(tmp_path / "other.plan", GeneratedWeights())


def test_more_memory_than_there_is_is_refused_with_numbers(plans: Plans) -> None:
    with pytest.raises(DeviceError, match=r"The plan needs .* GiB of GPU memory .* free: choose a smaller context"):
        plans.load(TINY, Room(2_000_000, 512))


def test_the_benchmark_measures_everything(plans: Plans, tmp_path: Path) -> None:
    few = ("--contexts", "8,40", "--repeats", "3", "--steps", "5", "--loads", "2", "--programs", "decode/1,decode/4")
    output = tmp_path / "records.json"
    asked = ("bench", str(plans.of(TINY)), "--random-weights", *few, "--breakdown", "-o", str(output), "--json")
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert records == json.loads(output.read_text())
    steps = {
        (item["params"]["rows"], item["params"]["context"]) for item in records if item["metric"] == "decode_step_us"
    }
    assert steps == {(1, 8), (1, 40), (4, 8), (4, 40)}
    assert all(
        item["value"] > 0 for item in records if item["metric"] in ("decode_step_us", "kernel_us", "graph_nodes")
    )


FAULT = """
import sys
from dataclasses import replace

import lynnc.runtime
from lynnc.errors import DeviceError
from lynnc.runtime.calls import KeptCalls
from lynnc.runtime.loading.generated import GeneratedWeights

executor = lynnc.runtime.load(sys.argv[1], GeneratedWeights(), lynnc.runtime.Room(1, 64), debug=sys.argv[2] == "debug")
addresses = executor.memory.addresses
wrong = {**addresses.weights, ("layers.1.mlp_down_weight", "data"): 1 << 20}
executor._calls = KeptCalls(executor.kernels, replace(addresses, weights=wrong), executor.context)
try:
    executor.launch(executor.program("decode/1"), [lynnc.runtime.Row(1, 0)])
    executor.device.synchronize()
except DeviceError as error:
    print(error)
executor.close()
"""
"""A weight of layer 1 lies where nothing does. The process's context is lost with it, so it is one of its own."""


@pytest.mark.parametrize("mode", ["debug", "plain"])
def test_a_kernel_that_faults_is_named_in_debug_mode(mode: str, plans: Plans) -> None:
    folder = plans.of(Case("tiny-dense"))
    run = subprocess.run([sys.executable, "-c", FAULT, str(folder), mode], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    assert ("Running layers.1." in line) == (mode == "debug"), line
    assert "load the plan again, with debug to learn which launch it was" in line
