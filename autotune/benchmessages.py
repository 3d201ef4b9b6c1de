"""What a bench and its child process say to each other, as JSON.

In: records. Out: lines that the other side makes the same records of. A task names launches and kernels whole, so that
a child which was just started needs nothing of what an earlier one was told but its opening.

Example::

    task_of(task_text(KernelTask(Variant("decode/1", launches), (), kernels, repeats=5, is_checked=False)))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lynnc.autotune.conditions import Conditions
from lynnc.autotune.trial import Outcome, Status
from lynnc.jsonform import decode, encode, shallow
from lynnc.plan import KernelEntry, Launch

READY, FAILED, PHASE, DONE = "ready", "failed", "phase", "done"
"""Kinds of what a child says: it takes tasks, it could not start, it begins with a part of a task, it has done one."""
SETUP, CANDIDATE = "setup", "candidate"
"""Parts of a task: what the plan's own kernels compute, and what those of the task do."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message to a child: the folder of the plan that it loads, and under what it measures."""

    folder: str
    conditions: Conditions


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel with the facts of its machine code, and the file that holds it; no file where a device needs none."""

    entry: KernelEntry
    cubin: str


@dataclass(frozen=True, slots=True)
class Variant:
    """Launches that take the place of a program's launches of the same ops."""

    program: str
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class KernelTask:
    """To check launches, unless they have been, and to time a chain of them.

    ``partners`` holds the same launches in the decode program whose rows must have the same bits, or nothing.
    """

    variant: Variant
    partners: tuple[Variant, ...]
    kernels: tuple[CompiledKernel, ...]
    repeats: int
    is_checked: bool


@dataclass(frozen=True, slots=True)
class StepTask:
    """To time whole steps of a program, one for each variant, in turns."""

    program: str
    variants: tuple[Variant, ...]
    kernels: tuple[CompiledKernel, ...]
    repeats: int


Task = KernelTask | StepTask
_TASKS: Mapping[str, type[KernelTask] | type[StepTask]] = {"kernel": KernelTask, "steps": StepTask}


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a child. ``text`` is the part that begins, or why it could not start; ``is_lost`` says that its
    GPU, or what lies in its memory, is of no use any more."""

    kind: str
    text: str = ""
    outcomes: tuple[Outcome, ...] = ()
    is_lost: bool = False


def opening_of(text: str) -> Opening:
    """The opening of a text, which ``encode`` made."""
    found: Opening = decode(Opening, json.loads(text))
    return found


def task_text(task: Task) -> str:
    """A task for the child."""
    kind = next(name for name, known in _TASKS.items() if isinstance(task, known))
    return json.dumps({"kind": kind, "task": task}, default=shallow)  # unsorted: a signature is in order


def task_of(text: str) -> Task:
    """The task of a text."""
    data = json.loads(text)
    found: Task = decode(_TASKS[data["kind"]], data["task"])
    return found


def said_text(said: Said) -> str:
    """A message for the parent."""
    return encode(said)


def said_of(text: str) -> Said:
    """The message of a text."""
    data = json.loads(text)
    return Said(data["kind"], data["text"], _outcomes(data["outcomes"]), data["is_lost"])


def _outcomes(items: Sequence[Mapping[str, Any]]) -> tuple[Outcome, ...]:
    return tuple(Outcome(**{**item, "status": Status(item["status"])}) for item in items)
