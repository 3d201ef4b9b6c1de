"""What the tuner tries and what comes of it: the values between search, measurement and records.

In: nothing. Out: a ``Candidate`` (a kernel's knobs for one problem), its ``Outcome`` (timed, or why not), and the
``Bench`` that turns one into the other. The search knows no device but a bench; a bench knows nothing of the search.

Example::

    outcome = bench.measure(Candidate("decode/1", "linear", problem, knobs), repeats=5)
    outcome.status, outcome.seconds, outcome.reason
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from lynnc.kernels.kernel import Knobs, Problem


@dataclass(frozen=True, slots=True)
class Candidate:
    """Knobs for one kernel's launches of one problem in a program."""

    program: str
    kernel: str
    problem: Problem
    knobs: Knobs


class Status(StrEnum):
    """What became of a candidate."""

    TIMED = "timed"
    REFUSED = "refused"
    """By a constraint or the roofline, before anything was compiled."""
    NOT_COMPILED = "not compiled"
    WRONG = "wrong"
    """Not finite, not the reference, not the same bits again, or not the same for other rows of the step."""
    CRASHED = "crashed"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a launch (median, least and greatest of ``repeats`` runs) if it was timed, else a sentence why not."""

    status: Status
    seconds: float = 0.0
    least: float = 0.0
    greatest: float = 0.0
    repeats: int = 0
    reason: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether there is a time to compare."""
        return self.status is Status.TIMED


class Bench(Protocol):
    """A device that measures candidates: a GPU behind a child process, or a simulated one."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts to compile candidates that will be measured soon; returns at once."""
        ...

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether ``measure`` would wait for no compiler."""
        ...

    def measure(self, candidate: Candidate, repeats: int) -> Outcome:
        """Checks a candidate, if that was not done yet, and times it."""
        ...

    def measure_steps(self, program: str, choices: Sequence[Sequence[Candidate]], repeats: int) -> Sequence[Outcome]:
        """Seconds of whole steps of a program, for each set of choices, taken in turns; other kernels keep theirs."""
        ...

    def close(self) -> None:
        """Ends child processes."""
        ...
