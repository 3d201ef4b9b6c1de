"""A worker process on a made-up device, for tests: ``tuning_worker.py STORAGE STUDY SEED TRIALS SECONDS``.

Says ``ready`` and waits for a line, so that several begin together; then prints the number of every candidate that it
has finished, and how many they were.
"""

from __future__ import annotations

import sys
import time

from tuning import Rig, tasks

from lynnc.autotune.synthetic import Traits
from lynnc.records import Records

KERNELS = ("experts_up", "gdn_step")
SEED = 21
"""Of the device, which all workers share."""


def rig(storage: str, study: str, seed: int = 0, seconds: float = 0.0) -> Rig:
    """One for the same device in every process."""
    made = Rig(tasks(*KERNELS), Traits(seed=SEED, noise=0.001, measure_seconds=seconds), storage, study, seed)
    made.clock.wait = time.sleep  # type: ignore[method-assign]
    made.bench._wait = time.sleep
    return made


def main() -> None:
    storage, study, seed, trials, seconds = sys.argv[1:]
    made = rig(storage, study, int(seed), float(seconds))
    tuner, budget = made.tuner(ahead=3), made.budget(trials=int(trials))
    print("ready", flush=True)
    sys.stdin.readline()
    tuner.search(budget, Records(), lambda task, tried: print(tried.number, flush=True))
    print("done", budget.spent, flush=True)


if __name__ == "__main__":
    main()
