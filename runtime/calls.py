"""A program's launches with every address and number in place.

In: a program, the rows of a step, the context, and where weights, states and tensors lie. Out: ``Call`` records that a
device launches as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lynnc.dims import Dimension, evaluate
from lynnc.errors import PlanError
from lynnc.plan import Argument, Launch, Program
from lynnc.runtime.budget import place_of
from lynnc.runtime.device import Call, KernelFacts

SIZES_KEPT = 1 << 16
"""Sizes of recent steps that are not computed again."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything lies in GPU memory: weights by (weight, array), states, inputs and outputs, and workspace."""

    weights: Mapping[tuple[str, str], int]
    states: Mapping[str, int]
    tensors: Mapping[str, int]
    workspace: int

    def of(self, program: Program) -> Mapping[str, int]:
        """Address of each tensor of a program by name."""
        return {
            place.name: self.tensors[place_of(place.name)] if place.offset is None else self.workspace + place.offset
            for place in program.tensors
        }


@dataclass(frozen=True, slots=True)
class _Step:
    addresses: Addresses
    tensors: Mapping[str, int]
    rows: int
    context: int

    def value(self, argument: Argument) -> int:
        if argument.kind == "value":
            return _size(argument.value, self.rows, self.context)
        if argument.kind == "weight":
            return self.addresses.weights[argument.name, argument.array]
        if argument.kind == "state":
            return self.addresses.states[argument.name]
        return self.tensors[argument.name] if argument.kind == "tensor" else 0


def calls_of(
    program: Program,
    kernels: Mapping[str, KernelFacts],
    addresses: Addresses,
    rows: int,
    context: int,
    tensors: Mapping[str, int] | None = None,
) -> tuple[Call, ...]:
    """The launches of a step of ``rows`` rows; ``tensors`` are used instead of the workspace where given.

    Only the first waits for all that came before: kernels read what earlier steps wrote before they wait for their
    neighbour.
    """
    step = _Step(addresses, tensors or addresses.of(program), rows, context)
    calls = []
    for index, launch in enumerate(program.launches):
        facts = kernels[launch.kernel]
        width, height, depth = (_size(size, rows, context) for size in launch.grid)
        values = (*(step.value(argument) for argument in launch.args), *_hidden(program, launch, facts))
        has_pdl = facts.has_pdl and index > 0
        calls.append(Call(launch.op, launch.kernel, (width, height, depth), values, has_pdl))
    return tuple(calls)


def _hidden(program: Program, launch: Launch, facts: KernelFacts) -> tuple[int, ...]:
    """Values of the parameters that Triton appends; PlanError if the visible ones are not the launch's arguments."""
    visible = [parameter.name for parameter in facts.parameters if not parameter.hidden]
    if visible != [argument.parameter for argument in launch.args]:
        raise PlanError(
            f"{program.name}: the arguments of {launch.op} are not its kernel's parameters: compile the plan again."
        )
    return (0,) * (len(facts.parameters) - len(visible))


@lru_cache(SIZES_KEPT)
def _size(size: Dimension, rows: int, context: int) -> int:
    return evaluate(size, rows, context)
