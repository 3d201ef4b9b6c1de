"""One packed projection beside torch's BF16 matrix-vector product of the same shape, in the same run.

In: a plan of one-row decode. Out: for each of its packed projections the time of a launch in a chain of its own, the
time of torch's product in such a chain, and their ratio; for a model with experts also the time of its two kernels of
experts in a chain of theirs. A table and a JSON list of records. All chains are long, so that the start of a graph is
no part of a launch, and go through the layers' weights in turn, so that no cache holds one until it is read again.

Example::

    python benchmarks/projection_speed.py qwen3.6-35b-a3b.h200.plan --output benchmarks/results/h200-projections.json
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from gputiming import time_on_gpu

from lynnc.bench.kernels import Parts, label_of
from lynnc.bench.records import Record, setting_of, write_records
from lynnc.bench.timing import Effort, Timing
from lynnc.runtime import Room, load
from lynnc.runtime.executor import DECODE
from lynnc.runtime.loading.generated import GeneratedWeights

CHAIN = 40
"""Launches of a chain, at least."""
REPEATS = 15
EXPERTS = ("experts_up", "experts_down")
"""Kernels of a layer's experts."""


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
            times = -(-CHAIN // len(own))
            ours = parts.time(own * times, Effort(REPEATS)).over(len(own) * times)
            rows, columns = int(entry.problem["n"]), int(entry.problem["k"])
            theirs = time_torch(rows, columns, len(own), times)
            where: dict[str, str | int | float | bool] = {
                "op": label_of(own),
                "rows": rows,
                "columns": columns,
                "weights": len(own),
                "launches": len(own) * times,
            }
            records.append(setting.time("projection_us", ours, **where))
            records.append(setting.time("torch_bf16_matvec_us", theirs, **where))
            ratio = theirs.median / ours.median
            records.append(setting.count("torch_over_packed", ratio, "x", **where))
            click.echo(
                f"{rows:7} x {columns:5}: packed {ours.median * 1e6:7.2f} us, torch BF16 "
                f"{theirs.median * 1e6:7.2f} us, {ratio:.2f} times as long"
            )
        pair = [call for call in parts.calls if executor.plan.kernels[call.kernel].name in EXPERTS]
        if pair:
            layers = len(pair) // len(EXPERTS)
            ours = parts.time(pair, Effort(REPEATS)).over(layers)
            records.append(setting.time("experts_us", ours, op=label_of(pair), launches=len(pair)))
            click.echo(f"{label_of(pair)} of a layer: {ours.median * 1e6:.2f} us together")
    if output:
        write_records(output, records, force)


def time_torch(rows: int, columns: int, unlike: int, times: int) -> Timing:
    """Time of one BF16 ``weight @ x`` in a captured chain that goes through unlike weights several times."""
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(unlike)]
    x = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mv(weights[0], x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [torch.mv(weight, x) for weight in weights * times]
    timing = time_on_gpu(graph.replay, REPEATS)
    assert len(kept) == unlike * times and timing.median > 0
    return timing.over(len(kept))


def _command(plan: Path) -> str:
    return f"python benchmarks/projection_speed.py {plan}"


if __name__ == "__main__":
    main()
