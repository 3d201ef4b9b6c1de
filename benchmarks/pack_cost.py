"""What packing costs: bytes of BF16 a second and peak memory, for layers of the real size with random weights.

In: a model and how many of its layers to make. Out: a table and a JSON list of records. A BF16 checkpoint in the
published layout (fused experts, shards of 4 GB at most) is written first; then ``lynnc pack`` runs on it in processes
of its own: from the page cache, with the search for scales, and verifying.

Example::

    python benchmarks/pack_cost.py --layers 4 --output benchmarks/results/pack_cost.json
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from measuring import Bench, Record, Usage, report
from safetensors.torch import save_file

from lynnc.build import build_graph
from lynnc.model import Mixer, ModelSpec
from lynnc.modelfile import dump_model, load_model
from lynnc.runtime.weights.quantise import quantise_nvfp4
from lynnc.tensors import Format, Weight

RUNS = 3
MATRIX = (65536, 2048)
"""What is quantised alone: a quarter of a gigabyte."""
SHARD_BYTES = 4 << 30
PACKAGES = ("lynnc", "torch", "safetensors", "numpy", "xxhash")


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint that was written: its folder, model file, bytes in all and bytes of its largest tensor."""

    folder: Path
    model: Path
    bytes: int
    largest: int


def make_checkpoint(folder: Path, spec: ModelSpec) -> Made:
    """Random BF16 weights for every part of the model's graph, in the layout in which such models are published."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = largest = 0
    for name, tensor in _tensors(spec):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            _write(folder, shard, weight_map)
        shard[name] = tensor
        total, largest = total + tensor.nbytes, max(largest, tensor.nbytes)
    _write(folder, shard, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": f"{spec.family}_text"}))
    model = folder.with_suffix(".yaml")
    model.write_text(dump_model(spec))
    return Made(folder, model, total, largest)


def _write(folder: Path, shard: dict[str, torch.Tensor], weight_map: dict[str, str]) -> None:
    file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
    save_file(shard, folder / file)
    weight_map.update(dict.fromkeys(shard, file))
    shard.clear()


def _tensors(spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator("cuda" if torch.cuda.device_count() else "cpu").manual_seed(0)
    for weight in build_graph(spec, 1).weights.values():
        if len(weight.shape) == 3:
            yield _fused_experts(weight, generator)
            continue
        for part in weight.parts:
            shape = (part.rows,) if len(weight.shape) == 1 else (part.rows, weight.columns)
            values = _random(shape, weight.columns, generator)
            yield part.source, values.float() if weight.format is Format.F32 else values


def _fused_experts(weight: Weight, generator: torch.Generator) -> tuple[str, torch.Tensor]:
    block = weight.parts[0].source.split(".{expert}.")[0]
    name = "gate_up_proj" if len(weight.parts) > 1 else "down_proj"
    return f"{block}.{name}", _random(weight.shape, weight.columns, generator)


def _random(shape: tuple[int, ...], columns: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0.0, columns**-0.5, generator=generator).cpu()


def measure(bench: Bench, made: Made, device: str, is_quick: bool) -> list[Record]:
    """Every metric, or those of packing alone. The inner rate is that of a run's own report."""
    output = bench.folder / "packed"
    reported: list[float] = []

    def pack(*options: str) -> Usage:
        shutil.rmtree(output, ignore_errors=True)
        arguments = ("pack", str(made.folder), "--model", str(made.model), "-o", str(output), "--device", device)
        usage = bench.run(*arguments, "--json", *options)
        reported.append(made.bytes / json.loads(usage.output)["seconds"] / 1e9)
        return usage

    command = f"python -m lynnc.cli pack CHECKPOINT --model MODEL -o packed --device {device}"
    plain = [pack() for _ in range(RUNS)]
    inner = reported[:]
    packed = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    rates = [made.bytes / run.seconds / 1e9 for run in plain]
    over = [run.tree_kib / 2**20 - made.largest / 2**30 for run in plain]
    records = [
        bench.record("checkpoint", [made.bytes / 1e9], "GB", command),
        bench.record("largest tensor", [made.largest / 2**30], "GiB", command),
        bench.record("packed", [packed / 1e9], "GB", command),
        bench.record("whole run, checkpoint bytes per second", rates, "GB/s", command),
        bench.record("without the start of Python and torch", inner, "GB/s", command),
        bench.record("peak memory of all processes above the largest tensor", over, "GiB", command),
    ]
    if is_quick:
        return records
    check = bench.run("pack", str(made.folder), "-o", str(output), "--verify-only")
    search = pack("--scale-search")
    return [
        *records,
        bench.record("with --scale-search", [made.bytes / search.seconds / 1e9], "GB/s", f"{command} --scale-search"),
        bench.record("verifying", [made.bytes / check.seconds / 1e9], "GB/s", f"{command} --verify-only"),
    ]


def measure_quantising(bench: Bench, device: str) -> list[Record]:
    """A matrix in memory, quantised by one thread of torch or by the GPU, without reading and writing."""
    torch.set_num_threads(1)
    values = torch.randn(MATRIX, device=device).bfloat16()
    quantise_nvfp4(values)
    rates = []
    for _ in range(RUNS):
        started = time.perf_counter()
        float(quantise_nvfp4(values).words[-1, -1])  # waits for a GPU
        rates.append(values.nbytes / (time.perf_counter() - started) / 1e9)
    return [bench.record(f"quantising alone, one thread, {list(MATRIX)}", rates, "GB/s", "quantise_nvfp4")]


@click.command()
@click.option("--model", default="qwen3.6-35b-a3b", show_default=True, help="A shipped model, or a model file.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Layers to make, the first.")
@click.option(
    "--device", "devices", default=("cpu",), multiple=True, help="Where to quantise: cpu or cuda; repeatable."
)
@click.option("--quick", "is_quick", is_flag=True, help="Neither the search for scales nor verifying.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files go; the system's folder if not given.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(
    model: str, layers: int, devices: tuple[str, ...], is_quick: bool, folder: Path | None, output: Path | None
) -> None:
    """Measure what packing costs on this machine; keep it otherwise idle."""
    spec = first_layers(load_model(model), layers)
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="lynnc-bench-", dir=folder) as scratch:
        made = make_checkpoint(Path(scratch) / "checkpoint", spec)
        for device in devices:
            params = {"model": model, "layers": str(layers), "weights": "random, BF16", "device": named(device)}
            bench = Bench(Path(scratch), params, PACKAGES)
            records += [*measure(bench, made, device, is_quick), *measure_quantising(bench, device)]
    report(records, output)


def named(device: str) -> str:
    """The device, with the name of a GPU."""
    return device if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """The model cut to its first layers."""
    moe = replace(spec.moe, experts=spec.moe.experts[:count]) if spec.moe else None
    layers = spec.layers[:count]
    gdn = spec.gdn if Mixer.GDN in layers else None
    return replace(spec, name=f"{spec.name}-{count}-layers", layers=layers, moe=moe, gdn=gdn)


if __name__ == "__main__":
    main()
