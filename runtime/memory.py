"""An executor's memory: states, workspace, inputs and outputs, and the host's side of them.

In: a plan, a device and a budget that fits. Out: a ``Memory`` with all addresses. Everything is allocated at once, and
nothing later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lynnc.dims import evaluate
from lynnc.errors import OptionError
from lynnc.plan import Plan, Program
from lynnc.runtime.budget import HISTORY, Budget, Room, own_tensors, place_of, state_bytes
from lynnc.runtime.calls import Addresses
from lynnc.runtime.device import Device
from lynnc.runtime.loading.weightsource import PlacedWeights
from lynnc.runtime.rows import Columns
from lynnc.runtime.staging import STEPS_STAGED, Staging
from lynnc.runtime.tensors import DeviceTensor

INPUTS = ("token", "position", "slot", "start")
INT = 4
"""Bytes of an input's element."""


@dataclass(slots=True)
class Memory:
    """Everything that a plan's launches read and write. ``history`` is I32 [slots * context] of the host."""

    plan: Plan
    device: Device
    budget: Budget
    addresses: Addresses
    weights: PlacedWeights
    history: memoryview
    room: Room
    staging: Staging

    def write_columns(self, columns: Columns) -> None:
        """The inputs of a step that is started next."""
        self.staging.upload(self.addresses.tensors, columns)

    def keep_token(self, slot: int, position: int) -> None:
        """Copies the token that a prefill chose to where the history keeps it."""
        target = self.addresses.states[HISTORY] + (slot * self.room.context + position) * INT
        self.device.download(target, self.addresses.tensors["token"], INT)

    def read(self, name: str, count: int) -> list[int]:
        """The first integers of an input or output."""
        found = (ctypes.c_int32 * count)()
        self.device.download(ctypes.addressof(found), self.addresses.tensors[name], count * INT)
        self.device.synchronize()
        return list(found)

    def read_into(self, data: bytearray, address: int) -> None:
        """Copies GPU memory into a buffer of the host."""
        self.device.download(ctypes.addressof(ctypes.c_char.from_buffer(data)), address, len(data))
        self.device.synchronize()

    def save_states(self) -> dict[str, bytearray]:
        """Contents of all states, by name."""
        return {name: bytearray(self.tensor(name).read().tobytes()) for name in self.plan.states}

    def restore_states(self, states: Mapping[str, bytearray]) -> None:
        """Writes contents that ``save_states`` gave; the lengths of sequences are the executor's."""
        for name, data in states.items():
            source = ctypes.addressof(ctypes.c_char.from_buffer(data))
            self.device.upload(self.addresses.states[name], source, len(data))
        self.device.synchronize()

    def tensor(self, name: str) -> DeviceTensor:
        """An input, output or state by name, with the rows of the largest loaded program; OptionError for another."""
        if name in self.plan.states:
            state = self.plan.states[name]
            shape = (self.room.slots, *(evaluate(size, context=self.room.context) for size in state.shape))
            return DeviceTensor(name, state.dtype, shape, self.addresses.states[name], self.device)
        found = [
            (place.bytes, place, program.max_rows)
            for program in self.plan.programs.values()
            for place in program.tensors
            if program.name in (self.room.programs or self.plan.programs)
            if place.name == name and place.offset is None
        ]
        if found:
            _, place, rows = max(found, key=lambda item: item[0])
            shape = tuple(evaluate(size, rows, self.room.context) for size in place.shape)
            return DeviceTensor(name, place.dtype, shape, self.addresses.tensors[place_of(name)], self.device)
        names = sorted({*self.addresses.tensors, *self.plan.states})
        raise OptionError(f"There is no input, output or state {name!r}: choose one of {', '.join(names)}.")


def _clear(device: Device, states: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Zeros in all states: no sequence reads them, but measurements of steps without a prompt do."""
    for name, size in sizes.items():
        device.fill(states[name], 0, size)


def take_memory(
    plan: Plan, programs: Mapping[str, Program], device: Device, budget: Budget, given: tuple[Room, PlacedWeights]
) -> Memory:
    """Allocates what the budget counts beside the weights; ``given`` is the room to make, and where the weights lie."""
    room, weights = given
    sizes = {state.name: state_bytes(state, room) for state in plan.states.values()}
    history = device.allocate_host(sizes.pop(HISTORY, 0))
    own = own_tensors(programs.values())
    workspace = max((program.workspace_bytes for program in programs.values()), default=0)
    start = device.allocate(sum(sizes.values()) + sum(own.values()) + workspace)
    places: dict[str, int] = {}
    for name, taken in [*sizes.items(), *own.items()]:
        places[name] = start
        start += taken
    addresses = Addresses(
        weights=weights.addresses,
        states=MappingProxyType({**{name: places[name] for name in sizes}, HISTORY: history.address}),
        tensors=MappingProxyType({name: places[name] for name in own}),
        workspace=start,
    )
    _clear(device, addresses.states, sizes)
    rows = max(program.max_rows for program in programs.values())
    staging = Staging(device, device.allocate_host(STEPS_STAGED * len(INPUTS) * rows * INT))
    tokens = history.view.cast("i")
    return Memory(plan, device, budget, addresses, weights, tokens, room, staging)
