"""A census of the launches of a step: which kernels, how often, how many blocks, and the nodes of the captured graph.

In: an executor and a program. Out: a ``Census``. Example: ``census_of(executor, "decode/1").nodes`` is 254 for a model
of 30 Gated DeltaNet layers and 10 attention layers with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lynnc.bench.kernels import by_kernel, label_of
from lynnc.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class CensusRow:
    """Launches of one kernel in a step, with the threads and registers of a block."""

    label: str
    kernel: str
    launches: int
    blocks: int
    threads: int
    registers: int
    has_pdl: bool


@dataclass(frozen=True, slots=True)
class Census:
    """A step's launches by kernel; ``nodes`` are those of its captured graph."""

    program: str
    nodes: int
    rows: tuple[CensusRow, ...]


def census_of(executor: Executor, name: str) -> Census:
    """The launches of a decode program."""
    program = executor.program(name)
    calls = executor.calls(program, program.max_rows)
    rows = []
    for key, own in by_kernel(calls).items():
        entry, facts = executor.plan.kernels[key], executor.kernels[key]
        registers = int(str(entry.artifact.get("registers", 0)))
        blocks, has_pdl = prod(own[0].grid), facts.has_pdl
        rows.append(CensusRow(label_of(own), entry.name, len(own), blocks, facts.threads, registers, has_pdl))
    return Census(name, executor.graph(name).nodes, tuple(rows))
