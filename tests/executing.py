"""What the tests of the runtime share: plans that nothing was compiled for, and executors on a simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from meaning import Meaning, few_splits
from reference import Case, make
from runners import CONTEXT, PREFILL_ROWS, SIMULATOR_KNOBS, Followed
from simulated import SimulatedDevice

from lynnc.compiler import Request, assemble_plan, lower_programs
from lynnc.model import ModelSpec
from lynnc.plan import Options, Plan
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Device
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import prepare
from lynnc.runtime.loading.weightsource import PlacedWeights, Progress, WeightSource, arrays_of
from lynnc.runtime.rows import rows_of
from lynnc.target import find_target

PROGRAMS = ("decode/1", "decode/2", "decode/4", "prefill/16", "prefill")


@dataclass(frozen=True)
class HostWeights:
    """Packed arrays by (weight, array) as a source of weights."""

    arrays: Mapping[tuple[str, str], torch.Tensor] = field(repr=False)

    def resident_bytes(self, plan: Plan) -> int:
        return sum(array.bytes for _, array in arrays_of(plan))

    def place(self, plan: Plan, device: Device, progress: Progress | None) -> PlacedWeights:
        found = {}
        for weight, array in arrays_of(plan):
            stored = self.arrays[weight.name, array.array].contiguous()
            found[weight.name, array.array] = address = device.allocate(array.bytes)
            device.upload(address, stored.data_ptr(), array.bytes)
            device.synchronize()
        return PlacedWeights(found, self.resident_bytes(plan))


@cache
def plan_for(case: Case) -> Plan:
    """A plan whose kernels have no machine code."""
    return plan_of(case.spec)


def plan_of(spec: ModelSpec, programs: tuple[str, ...] = PROGRAMS) -> Plan:
    """The same for any model."""
    options = Options(knobs=SIMULATOR_KNOBS, prefill_rows=PREFILL_ROWS, programs=programs)
    request = Request(find_target("sm_90"), options=options)
    with few_splits():
        lowered = lower_programs(spec, request)
    kernels = {key: call.entry for _, low in lowered.values() for key, call in low.kernels.items()}
    return assemble_plan(spec, request, lowered, kernels, {})


def executor_for(case: Case, slots: int = 1, context: int = CONTEXT, device: SimulatedDevice | None = None) -> Executor:
    """The case's model on a simulated device; on one of its own, steps run by their meaning."""
    plan, room = plan_for(case), Room(slots, context)
    return executor_on(plan, HostWeights(make(case).packed), room, device or meaning_device(plan, room))


def executor_on(plan: Plan, source: WeightSource, room: Room, device: SimulatedDevice) -> Executor:
    """A plan without machine code on a simulated device."""
    executor = prepare(plan, dict.fromkeys(plan.kernels, b""), source, device, room)
    meaning = getattr(device.runs, "__self__", None)
    if isinstance(meaning, Meaning):
        meaning.executor = executor
    return executor


def meaning_device(plan: Plan, room: Room) -> SimulatedDevice:
    """A device on which steps of the plan run by their meaning."""
    return SimulatedDevice(runs=Meaning(plan, room).run)


def logits_of(executor: Executor, rows: int = 1) -> torch.Tensor:
    """Logits [rows, V] of the last step."""
    tensor = executor.tensor("logits")
    return torch.tensor(tensor.read()).reshape(tensor.shape)[:rows]


def follow_executor(executor: Executor, tokens: Sequence[int], prompt: int, rows: int = 1) -> Followed:
    """A prompt, then decode steps of given tokens; logits and choices as ``runners.follow`` gives them."""
    chosen = [executor.prefill(tokens[:prompt])]
    logits = [logits_of(executor)]
    for first in range(prompt, len(tokens), rows):
        chosen += executor.step(rows_of(tokens[first : first + rows], first))
        logits.append(logits_of(executor, rows))
    positions = [prompt - 1, *range(prompt, len(tokens))]
    return Followed(positions, torch.cat(logits), torch.tensor(chosen))
