"""One worker process for each GPU of this host: the same command again, searching only, in the same study.

In: the arguments, the name of the run, GPUs. Out: when all have ended, how many of them did so well. A worker that
dies takes one measurement with it; the others go on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from lynnc.cli.output import warn
from lynnc.cli.tunewish import SEEDS, Arguments, Wish
from lynnc.errors import DeviceError

GRACE_SECONDS = 10.0


def worker_commands(arguments: Arguments, wish: Wish, storage: str, study: str) -> tuple[list[str], ...]:
    """The command of each worker."""
    shared = [sys.executable, "-m", "lynnc.cli", "tune", wish.model, "--search-only"]
    options: Mapping[str, object] = {
        "--storage": storage,
        "--study": study,
        "--programs": ",".join(wish.programs),
        "--kernels": ",".join(wish.kernels),
        "--without": ",".join(wish.without),
        "--budget": arguments.budget or ("" if wish.trials else wish.budget),
        "--trials": -(-wish.trials // len(wish.gpus)) if wish.trials else "",
        "--records": arguments.records,
        "--records-folder": arguments.records_folder or "",
        "--store": arguments.store or "",
    }
    for name, value in options.items():
        shared += [name, str(value)] if value else []
    shared += ["--rehearse"] if arguments.rehearse else []
    seeds = {gpu: (arguments.seed + gpu) % SEEDS for gpu in wish.gpus}
    return tuple([*shared, "--device", f"cuda:{gpu}", "--seed", str(seeds[gpu])] for gpu in wish.gpus)


def run_workers(commands: Sequence[Sequence[str]]) -> None:
    """Runs all until all have ended; DeviceError if none did so well. Leaving early ends them, and they clean up."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            workers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        codes = [worker.wait() for worker in workers]
    finally:
        _end(workers)
    failed = [index for index, code in enumerate(codes) if code]
    if len(failed) == len(codes):
        raise DeviceError("Every worker failed, see above: tune on one GPU with --device cuda:0 to see more.")
    for index in failed:
        warn(f"worker {index} ended with code {codes[index]}; what it had finished counts.")


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        try:
            worker.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
