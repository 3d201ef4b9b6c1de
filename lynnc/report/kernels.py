"""Each kernel of a program once: its launches, what binds it, and how long it took where that was measured.

In: a ``CostedProgram``, T and S, and measurements. Out: ``KernelUse`` values, numbered in the order of first launch.

Example::

    uses = kernel_uses(plan, programs["decode/1"], Setting(rows=1, context=4096), measured=None)
    [(use.number, use.label, use.mean.bound) for use in uses]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lynnc.bench.timing import Timing
from lynnc.cost import Estimate
from lynnc.plan import KernelEntry, Launch, Plan
from lynnc.programs import expected_rows, program_rows
from lynnc.report.costing import CostedProgram
from lynnc.report.measured import KernelFigure, Measurements


@dataclass(frozen=True, slots=True)
class Setting:
    """T and S of a step; ``is_measured`` if kernels were timed at them."""

    rows: int
    context: int
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A kernel in a program; ``mean`` is the mean cost of its launches, ``timing`` of one launch in a chain of them."""

    number: int
    label: str
    kind: str
    entry: KernelEntry
    launches: tuple[Launch, ...]
    mean: Estimate
    timing: Timing | None

    @property
    def count(self) -> int:
        """Launches in a step."""
        return len(self.launches)

    @property
    def least_s(self) -> float:
        """Seconds of all its launches at the least."""
        return self.count * self.mean.seconds

    @property
    def measured_s(self) -> float | None:
        """Seconds of all its launches as measured."""
        return self.count * self.timing.median if self.timing else None

    @property
    def of_limit(self) -> float | None:
        """Which share of the speed that bytes and FLOPs allow was reached; above 1 where caches helped."""
        return max(self.mean.memory_s, self.mean.compute_s) / self.timing.median if self.timing else None


def layerless(op: str) -> str:
    """An op's name with ``*`` for its layer."""
    return re.sub(r"layers\.\d+\.", "layers.*.", op)


def setting_of(costed: CostedProgram, context: int, measured: Measurements | None) -> Setting:
    """Where the kernels of a program were measured (with the most rows, if at several), else at ``context``."""
    figures = _figures_of(costed, measured)
    if figures:
        largest = max(figures, key=lambda figure: (figure.rows, figure.context))
        return Setting(largest.rows, largest.context, is_measured=True)
    name = costed.program.name
    rows = program_rows(name) or min(expected_rows(name), costed.program.max_rows)
    return Setting(rows, max(rows, context) if program_rows(name) else rows)


def _figures_of(costed: CostedProgram, measured: Measurements | None) -> tuple[KernelFigure, ...]:
    figures = measured.kernels if measured else ()
    return tuple(figure for figure in figures if figure.program == costed.program.name)


def kernel_uses(
    plan: Plan, costed: CostedProgram, setting: Setting, measured: Measurements | None
) -> tuple[KernelUse, ...]:
    """The kernels of a program in the order of first launch."""
    timings = {
        (figure.op, figure.kernel): figure.timing
        for figure in _figures_of(costed, measured)
        if (figure.rows, figure.context) == (setting.rows, setting.context)
    }
    found: dict[str, list[Launch]] = {}
    for launch in costed.program.launches:
        found.setdefault(launch.kernel, []).append(launch)
    return tuple(
        _use(number, plan.kernels[key], launches, costed, (setting, timings))
        for number, (key, launches) in enumerate(found.items(), start=1)
    )


def _use(
    number: int,
    entry: KernelEntry,
    launches: Sequence[Launch],
    costed: CostedProgram,
    known: tuple[Setting, Mapping[tuple[str, str], Timing]],
) -> KernelUse:
    setting, timings = known
    label = ", ".join(dict.fromkeys(layerless(launch.op) for launch in launches))
    estimates = [costed.estimate(launch, setting.rows, setting.context) for launch in launches]
    mean = mean_estimate(estimates)
    return KernelUse(number, label, launches[0].kind, entry, tuple(launches), mean, timings.get((label, entry.label)))


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of each figure."""

    def mean(name: str) -> float:
        return fmean(getattr(one, name) for one in estimates)

    return Estimate(mean("bytes"), mean("flops"), mean("memory_s"), mean("compute_s"), mean("launch_s"))
