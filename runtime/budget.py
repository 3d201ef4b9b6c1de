"""How much memory a plan needs, counted before any of it is taken.

In: a plan, slots, context and the bytes of the weights. Out: a ``Budget``, a table of needs. It is compared with what
the GPU has free; too little is an error with numbers, not a failed allocation half-way.

Example::

    budget = budget_of(plan, plan.programs, Room(slots=1, context=4096), weight_bytes=19_900_000_000)
    check_budget(budget, device.free_bytes(), device.facts)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lynnc.errors import DeviceError, OptionError
from lynnc.plan import Plan, Program, StateEntry, aligned
from lynnc.runtime.device import DeviceFacts

RESERVE = 192 << 20
"""Bytes that code, graphs and the driver itself may take beside what is counted."""
MOST_RESIDENT = 1.03
"""Weights in memory over packed weights: nothing of a weight is kept twice."""
HISTORY = "history"
"""The state of tokens chosen, which lies in host memory that the GPU writes."""
GIB = 1 << 30
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Room:
    """Sequences at once and positions of each; ``programs`` are those of the plan to load, all if empty."""

    slots: int = 1
    context: int = DEFAULT_CONTEXT
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """A class of memory; ``is_host`` for pinned memory of the host."""

    what: str
    bytes: int
    is_host: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """All needs, in the order of a table."""

    needs: tuple[Need, ...]

    @property
    def gpu_bytes(self) -> int:
        """Memory of the GPU."""
        return sum(need.bytes for need in self.needs if not need.is_host)

    def __str__(self) -> str:
        return ", ".join(f"{need.what} {need.bytes / GIB:.2f}" for need in self.needs if not need.is_host)


def state_bytes(state: StateEntry, room: Room) -> int:
    """Bytes that a state takes over all slots."""
    return aligned(room.slots * state.bytes(room.context))


def own_tensors(programs: Iterable[Program]) -> dict[str, int]:
    """Bytes of each input and output: programs share the memory of those of one name, so the largest counts.

    What a decode step leaves for the next one lies where that one reads it, see ``place_of``.
    """
    sizes: dict[str, int] = {}
    for program in programs:
        for place in program.tensors:
            if place.offset is None:
                name = place_of(place.name)
                sizes[name] = max(sizes.get(name, 0), aligned(place.bytes))
    return sizes


def place_of(name: str) -> str:
    """The memory of an input or output: ``next_token`` is the next step's ``token``, and so on."""
    return name.removeprefix("next_")


def budget_of(plan: Plan, programs: Mapping[str, Program], room: Room, weight_bytes: int) -> Budget:
    """What loading the programs needs; OptionError for slots or a context that cannot be."""
    most = plan.longest_context
    if room.slots < 1 or not 1 <= room.context <= most:
        raise OptionError(
            f"{plan.model_name} runs with 1 slot or more and a context of 1 to {most}, not with {room.slots} and "
            f"{room.context}: choose others."
        )
    caches, states, host = 0, 0, 0
    for state in plan.states.values():
        size = state_bytes(state, room)
        if state.name == HISTORY:
            host += size
        elif any(isinstance(dim, str) for dim in state.shape):
            caches += size
        else:
            states += size
    used = programs.values()
    needs = (
        Need("weights", weight_bytes),
        Need("key/value caches", caches),
        Need("recurrent states", states),
        Need("workspace", max((program.workspace_bytes for program in used), default=0)),
        Need("inputs and outputs", sum(own_tensors(used).values())),
        Need("token history", host, is_host=True),
    )
    return Budget(tuple(need for need in needs if need.bytes))


def check_budget(budget: Budget, free_bytes: int, facts: DeviceFacts) -> None:
    """DeviceError if the GPU has less free than the budget and a reserve."""
    if budget.gpu_bytes + RESERVE > free_bytes:
        raise DeviceError(
            f"The plan needs {(budget.gpu_bytes + RESERVE) / GIB:.2f} GiB of GPU memory ({budget}, reserve "
            f"{RESERVE / GIB:.2f}) and {facts.name} has {free_bytes / GIB:.2f} of {facts.memory_bytes / GIB:.2f} GiB "
            "free: choose a smaller context or fewer slots, or free memory."
        )
