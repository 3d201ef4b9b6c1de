"""The process that has the GPU while candidates are measured: it may crash or hang, and its parent goes on.

In: the number of a GPU on the command line; a plan folder and conditions, then tasks on a connection. Out: what becomes
of them, on the same connection. Weights are random, the same in every process. Ends when the connection or the parent
does, or when its GPU is lost.

Example::

    python -m lynnc.autotune.benchchild 5 0
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from lynnc.autotune.benchmessages import DONE, FAILED, PHASE, READY, Said, opening_of, said_text, task_of
from lynnc.autotune.conditions import Conditions
from lynnc.autotune.measurer import Measurer
from lynnc.errors import LynncError
from lynnc.planfile import load_plan
from lynnc.runtime.executor import Executor
from lynnc.runtime.loader import load
from lynnc.runtime.loading.generated import GeneratedWeights

WATCH_SECONDS = 1.0
"""Between two looks at whether the parent lives."""
SEED = 0


def main() -> None:
    """Loads the plan, then answers tasks."""
    connection, gpu = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
    where = f"cuda:{gpu}" if torch.cuda.is_available() else "cpu"
    try:
        opening = opening_of(connection.recv_bytes().decode())
    except EOFError:
        return

    def open_executor() -> Executor:
        plan = load_plan(opening.folder)
        room = opening.conditions.room(plan, tuple(plan.programs))
        return load(opening.folder, GeneratedWeights(SEED), room, gpu=gpu)

    serve(connection, open_executor, opening.conditions, where)


def serve(
    connection: Connection, open_executor: Callable[[], Executor], conditions: Conditions, torch_device: str
) -> None:
    """Answers tasks on an executor until the connection ends, or nothing more can be measured."""

    def say(said: Said) -> None:
        connection.send_bytes(said_text(said).encode())

    try:
        executor = open_executor()
        measurer = Measurer(executor, conditions, lambda part: say(Said(PHASE, part)), torch_device)
    except LynncError as error:
        say(Said(FAILED, str(error)))
        return
    say(Said(READY, executor.device.facts.name))
    is_usable = True
    while is_usable:
        try:
            task = task_of(connection.recv_bytes().decode())
        except EOFError:
            break
        said = measurer.answer(task)
        assert said.kind == DONE
        say(said)
        is_usable = not said.is_lost


def watch(parent: int) -> None:
    """Ends this process soon after its parent, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
