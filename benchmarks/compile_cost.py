"""What compiling costs: time with an empty and a full store, memory, kernels, and the start of the command line.

In: a model and a target. Out: a table, and a JSON list of records (metric, value, unit, spread and what it was measured
with). Everything runs through the command line, in processes of its own, with a store and a home that start empty.

Example::

    python benchmarks/compile_cost.py --model lynn-27b-a3b --target sm_121 --output benchmarks/results/compile_cost.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from measuring import Bench, Record, Usage, report

from lynnc.planfile import read_plan

WARM_RUNS, HELP_RUNS = 5, 10
PACKAGES = ("lynnc", "triton", "sympy", "jinja2", "click")


def measure(bench: Bench, model: str, target: str) -> list[Record]:
    """Every metric, the empty store first."""

    def compile_to(plan: str) -> Usage:
        return bench.run("compile", model, "--target", target, "--output", str(bench.folder / plan))

    compiling = f"python -m lynnc.cli compile {model} --target {target}"
    cold = compile_to("cold.plan")
    warm = [compile_to(f"warm{run}.plan") for run in range(WARM_RUNS)]
    start = [bench.run("--help") for _ in range(HELP_RUNS)]
    kernels = len(read_plan(bench.folder / "cold.plan").kernels)
    return [
        bench.record("compile, empty store", [cold.seconds], "s", compiling),
        bench.record("compile, full store", [run.seconds for run in warm], "s", compiling),
        bench.record("peak memory of all processes, empty store", [cold.tree_kib / 1024], "MiB", compiling),
        bench.record("peak memory of the largest process, empty store", [cold.largest_kib / 1024], "MiB", compiling),
        bench.record("peak memory of all processes, full store", [r.tree_kib / 1024 for r in warm], "MiB", compiling),
        bench.record("start of the command line", [run.seconds for run in start], "s", "python -m lynnc.cli --help"),
        bench.record("kernels", [kernels], "kernels", compiling),
    ]


@click.command()
@click.option("--model", default="lynn-27b-a3b", show_default=True, help="A shipped model, or a model file.")
@click.option("--target", default="sm_121", show_default=True, help="Architecture to compile for.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(model: str, target: str, output: Path | None) -> None:
    """Measure what compiling MODEL costs on this machine; keep it otherwise idle."""
    name = str(Path(model).resolve()) if Path(model).exists() else model
    with tempfile.TemporaryDirectory(prefix="lynnc-bench-") as folder:
        bench = Bench(Path(folder), {"model": Path(model).name, "target": target}, PACKAGES)
        records = measure(bench, name, target)
    report(records, output)


if __name__ == "__main__":
    main()
