"""Who works on a study, whether it is still alive, and the beat by which others know.

In: a seed. Out: a ``Worker`` whose name tells host, process and its start, and a ``Heart`` that a database hears while
candidates are in hand. A journal file has no heartbeats: there a worker whose process can be seen from here is dead if
the process is, and any other if it has held a candidate for longer than any takes.

Example::

    worker = Worker.here(seed=1)
    worker.knows_to_be_lost("otherhost:4711:123456:1a7a8f03.4026531836", started)
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lynnc.errors import StorageError

HEARTBEAT_SECONDS = 5
LOST_AFTER_SECONDS = 60
"""Silence after which a database takes a worker for dead."""
LONGEST_HOLD_SECONDS = 900
"""A worker holds some candidates while they compile, and the slowest is given up after minutes."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that measures. ``name`` is ``host:process:start:space``, which no other process ever has."""

    name: str
    seed: int = 0

    @staticmethod
    def here(seed: int = 0) -> Worker:
        """This process."""
        pid = os.getpid()
        return Worker(f"{socket.gethostname()}:{pid}:{_start_of(pid)}:{_process_space()}", seed)

    def knows_to_be_lost(self, other: str, started: datetime.datetime | None) -> bool:
        """Whether another worker, which began a candidate at ``started``, is gone, as far as a journal can tell."""
        if other == self.name:
            return False
        _, pid, start, space = _parts(other)
        if space and space == _parts(self.name)[3] and pid.isdigit() and not _is_hidden(int(pid)):
            return _start_of(int(pid)) != start
        age = datetime.datetime.now() - started if started else datetime.timedelta(0)
        return age.total_seconds() > LONGEST_HOLD_SECONDS


def _parts(name: str) -> list[str]:
    return [*name.split(":"), "", "", "", ""][:4]


def _process_space() -> str:
    """Where a number means the same process: a boot of a machine, and a namespace of it, as containers of one host may
    all have its name; empty if that is not known."""
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):  # another namespace's processes are shown there
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _is_hidden(pid: int) -> bool:
    """Whether a process is there of which nothing else is to be known: ``/proc`` may hide those of other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}/stat").exists()
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


class Heart:
    """Beats for every trial in hand, from a thread, into a storage that listens; does nothing without one."""

    def __init__(self, beat: Callable[[int], None] | None) -> None:
        self._beat = beat
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if beat else None

    @property
    def is_heard(self) -> bool:
        """Whether the storage listens."""
        return self._beat is not None

    def hold(self, trial: int) -> None:
        """Beats for a trial from now on."""
        with self._lock:
            self._held.add(trial)
        if self._beat and self._thread:
            self._beat(trial)
            if not self._thread.is_alive():
                self._thread.start()

    def let_go(self, trial: int) -> None:
        """The trial is finished."""
        with self._lock:
            self._held.discard(trial)

    def stop(self) -> None:
        """Beats no more; a beat that waits for a lost storage is not waited for."""
        self._stopped.set()
        if self._thread and self._thread.is_alive():
            self._thread.join(HEARTBEAT_SECONDS)

    def _run(self) -> None:
        """Goes on whatever happens to the storage: it may come back."""
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            with self._lock:
                held = tuple(self._held)
            with contextlib.suppress(StorageError):
                for trial in held:
                    if self._beat:
                        self._beat(trial)
