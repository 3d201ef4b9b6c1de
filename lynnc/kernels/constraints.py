"""Limits that several kernels share: each says why knobs cannot work on a target, in registers or shared memory.

In: a problem, knobs, a target. Out: a reason, or None. A limit here is never stricter than the hardware's: what is
merely slow is for a tuner to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lynnc.kernels.kernel import Knobs, Problem, next_power_of_two
from lynnc.target import Target
from lynnc.tensors import GROUP, Format

WARP = 32
MOST_VALUES = 512
"""Values of a weight that a thread works on at once: with more, the code is thousands of lines and spills."""
MOST_WEIGHT_REGISTERS = 128
"""Registers of a thread, of 255, that those values may fill as they are stored."""
MOST_SUM_REGISTERS = 128
"""Registers of a thread that the sums of a tile may fill."""
STORED_BYTES: Mapping[str, float] = MappingProxyType(
    {Format.NVFP4: 0.5, Format.NVFP4_FP16: 0.5, Format.FP8: 1.0, Format.BF16: 2.0, Format.F32: 4.0}
)


def registers_fit_block(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A block with ``maxnreg`` registers for each thread must find them in one multiprocessor."""
    threads = WARP * knobs["num_warps"]
    if threads * knobs["maxnreg"] <= target.registers_per_sm:
        return None
    return (
        f"{threads} threads of {knobs['maxnreg']} registers exceed the {target.registers_per_sm:,} of a multiprocessor"
    )


def weights_fit_registers(problem: Problem, knobs: Knobs, target: Target) -> str | None:
    """A program without tensor cores holds BLOCK_N rows of a block of columns, no more of them than a row has."""
    stored = str(problem["formats"]).split("+")[0]
    limit = knobs["BLOCK_K"] if Format(stored).is_packed else knobs["BLOCK_K"] // 4
    columns = max(GROUP, min(limit, next_power_of_two(int(problem["k"]))))
    values = knobs["BLOCK_N"] * columns // (WARP * knobs["num_warps"])
    if values > MOST_VALUES:
        return f"{values:,} weights a thread are more than {MOST_VALUES}: choose smaller blocks or more warps"
    registers = int(values * STORED_BYTES[stored] / 4)
    if registers > MOST_WEIGHT_REGISTERS:
        return f"weights fill {registers} registers a thread, more than {MOST_WEIGHT_REGISTERS}: use smaller blocks"
    return None


def sums_refusal(rows: int, columns: int, knobs: Knobs, target: Target) -> str | None:
    """Why a tile's FP32 sums do not fit into registers; tcgen05 keeps them in a memory of its own."""
    registers = rows * columns // (WARP * knobs["num_warps"])
    if target.has_tcgen05 or registers <= MOST_SUM_REGISTERS:
        return None
    return f"sums of {rows} x {columns} take {registers} registers a thread, more than {MOST_SUM_REGISTERS}"


def shared_memory_refusal(what: str, needed: int, target: Target) -> str | None:
    """Why ``needed`` bytes of shared memory are too many."""
    if needed <= target.shared_memory_limit:
        return None
    return f"{what} of {needed:,} bytes exceed the {target.shared_memory_limit:,} of shared memory"
