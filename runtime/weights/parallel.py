"""Work on many parts at once, in processes of their own, or, for a GPU, in threads.

In: a function and the parts. Out: a generator of (index, result) in the order in which parts get finished, to be
closed. Threads would not do: an operation of torch on what fits a core's cache takes some 20 microseconds, as long as
Python's lock takes to change hands. Nor would torch's own threads, which meet after every operation and wait for the
slowest. So each process runs torch with one thread. Processes are forked: they have all that the function refers to,
and take parts from a common counter.

Example::

    for index, result in spread(convert_part, parts, workers=2):
        ...
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

import torch

from lynnc.errors import LynncError, WeightError

Item = TypeVar("Item")
Result = TypeVar("Result")


THREADS_ON_GPU = 4
"""Threads that share a GPU: while one waits for it, others read and write."""


def worker_count() -> int:
    """Processes for this one: one for each core that it may use."""
    return len(os.sched_getaffinity(0))


def spread(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[int, Result], None, None]:
    """``function`` of each item, by index. Results are pickled, so they should be small. A ``LynncError`` of the
    function is raised here; WeightError if a process is killed. With one worker, all happens in this process."""
    if workers < 2 or len(items) < 2:
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    context = get_context("fork")
    counter = context.Value("q", 0)
    started = [_start(context, function, items, counter) for _ in range(min(workers, len(items)))]
    readers = {reader: process for process, reader in started}
    try:
        while readers:
            for reader in connection.wait(list(readers)):
                yield from _receive(reader, readers)
    finally:
        for process, reader in started:
            process.terminate()
            process.join()
            reader.close()


def _start(
    context: Any, function: Callable[[Item], Result], items: Sequence[Item], counter: Synchronized[int]
) -> tuple[ForkProcess, connection.Connection]:
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, items, counter, writer, os.getpid()), daemon=True)
    process.start()
    writer.close()
    return process, reader


def _work(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    counter: Synchronized[int],
    writer: connection.Connection,
    parent: int,
) -> None:
    """Takes the next item until there is none, or the parent is gone or has been told of an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while os.getppid() == parent:
        with counter.get_lock():
            index, counter.value = counter.value, counter.value + 1
        if index >= len(items):
            writer.send(None)
            return
        try:
            writer.send((index, function(items[index])))
        except LynncError as error:
            writer.send(error)
            return


def _receive(reader: Any, readers: dict[Any, ForkProcess]) -> Generator[tuple[int, Any], None, None]:
    """One message of a process: a result, an error, or None for its end."""
    try:
        message = reader.recv()
    except EOFError:
        process = readers[reader]
        process.join()
        raise WeightError(
            f"A worker process ended with code {process.exitcode}: if the system was short of memory, free some, and "
            "run the same command again."
        ) from None
    if isinstance(message, LynncError):
        raise message
    if message is None:
        del readers[reader]
    else:
        yield message


def spread_threads(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[int, Result], None, None]:
    """Like ``spread``, with threads: for work on a GPU, which processes could only share at the price of a context and
    its memory for each."""
    with ThreadPoolExecutor(workers, "lynnc-part") as pool:
        pending: dict[Future[Result], int] = {}
        try:
            for index, item in enumerate(items):
                pending[pool.submit(function, item)] = index
                if len(pending) >= 2 * workers:
                    yield from _finished(pending)
            while pending:
                yield from _finished(pending)
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(pending: dict[Future[Result], int]) -> Generator[tuple[int, Result], None, None]:
    """Waits for one at least."""
    for future in wait(pending, return_when=FIRST_COMPLETED).done:
        yield pending.pop(future), future.result()
