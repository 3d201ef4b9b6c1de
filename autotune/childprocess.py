"""A process that answers tasks, with patience: whatever it does, the caller gets a message or an error in time.

In: a command that takes the number of a connection, and what it is told first. Out: what the process said last to a
task. It is started when it is first needed, killed when it takes too long, and started again for the next task.

Example::

    child = ChildProcess(lambda number: [sys.executable, "child.py", str(number)], Patience())
    child.begin()
    ...
    said = child.ask(task_text(task))
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from lynnc.autotune.benchmessages import CANDIDATE, FAILED, PHASE, READY, Said, said_of

KILL_SECONDS = 30.0
"""For which a killed process is waited for: the driver ends what it had on the GPU first."""
ATTEMPTS, PAUSE_SECONDS = 3, 2.0
"""To start a process again, and how long between two."""


class ChildError(Exception):
    """A process that gave no answer; it has been killed, or is dead."""


class ChildHungError(ChildError):
    """It took too long."""


class ChildDiedError(ChildError):
    """It ended, or could not be started."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a process may take to start, to compute what a candidate is judged by, and for a candidate."""

    start: float = 300.0
    setup: float = 180.0
    candidate: float = 20.0


class ChildProcess:
    """See the module's docstring."""

    def __init__(
        self, command: Callable[[int], Sequence[str]], patience: Patience, greeting: Callable[[], str] | None = None
    ) -> None:
        self._command, self.patience, self._greeting = command, patience, greeting
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._connection: Connection | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="lynnc-child-")
        self._log = Path(self._folder.name) / "log"
        self.starts = 0

    def begin(self) -> None:
        """Starts the process, if none runs, without waiting: what it imports takes as long as what it will be told."""
        if self._process is None:
            self._spawn()

    def start(self) -> None:
        """Starts the process, if none runs, greets it and waits until it takes tasks; ChildError if it never does.

        One that follows another is tried a few times: a GPU's memory is free a while after its owner has ended.
        """
        attempts = ATTEMPTS if self.starts else 1
        while not self._is_ready:
            attempts -= 1
            try:
                self._start()
            except ChildDiedError:
                if attempts == 0:
                    raise
                time.sleep(PAUSE_SECONDS)

    def _start(self) -> None:
        self.begin()
        assert self._connection is not None
        with self._killed_unless_done():
            if self._greeting:
                self._send(self._greeting())
            said = self._wait(self.patience.start, "starting the measuring process")
            if said.kind == FAILED:
                raise ChildDiedError(said.text)
            assert said.kind == READY
        self._is_ready = True
        self.starts += 1

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the parent's affair
                )
        except OSError as error:
            ours.close()
            raise ChildDiedError(f"the measuring process could not be started ({error})") from error
        finally:
            theirs.close()
        self._connection = ours

    def ask(self, task: str) -> Said:
        """The process's answer to a task; ChildError if there is none, and then it is started anew for the next."""
        self.start()
        with self._killed_unless_done():
            self._send(task)
            said = self._wait(self.patience.setup, "the task's setup")
            while said.kind == PHASE:
                is_candidate = said.text == CANDIDATE
                seconds = self.patience.candidate if is_candidate else self.patience.setup
                said = self._wait(seconds, "the candidate" if is_candidate else "the plan's own kernels")
        if said.is_lost:
            self.kill()
        return said

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._is_ready = False

    @contextlib.contextmanager
    def _killed_unless_done(self) -> Iterator[None]:
        """Kills the process when the block is left early, by Ctrl-C too: the next answer would be to the last task."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self.kill()

    def _send(self, text: str) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(text.encode())
        except OSError as error:
            raise ChildDiedError(self._obituary()) from error

    def _wait(self, seconds: float, what: str) -> Said:
        assert self._connection is not None
        try:
            if not self._connection.poll(seconds):
                raise ChildHungError(f"{what} took more than {seconds:g} s and was killed")
            return said_of(self._connection.recv_bytes().decode())
        except (EOFError, OSError) as error:
            raise ChildDiedError(self._obituary()) from error

    def _obituary(self) -> str:
        """How the process ended and what it said last."""
        assert self._process is not None
        try:
            code = self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its connection"
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        said = f", its last words: {lines[-1].strip()}" if lines else ""
        return f"the measuring process {end}{said}"
