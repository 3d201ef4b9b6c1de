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

from lynnc.compiler import graph_of
from lynnc.fields import Place
from lynnc.modelfile import dump_model
from lynnc.modelshape import from_dict
from lynnc.plan import Plan
from lynnc.planfile import PLAN_FILE
from lynnc.runtime import Room, load
from lynnc.runtime.executor import DECODE, Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.weights.packedindex import (
    MODEL_FILE,
    PADDING,
    PackedIndex,
    ShardEntry,
    ShardLayout,
    SourceEntry,
    array_name,
    place_arrays,
    shard_header,
    shard_metadata,
)
from lynnc.runtime.weights.packedwriter import Finished, PackedWriter

SHARD_BYTES = 4 << 30
NO_DIGEST, NO_SOURCE = "0" * 32, "0" * 64


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
def main(plan: Path, output: Path, seed: int) -> None:
    """Write a packed folder of random weights for PLAN, made on the GPU."""
    with load(plan, GeneratedWeights(seed), Room(1, 64, (DECODE,))) as executor:
        layouts = place_arrays(graph_of(executor.plan, DECODE).weights.values(), (), SHARD_BYTES)
        draft = draft_of(executor.plan, layouts, seed)
        with PackedWriter.open(output, layouts, draft, f"random, seed {seed}") as writer:
            for name in executor.plan.weights:
                if name not in writer.finished:
                    writer.finish(Finished(name, {}, f"random, seed {seed}"), write(executor, writer, name))
            digests = {name: value for done in writer.finished.values() for name, value in done.digests.items()}
            writer.publish(replace(draft, digests=digests), {}, {MODEL_FILE: model_text(executor.plan)})
    click.echo(f"{sum(layout.bytes for layout in layouts) / 1e9:.1f} GB in {output}")


def write(executor: Executor, writer: PackedWriter, name: str) -> dict[str, int]:
    """Copies a weight's arrays from the GPU to their places; bytes by array."""
    written = {}
    for array in executor.plan.weights[name].arrays:
        data = bytearray(array.bytes)
        executor.memory.read_into(data, executor.memory.addresses.weights[name, array.array])
        stored = array_name(name, array.array)
        written[stored] = writer.array(stored).write(0, torch.frombuffer(data, dtype=torch.uint8))
    return written


def draft_of(plan: Plan, layouts: tuple[ShardLayout, ...], seed: int) -> PackedIndex:
    """The index, with digests that are not known yet."""
    names = (place.name for layout in layouts for place in layout.arrays)
    index = PackedIndex(
        lynnc=plan.lynnc,
        layout=plan.layout,
        model=plan.model,
        model_digest=plan.model_digest,
        source=SourceEntry("random", f"seed {seed}", "bf16", NO_SOURCE),
        experts={},
        weights=plan.weights,
        origins={name: () for name in plan.weights},
        shards=(),
        digests={name: NO_DIGEST for name in names if not name.startswith(f"{PADDING}.")},
        skipped={},
        files=(MODEL_FILE,),
    )
    headers = ((layout, len(shard_header(layout, shard_metadata(index, layout)))) for layout in layouts)
    return replace(index, shards=tuple(ShardEntry(layout.name, size + layout.bytes) for layout, size in headers))


def model_text(plan: Plan) -> str:
    """The model file that the plan was compiled from."""
    return dump_model(from_dict(plan.model, Place(PLAN_FILE, "model")))


if __name__ == "__main__":
    main()
