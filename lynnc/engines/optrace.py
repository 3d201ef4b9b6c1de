"""One section of a graph (the embedding, a layer, or the head) run by itself, with what each of its ops leaves.

In: a graph, weights, states, the inputs of a step, and what the section before would have left. Out: an ``OpOutput``
for each tensor in the order of writing. Two engines that start a section from the same values show which op parts them:
errors that came before the section count for none of its ops.

Example::

    engine.reset()
    engine.trace_ops("layers.1", [5, 17, 300], hidden)[0]      # OpOutput(op="layers.1.input_norm", kind="RmsNorm", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lynnc.interpret import run_op
from lynnc.ir import Graph, Op, primitive_ops
from lynnc.mixerops import CacheAppend
from lynnc.stepvalues import Run, Weights

EMBED, HEAD = "embed", "head"


@dataclass(frozen=True, slots=True)
class OpOutput:
    """What a step left in ``tensor``: values [n, ...], or, of a state, the key/value cache [heads, n so far, ...].
    ``op`` and ``kind`` are those of the launch, ``inner`` the op of its body that wrote."""

    op: str
    kind: str
    inner: str
    tensor: str
    values: torch.Tensor
    is_state: bool = False


@runtime_checkable
class OpTraced(Protocol):
    """An engine whose ops can be seen."""

    def trace_ops(self, section: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> tuple[OpOutput, ...]:
        """Appends tokens to one section alone, from ``hidden`` [n, hidden] (None for the embedding)."""


def section_names(layers: int) -> tuple[str, ...]:
    """The embedding, each layer, the head, in order."""
    return (EMBED, *(f"layers.{layer}" for layer in range(layers)), HEAD)


def ops_of_section(graph: Graph, section: str) -> tuple[Op, ...]:
    """Ops by the layer in their names; those before the first layer and after the last one belong to the ends."""
    found: list[Op] = []
    is_before = True
    for op in graph.ops:
        words = op.name.split(".")
        in_layer = words[0] == "layers"
        is_before = is_before and not in_layer
        owner = ".".join(words[:2]) if in_layer else EMBED if is_before else HEAD
        if owner == section:
            found.append(op)
    return tuple(found)


def entry_of_section(section: str, layers: int) -> str:
    """The tensor of the residual stream that a section starts from; empty for the embedding."""
    return "" if section == EMBED else f"h.{layers if section == HEAD else section.split('.')[1]}"


def run_section(
    graph: Graph,
    section: str,
    weights: Weights,
    states: dict[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    entry: torch.Tensor | None,
) -> Iterator[OpOutput]:
    """Runs the section's ops in order and gives what each leaves; states go on as in a whole step."""
    run = Run(graph, weights, states, rows=inputs["token"].shape[0])
    for name in graph.inputs:
        run.put(name, inputs[name])
    if entry is not None:
        layers = sum(name.startswith("h.") and name[2:].isdigit() for name in graph.tensors) - 1
        run.put(entry_of_section(section, layers), entry)
    length = int(inputs["position"].max()) + 1
    reading = Reading(graph, lambda name: run.get(name).clone(), lambda name: run.states[name][0, :, :length].clone())
    for op in ops_of_section(graph, section):
        for inner in primitive_ops(op):
            run_op(run, inner)
            yield from outputs_of(reading, op, inner, inner.writes)


@dataclass(frozen=True, slots=True)
class Reading:
    """How values are read behind an op: a tensor of the graph, or a key/value cache [heads, n so far, ...], by name."""

    graph: Graph
    tensor: Callable[[str], torch.Tensor]
    cache: Callable[[str], torch.Tensor]


def outputs_of(reading: Reading, op: Op, inner: Op, seen: Sequence[str]) -> Iterator[OpOutput]:
    """What an op in a launch left: those of its tensors that can be ``seen``, views of them, and the cache that it went
    on with."""
    for written in inner.writes:
        if written in seen:
            views = (tensor.name for tensor in reading.graph.tensors.values() if tensor.base == written)
            for name in (written, *views):
                yield OpOutput(op.name, op.kind, inner.kind, name, reading.tensor(name))
    if isinstance(inner, CacheAppend):
        for name in inner.names("state"):
            yield OpOutput(op.name, op.kind, inner.kind, name, reading.cache(name), True)
