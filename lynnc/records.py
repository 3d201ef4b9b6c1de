"""Which record serves a problem: one of exactly this problem on this device, else the nearest of the architecture.

In: the ``Records`` known for a device, a kernel, a problem. Out: a ``Match``, or None, and then the kernel's default
serves. A record counts only if the template still has the text that it was measured with and if its knobs are legal;
one that was measured with the Triton that compiles now goes before one of another release.

Example::

    match = best_record(records, kernel, problem, target)
    match.record.knobs, match.is_exact, match.text           # ..., True, "record h200"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from lynnc.deviceidentity import Identity
from lynnc.kernels.kernel import Kernel, Problem
from lynnc.record import Record, RecordOrigin, release_of
from lynnc.render import template_digest
from lynnc.target import Target

NEAREST, OF_TRITON = "nearest ", " of Triton "
FARTHEST = 1.5
"""Distance up to which a record of another problem or device may serve; see ``distance``."""


@dataclass(frozen=True, slots=True)
class Known:
    """A record and the file or folder that it was read from; ``is_user`` for one of the user's own."""

    record: Record
    is_user: bool = False
    file: str = ""

    @property
    def text(self) -> str:
        """Where it comes from, in words."""
        users, simulated = "user " * self.is_user, "simulated " * self.record.is_simulated
        return f"{users}{simulated}record {self.record.device.name}"


@dataclass(frozen=True)
class Records:
    """What is known for ``device``: its own records and those of other devices of its architecture.

    ``triton`` is the version that will compile, or empty if that does not count.
    """

    device: Identity | None = None
    known: tuple[Known, ...] = ()
    triton: str = ""

    def known_as(self, origin: str) -> Known | None:
        """One of the records that choices of this origin, as ``Match.text`` says it, were made by; None if by none."""
        words = origin.removeprefix(NEAREST).partition(OF_TRITON)[0]
        return next((known for known in self.known if known.text == words), None)

    @cached_property
    def by_kernel(self) -> Mapping[str, tuple[Known, ...]]:
        """The records of each kernel."""
        found: dict[str, list[Known]] = {}
        for item in self.known:
            found.setdefault(item.record.kernel, []).append(item)
        return {name: tuple(items) for name, items in found.items()}


@dataclass(frozen=True, slots=True)
class Match:
    """A record that may serve; ``distance`` is 1 for an exact one; ``is_foreign`` if another Triton compiled for it."""

    known: Known
    is_exact: bool
    distance: float
    is_foreign: bool = False

    @property
    def record(self) -> Record:
        """The record."""
        return self.known.record

    @property
    def text(self) -> str:
        """Where the knobs come from, as plans and tables say it."""
        made_with = f"{OF_TRITON}{self.record.compiler}" * self.is_foreign
        return f"{NEAREST * (not self.is_exact)}{self.known.text}{made_with}"

    def is_current(self, kernel: Kernel) -> bool:
        """Whether the kernel's template has the text that the record is valid for."""
        return self.record.template == template_digest(kernel.template)

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts matches, the best first."""
        record = self.record
        return (
            not self.is_exact,
            record.is_simulated,
            self.distance,
            self.is_foreign,
            not self.known.is_user,
            record.origin is RecordOrigin.CARRIED_OVER,
            math.inf if record.seconds is None else record.seconds,
            record.question,
            sorted(record.knobs.items()),
        )


def best_record(records: Records, kernel: Kernel, problem: Problem, target: Target) -> Match | None:
    """The best record that may serve a problem, if there is any."""
    return next((match for match in legal_records(records, kernel, problem, target) if match.is_current(kernel)), None)


def legal_records(records: Records, kernel: Kernel, problem: Problem, target: Target) -> Iterator[Match]:
    """Records whose knobs are legal for a problem, the best first; outdated ones too, which a tuner may try again."""
    for match in sorted(_matches(records, kernel.name, problem), key=lambda match: match.rank):
        if kernel.refusal(problem, match.record.knobs, target) is None:
            yield match


def distance(problem: Problem, other: Problem) -> float:
    """The product of the ratios, each at least 1, of the numbers of two problems.

    Infinite where they have other fields, where a word differs, or where one number is 0 and the other is not.
    """
    if problem.keys() != other.keys():
        return math.inf
    return math.prod(_ratio(value, other[name]) for name, value in problem.items())


def _ratio(value: int | str, other: int | str) -> float:
    if value == other:
        return 1.0
    if isinstance(value, str) or isinstance(other, str) or min(value, other) <= 0:
        return math.inf
    try:
        return max(value, other) / min(value, other)
    except OverflowError:  # a damaged record may hold a number of any length
        return math.inf


def _matches(records: Records, kernel: str, problem: Problem) -> Iterator[Match]:
    device = records.device
    for known in records.by_kernel.get(kernel, ()):
        record = known.record
        if device is None or record.device.arch != device.arch:
            continue
        is_foreign = bool(records.triton and record.triton) and record.compiler != release_of(records.triton)
        if record.device == device and record.problem == problem:
            yield Match(known, True, 1.0, is_foreign)
        elif not record.is_simulated:
            far = distance(problem, record.problem) * _ratio(device.sm_count, record.device.sm_count)
            if far <= FARTHEST:
                yield Match(known, False, far, is_foreign)
