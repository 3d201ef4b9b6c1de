"""A program's launches with every address and number in place.

In: a program, the rows of a step, the context, and where weights, states and tensors lie. Out: ``Call`` records that a
device launches as they are.

Example::

    calls_of(program, kernels, addresses, rows=16, context=4096)[0].grid
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from lynnc.dims import Dimension, evaluate
from lynnc.errors import PlanError
from lynnc.plan import Argument, Launch, Program
from lynnc.runtime.budget import place_of
from lynnc.runtime.device import Call, KernelFacts

STEPS_KEPT = 24
"""Steps whose calls are kept: making those of a step takes the host as long as starting them."""


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
class _Bound:
    """A launch with its addresses; what depends on the rows of the step is still the text of a size."""

    op: str
    kernel: str
    grid: tuple[Dimension, ...]
    values: tuple[Dimension, ...]
    has_pdl: bool


@dataclass(slots=True)
class CallMaker:
    """The launches of one program; each distinct size is evaluated once for a number of rows."""

    bound: tuple[_Bound, ...]
    sizes: tuple[str, ...]
    context: int

    def calls(self, rows: int) -> tuple[Call, ...]:
        """The launches of a step of ``rows`` rows."""
        found = {size: evaluate(size, rows, self.context) for size in self.sizes}
        calls = []
        for launch in self.bound:
            width, height, depth = (found[size] if isinstance(size, str) else size for size in launch.grid)
            values = tuple([found[value] if isinstance(value, str) else value for value in launch.values])
            calls.append(Call(launch.op, launch.kernel, (width, height, depth), values, launch.has_pdl))
        return tuple(calls)


def bind(
    program: Program,
    kernels: Mapping[str, KernelFacts],
    addresses: Addresses,
    context: int,
    tensors: Mapping[str, int] | None = None,
) -> CallMaker:
    """A program's launches for steps of any number of rows; ``tensors`` are used instead of the workspace where given.

    Only the first launch waits for all that came before: kernels read what earlier steps wrote before they wait for
    their neighbour.
    """
    places = tensors or addresses.of(program)
    bound = []
    for index, launch in enumerate(program.launches):
        facts = kernels[launch.kernel]
        visible = tuple(_value(argument, addresses, places) for argument in launch.args)
        values = (*visible, *_hidden(program, launch, facts))
        bound.append(_Bound(launch.op, launch.kernel, launch.grid, values, facts.has_pdl and index > 0))
    texts = [size for launch in bound for size in (*launch.grid, *launch.values) if isinstance(size, str)]
    return CallMaker(tuple(bound), tuple(dict.fromkeys(texts)), context)


def _value(argument: Argument, addresses: Addresses, places: Mapping[str, int]) -> Dimension:
    if argument.kind == "value":
        return argument.value
    if argument.kind == "weight":
        return addresses.weights[argument.name, argument.array]
    if argument.kind == "state":
        return addresses.states[argument.name]
    return places[argument.name] if argument.kind == "tensor" else 0


def calls_of(
    program: Program,
    kernels: Mapping[str, KernelFacts],
    addresses: Addresses,
    rows: int,
    context: int,
    tensors: Mapping[str, int] | None = None,
) -> tuple[Call, ...]:
    """The launches of one step of ``rows`` rows; see ``bind``."""
    return bind(program, kernels, addresses, context, tensors).calls(rows)


@dataclass(slots=True)
class KeptCalls:
    """The calls of recent steps by program and rows, at most ``STEPS_KEPT``; the least recently used go first."""

    kernels: Mapping[str, KernelFacts]
    addresses: Addresses
    context: int
    _makers: dict[str, CallMaker] = field(default_factory=dict)
    _kept: OrderedDict[tuple[str, int], tuple[Call, ...]] = field(default_factory=OrderedDict)

    def of(self, program: Program, rows: int) -> tuple[Call, ...]:
        """The launches of a step of ``rows`` rows."""
        key = program.name, rows
        found = self._kept.get(key)
        if found is None:
            if program.name not in self._makers:
                self._makers[program.name] = bind(program, self.kernels, self.addresses, self.context)
            found = self._kept[key] = self._makers[program.name].calls(rows)
            if len(self._kept) > STEPS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _hidden(program: Program, launch: Launch, facts: KernelFacts) -> tuple[int, ...]:
    """Values of the parameters that Triton appends; PlanError if the visible ones are not the launch's arguments."""
    visible = [parameter.name for parameter in facts.parameters if not parameter.hidden]
    if visible != [argument.parameter for argument in launch.args]:
        raise PlanError(
            f"{program.name}: the arguments of {launch.op} are not its kernel's parameters: compile the plan again."
        )
    return (0,) * (len(facts.parameters) - len(visible))
