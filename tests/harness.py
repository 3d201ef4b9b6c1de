"""What the numeric tests share: random weights, one-op graphs, and one comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from lynnc.choose import choose_all
from lynnc.columnorder import ColumnOrder
from lynnc.interpret import interpret, new_states
from lynnc.ir import Graph, Op, Stage
from lynnc.lower import lower
from lynnc.records import Records
from lynnc.runtime.weights.arrays import PackedWeight, pack_weight, unpack_weight
from lynnc.simulate import Simulator
from lynnc.stepvalues import in_memory, natural
from lynnc.target import find_target
from lynnc.tensors import DType, State, Tensor, Weight

TARGET = find_target("sm_90")
_DEVICE = ["cpu"]


def use_device(device: str) -> None:
    """Where ``run_both`` runs kernels from now on."""
    _DEVICE[0] = device


def device() -> str:
    """Where kernels run: cpu or cuda."""
    return _DEVICE[0]


@dataclass(frozen=True)
class Errors:
    """Differences over the RMS of the reference."""

    max: float
    rms: float


def errors(actual: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Maximum and RMS difference, both over the RMS of ``expected``."""
    actual, expected = actual.double(), expected.double()
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    difference = (actual - expected).abs()
    return Errors(float(difference.max() / scale), float(difference.square().mean().sqrt() / scale))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float, what: str = "") -> None:
    """The one comparison: finite, same shape, RMS error within ``limit`` and maximum within 8 times that."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.isfinite().all(), f"{what}: {int((~actual.isfinite()).sum())} values are not finite"
    found = errors(actual, expected)
    assert found.rms <= limit and found.max <= 8 * limit, f"{what}: {found}, limit {limit}"


def random_lookup(seed: int, shapes: Mapping[str, tuple[int, ...]]):
    """Checkpoint tensors by name, each from its own generator so that order does not matter."""

    def lookup(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, name)) * 7919 + len(name))
        shape = shapes[name.format(expert="{expert}") if name in shapes else name]
        return torch.randn(shape, generator=generator)

    return lookup


def pack_graph(graph: Graph, seed: int = 0, gain: float = 1.0) -> tuple[dict, dict]:
    """Random weights for every weight of a graph: packed arrays by (weight, array), and dequantised values."""
    packed: dict[tuple[str, str], torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for index, weight in enumerate(graph.weights.values()):
        result = pack_weight(weight, _random_part(weight, seed + index, gain))
        packed.update({(weight.name, name): array for name, array in result.arrays.items()})
        values[weight.name] = unpack_weight(result)
    return packed, values


def _random_part(weight: Weight, seed: int, gain: float):
    columns = weight.columns if len(weight.shape) > 1 else 1
    # Parts of unlike size: a global scale of the wrong part is far outside every tolerance.
    size = {part.source: (part.rows, (1.0, 2.0, 0.5)[index % 3]) for index, part in enumerate(weight.parts)}
    generator = torch.Generator().manual_seed(seed)

    def lookup(name: str) -> torch.Tensor:
        count, factor = next(s for source, s in size.items() if all(end in name for end in source.split("{expert}")))
        scale = gain if len(weight.shape) == 1 else gain * factor * columns**-0.5
        return torch.randn(count, columns, generator=generator) * scale

    return lookup


def op_graph(
    *ops: Op,
    tensors: Mapping[str, tuple[DType, tuple]],
    weights: tuple[Weight, ...] = (),
    states: tuple[State, ...] = (),
    rows=1,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    program: str | None = None,
) -> Graph:
    """A fused-stage graph of a few ops, for one kernel's test."""
    return Graph(
        model="test",
        program=program or f"decode/{rows}",
        stage=Stage.FUSED,
        rows=rows,
        ops=ops,
        tensors={name: Tensor(name, dtype, shape) for name, (dtype, shape) in tensors.items()},
        weights={weight.name: weight for weight in weights},
        states={state.name: state for state in states},
        inputs=inputs,
        outputs=outputs,
    )


def in_lanes(graph: Graph, *names: str) -> Graph:
    """The graph with the columns of some tensors in the order of lanes."""
    ordered = {name: replace(graph.tensors[name], order=ColumnOrder.LANES) for name in names}
    return replace(graph, tensors={**graph.tensors, **ordered})


@dataclass
class Outcome:
    """Values of a graph by tensor name: from the kernels and from the interpreter, with the states after the step."""

    kernels: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor]
    kernel_states: dict[str, torch.Tensor]
    reference_states: dict[str, torch.Tensor]


def run_both(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    knobs: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    states: Mapping[str, torch.Tensor] | None = None,
    slots: int = 1,
    context: int = 64,
    seed: int = 0,
    weights: tuple[dict, dict] | None = None,
) -> Outcome:
    """Runs a fused graph through its generated kernels and through the interpreter, on equal inputs and states.

    ``inputs`` are all the graph's inputs by name; rows are taken from the first. Tensors of the graph's ``inputs``
    that are not I32 columns are allowed here: they stand for what an earlier launch wrote.
    """
    packed, values = weights or pack_graph(graph, seed)
    start = states if states is not None else new_states(graph, slots, context)
    kernel_states = {name: value.clone() for name, value in start.items()}
    reference_states = {name: value.clone() for name, value in start.items()}
    step = dict(inputs)
    step.setdefault("token", torch.zeros(next(iter(inputs.values())).shape[0], 1, dtype=torch.int32))
    lowered = lower(graph, choose_all(graph, TARGET, Records(), knobs), TARGET, max(64, step["token"].shape[0]))
    entries = {key: call.entry for key, call in lowered.kernels.items()}
    simulator = Simulator(entries, packed, kernel_states, context, device())
    known = {name: graph.tensors[name] for name in step if name in graph.tensors}
    stored = {name: in_memory(known[name], value) if name in known else value for name, value in step.items()}
    kernels = simulator.run(lowered.program, stored)
    reference = interpret(graph, values, reference_states, step)
    kernel_states = {name: value.cpu() for name, value in simulator.states.items()}
    found = {name: natural(graph.tensors[name], value.cpu()) for name, value in kernels.items()}
    return Outcome(found, reference, kernel_states, reference_states)


__all__ = [
    "Errors",
    "Outcome",
    "PackedWeight",
    "assert_close",
    "errors",
    "in_lanes",
    "op_graph",
    "pack_graph",
    "replace",
    "run_both",
]
