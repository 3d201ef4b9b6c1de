"""A packed folder of random weights of a plan's size, to measure how fast one is loaded without a checkpoint at hand.

In: a plan. Out: a folder as ``lynnc pack`` writes it, with the weights that ``lynnc bench --random-weights`` makes.

Example::

    python benchmarks/random_folder.py qwen3.6-35b-a3b.h200.plan packed
    lynnc bench qwen3.6-35b-a3b.h200.plan --weights packed --loads 5
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import torch

from lynnc.compiler import graph_of, model_of
from lynnc.modelfile import dump_model
from lynnc.plan import Plan
from lynnc.runtime import Room, load
from lynnc.runtime.executor import DECODE, Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.weights.draft import EMPTY_SOURCE, Draft, empty_digests, shard_entries
from lynnc.runtime.weights.packedindex import (
    MODEL_FILE,
    PackedIndex,
    ShardLayout,
    SourceEntry,
    array_name,
    place_arrays,
)
from lynnc.runtime.weights.packedwriter import Finished, PackedWriter

SHARD_BYTES = 4 << 30


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
def main(plan: Path, output: Path, seed: int) -> None:
    """Write a packed folder of random weights for PLAN, made on the GPU."""
    with load(plan, GeneratedWeights(seed), Room(1, 64, (DECODE,))) as executor:
        size = write_folder(executor, output, seed)
    click.echo(f"{size / 1e9:.1f} GB in {output}")


def write_folder(executor: Executor, output: Path, seed: int) -> int:
    """The folder of what an executor holds; bytes of its arrays."""
    layouts = place_arrays(graph_of(executor.plan, DECODE).weights.values(), (), SHARD_BYTES)
    draft = draft_of(executor.plan, layouts, seed)
    with PackedWriter.open(output, layouts, draft.index, draft.identity) as writer:
        for name in executor.plan.weights:
            if name not in writer.finished:
                writer.finish(Finished(name, {}, draft.identity), write(executor, writer, name))
        writer.publish(draft.completed(writer.finished), {}, {MODEL_FILE: dump_model(model_of(executor.plan))})
    return sum(layout.bytes for layout in layouts)


def write(executor: Executor, writer: PackedWriter, name: str) -> dict[str, int]:
    """Copies a weight's arrays from the GPU to their places; bytes by array."""
    written = {}
    for array in executor.plan.weights[name].arrays:
        data = bytearray(array.bytes)
        executor.memory.read_into(data, executor.memory.addresses.weights[name, array.array])
        stored = array_name(name, array.array)
        written[stored] = writer.array(stored).write(0, torch.frombuffer(data, dtype=torch.uint8))
    return written


def draft_of(plan: Plan, layouts: tuple[ShardLayout, ...], seed: int) -> Draft:
    """What is known before anything is written."""
    identity = f"random, seed {seed}"
    index = PackedIndex(
        lynnc=plan.lynnc,
        layout=plan.layout,
        model=plan.model,
        model_digest=plan.model_digest,
        source=SourceEntry("random", f"seed {seed}", "bf16", EMPTY_SOURCE),
        experts={},
        weights=plan.weights,
        origins={name: () for name in plan.weights},
        shards=(),
        digests=empty_digests(layouts),
        skipped={},
        files=(MODEL_FILE,),
    )
    return Draft(layouts, replace(index, shards=shard_entries(layouts, index)), identity)


if __name__ == "__main__":
    main()
