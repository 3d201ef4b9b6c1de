"""A process in the place of the one that has the GPU: it does what its second argument says.

``answer`` times every task, ``lost`` does and says that its GPU is gone; ``silent`` never says that it is ready,
``refuse`` says why it is not, ``greeted`` is ready after it was told of a plan. A task with ``hangs`` or ``crashes`` in
a kernel's file name makes it sleep or die.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from lynnc.autotune.benchmessages import (
    CANDIDATE,
    DONE,
    FAILED,
    PHASE,
    READY,
    KernelTask,
    Said,
    opening_of,
    said_text,
    task_of,
)
from lynnc.autotune.trial import Outcome, Status

LONG = 3600.0


def main() -> None:
    connection, mode = Connection(int(sys.argv[1])), sys.argv[2]

    def say(said: Said) -> None:
        connection.send_bytes(said_text(said).encode())

    if mode == "silent":
        time.sleep(LONG)
    if mode == "refuse":
        say(Said(FAILED, "No CUDA driver was found on this machine."))
        return
    if mode == "greeted":
        assert opening_of(connection.recv_bytes().decode()).folder == "a.plan"
    say(Said(READY, "a GPU of paper"))
    while True:
        try:
            task = task_of(connection.recv_bytes().decode())
        except EOFError:
            return
        say(Said(PHASE, CANDIDATE))
        files = " ".join(kernel.cubin for kernel in task.kernels)
        if "hangs" in files:
            time.sleep(LONG)
        if "crashes" in files:
            print("Traceback, and so on\nCUDA_ERROR_ILLEGAL_ADDRESS", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        count, checked = (1, task.is_checked) if isinstance(task, KernelTask) else (len(task.variants), True)
        outcome = Outcome(Status.TIMED, 2.0 if checked else 1.0, 0.5, 3.0, task.repeats)
        say(Said(DONE, outcomes=(outcome,) * count, is_lost=mode == "lost"))


if __name__ == "__main__":
    main()
