"""From a plan folder and weights to an executor: everything is checked, then counted, then allocated.

In: a plan's folder, and a packed folder or another source of weights. Out: an ``Executor``.

Example::

    executor = load("lynn.plan", "packed", Room(slots=2, context=8192))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lynnc.errors import PlanError
from lynnc.plan import Plan, Program
from lynnc.planfile import kernel_file, load_plan
from lynnc.runtime.budget import MOST_RESIDENT, Room, budget_of, check_budget
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.device import Device, DeviceFacts, KernelFacts
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.packedfolder import PackedFolder
from lynnc.runtime.loading.weightsource import BorrowedWeights, Progress, WeightSource, packed_bytes
from lynnc.runtime.memory import take_memory

ONE_SEQUENCE = Room()


def load(
    plan: str | os.PathLike[str],
    weights: str | os.PathLike[str] | Mapping[tuple[str, str], Any] | WeightSource,
    room: Room = ONE_SEQUENCE,
    *,
    gpu: int = 0,
    debug: bool = False,
    progress: Progress | None = None,
) -> Executor:
    """The plan on GPU number ``gpu`` with its weights: a packed folder, or arrays that are on that GPU already.

    ``debug`` waits after every launch, so that a failure names its op. PlanError for a plan that is damaged or for
    another architecture, WeightError for weights that are damaged or another model's, DeviceError for a GPU that is
    missing or too small; whatever was allocated before an error is given back.
    """
    folder = Path(plan)
    loaded = load_plan(folder)
    with ExitStack() as undo:
        device = open_device(gpu, debug)
        undo.callback(device.close)
        check_architecture(loaded, device.facts)
        cubins = {key: (folder / kernel_file(entry, "cubin")).read_bytes() for key, entry in loaded.kernels.items()}
        executor = prepare(loaded, cubins, source_of(weights), device, room, progress)
        undo.pop_all()
    return executor


def check_architecture(plan: Plan, facts: DeviceFacts) -> None:
    """PlanError if the plan's machine code is not for this GPU: with a suffix it serves one architecture alone, without
    one also the newer ones of its generation."""
    number = int("".join(filter(str.isdigit, plan.arch)))
    is_alike = number // 10 == facts.capability // 10 and number <= facts.capability
    if number != facts.capability and (plan.arch[-1].isalpha() or not is_alike):
        raise PlanError(
            f"{plan.name} is for {plan.arch} and {facts.name} is sm_{facts.capability}: run `lynnc compile "
            f"{plan.model_name} --target sm_{facts.capability}`."
        )


def source_of(weights: str | os.PathLike[str] | Mapping[tuple[str, str], Any] | WeightSource) -> WeightSource:
    """A source of weights from what a caller gave."""
    if isinstance(weights, Mapping):
        return BorrowedWeights(weights)
    if isinstance(weights, str | os.PathLike):
        return PackedFolder(Path(weights))
    return weights


def prepare(
    plan: Plan,
    cubins: Mapping[str, bytes],
    source: WeightSource,
    device: Device,
    room: Room = ONE_SEQUENCE,
    progress: Progress | None = None,
) -> Executor:
    """An executor on a device that is open, from a plan that is checked; ``cubins`` are by kernel key."""
    programs = programs_of(plan, room.programs)
    resident = source.resident_bytes(plan)
    budget = budget_of(plan, programs, room, resident)
    if resident > MOST_RESIDENT * packed_bytes(plan):
        raise PlanError(
            f"The weights would take {resident} bytes for {packed_bytes(plan)} packed ones: pack the checkpoint again."
        )
    free = device.free_bytes()
    check_budget(budget, free, device.facts)
    with ExitStack() as undo:
        undo.callback(device.free_all)
        kernels = _load_kernels(plan, programs, cubins, device)
        weights = source.place(plan, device, progress)
        memory = take_memory(plan, programs, device, budget, (room, weights))
        device.synchronize()
        undo.pop_all()
    return Executor(plan, device, memory, kernels, room, free)


def programs_of(plan: Plan, names: tuple[str, ...]) -> Mapping[str, Program]:
    """The programs of those names, all if there are none; PlanError for one that the plan lacks."""
    unknown = [name for name in names if name not in plan.programs]
    if unknown:
        raise PlanError(f"{plan.name} has no program {unknown[0]}: it has {', '.join(plan.programs)}.")
    return {name: program for name, program in plan.programs.items() if not names or name in names}


def _load_kernels(
    plan: Plan, programs: Mapping[str, Program], cubins: Mapping[str, bytes], device: Device
) -> Mapping[str, KernelFacts]:
    used = dict.fromkeys(launch.kernel for program in programs.values() for launch in program.launches)
    return {key: device.load_kernel(plan.kernels[key], cubins[key]) for key in used}
