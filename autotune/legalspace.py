"""What is left of a kernel's space where constraints are checked for one problem.

In: a task and a target. Out: a ``LegalSpace``: the values of each knob that some legal combination has, and those
combinations where they are few enough to be listed. A sampler that knows them draws a fraction of what it would draw
in vain: columns in the order of lanes leave one value of two knobs, and shared memory the smaller ones of others.

Example::

    legal_space(task, target).knobs["BLOCK_K"].values        # (128,)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from lynnc.autotune.problems import Task
from lynnc.kernels.kernel import Choice, Knob, Knobs, PowerOfTwo
from lynnc.target import Target

LISTED_SPACE = 8192
"""Combinations up to which a space is listed."""


@dataclass(frozen=True, slots=True)
class LegalSpace:
    """Knobs with the values that are worth drawing, and all legal combinations, or none if there are too many."""

    knobs: Mapping[str, Knob]
    combinations: tuple[Knobs, ...] = ()


def legal_space(task: Task, target: Target) -> LegalSpace:
    """The space of a task; as it stands in the kernel where it is too large to be listed."""
    space = task.kernel.space
    if prod(len(knob.values) for knob in space.values()) > LISTED_SPACE:
        return LegalSpace(space)
    legal = tuple(knobs for knobs in _combinations(space) if task.kernel.refusal(task.problem, knobs, target) is None)
    return LegalSpace({name: _narrowed(knob, {knobs[name] for knobs in legal}) for name, knob in space.items()}, legal)


def _combinations(space: Mapping[str, Knob]) -> Iterator[Knobs]:
    values = itertools.product(*(knob.values for knob in space.values()))
    return (dict(zip(space, chosen, strict=True)) for chosen in values)


def _narrowed(knob: Knob, used: set[int]) -> Knob:
    """A knob of the used values; powers of two without a gap stay such, of which a sampler knows the order."""
    values = tuple(value for value in knob.values if value in used)
    if isinstance(knob, PowerOfTwo) and values and PowerOfTwo(values[0], values[-1]).values == values:
        return PowerOfTwo(values[0], values[-1])
    return Choice(values or knob.values)
