"""Kernels compiled beside other work: asked for early, waited for late.

In: ``KernelSource`` values, one at a time. Out: for each a future of its ``Artifact``, or of the ``CompileError`` that
says why there is none. As many compiler processes as there are jobs stay alive between requests; one that takes too
long over a kernel is killed.

Example::

    with closing(CompileAhead(store)) as ahead:
        futures = [ahead.start(source) for source in sources]
        futures[0].result()
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lynnc.artifact import Artifact
from lynnc.compile import KernelSource, Outcome, finish, look_up, request_of
from lynnc.compile_pool import CompilerPool
from lynnc.errors import LynncError
from lynnc.store import Store
from lynnc.target import check_tools
from lynnc.tools import find_tools

COMPILE_SECONDS = 60.0
"""After which a kernel counts as one that does not compile: tiles that unroll far keep ptxas busy for minutes."""


class CompileAhead:
    """Each key is compiled once; the first that were asked for come first."""

    def __init__(self, store: Store, jobs: int | None = None, seconds: float = COMPILE_SECONDS) -> None:
        self._store, self._seconds = store, seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="lynnc-compile-")
        self._pool = CompilerPool(Path(self._scratch.name))
        self._jobs = jobs or len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._jobs, "compile")
        self._futures: dict[str, Future[Outcome | LynncError]] = {}

    def warm_up(self) -> None:
        """Starts every process, so that the first kernels wait for none."""
        self._pool.start(self._jobs)

    def compile_all(self, sources: Sequence[KernelSource]) -> dict[str, Artifact]:
        """Artifacts by key, as ``compile_kernels`` gives them; the error of a kernel that fails."""
        futures = {source.key: self.start(source) for source in sorted(sources, key=lambda source: -len(source.text))}
        found: dict[str, Artifact] = {}
        for key, future in futures.items():
            outcome = future.result()
            if isinstance(outcome, LynncError):
                raise outcome
            found[key] = outcome
        return found

    def start(self, source: KernelSource) -> Future[Outcome | LynncError]:
        """The kernel's future: an artifact, or the error that there was; it raises nothing but on a closed compiler."""
        key = source.key
        if key not in self._futures:
            self._futures[key] = self._threads.submit(self._compile, source, key)
        return self._futures[key]

    def close(self) -> None:
        """Ends every process, and forgets what was not begun."""
        self._pool.kill()
        self._threads.shutdown(cancel_futures=True)
        self._pool.close()
        self._scratch.cleanup()

    def _compile(self, source: KernelSource, key: str) -> Outcome | LynncError:
        try:
            found = look_up(source, key, self._store)
            if found:
                return found
            tools = find_tools()
            check_tools(source.target, tools)
            reply = self._pool.ask(request_of(source, key, tools), self._seconds)
            return finish(source, key, reply, self._store)
        except LynncError as error:
            return error
