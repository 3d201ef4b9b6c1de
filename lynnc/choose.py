"""Picks a kernel and its knobs for every launch.

In: a fused graph, a target and the records of a device. Out: a ``KernelChoice`` for each op: the record that serves its
problem (``lynnc.records``), else the kernel's default. Rows of the step never enter: a row's bits must be the same in
every decode program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lynnc.errors import OptionError
from lynnc.ir import Graph
from lynnc.kernels.kernel import Kernel, Knobs, Problem
from lynnc.kernels.table import kernel_for
from lynnc.records import Records, best_record
from lynnc.target import Target


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel with its knobs for one problem; ``origin`` says where the knobs come from: ``default``, ``option``, or a
    record, in the words of ``lynnc.records.Match.text``."""

    kernel: Kernel
    problem: Problem
    knobs: Knobs
    origin: str

    def __str__(self) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in sorted(self.knobs.items()))
        problem = " ".join(f"{name}={value}" for name, value in sorted(self.problem.items()))
        return f"{self.kernel.name} [{problem}] {knobs} ({self.origin})"


Overrides = Mapping[str, Mapping[str, int]]
"""Knobs set by hand: kernel name to knob name to value."""


def choose(kernel: Kernel, problem: Problem, target: Target, records: Records, overrides: Overrides) -> KernelChoice:
    """The choice for one problem of a kernel; OptionError if its knobs are not legal there."""
    knobs, origin = kernel.default(problem, target), "default"
    match = best_record(records, kernel, problem, target)
    if match is not None:
        knobs, origin = match.record.knobs, match.text
    if kernel.name in overrides:
        knobs, origin = {**knobs, **overrides[kernel.name]}, "option"
    refusal = kernel.refusal(problem, knobs, target)
    if refusal:
        advice = "choose other knobs" if origin == "option" else "change the model's dimensions or --without a fusion"
        raise OptionError(f"{refusal}; {advice}.")
    return KernelChoice(kernel, MappingProxyType(dict(problem)), MappingProxyType(dict(knobs)), origin)


def choose_all(
    graph: Graph, target: Target, records: Records, overrides: Overrides = MappingProxyType({})
) -> tuple[KernelChoice, ...]:
    """One choice for each op of a fused graph, in order; launches of one problem share theirs."""
    found: dict[tuple[object, ...], KernelChoice] = {}
    choices = []
    for op in graph.ops:
        kernel = kernel_for(graph, op)
        problem = kernel.problem(graph, op)
        key = (kernel.name, *problem.items())
        if key not in found:
            try:
                found[key] = choose(kernel, problem, target, records, overrides)
            except OptionError as error:
                raise OptionError(f"{op.name} on {target.name}: {error}") from None
        choices.append(found[key])
    return tuple(choices)
