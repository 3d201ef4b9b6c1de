"""What a candidate cannot beat, and what it really is, before anything is compiled.

In: a task, knobs, a device. Out: the least seconds that the roofline allows with this many programs, and an identity
that two candidates share if they are the same kernel launched the same way.
"""

from __future__ import annotations

from math import prod

from lynnc.autotune.problems import Task
from lynnc.cost import evaluate_formula
from lynnc.kernels.kernel import Binding, Knobs
from lynnc.target import Device

FAIR_SHARES = 4.0
"""Fair shares of the bandwidth that one multiprocessor could draw at most, were the others idle."""


def programs_of(task: Task, binding: Binding, context: int) -> int:
    """Programs of a launch."""
    return max(1, int(prod(evaluate_formula(size, task.rows, max(context, task.rows)) for size in binding.grid)))


def lower_bound(task: Task, knobs: Knobs, device: Device, context: int) -> float:
    """Seconds that no launch with these knobs can beat: too few programs leave multiprocessors idle.

    Only weights count as moved bytes, since activations and states may lie in the L2 cache; the launch itself is free.
    """
    programs = programs_of(task, task.kernel.bind(task.graph, task.op, knobs), context)
    busy = programs / device.sm_count
    memory, compute = _least_seconds(task, device, context)
    return max(memory / min(1.0, FAIR_SHARES * busy), compute / min(1.0, busy))


def least_bound(task: Task, device: Device, context: int) -> float:
    """Seconds that no knobs at all can beat."""
    return max(_least_seconds(task, device, context))


def _least_seconds(task: Task, device: Device, context: int) -> tuple[float, float]:
    """Reading the weights, and the arithmetic."""
    seen = max(context, task.rows)
    bytes_read = evaluate_formula(task.cost.weight_bytes, task.rows, seen)
    flops = evaluate_formula(task.cost.flops, task.rows, seen)
    return bytes_read / device.bandwidth_bytes_per_s, flops / device.flops_per_s


def identity(task: Task, knobs: Knobs) -> str:
    """What is compiled and launched: knobs beyond a problem's size often change nothing."""
    binding = task.kernel.bind(task.graph, task.op, knobs)
    constants = sorted(binding.constants.items())
    structure = sorted(binding.structure.items())
    launch = tuple(knobs.get(name, 0) for name in ("num_warps", "num_stages", "maxnreg"))
    return repr((constants, structure, tuple(map(str, binding.grid)), launch))
