"""One packed projection beside torch's BF16 matrix-vector product of the same shape, in the same run.

In: a plan of one-row decode. Out: for each of its packed projections the time of a launch in a chain of its own, the
time of torch's product over as many unlike weights, and their ratio, as a table and a JSON list of records.

Example::

    python benchmarks/projection_speed.py qwen3.6-35b-a3b.h200.plan --output benchmarks/results/h200-projections.json
"""

from __future__ import annotations

import statistics
from pathlib import Path

import click
import torch

from lynnc.bench.kernels import Parts, label_of
from lynnc.bench.records import Record, setting_of, write_records
from lynnc.bench.timing import Effort, Timing, timing_of
from lynnc.runtime import Room, load
from lynnc.runtime.executor import DECODE
from lynnc.runtime.loading.generated import GeneratedWeights

CHAIN = 40
"""Unlike weights of a chain, so that none is left in a cache."""
REPEATS = 15


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File for the records.")
@click.option("--force", is_flag=True, help="Replace it.")
def main(plan: Path, output: Path | None, force: bool) -> None:
    """Measure every packed projection of a plan."""
    records: list[Record] = []
    with load(plan, GeneratedWeights(0), Room(1, 1024, (DECODE,))) as executor:
        setting = setting_of(executor.plan, executor.device.facts, {"torch": torch.__version__}, _command(plan))
        parts = Parts(executor, DECODE, 128)
        for key in dict.fromkeys(call.kernel for call in parts.calls):
            entry = executor.plan.kernels[key]
            if entry.name != "linear" or str(entry.problem["n"]).startswith("router"):
                continue
            own = [call for call in parts.calls if call.kernel == key]
            ours = parts.time(own, Effort(REPEATS)).over(len(own))
            rows, columns = int(entry.problem["n"]), int(entry.problem["k"])
            theirs = time_torch(rows, columns, min(CHAIN, len(own)))
            where: dict[str, str | int | float | bool] = {"op": label_of(own), "rows": rows, "columns": columns}
            records.append(setting.time("projection_us", ours, **where))
            records.append(setting.time("torch_bf16_matvec_us", theirs, **where))
            ratio = theirs.median / ours.median
            records.append(setting.count("torch_over_packed", ratio, "x", **where))
            click.echo(
                f"{rows:7} x {columns:5}: packed {ours.median * 1e6:7.2f} us, torch BF16 "
                f"{theirs.median * 1e6:7.2f} us, {ratio:.2f} times as long"
            )
    if output:
        write_records(output, records, force)


def time_torch(rows: int, columns: int, chain: int) -> Timing:
    """Time of one BF16 ``weight @ x`` in a captured chain over unlike weights."""
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(chain)]
    x = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mv(weights[0], x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [torch.mv(weight, x) for weight in weights]
    seconds = []
    for _ in range(REPEATS + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3)
    assert len(kept) == chain and statistics.median(seconds) > 0
    return timing_of(seconds[1:]).over(chain)


def _command(plan: Path) -> str:
    return f"python benchmarks/projection_speed.py {plan}"


if __name__ == "__main__":
    main()
