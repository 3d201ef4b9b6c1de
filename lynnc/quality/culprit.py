"""Which op parts candidate and base: a section's ops of both, from the same input.

In: a pair of engines whose ops can be seen, and a ``Drift``. Out: the first op (of a plan: the launch, and the op in
it) whose result differs by more than a kind of change allows, or None.

Example::

    find_culprit(pair, drift, leaving, thresholds)     # Culprit(section="layers.1", op="layers.1.experts_up", ...)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from lynnc.engines.engine import Engine
from lynnc.engines.optrace import EMBED, HEAD, OpOutput, OpTraced, section_names
from lynnc.quality.drift import Drift, Place, cut
from lynnc.quality.pair import Pair
from lynnc.quality.thresholds import Thresholds

FEW_ROWS = 0.1
"""Share of rows whose whole numbers may differ through ties alone, where anything may differ."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """An op and the tensor in which it shows. ``error``: relative L2, of whole numbers the share of rows that differ,
    infinite where the candidate alone is not finite."""

    section: str
    op: str
    kind: str
    inner: str
    tensor: str
    error: float
    is_whole: bool = False

    @property
    def amount(self) -> str:
        """The error in words."""
        return f"{self.error:.1%} of tokens choose others" if self.is_whole else f"relative error {self.error:.4g}"

    def __str__(self) -> str:
        inside = f"{self.kind}, in it {self.inner}" if self.inner != self.kind else self.kind
        return f"{self.op} ({inside}) at {self.tensor}"


@dataclass(slots=True)
class _Sums:
    """Squares of the difference and of the base over all pieces of a sequence; of whole numbers, rows."""

    output: OpOutput
    difference: float = 0.0
    base: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the tensor holds whole numbers, such as the experts that a token chose."""
        return not self.output.values.is_floating_point()

    def add(self, base: torch.Tensor, candidate: torch.Tensor) -> None:
        """Rows of one piece."""
        if self.is_whole:
            self.difference += float(_other_sets(base, candidate).sum())
            self.base += len(base)
            return
        ours, theirs = base.double(), candidate.double()
        difference = torch.where(ours.isnan() & theirs.isnan(), 0.0, ours - theirs)
        self.difference += float(torch.where(ours == theirs, 0.0, difference).square().sum())
        self.base += float(ours.square().sum())

    @property
    def error(self) -> float:
        """Relative error; what is not finite differs without end."""
        if not math.isfinite(self.difference):
            return math.inf
        if self.difference == 0:
            return 0.0
        ratio = self.difference / self.base if self.base > 0 else math.inf
        return ratio if self.is_whole else math.sqrt(ratio)

    def is_far_off(self, thresholds: Thresholds) -> bool:
        """Whether the op is to be named."""
        limit = thresholds.op_l2
        return self.error > (max(limit, FEW_ROWS) if self.is_whole and limit > 0 else limit)


class _Section:
    """Sums of a section by op and tensor, in the candidate's order."""

    def __init__(self, section: str) -> None:
        self.is_head = section == HEAD
        self.sums: dict[tuple[str, str, str], _Sums] = {}

    def add(self, base: tuple[OpOutput, ...], candidate: tuple[OpOutput, ...]) -> None:
        """One piece. A token whose router was nearly tied may choose other experts, which says nothing of the ops that
        follow, so it counts there no more."""
        known = {output.tensor: output.values for output in base}
        same: torch.Tensor | None = None
        for output in candidate:
            ours, theirs = known.get(output.tensor), output.values
            if ours is None or ours.shape != theirs.shape:
                continue
            theirs = theirs.to(ours.device)
            sums = self.sums.setdefault((output.op, output.inner, output.tensor), _Sums(output))
            if sums.is_whole:
                if not self.is_head:  # which token is likeliest follows from the logits
                    sums.add(ours, theirs)
                    same = ~_rows_that_differ(ours, theirs)
                continue
            kept = same is not None and not output.is_state
            sums.add(ours[same] if kept else ours, theirs[same] if kept else theirs)


def _rows_that_differ(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    return (base != candidate).flatten(1).any(-1)


def _other_sets(base: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Rows [n] of whole numbers that are not the same ones in any order: experts of equal weight may change places."""
    return _rows_that_differ(*(rows.flatten(1).sort(-1).values for rows in (base, candidate)))


def find_culprit(pair: Pair, drift: Drift, leaving: Place, thresholds: Thresholds) -> Culprit | None:
    """The op that shows in the section that leaves the band; if none does there, in the sections before it: errors that
    are small where they arise may leave the band later."""
    sections = section_names(len(drift.hidden) - 1)
    before = sections[: sections.index(leaving.section)]
    for section in (leaving.section, *before):
        found = culprit_of_section(pair, drift, section, thresholds)
        if found:
            return found
    return None


def culprit_of_section(pair: Pair, drift: Drift, section: str, thresholds: Thresholds) -> Culprit | None:
    """The first op of one section that differs, in the candidate's order; None also if ops cannot be
    seen, or the sequence was not followed from its beginning."""
    base, candidate = pair.base.engine, pair.candidate.engine
    if not isinstance(base, OpTraced) or not isinstance(candidate, OpTraced):
        return None
    if drift.skipped:
        return None
    found = _Section(section)
    for ours, theirs in zip(_pieces(base, drift, section), _pieces(candidate, drift, section), strict=True):
        found.add(_joined(ours), _joined(theirs))
    for sums in found.sums.values():
        if sums.is_far_off(thresholds):
            output = sums.output
            return Culprit(section, output.op, output.kind, output.inner, output.tensor, sums.error, sums.is_whole)
    return None


def _pieces(engine: Engine, drift: Drift, section: str) -> list[tuple[OpOutput, ...]]:
    """What the section's ops leave in each piece of the drift's sequence."""
    assert isinstance(engine, OpTraced)
    layers = len(drift.hidden) - 1
    entry = None if section == EMBED else drift.hidden[layers if section == HEAD else int(section.split(".")[1])]
    engine.reset()
    found = []
    first = 0
    for piece in cut(drift.tokens, drift.prompt):
        hidden = None if entry is None else entry[first : first + len(piece)]
        found.append(engine.trace_ops(section, piece, hidden))
        first += len(piece)
    return found


def _joined(outputs: tuple[OpOutput, ...]) -> tuple[OpOutput, ...]:
    """For each op and tensor, the steps of one piece after one another; of a cache, what the last step left."""
    found: dict[tuple[str, str], OpOutput] = {}
    for output in outputs:
        key = (output.op, output.tensor)
        if key in found and not output.is_state:
            values = torch.cat([found[key].values, output.values])
            output = replace(output, values=values)
        found[key] = output
    return tuple(found.values())
