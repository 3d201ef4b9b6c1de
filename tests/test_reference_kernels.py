"""The generated kernels of whole programs against ``transformers``, for every family.

Every step goes the whole way: graph, passes, choices, lowering, rendered source, in Triton's interpreter or on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from harness import errors
from reference import BLOCKS, FAMILIES, LIMIT, PAIR, PROMPT, STEPS, VARIANTS, Case, Run, judge_long, judged, make
from runners import CONTEXT, Followed, Interpreter, Kernels, check, follow

from lynnc.columnorder import ColumnOrder
from lynnc.compiler import fused_graph
from lynnc.passes import PIPELINE
from lynnc.passes.split_attention import SPLITS
from lynnc.runtime.budget import Room

each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)
NAMES = tuple(step.name for step in PIPELINE)


@dataclass(frozen=True)
class Split:
    """Prefill steps from position 0; one decode step follows."""

    prefills: tuple[int, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.prefills))


LENGTHS = tuple(Split(prefills) for prefills in ((1, 2), (2,), (15,), (16, 1), (17,), (33,)))
ODD = (FAMILIES[0], Split((2, 1, 5)))
ROWS = ((FAMILIES[0], (4, 8)), (FAMILIES[1], (2, 4)), (FAMILIES[2], (4,)))
"""Rows of the decode steps that are compared with steps of one row."""


def prompted(case: Case, length: int = PROMPT, slots: int = 1) -> dict[str, torch.Tensor]:
    """The states that the interpreter leaves after the first tokens of every slot."""
    runner = Interpreter(make(case), slots)
    for slot in range(slots):
        runner.step(judged(case).tokens[: length + 3 * slot], slot=slot, prefill=True)
    return runner.states


def after_prompt(case: Case, **options: object) -> Kernels:
    runner = Kernels(case, **options)  # type: ignore[arg-type]
    runner.load(prompted(case))
    return runner


def next_step(runner: Kernels, case: Case) -> Followed:
    """One decode step after the prompt."""
    values = runner.step([judged(case).tokens[PROMPT]], PROMPT)
    return Followed([PROMPT], values["logits"], values["next_token"][:, 0])


def snapshot(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: state.clone() for name, state in states.items()}


def assert_equal_states(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    for name, state in found.items():
        assert torch.equal(state, expected[name]), f"{what}: {name}"


LONG = ((FAMILIES[0], (PROMPT,)), (FAMILIES[1], (PROMPT, 16)), (FAMILIES[2], (PROMPT, 16)))
"""Prompts; every decode goes on to the same position, behind rings of 16 and a tile of 32. The family with both mixers
decodes far enough for errors of its states to add up."""


@pytest.mark.parametrize(("case", "prefills"), LONG, ids=str)
def test_prompt_and_decode(case: Case, prefills: tuple[int, ...]) -> None:
    run = judged(case)
    found = follow(Kernels(case), run.tokens, prefills)
    assert found.positions[-1] == PROMPT + STEPS - 1
    check(found, run, LIMIT, str(case))


@pytest.mark.parametrize("program", ["prefill/16", "prefill"])
def test_columns_in_the_order_of_lanes_and_sums_by_parts(program: str) -> None:
    run, runner = judged(BLOCKS), Kernels(BLOCKS)
    runner.prompts = program
    check(follow(runner, run.tokens[: PROMPT + 1], prefills=(PROMPT,)), run, LIMIT, program)
    graph = fused_graph(BLOCKS.spec, program)
    ordered = {n.rpartition(".")[2] for n, tensor in graph.tensors.items() if tensor.order is ColumnOrder.LANES}
    assert ordered == {"x", "y_lanes", "gated", "experts_act", "shared_act"}
    assert sum(op.kind == "SumPartsNorm" for op in graph.ops) == (2 if program == "prefill/16" else 0)


@pytest.mark.parametrize(("case", "split"), [*product(FAMILIES, LENGTHS), ODD], ids=str)
def test_prompts_of_any_split(case: Case, split: Split) -> None:
    run, kernels, interpreter = judged(case), Kernels(case), Interpreter(make(case))
    tokens = run.tokens[: sum(split.prefills) + 1]
    check(follow(kernels, tokens, split.prefills), run, LIMIT, f"{case} {split}")
    follow(interpreter, tokens, split.prefills)
    for name, expected in interpreter.states.items():
        state, written = kernels.states[name].cpu(), expected != 0
        if name == "history" and not written.any():
            continue  # a prefill alone keeps no token
        assert errors(state[written], expected[written]).rms <= 2 * LIMIT, name  # both sides round, each its own way
        assert not state[~written].any(), name


@pytest.fixture(scope="module")
def long_run() -> Run:
    return judge_long(make(PAIR), 258)


GPU_SPLITS = tuple(Split(prefills) for prefills in ((1,), (15,), (16,), (17,), (255,), (256,), (257,), (130, 127)))


@pytest.mark.parametrize(
    "split", [Split((65, 17)), *(pytest.param(split, marks=pytest.mark.gpu) for split in GPU_SPLITS)], ids=str
)
def test_prompts_of_several_chunks_and_steps(split: Split, long_run: Run) -> None:
    """Known bug: lengths around 16 and 256. Triton's interpreter has time for a step of two chunks of the delta rule
    and one that goes on behind them."""
    kernels = Kernels(PAIR, Room(1, 320))
    check(follow(kernels, long_run.tokens[: sum(split.prefills) + 1], split.prefills), long_run, LIMIT, str(split))


@pytest.mark.parametrize(("case", "counts"), ROWS, ids=str)
def test_rows_of_a_step_are_bit_identical(case: Case, counts: tuple[int, ...]) -> None:
    tokens = judged(case).tokens[PROMPT : PROMPT + max(counts)]
    runner, start = after_prompt(case), prompted(case)
    rows, states = [], []
    for row, token in enumerate(tokens):
        rows.append(runner.step([token], PROMPT + row)["logits"])
        states.append(snapshot(runner.states))
    for count in counts:
        runner.load(start)
        values = runner.step(tokens[:count], PROMPT)
        assert torch.equal(values["logits"], torch.cat(rows[:count])), f"decode/{count}"
        assert_equal_states(runner.states, states[count - 1], f"decode/{count}")


@each_family
def test_slots_of_a_step_are_bit_identical(case: Case) -> None:
    slots, tokens = [2, 0, 3, 1], judged(case).tokens[:4]
    starts, runner = [PROMPT + 3 * slot for slot in slots], Kernels(case, Room(4, CONTEXT))
    start = prompted(case, slots=4)
    runner.load(start)
    together = runner.step(tokens, starts, slots)["logits"]
    states = snapshot(runner.states)
    runner.load(start)
    alone = [runner.step([token], at, slot)["logits"] for token, at, slot in zip(tokens, starts, slots, strict=True)]
    assert torch.equal(together, torch.cat(alone))
    assert_equal_states(runner.states, states, "states")


@each_family
def test_a_used_slot_starts_afresh(case: Case) -> None:
    run, runner = judged(case), Kernels(case, Room(2, CONTEXT))
    states = [state for name, state in runner.states.items() if name != "history"]
    for state in states:
        state.fill_(torch.nan)
    check(follow(runner, run.tokens[:3], prefills=(2,), slot=1), run, LIMIT, "prefill")
    check(follow(runner, run.tokens[:1], slot=1), run, LIMIT, "decode")
    assert all(state[0].isnan().all() for state in states)


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_other_formats(case: Case) -> None:
    run = judged(case)
    check(follow(Kernels(case), run.tokens[:4], prefills=(3,)), run, LIMIT, str(case))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_pass(name: str) -> None:
    case = FAMILIES[0]
    check(next_step(after_prompt(case, without=(name,)), case), judged(case), LIMIT, name)


@each_family
def test_without_any_pass(case: Case) -> None:
    check(next_step(after_prompt(case, without=NAMES), case), judged(case), LIMIT, str(case))


def test_default_knobs() -> None:
    case = FAMILIES[0]
    check(next_step(after_prompt(case, knobs={}, splits=SPLITS), case), judged(case), LIMIT, str(case))
