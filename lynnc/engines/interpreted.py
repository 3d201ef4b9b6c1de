"""A packed model as its graph is defined, in torch, on any machine: exact, without a compiler and without a GPU.

In: a packed folder, or a model and the FP32 values of its weights. Out: an ``Engine``.

Example::

    engine = open_interpreted(Path("models/lynn-mini"))
    engine.append([1, 2, 3])[-1].argmax()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lynnc.build import build_graph
from lynnc.engines.engine import Trace
from lynnc.engines.optrace import OpOutput, run_section
from lynnc.errors import OptionError
from lynnc.interpret import interpret, new_states, step_inputs
from lynnc.ir import Graph
from lynnc.model import ModelSpec
from lynnc.runtime.weights.packedfile import open_packed

CHUNK = 64
"""Tokens of a step; the memory of a step grows with them."""


@dataclass(slots=True)
class Interpreted:
    """An engine that runs the model's graph op by op; ``weights`` are FP32 values by weight name, on ``device``."""

    spec: ModelSpec
    weights: Mapping[str, torch.Tensor]
    label: str
    context: int
    length: int = 0
    device: str = "cpu"
    _states: dict[str, torch.Tensor] = field(default_factory=dict)
    _graphs: dict[int, Graph] = field(default_factory=dict)

    def reset(self) -> None:
        """Begins a new sequence: what an old one left is never read."""
        self.length = 0

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends tokens; FP32 logits [n, vocabulary]. OptionError if they do not fit the context or the model."""
        return torch.cat([found["logits"] for found in self._steps(tokens)])

    def trace(self, tokens: Sequence[int]) -> Trace:
        """The same with the residual stream after each layer."""
        steps = self._steps(tokens)
        names = [f"h.{layer}" for layer in range(len(self.spec.layers) + 1)]
        hidden = [torch.stack([found[name].float() for name in names]) for found in steps]
        return Trace(torch.cat([found["logits"] for found in steps]), torch.cat(hidden, dim=1))

    def trace_ops(self, section: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> tuple[OpOutput, ...]:
        """Appends tokens to one section of the graph alone, which starts from ``hidden`` [n, hidden] instead of what
        the section before it would leave; see ``lynnc.engines.optrace``."""
        found: list[OpOutput] = []
        first = 0
        with torch.inference_mode(), torch.device(self.device):
            for piece, graph in self._pieces(tokens):
                inputs = step_inputs(piece, self.length)
                entry = None if hidden is None else hidden[first : first + len(piece)].to(self.device)
                found += run_section(graph, section, self.weights, self._states, inputs, entry)
                self.length += len(piece)
                first += len(piece)
        return tuple(found)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights' values and of the states."""
        return sum(held.nbytes for held in (*self.weights.values(), *self._states.values()))

    def close(self) -> None:
        """Nothing is held but ordinary memory."""

    def _steps(self, tokens: Sequence[int]) -> list[Mapping[str, torch.Tensor]]:
        found: list[Mapping[str, torch.Tensor]] = []
        with torch.inference_mode(), torch.device(self.device):
            for piece, graph in self._pieces(tokens):
                found.append(interpret(graph, self.weights, self._states, step_inputs(piece, self.length)))
                self.length += len(piece)
        return found

    def _pieces(self, tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], Graph]]:
        """The tokens of each step with its graph; states are there before the first."""
        check_tokens(self.spec, tokens, self.length, self.context)
        while tokens:
            piece = tokens[: self._rows(len(tokens))]
            graph = self._graph(len(piece))
            self._states = self._states or new_states(graph, slots=1, context=self.context)
            yield piece, graph
            tokens = tokens[len(piece) :]

    def _rows(self, left: int) -> int:
        """Rows of the next step where ``left`` tokens are left."""
        return min(left, CHUNK)

    def _graph(self, rows: int) -> Graph:
        if rows not in self._graphs:
            self._graphs[rows] = build_graph(self.spec, rows)
        return self._graphs[rows]


def check_tokens(spec: ModelSpec, tokens: Sequence[int], length: int, context: int) -> None:
    """OptionError unless there are tokens, all of the model, with room for them."""
    if not tokens:
        raise OptionError("There are no tokens: give at least one.")
    wrong = next((token for token in tokens if not 0 <= token < spec.vocabulary), None)
    if wrong is not None:
        raise OptionError(f"{wrong} is no token of {spec.name}: they go from 0 to {spec.vocabulary - 1}.")
    if length + len(tokens) > context:
        raise OptionError(
            f"{length + len(tokens)} tokens do not fit a context of {context}: shorten the text, or allow a longer one."
        )


def open_interpreted(folder: Path, context: int | None = None, device: str = "cpu") -> Interpreted:
    """The model of a packed folder with all its weights as FP32 values; WeightError if the folder is damaged."""
    packed = open_packed(folder)
    weights = {name: packed.values(name, device) for name in packed.weights}
    label = f"{packed.spec.name}, interpreted"
    return Interpreted(packed.spec, weights, label, context or packed.spec.max_context, device=device)
