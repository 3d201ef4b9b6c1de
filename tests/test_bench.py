"""Measurements on a simulated device, on whose clock a launch takes a microsecond, and the records made of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from executing import (
    HostWeights,
    executor_for,
    executor_on,
    logits_of,
    meaning_device,
    plan_for,
)
from reference import Case, make
from simulated import SimulatedDevice, record_only

from lynnc.bench import records, session
from lynnc.bench.census import census_of
from lynnc.bench.kernels import KernelTime, Parts, needs_of_launches, time_kernels
from lynnc.bench.outcome import Outcome, records_of
from lynnc.bench.records import Setting, records_text, setting_of, write_records
from lynnc.bench.session import Session, StepTime, Wish, open_session
from lynnc.bench.timing import TOKEN, Effort, Timing, time_decode, time_rows, timing_of
from lynnc.errors import OutputError
from lynnc.runtime.budget import Room
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import packed_bytes
from lynnc.runtime.peers.llamabench import PeerSpeed
from lynnc.runtime.random.fillbits import fill_array
from lynnc.runtime.random.randomweights import random_weights
from lynnc.runtime.rows import Row, rows_of
from lynnc.target import find_device

TINY = Case("tiny-moe")
H200 = find_device("h200")
DENSE = Case("tiny-dense")
EFFORT = Effort(repeats=3, steps=4, warmup=2)
WISH = Wish(contexts=(8, 40), effort=EFFORT, programs=("decode/1", "decode/4"))
MICROSECOND = 1e-6


def recording(room: Room, case: Case = TINY) -> Executor:
    source = HostWeights(make(case).packed)
    return executor_on(plan_for(case), source, room, SimulatedDevice(runs=record_only))


@pytest.fixture
def executor() -> Executor:
    return recording(Room(1, WISH.room))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session on a simulated device, loaded twice."""
    monkeypatch.setattr(session, "load", lambda plan, source, room, gpu, progress: recording(room))
    wish = replace(WISH, loads=2)
    yield open_session(Path("tiny.plan"), HostWeights(make(TINY).packed), wish, 0, None)


def launches(executor: Executor, name: str = "decode/1") -> int:
    return len(executor.program(name).launches)


def test_timings_are_medians_with_their_spread() -> None:
    timing = timing_of([4.0, 1.0, 2.0])
    assert timing == Timing(median=2.0, least=1.0, greatest=4.0, runs=3)
    assert timing.over(4) == Timing(median=0.5, least=0.25, greatest=1.0, runs=3)


def test_a_step_takes_the_time_of_its_launches(opened: Session) -> None:
    said: list[str] = []
    steps = list(opened.step_times(WISH, said.append))
    assert [(step.rows, step.context) for step in steps] == [(1, 8), (1, 40), (4, 8), (4, 40)]
    assert said[0] == "decode/1 at context 8" and len(said) == 4
    for step in steps:
        expected = launches(opened.executor, f"decode/{step.rows}") * MICROSECOND
        assert step.step.median == pytest.approx(expected) and step.step.runs == EFFORT.repeats
        assert (step.wall is None) == (step.host is None) == (step.rows > 1)
        if step.wall and step.host:
            assert 0 < step.host.least <= step.wall.greatest


def test_measured_steps_stay_in_the_context() -> None:
    """By their meaning, since every step goes on by one position."""
    effort = Effort(repeats=6, steps=2, warmup=1)
    wish = Wish(contexts=(20,), effort=effort)
    executor = executor_for(DENSE, context=wish.room)
    time_decode(executor, 20, effort)
    assert executor.lengths[0] < executor.context
    time_rows(executor, 4, 20, effort)
    # One step to begin with and two that are timed, behind 20 tokens.
    assert executor.memory.read("position", 4) == [23, 24, 25, 26]
    parts = Parts(executor, "decode/1", 20)
    parts.time(parts.calls, effort)
    assert executor.memory.read("position", 1) == [20 + effort.repeats + 1]
    assert 20 + effort.repeats + 1 < executor.context


def test_parts_have_memory_of_their_own_and_compute_the_step() -> None:
    executor = executor_for(DENSE)
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    taken, states = device.taken, executor.memory.save_states()
    parts = Parts(executor, "decode/1", context=8)
    logits = logits_of(executor)
    own = parts.own
    inside = [place for place in parts.program.tensors if place.offset is not None]
    spans = sorted((own[place.name], own[place.name] + place.bytes) for place in inside)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert device.taken > taken and spans[0][0] == device.blocks[-1].address
    assert spans[-1][1] <= device.blocks[-1].address + device.blocks[-1].size
    for place in parts.program.tensors:
        if place.offset is None:
            assert own[place.name] == executor.memory.addresses.of(parts.program)[place.name]
    executor.memory.restore_states(states)
    executor.write_rows(rows_of([TOKEN], 8))
    executor.device.launch(executor.calls(parts.program, 1))
    assert logits_of(executor).equal(logits)


def test_kernels_are_timed_alone_and_by_what_the_step_lacks_without_them(executor: Executor) -> None:
    found = list(time_kernels(executor, "decode/1", 8, EFFORT, with_marginal=True))
    assert sum(kernel.count for kernel in found) == launches(executor)
    assert {kernel.label for kernel in found} >= {"embed", "layers.*.delta", "layers.*.experts_up", "lm_head", "argmax"}
    for kernel in found:
        assert kernel.alone.median == pytest.approx(MICROSECOND)
        assert kernel.marginal == pytest.approx(MICROSECOND)
        assert kernel.total == pytest.approx(kernel.count * MICROSECOND)
    without = list(time_kernels(executor, "decode/1", 8, EFFORT))
    assert [kernel.marginal for kernel in without] == [None] * len(found)
    head = next(kernel for kernel in found if kernel.label == "lm_head")
    assert head.bytes >= sum(array.bytes for array in executor.plan.weights["lm_head"].arrays)


def test_only_the_first_launch_of_a_part_waits(executor: Executor) -> None:
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    parts = Parts(executor, "decode/1", context=8)
    own = [call for call in parts.calls if call.op.endswith("out_proj")]
    assert all(call.has_pdl for call in own)
    device.launched.clear()
    parts.time(own, EFFORT)
    assert [call.has_pdl for call in device.launched[: len(own)]] == [False] + [True] * (len(own) - 1)


def test_every_launch_has_bytes_that_grow_with_the_context(executor: Executor) -> None:
    short, long = (needs_of_launches(executor, "decode/1", 1, context) for context in (8, 40))
    assert set(short) == {launch.op for launch in executor.program("decode/1").launches}
    assert all(need.bytes > 0 for need in short.values())
    grown = {op for op in short if long[op].bytes > short[op].bytes}
    assert grown == {op for op in short if "attention" in op}
    assert grown >= {op for op in short if long[op].flops > short[op].flops} != set()


def test_a_census_counts_the_launches_and_nodes(executor: Executor) -> None:
    census = census_of(executor, "decode/1")
    assert census.program == "decode/1" and census.nodes == launches(executor)
    assert sum(row.launches for row in census.rows) == census.nodes
    (delta,) = (row for row in census.rows if row.label == "layers.*.delta")
    assert (delta.launches, delta.threads, delta.has_pdl) == (3, 128, True) and delta.blocks > 0


def test_a_session_says_memory_and_loading(opened: Session) -> None:
    memory, plan = opened.memory, opened.plan
    assert memory.packed == memory.resident_weights == packed_bytes(plan)
    assert memory.taken == sum(count for _, count, is_host in memory.needs if not is_host)
    assert [(load.is_cold, load.label) for load in opened.loads] == [(False, "warm")], "only packed folders can be cold"
    assert opened.loads[0].timing.runs == 2 and opened.loads[0].bytes == packed_bytes(plan)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_packed_folder_is_dropped_from_the_page_cache_before_the_first_of_several_loads(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [tmp_path / f"shard-{index}.safetensors" for index in range(3)]
    for shard in shards:
        shard.write_bytes(b"shard")
    (tmp_path / "folder").mkdir()
    done: list[str] = []

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        done.append(Path(f"/proc/self/fd/{file}").readlink().name)

    def load(plan: Path, source: PackedFolder, room: Room, gpu: int, progress: object) -> Executor:
        done.append("load")
        return recording(room)

    monkeypatch.setattr(session.os, "posix_fadvise", advise)
    monkeypatch.setattr(session, "load", load)
    found = open_session(Path("tiny.plan"), PackedFolder(tmp_path), replace(WISH, loads=count), 0, None).loads
    dropped, loads = done[:-count], done[-count:]
    assert loads == ["load"] * count and sorted(dropped) == ([shard.name for shard in shards] if count > 1 else [])
    labels = {1: [("first", None, 1)], 2: [("cold", True, 1), ("warm", False, 1)]}
    labels[3] = [("cold", True, 1), ("warm", False, 2)]
    assert [(load.label, load.is_cold, load.timing.runs) for load in found] == labels[count]
    loaded = json.loads(records_text(records_of(Outcome(loads=found), setting(), H200)))
    assert [(item["metric"], item["params"]["cold"]) for item in loaded] == [
        ("load_bytes_per_s", is_cold) for _, is_cold, _ in labels[count]
    ]


def test_weights_that_are_made_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load", lambda plan, source, room, gpu, progress: recording(room))
    (made,) = open_session(Path("tiny.plan"), GeneratedWeights(0), replace(WISH, loads=2), 0, None).loads
    assert (made.label, made.timing.runs) == ("generated", 2)
    (record,) = records_of(Outcome(loads=(made,)), setting(), H200)
    assert record.metric == "generate_bytes_per_s" and "cold" not in record.params


SPEED = PeerSpeed(8, 128, 200.0, 1.0, (199.0, 201.0), "7123 c46583b", "CUDA", "NVIDIA H200", 10, ("llama-bench",))
TIMING = Timing(median=2e-6, least=1e-6, greatest=4e-6, runs=5)


def setting() -> Setting:
    facts = SimulatedDevice().facts
    return setting_of(plan_for(TINY), facts, {"weights": "random, seed 0"}, "lynnc bench tiny-moe --random-weights")


def outcome(opened: Session) -> Outcome:
    kernel = KernelTime("lm_head", "linear", 1, 1000.4, 2000.4, TIMING, 3e-6)
    return Outcome(
        loads=opened.loads,
        memory=opened.memory,
        census=census_of(opened.executor, "decode/1"),
        steps=[StepTime(1, 8, TIMING, TIMING, TIMING), StepTime(4, 8, TIMING)],
        kernels=[kernel],
        peers=(SPEED,),
    )


def test_records_say_what_another_needs_to_repeat_them(opened: Session, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    write_records(path, records_of(outcome(opened), setting(), H200), force=False)
    document = json.loads(path.read_text())
    assert isinstance(document, list)
    for record in document:
        assert list(record) == list(records.Record.__dataclass_fields__)
        assert record["spread"][0] <= record["value"] <= record["spread"][1] and record["runs"] >= 1
        assert record["params"]["model"] == "tiny-moe" and record["params"]["weights"] == "random, seed 0"
        assert record["device"]["name"] == "simulated GPU" and record["versions"]["lynnc"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["date"])
        assert record["command"] == "lynnc bench tiny-moe --random-weights"
    found = {(record["metric"], record["params"].get("rows")): record for record in document}
    assert (found["decode_step_us", 1]["value"], found["decode_step_us", 1]["unit"]) == (2.0, "us")
    speed = found["decode_tokens_per_s", 4]
    assert (speed["value"], speed["spread"], speed["params"]["context"]) == (2_000_000, [1_000_000, 4_000_000], 8)
    assert ("host_us_per_token", 1) in found and ("host_us_per_token", 4) not in found
    assert found["kernel_us", None]["params"]["bytes"] == 1000
    assert found["kernel_marginal_us", None]["value"] == 3.0
    peer = found["peer_tokens_per_s", None]
    assert (peer["value"], peer["spread"], peer["runs"]) == (200.0, [199.0, 201.0], 2)
    assert peer["params"]["build"] == "7123 c46583b CUDA"
    with pytest.raises(OutputError, match="exists already"):
        write_records(path, [], force=False)
    write_records(path, [], force=True)
    assert json.loads(path.read_text()) == []


def test_a_run_that_was_stopped_keeps_what_it_had_measured() -> None:
    assert records_of(Outcome(), setting(), H200) == []
    (first, *_) = records_of(Outcome(steps=[StepTime(1, 8, TIMING)]), setting(), H200)
    assert json.loads(records_text([first]))[0]["metric"] == "decode_step_us" == asdict(first)["metric"]


def test_the_commit_is_that_of_the_checkout_with_a_mark_for_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert re.fullmatch(r"([0-9a-f]{7,40}\+?)?", records.commit().rpartition("-g")[2])
    monkeypatch.setattr(records.lynnc, "__file__", str(tmp_path / "__init__.py"))
    assert records.commit() == ""


def test_random_weights_are_those_of_numpy_and_of_the_seed() -> None:
    plan, room = plan_for(TINY), Room(1, 64)
    device, seen = meaning_device(plan, room), []
    placed = GeneratedWeights(seed=3).place(plan, device, lambda done, total: seen.append((done, total)))
    fills = random_weights(plan)
    assert list(placed.addresses) == [(fill.weight, fill.array) for fill in fills]
    assert placed.resident_bytes == device.taken == seen[-1][0] == seen[-1][1]
    (block,) = device.blocks
    for fill in fills:
        start = placed.addresses[fill.weight, fill.array]
        values = fill_array(fill, 3)
        assert start % 256 == 0
        assert block.view[start - block.address :][: values.nbytes] == values.tobytes()
    tokens = []
    for seed in (3, 3, 4):
        executor = executor_on(plan, GeneratedWeights(seed), room, meaning_device(plan, room))
        assert executor.device.taken == executor.budget.gpu_bytes  # type: ignore[attr-defined]
        executor.prefill([1, 2, 3])
        tokens.append(logits_of(executor))
        assert tokens[-1].isfinite().all()
    assert tokens[0].equal(tokens[1]) and not tokens[0].equal(tokens[2])


def test_a_measured_sequence_needs_no_prompt(executor: Executor) -> None:
    executor.assume(8, TOKEN)
    first = executor.enqueue(2)
    assert (first, executor.lengths) == (9, [10])
    executor.step([Row(TOKEN, 8)])
    assert executor.lengths == [9]
