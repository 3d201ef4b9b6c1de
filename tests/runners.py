"""Our side of a comparison with the judge: the interpreter, or the generated kernels in Triton's interpreter.

A ``Runner`` holds the states of its slots and runs steps; ``follow`` runs a whole sequence through one, ``check``
compares what came out with the judge.

Example::

    found = follow(Interpreter(make(case)), run.tokens, prefills=(11,))
    check(found, run, LIMIT, "tiny-moe")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Protocol
from unittest.mock import patch

import harness
import torch
from harness import TARGET, assert_close
from reference import STEPS, Case, Reference, Run, make

from lynnc.build import build_graph
from lynnc.choose import Overrides, choose_all
from lynnc.compiler import model_graph
from lynnc.interpret import interpret, new_states, step_inputs
from lynnc.ir import Graph
from lynnc.lower import Lowered, lower
from lynnc.passes import run_passes
from lynnc.plan import KernelEntry
from lynnc.programs import PREFILL
from lynnc.records import Records
from lynnc.runtime.budget import Room
from lynnc.simulate import Simulator
from lynnc.tensors import DType, T

CONTEXT = 64
"""Positions that the tests' key/value caches hold."""
FEW_SPLITS = 4
"""Runs of attention, where a GPU wants many: each costs a program, most of them empty."""
PREFILL_ROWS = 64
"""Rows of the longest prefill step of plans in the tests."""
MOST_ROWS = 257
"""Rows of the longest prefill step that ``Kernels`` runs."""

ROOM = Room(1, CONTEXT)

SIMULATOR_KNOBS: Overrides = MappingProxyType(
    {
        "linear": {"BLOCK_N": 256, "BLOCK_K": 512, "num_warps": 8},
        "gate_up": {"BLOCK_N": 256, "BLOCK_K": 512, "num_warps": 8},
        "experts_up": {"BLOCK_N": 64, "BLOCK_K": 512},
        "experts_down": {"BLOCK_N": 128, "BLOCK_K": 512},
        "expert_linear": {"BLOCK_N": 128, "BLOCK_K": 512},
        "gemm": {"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8, "num_stages": 1},
        "causal_conv": {"BLOCK_C": 512},
        "gated_delta": {"BLOCK_V": 64},
        "gated_norm": {"BLOCK_HEADS": 64},
    }
)
"""Large tiles: a program costs Triton's interpreter some 20 ms whatever its size."""


def routing_noise(reference: Reference, run: Run) -> float:
    """The largest difference between the interpreter's router logits and the judge's: what a margin must exceed."""
    values = Interpreter(reference).step(run.tokens, prefill=True)
    ours = [values[f"layers.{layer}.logits"] for layer in range(len(run.routers))]
    return max((float((a - b).abs().max()) for a, b in zip(ours, run.routers, strict=True)), default=0.0)


class Runner(Protocol):
    """One side under test, with the states of its slots."""

    states: dict[str, torch.Tensor]

    def step(
        self,
        tokens: Sequence[int],
        start: int | Sequence[int] = 0,
        slot: int | Sequence[int] = 0,
        prefill: bool = False,
    ) -> dict[str, torch.Tensor]:
        """The tensors after one step of the prefill program, or of the decode program of as many rows."""
        ...


class Interpreter:
    """``lynnc.interpret`` on the ``model`` stage; ``exact`` keeps every activation and state in FP32."""

    def __init__(self, reference: Reference, slots: int = 1, context: int = CONTEXT, exact: bool = False) -> None:
        self.reference = reference
        self.exact = exact
        self.states = new_states(self._graph(1), slots, context)

    def _graph(self, rows: int | None) -> Graph:
        graph = build_graph(self.reference.spec, rows or T)
        return unrounded(graph) if self.exact else graph

    def step(
        self,
        tokens: Sequence[int],
        start: int | Sequence[int] = 0,
        slot: int | Sequence[int] = 0,
        prefill: bool = False,
    ) -> dict[str, torch.Tensor]:
        graph = self._graph(None if prefill else len(tokens))
        return interpret(graph, self.reference.values, self.states, step_inputs(tokens, start, slot))


def unrounded(graph: Graph) -> Graph:
    """The graph with FP32 in the place of BF16; the ops' own rounding is ``lynnc.interpret.bf16``."""
    tensors = {name: replace(item, dtype=_wide(item.dtype)) for name, item in graph.tensors.items()}
    states = {name: replace(item, dtype=_wide(item.dtype)) for name, item in graph.states.items()}
    return replace(graph, tensors=tensors, states=states)


def _wide(dtype: DType) -> DType:
    return DType.F32 if dtype is DType.BF16 else dtype


class Kernels:
    """The generated kernels of whole programs, in Triton's interpreter or on the device that the tests were given."""

    def __init__(
        self,
        case: Case,
        room: Room = ROOM,
        knobs: Overrides = SIMULATOR_KNOBS,
        splits: int = FEW_SPLITS,
        without: tuple[str, ...] = (),
        packed: Mapping[tuple[str, str], torch.Tensor] | None = None,
    ) -> None:
        """``packed`` are the arrays of another checkpoint of the case's model than ``make`` gives."""
        self.case, self.knobs, self.splits, self.without = case, _hashable(knobs), splits, without
        self.prompts = PREFILL  # the program that runs them
        self.entries: dict[str, KernelEntry] = {}
        states = new_states(build_graph(case.spec, 1), room.slots, room.context)
        arrays = make(case).packed if packed is None else packed
        self.simulator = Simulator(self.entries, arrays, states, room.context, harness.device())

    @property
    def states(self) -> dict[str, torch.Tensor]:
        return self.simulator.states

    def load(self, states: Mapping[str, torch.Tensor]) -> None:
        """Goes on from these states."""
        for name, state in states.items():
            self.states[name].copy_(state)

    def step(
        self,
        tokens: Sequence[int],
        start: int | Sequence[int] = 0,
        slot: int | Sequence[int] = 0,
        prefill: bool = False,
    ) -> dict[str, torch.Tensor]:
        program = self.prompts if prefill else f"decode/{len(tokens)}"
        lowered = _lowered(self.case, program, self.knobs, self.splits, self.without)
        self.entries.update({key: call.entry for key, call in lowered.kernels.items()})
        values = self.simulator.run(lowered.program, step_inputs(tokens, start, slot))
        return {name: values[name].cpu() for name in lowered.program.outputs}


_Knobs = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def _hashable(knobs: Overrides) -> _Knobs:
    return tuple((kernel, tuple(values.items())) for kernel, values in knobs.items())


@cache
def _lowered(case: Case, program: str, knobs: _Knobs, splits: int, without: tuple[str, ...]) -> Lowered:
    with patch.object(import_module("lynnc.passes.split_attention"), "SPLITS", splits):
        graph = run_passes(model_graph(case.spec, program), without)
    overrides = {kernel: dict(values) for kernel, values in knobs}
    return lower(graph, choose_all(graph, TARGET, Records(), overrides), TARGET, MOST_ROWS)


@dataclass(frozen=True)
class Followed:
    """Logits [n, V] at some positions, and the tokens chosen there."""

    positions: list[int]
    logits: torch.Tensor
    chosen: torch.Tensor


def follow(
    runner: Runner, tokens: Sequence[int], prefills: Sequence[int] = (), rows: int = 1, slot: int = 0
) -> Followed:
    """Runs prefill steps of the given lengths over ``tokens``, then decode steps of ``rows`` to their end."""
    start, positions, logits, chosen = 0, [], [], []
    for length in prefills:
        values = runner.step(tokens[start : start + length], start, slot, prefill=True)
        start += length
        positions.append(start - 1)
        logits.append(values["logits"])
        chosen.append(values["next_token"])
    for first in range(start, len(tokens), rows):
        values = runner.step(tokens[first : first + rows], first, slot)
        positions.extend(range(first, min(first + rows, len(tokens))))
        logits.append(values["logits"])
        chosen.append(values["next_token"])
    return Followed(positions, torch.cat(logits), torch.cat(chosen)[:, 0])


def assert_same_choice(found: Followed, run: Run, what: str) -> None:
    """The judge's token wherever its best two logits differ by more than twice the largest error of the row."""
    expected = run.logits[found.positions]
    best = expected.topk(2, dim=-1).values
    is_clear = best[:, 0] - best[:, 1] > 2 * (found.logits - expected).abs().amax(-1)
    wrong = is_clear & (found.chosen != expected.argmax(-1))
    assert len(is_clear) < STEPS or is_clear.float().mean() > 0.75, f"{what}: the judge's choices are too close"
    assert not wrong.any(), f"{what}: another token in rows {wrong.nonzero().flatten().tolist()}"


def check(found: Followed, run: Run, limit: float, what: str) -> None:
    """Every row's logits are close to the judge's and choose the same token."""
    expected = run.logits[found.positions]
    assert_close(found.logits, expected, limit, what)
    for position, row, judged in zip(found.positions, found.logits, expected, strict=True):
        assert_close(row, judged, 1.5 * limit, f"{what} at position {position}")
    assert_same_choice(found, run, what)
