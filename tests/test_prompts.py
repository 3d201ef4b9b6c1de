"""Prompts in steps: which program takes how many rows, padding in front, graphs of sizes that were met before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from executing import HostWeights, executor_for, executor_on, logits_of, plan_for, plan_of
from reference import Case, judged, make
from simulated import SimulatedDevice, SimulatedGraph, record_only

from lynnc.cli.main import cli
from lynnc.cli.parameters import complete_program, complete_programs
from lynnc.errors import OptionError
from lynnc.plan import Options, Plan, Program
from lynnc.planfile import load_plan, save_plan
from lynnc.programs import MOST_DECODE_ROWS, most_rows, prefill_programs, program_rows
from lynnc.runtime import prompts, staging
from lynnc.runtime.budget import Room
from lynnc.runtime.calls import STEPS_KEPT, calls_of
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.prompts import SIZES, padded_rows, pieces_of, prompt_programs

TINY = Case("tiny-moe")
MOST = 1 << 16


@pytest.mark.parametrize(("name", "rows"), [("prefill/1", 1), ("prefill/16", 16), (f"prefill/{MOST}", MOST)])
def test_names_of_programs_for_prompts(name: str, rows: int) -> None:
    assert program_rows(name) is None and most_rows(name) == rows


@pytest.mark.parametrize(
    "name", ["prefill/0", "prefill/x", "prefill/", "prefill/016", "prefill/-1", f"prefill/{MOST + 1}", "prefill/99999"]
)
def test_names_that_are_none(name: str) -> None:
    assert most_rows(name) is None
    with pytest.raises(OptionError, match="no program: name prefill, prefill/16"):
        program_rows(name)


def test_programs_for_prompts_are_ordered_by_their_rows() -> None:
    names = ("prefill", "decode/8", "prefill/512", "decode/1", "prefill/64")
    assert prefill_programs(names) == ("prefill/64", "prefill/512", "prefill")


def test_a_plan_keeps_its_programs_for_prompts(tmp_path: Path) -> None:
    save_plan(TESTED, {}, tmp_path / "tiny.plan")
    kept = load_plan(tmp_path / "tiny.plan")
    assert kept.options.programs == ("decode/1", "decode/2", "decode/4", "prefill/16", "prefill")
    assert set(kept.programs) == set(kept.options.programs)
    assert [kept.programs[name].max_rows for name in ("prefill/16", "prefill")] == [16, 64]
    assert kept.programs["prefill/16"].rows == "T"
    assert Options().programs[-4:] == ("prefill/16", "prefill/64", "prefill/512", "prefill")


@pytest.mark.parametrize(
    "command", [("show", "--stage", "choices", "--target", "sm_90"), ("show",), ("explain", "--device", "h200")]
)
def test_a_program_for_prompts_is_shown_and_explained(command: tuple[str, ...]) -> None:
    name, *options = command
    result = CliRunner().invoke(cli, [name, "tiny-moe", *options, "--program", "prefill/64"])
    assert result.exit_code == 0, result.output
    assert "prefill/64" in result.stdout or "choices" in options
    assert name == "show" or "prefill/64 on h200 at T = 64, S = 4,096" in result.stdout
    refused = CliRunner().invoke(cli, [name, "tiny-moe", *options, "--program", "prefill/0"])
    assert refused.exit_code == 2 and "'prefill/0' is no program" in refused.stderr


def test_shells_complete_programs_for_prompts() -> None:
    context, parameter = CliRunner(), cli.params[0]
    assert complete_programs(context, parameter, "decode/1,prefill/6") == ["decode/1,prefill/64"]  # type: ignore[arg-type]
    found = complete_program(context, parameter, "pre")  # type: ignore[arg-type]
    assert found == ["prefill/16", "prefill/64", "prefill/512", "prefill"]


@dataclass(frozen=True)
class Split:
    """A prompt's length, and (program, tokens, rows) of its steps."""

    length: int
    steps: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return str(self.length)


TESTED = plan_for(TINY)
"""Its programs for prompts are prefill/16 and prefill, of 64 rows."""
SPLITS = (
    Split(1, (("prefill/16", 1, 16),)),
    Split(16, (("prefill/16", 16, 16),)),
    Split(17, (("prefill", 17, 32),)),
    Split(49, (("prefill", 49, 64),)),
    Split(64, (("prefill", 64, 64),)),
    Split(65, (("prefill", 64, 64), ("prefill/16", 1, 16))),
    Split(81, (("prefill", 64, 64), ("prefill", 17, 32))),
)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_prompt_runs_by_the_smallest_program_that_holds_what_is_left(split: Split) -> None:
    room = Room(1, 128)
    executor = recording(room)
    assert isinstance(executor.device, SimulatedDevice)
    executor.prefill([1] * split.length)
    pieces = list(pieces_of(split.length, prompt_programs(TESTED, room)))
    assert tuple((piece.program.name, piece.count, piece.rows) for piece in pieces) == split.steps
    expected = [call for piece in pieces for call in executor.calls(piece.program, piece.rows)]
    assert executor.device.launched == expected


@pytest.mark.parametrize("context", [0, 20], ids=["alone", "behind a context"])
def test_a_prompt_as_short_as_a_step_of_drafts_runs_programs_for_prompts(context: int) -> None:
    """Known bug: dispatch by the number of tokens, which gave a prompt of 1 + k tokens to the graph of speculation."""
    decodes = tuple(f"decode/{rows}" for rows in range(1, MOST_DECODE_ROWS + 1))
    executor = recording(Room(1, 128), plan=plan_of(TINY.spec, (*decodes, "prefill/16", "prefill")))
    device, expected = executor.device, executor.calls(executor.program("prefill/16"), 16)
    assert isinstance(device, SimulatedDevice)
    for length in (*range(1, MOST_DECODE_ROWS + 1), 1):
        executor.reset()
        if context:
            executor.prefill([1] * context)
        del device.launched[:]
        executor.prefill([1] * length)
        assert device.launched == list(expected), length


def recording(room: Room, device: SimulatedDevice | None = None, plan: Plan = TESTED) -> Executor:
    source = HostWeights(make(TINY).packed)
    return executor_on(plan, source, room, device or SimulatedDevice(runs=record_only))


def of_rows(*rows: int) -> list[Program]:
    programs = [replace(TESTED.programs["prefill"], name=f"prefill/{count}", max_rows=count) for count in rows]
    return [*programs[:-1], replace(programs[-1], name="prefill")]


def test_a_long_prompt_runs_whole_steps_first() -> None:
    programs = of_rows(16, 64, 512, 2048)
    steps = [(piece.program.name, piece.first, piece.count, piece.rows) for piece in pieces_of(4096 + 70, programs)]
    assert steps == [("prefill", 0, 2048, 2048), ("prefill", 2048, 2048, 2048), ("prefill/512", 4096, 70, 96)]
    (piece,) = pieces_of(1000, programs)
    assert (piece.rows, piece.padding) == (1000, 0), "a long step has no graph and needs no padding"


@pytest.mark.parametrize("only", [("decode/1", "prefill/16"), ("prefill/16",)])
def test_a_small_program_alone_takes_longer_prompts_piece_by_piece(only: tuple[str, ...]) -> None:
    executor = recording(Room(1, 128, only))
    assert isinstance(executor.device, SimulatedDevice)
    executor.prefill([1] * 40)
    program = executor.program("prefill/16")
    assert executor.device.launched == list(executor.calls(program, 16)) * 3


def test_padding_is_less_than_half_and_never_more_than_the_program_holds() -> None:
    for count in range(1, SIZES[-1] + 200):
        rows = padded_rows(count, 2048)
        assert count <= rows and (rows in SIZES or (rows == count and count > SIZES[-1]))
        assert count <= 32 or 3 * (rows - count) <= rows
        assert padded_rows(count, count) == count


def test_padding_stands_before_the_tokens() -> None:
    executor = recording(Room(2, 64))
    executor.prefill([1, 2, 3], slot=1)
    executor.prefill([7] * 20, slot=1)
    read = executor.memory.read
    assert read("token", 32) == [0] * 12 + [7] * 20
    assert read("position", 32) == [-1] * 12 + list(range(3, 23))
    assert read("slot", 32) == [1] * 32
    assert read("start", 32) == [-1] * 12 + [3] * 20


def test_a_size_that_comes_again_is_one_graph_with_the_bits_of_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_for(TINY, slots=2)
    device, tokens = executor.device, judged(TINY).tokens
    captured: list[Sequence[Call]] = []
    replayed: list[SimulatedGraph] = []
    assert isinstance(device, SimulatedDevice)
    capture, launch = device.capture, SimulatedGraph.launch
    monkeypatch.setattr(device, "capture", lambda calls: (captured.append(calls), capture(calls))[1])
    monkeypatch.setattr(SimulatedGraph, "launch", lambda graph: (replayed.append(graph), launch(graph))[1])
    found = []
    for graphs, replays in ((0, 0), (2, 2), (2, 4)):
        executor.reset()
        executor.prefill(tokens[:20])
        found.append((executor.prefill(tokens[20:25]), logits_of(executor), executor.memory.save_states()))
        assert (len(captured), len(replayed)) == (graphs, replays)
    assert [len(calls) for calls in captured] == [
        len(TESTED.programs[name].launches) for name in ("prefill", "prefill/16")
    ]
    assert replayed[:2] == replayed[2:]
    assert len({item[0] for item in found}) == 1
    assert all(torch.equal(item[1], found[0][1]) and item[2] == found[0][2] for item in found)
    executor.prefill(tokens[:18], slot=1)
    assert len(captured) == 2 and len(replayed) == 5, "another length of the same size and another slot"


def test_the_least_recently_used_graphs_go_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = recording(Room(1, 128))
    nodes = len(TESTED.programs["prefill"].launches)
    monkeypatch.setattr(prompts, "MOST_NODES", 2 * nodes)
    kept: list[SimulatedGraph] = []
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    capture = device.capture
    monkeypatch.setattr(device, "capture", lambda calls: (kept.append(capture(calls)), kept[-1])[1])
    for length in (32, 32, 48, 48, 32, 64, 64, 32):
        executor.reset()
        executor.prefill([1] * length)
    assert [graph.is_closed for graph in kept] == [False, True, False], "48 rows went, 32 had been used since"
    executor.reset()
    executor.prefill([1] * 48)
    assert len(kept) == 4 and [graph.is_closed for graph in kept] == [False, True, True, False]


def test_long_steps_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = recording(Room(1, 128))
    monkeypatch.setattr(prompts, "SIZES", (16, 32))
    monkeypatch.setattr(executor.device, "capture", lambda calls: pytest.fail("captured"))
    for _ in range(3):
        executor.reset()
        executor.prefill([1] * 40)


def test_calls_of_a_step_are_made_once_and_few_are_kept() -> None:
    executor = recording(Room(1, 128))
    program = executor.program("prefill")
    addresses = executor.memory.addresses
    first = executor.calls(program, 1)
    assert executor.calls(program, 1) is first
    for rows in range(1, STEPS_KEPT + 2):
        assert executor.calls(program, rows) == calls_of(program, executor.kernels, addresses, rows, 128)
    assert executor.calls(program, 1) is not first and executor.calls(program, 1) == first


class Waiting(SimulatedDevice):
    """Counts waits, and notes rows, and first and last position and start, of every step."""

    def __init__(self) -> None:
        super().__init__(runs=self.note)
        self.waits = 0
        self.steps: list[tuple[int, list[int], list[int]]] = []
        self.executor: Executor | None = None

    def synchronize(self) -> None:
        self.waits += 1

    def note(self, calls: Sequence[Call]) -> None:
        assert self.executor is not None
        rows, waits = calls[0].grid[0], self.waits
        position, start = (self.executor.memory.read(name, rows) for name in ("position", "start"))
        self.waits = waits
        self.steps.append((rows, [position[0], position[-1]], [start[0], start[-1]]))


def test_131072_tokens_run_without_a_wait_between_most_of_their_steps() -> None:
    count, rows = 131072, 64
    plan = plan_of(replace(TINY.spec, max_context=count + 64))
    device = Waiting()
    room = Room(1, count + 64, ("prefill/16", "prefill"))
    device.executor = executor = executor_on(plan, HostWeights(make(TINY).packed), room, device)
    device.waits = 0
    executor.prefill([5] * (count - 3))
    expected = [(rows, [at, at + rows - 1], [at, at]) for at in range(0, count - rows, rows)]
    assert device.steps == [*expected, (rows, [-1, count - 4], [-1, count - rows])]
    assert device.waits == count // rows // staging.STEPS_STAGED, "one where staging is full, and one at the end"
    assert executor.lengths == [count - 3]
