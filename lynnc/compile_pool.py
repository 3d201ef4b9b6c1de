"""Compiler processes: give each one request at a time, take replies as they come, survive their death.

In: JSON-like requests for ``compile_worker.py``. Out: ``Reply`` values, in the order in which they finish. This process
never imports triton. Leaving the generator early, by an error or by Ctrl-C, ends every process and what it started.

Example::

    with TemporaryDirectory() as scratch:
        for reply in run_requests(requests, 2, Path(scratch)):
            print(reply.index, reply.error or reply.fields["registers"])
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lynnc.errors import CompileError

WORKER = Path(__file__).with_name("compile_worker.py")
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)
"""All that a compiler process sees of our environment: Triton and LLVM read dozens of variables that change code."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to request number ``index``: the worker's fields and the folder of its files, or an error."""

    index: int
    folder: Path
    fields: Mapping[str, object]
    error: str = ""


def run_requests(requests: Sequence[Mapping[str, object]], jobs: int, scratch: Path) -> Generator[Reply, None, None]:
    """Yield one reply for each request, from ``jobs`` processes that keep their files below ``scratch``."""
    waiting = list(reversed(range(len(requests))))
    workers: list[_Worker] = []
    try:
        with selectors.DefaultSelector() as selector:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < jobs:
                    worker = _Worker(scratch / f"worker{len(workers)}")
                    workers.append(worker)
                    selector.register(worker.replies, selectors.EVENT_READ, worker)
                    worker.send(waiting[-1], requests[waiting.pop()])
                for key, _ in selector.select():
                    worker = key.data
                    reply = worker.receive()
                    if reply is None:
                        continue
                    if waiting and worker.is_alive:
                        worker.send(waiting[-1], requests[waiting.pop()])
                    else:
                        selector.unregister(worker.replies)
                        worker.end()
                    yield reply
    finally:
        for worker in workers:
            worker.end()


class CompilerPool:
    """Compiler processes for threads that each want one kernel at a time; a process is kept for the next that asks."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._started: list[_Worker] = []
        self._is_ended = False

    def start(self, count: int) -> None:
        """Starts processes before anybody asks: each takes seconds to import Triton."""
        fresh = [self._take() for _ in range(count)]
        with self._lock:
            self._idle += fresh

    def ask(self, request: Mapping[str, object], seconds: float) -> Reply:
        """The reply to one request; an error reply if it took longer than ``seconds``."""
        worker = self._take()
        worker.send(0, request)
        reply = worker.reply(seconds)
        with self._lock:
            if worker.is_alive:
                self._idle.append(worker)
        return reply

    def kill(self) -> None:
        """Ends every process; whoever waits for one gets an error reply, and nobody gets another."""
        with self._lock:
            self._is_ended = True
            for worker in self._started:
                worker.kill()

    def close(self) -> None:
        """Waits for the end of every process, once no thread asks any more."""
        self.kill()
        for worker in self._started:
            worker.end()

    def _take(self) -> _Worker:
        with self._lock:
            if self._is_ended:
                raise CompileError("The compiler processes were ended: start the command again.")
            if self._idle:
                return self._idle.pop()
            self._started.append(_Worker(self._scratch / f"worker{len(self._started)}"))
            return self._started[-1]


class _Worker:
    """One compiler process in a folder and a session of its own, so that Ctrl-C reaches only us."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_alive = True
        self._index = -1
        self._log = folder / "log"
        self._log_start = 0
        self._buffer = b""
        folder.mkdir()
        self.replies, to_parent = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), str(to_parent)],
                    cwd=folder,
                    env=_environment(folder),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(to_parent,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self.replies)
            raise CompileError(f"No compiler process could be started ({error}): free some memory.") from error
        finally:
            os.close(to_parent)

    def send(self, index: int, request: Mapping[str, object]) -> None:
        """Start on a request. A process that died meanwhile is noticed by ``receive``."""
        self._index = index
        self._log_start = self._log.stat().st_size
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Reply | None:
        """The reply if it is complete; an error reply if the process died."""
        chunk = os.read(self.replies, 65536)
        if not chunk:
            self.is_alive = False
            return Reply(self._index, self.folder, MappingProxyType({}), self._obituary())
        self._buffer += chunk
        if not self._buffer.endswith(b"\n"):
            return None
        fields = json.loads(self._buffer)
        self._buffer = b""
        return Reply(self._index, self.folder, fields, str(fields.get("error", "")))

    def reply(self, seconds: float) -> Reply:
        """The whole reply; an error reply if the process died, or took longer and was killed."""
        ends = time.monotonic() + seconds
        while select.select([self.replies], [], [], max(ends - time.monotonic(), 0.0))[0]:
            reply = self.receive()
            if reply is not None:
                return reply
        self.kill()
        self.is_alive = False
        return Reply(self._index, self.folder, MappingProxyType({}), f"it took the compiler more than {seconds:g} s")

    def kill(self) -> None:
        """Ends the process and its ptxas, if they still run, and does not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process and its ptxas, if they still run; harmless when repeated."""
        if self._process.returncode is None:
            self.kill()
            self._process.wait()
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            os.close(self.replies)

    def _obituary(self) -> str:
        code = self._process.wait()
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self._log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        said = f", its last words: {lines[-1].strip()}" if lines else ""
        return f"the compiler process {end}{said}"


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    own = {
        "TMPDIR": str(folder),
        "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
    }
    return {**kept, **own}
