"""Whether a launch with other knobs is right: near the reference, the same bits every time, each row as if alone.

In: a stage and what its launches start from. Out: one sentence that says what is wrong, or ``""``. The reference is the
interpreter's meaning of the op (``lynnc.compare``), computed once from the values that a step of the plan's own kernels
leaves before the launch.

Example::

    probes = [probe for probe in probes_of(stage, ("layers.0.gdn_in",), "cuda:0")]
    fault_of(stage, probes[0], call) or row_fault(pair, wide_call, single_call)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lynnc.autotune.stage import Contents, Region, Stage, read_regions, write_bytes, write_regions
from lynnc.compare import LIMIT, Agreement, Comparison
from lynnc.interpret import run_op
from lynnc.ir import Op
from lynnc.runtime.device import Call
from lynnc.stepvalues import Run

RUNS = 3
"""Runs from the same values that must leave the same bits."""
LARGEST = 8 * LIMIT
"""Of a single value, over the RMS; the default's own largest error may be greater, and then counts twice: one wrong
tile of many hides in an RMS."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One launch that is checked: what it starts from, what it has to leave, and what the plan's own kernel left."""

    op: Op
    before: Contents
    expected: Run
    usual: Contents
    largest: dict[str, float]
    fault: str
    """What is wrong with the plan's own kernel, or nothing."""
    device: str
    """Where torch has the expected values."""


def probes_of(stage: Stage, names: Sequence[str], device: str) -> Iterator[Probe]:
    """Probes of some ops, from one step of the plan's own launches; torch computes the reference on ``device``."""
    comparison = Comparison(stage.step, LIMIT, device)
    calls = {call.op: call for call in stage.calls()}
    for name in stage.walk(names):
        op = stage.op(name)
        found_there = read_regions(stage.executor, stage.regions(op))
        before = _cleared(stage, op, found_there)
        write_regions(stage.executor, before)
        expected = comparison.before(op)
        with torch.device(device):
            run_op(expected, op)
        expected.weights = {}
        usual = _launched(stage, op, calls[name], before)
        found = list(comparison.after(op, expected))
        write_regions(stage.executor, found_there)
        largest = {item.tensor: max(LARGEST, 2 * item.max) for item in found}
        yield Probe(op, before, expected, usual, largest, _disagreement(found, largest), device)


def _cleared(stage: Stage, op: Op, contents: Contents) -> Contents:
    """Contents with zeros in what the op writes and does not read: a step before has left the right values there."""
    read = {region.address for region in stage.read(op)}
    return {
        region: bytearray(data) if region.is_state or region.address in read else bytearray(region.bytes)
        for region, data in contents.items()
    }


def fault_of(stage: Stage, probe: Probe, call: Call) -> str:
    """What is wrong with a launch in the place of the plan's, or ``""``."""
    first = _launched(stage, probe.op, call, probe.before)
    fault = _disagreement(Comparison(stage.step, LIMIT, probe.device).after(probe.op, probe.expected), probe.largest)
    if fault:
        return fault
    for run in range(2, RUNS + 1):
        again = _launched(stage, probe.op, call, probe.before)
        if again != first:
            changed = next(region.name for region in first if first[region] != again[region])
            return f"{probe.op.name} left other bits in {changed} in run {run} than in run 1"
    return ""


def is_usual(stage: Stage, probe: Probe) -> bool:
    """Whether the plan's own kernel still leaves the bits that it left first: weights and states are as they were."""
    call = next(call for call in stage.calls() if call.op == probe.op.name)
    return _launched(stage, probe.op, call, probe.before) == probe.usual


def _launched(stage: Stage, op: Op, call: Call, before: Contents) -> dict[Region, bytearray]:
    """What a launch leaves that starts from ``before``."""
    write_regions(stage.executor, before)
    stage.executor.device.launch([call])
    stage.executor.device.synchronize()
    return read_regions(stage.executor, stage.written(op))


def _disagreement(found: Sequence[Agreement] | Iterator[Agreement], largest: dict[str, float]) -> str:
    for item in found:
        where = f"{item.op} leaves {item.tensor}"
        if not math.isfinite(item.rms):
            return f"{where} with values that are not finite"
        if not item.is_close:
            return f"{where} with an error of {item.rms:.3g} of its RMS, where {item.limit:g} is allowed"
        if item.max > largest[item.tensor]:
            return f"{where} with a value that is {item.max:.3g} of its RMS off, where {largest[item.tensor]:.3g} is"
    return ""


@dataclass(frozen=True, slots=True)
class RowPair:
    """An op in a decode step of several rows and in one of a single row; ``before`` is what the former starts from."""

    wide: Stage
    single: Stage
    op: Op
    before: Contents


def row_pair(wide: Stage, single: Stage, name: str) -> RowPair:
    """From one step of the wide program's own launches."""
    op = wide.op(name)
    (before,) = [read_regions(wide.executor, wide.regions(op)) for _ in wide.walk((name,))]
    return RowPair(wide, single, op, _cleared(wide, op, before))


def row_fault(pair: RowPair, wide_call: Call, single_call: Call) -> str:
    """Where a row of the wide step has other bits than steps of single rows, one after another, give it, or ``""``."""
    wide, executor = pair.wide, pair.wide.executor
    together = _launched(wide, pair.op, wide_call, pair.before)
    write_regions(executor, {region: data for region, data in pair.before.items() if region.is_state})
    outputs = {region.name: region for region in pair.single.written(pair.op)}
    for row in range(wide.step.rows):
        _write_row(pair, row)
        executor.device.launch([single_call])
        alone = read_regions(executor, [region for region in outputs.values() if not region.is_state])
        expected = {region.name: _row(region, data, row) for region, data in together.items()}
        for region, data in alone.items():
            if data != expected[region.name]:
                rows = wide.step.rows
                return f"{pair.op.name} leaves other bits in {region.name} of row {row} in {rows} rows than in one"
    for region, data in together.items():
        if region.is_state and read_regions(executor, [region])[region] != data:
            return f"{pair.op.name} leaves other bits in {region.name} in {wide.step.rows} rows than row by row"
    return ""


def _write_row(pair: RowPair, row: int) -> None:
    """The single step's inputs: one row of the wide step's, which starts where it stands."""
    single = {region.name: region for region in pair.single.regions(pair.op)}
    rows = {region.name: _row(region, data, row) for region, data in pair.before.items() if not region.is_state}
    for name, data in rows.items():
        is_start = name == "start" and "position" in rows
        write_bytes(pair.wide.executor, single[name].address, rows["position"] if is_start else data)


def _row(region: Region, data: bytearray, row: int) -> bytearray:
    return data[row * region.row_bytes : (row + 1) * region.row_bytes]
