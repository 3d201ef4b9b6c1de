"""What ranking without a device is worth: predicted against measured times of the candidates of a tuning run.

In: the storage and the name of a run on a real device, on a machine with the same compiler (the candidates are compiled
again, or found in the store). Out: for each problem Spearman's coefficient, and how much slower the candidate is that
the prediction likes best than the one that was measured best; beside it the default.

Example::

    python benchmarks/ranking_worth.py qwen3.6-35b-a3b tune.journal RUN --output benchmarks/results/ranking.json
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from lynnc.autotune.conditions import Conditions
from lynnc.autotune.legalspace import legal_space
from lynnc.autotune.predict import rank_correlation
from lynnc.autotune.problems import DECODE, Task, Wanted, tasks_of
from lynnc.autotune.simulatedbench import SimulatedBench, open_simulated_bench, predicted_and_measured
from lynnc.autotune.storages import open_storage
from lynnc.autotune.studies import Run
from lynnc.autotune.sweep import Tried
from lynnc.autotune.tuner import study_digest
from lynnc.autotune.worker import Worker
from lynnc.bench.records import commit
from lynnc.compiler import Request
from lynnc.deviceidentity import identity_of
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.store import Store, default_store_path
from lynnc.target import find_device

FEWEST = 8
"""Timed candidates below which a problem is left out."""


@dataclass(frozen=True, slots=True)
class Worth:
    """One problem. ``chosen_over_best`` is the measured time of the candidate that is predicted to be fastest over the
    best measured one; ``default_over_best`` the default's."""

    program: str
    kernel: str
    problem: dict[str, str]
    candidates: int
    spearman: float | None
    chosen_over_best: float
    default_over_best: float


def worth_of(task: Task, tried: tuple[Tried, ...], bench: SimulatedBench) -> Worth | None:
    """The comparison for a problem; None for one with few candidates."""
    timed = [one for one in tried if one.outcome.is_timed]
    pairs = predicted_and_measured(task, timed, bench)
    if len(pairs) < FEWEST:
        return None
    best = min(measured for _, measured in pairs)
    defaults = [one.outcome.seconds for one in timed if one.origin == "default"]
    return Worth(
        program=task.program,
        kernel=task.kernel.name,
        problem={name: str(value) for name, value in task.problem.items()},
        candidates=len(pairs),
        spearman=rank_correlation(pairs),
        chosen_over_best=min(pairs)[1] / best,
        default_over_best=defaults[0] / best if defaults else 0.0,
    )


@click.command()
@click.argument("model")
@click.argument("storage")
@click.argument("run")
@click.option("--device", default="h200", show_default=True, help="Device that measured.")
@click.option("--programs", default="decode/1", show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(model: str, storage: str, run: str, device: str, programs: str, output: Path | None) -> None:
    spec, chosen, names = load_model(model), find_device(device), tuple(programs.split(","))
    context = Conditions().before(DECODE)
    tasks = tasks_of(spec, Wanted(chosen, names, context=context))
    opened = Run(open_storage(storage), run, Worker.here())
    request = Request(chosen.target, chosen, Options(programs=tuple({*names, *(task.program for task in tasks)})))
    store = Store(default_store_path(os.environ))
    rows = []
    with closing(opened), closing(open_simulated_bench(spec, request, store, tasks, context)) as bench:
        for task in tasks:
            space = legal_space(task, chosen.target).knobs
            tried = opened.study(task, study_digest(task, space, identity_of(chosen)), space).tried()
            worth = worth_of(task, tried, bench)
            if worth:
                rows.append(worth)
                ranked = "none" if worth.spearman is None else f"{worth.spearman:.2f}"
                click.echo(
                    f"{worth.kernel:16} {worth.candidates:4} candidates, Spearman {ranked}; over the best: predicted "
                    f"best {worth.chosen_over_best:.2f}, default {worth.default_over_best:.2f}"
                )
    if output:
        document = {"model": model, "device": device, "run": run, "commit": commit(), "rows": [asdict(w) for w in rows]}
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
