"""What a packed folder holds, from its index and the headers of its shards.

In: a folder with ``lynnc-weights.json``. Out: an ``Inspection``, whose bytes are those that a plan loads. Shards that
are missing, damaged or of other sizes are remarks, not errors.

Example::

    inspect_packed(Path("packed")).facts["layout"]            # "nvfp4-w64-1"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

from lynnc.artifact import digest
from lynnc.build import build_graph
from lynnc.errors import ModelError, WeightError
from lynnc.fields import Place
from lynnc.layout import LAYOUT, weight_entries
from lynnc.model import ModelSpec
from lynnc.modelshape import from_dict
from lynnc.plan import WeightEntry, WeightPart
from lynnc.runtime.checkpoints.modulenames import split_prefix
from lynnc.runtime.checkpoints.shardheader import read_header
from lynnc.runtime.checkpoints.tensorclasses import tensor_class
from lynnc.runtime.weights.inspected import (
    Counted,
    Inspection,
    ShardSize,
    SkippedRow,
    add_up,
    mixed_classes,
    some,
)
from lynnc.runtime.weights.packedindex import (
    INDEX_FILE,
    MODEL_FILE,
    PackedIndex,
    array_names,
    read_index,
)


def inspect_packed(folder: Path) -> Inspection:
    """Counts what the index lists; WeightError for an index that cannot be read."""
    index = read_index(folder)
    remarks: list[str] = []
    model = _model(folder, index, remarks)
    counted = tuple(_counted(index))
    return Inspection(
        kind="packed",
        detail=f"by lynnc {index.lynnc} from {index.source.detail}",
        model=model,
        activations=index.source.activations,
        rows=add_up(counted),
        experts=model.moe.experts if model and model.moe else (),
        shards=tuple(ShardSize(shard.name, shard.bytes) for shard in index.shards),
        skipped=tuple(SkippedRow(reason, count, None) for reason, count in Counter(index.skipped.values()).items()),
        odd=(*remarks, *_odd_index(folder, index), *_odd_shards(folder, index), *mixed_classes(counted)),
        facts=_facts(index),
    )


def _facts(index: PackedIndex) -> dict[str, str]:
    pruned = {"pruned layers": str(len(index.experts))} if index.experts else {}
    search = {"scale search": "yes"} if index.scale_search else {}
    return {"layout": index.layout, "source digest": index.source.digest, **pruned, **search}


def _model(folder: Path, index: PackedIndex, remarks: list[str]) -> ModelSpec | None:
    try:
        model = from_dict(index.model, Place(str(folder / INDEX_FILE), "model"))
    except ModelError as error:
        remarks.append(f"the model is not understood: {error}")
        return None
    if weight_entries(build_graph(model, 1).weights.values()) != dict(index.weights):
        remarks.append(f"{INDEX_FILE} lists other weights than its model has: pack the checkpoint again")
    return model


def _counted(index: PackedIndex) -> Iterator[Counted]:
    """Every part of a weight with its share of the bytes that a plan loads: data and scales, which all have rows in
    proportion to the part's, but not what the checkpoint divided by."""
    for name, entry in index.weights.items():
        size, rows = sum(array.bytes for array in entry.arrays), sum(part.rows for part in entry.parts)
        stored = {origin.part: origin.stored.lower() for origin in index.origins.get(name, ())}
        for part in entry.parts:
            yield Counted(
                name=part.source,
                tensor_class=_class(entry, part),
                stored=stored.get(part.source, "unknown"),
                packed=entry.format,
                elements=prod(entry.shape) * part.rows // rows,
                bytes=size * part.rows // rows,
                count=entry.shape[0] if len(entry.shape) == 3 else 1,
            )


def _class(entry: WeightEntry, part: WeightPart) -> str:
    """The class of a part; weights join classes that are stored alike."""
    own = tensor_class(split_prefix(part.source.format(expert=0))[1]) if len(entry.parts) > 1 else None
    return own or entry.tensor_class


def _odd_index(folder: Path, index: PackedIndex) -> Iterator[str]:
    if index.layout != LAYOUT:
        yield f"the layout is {index.layout} and this lynnc reads {LAYOUT}: pack the checkpoint again"
    empty = [name for name, value in index.digests.items() if not value.strip("0")]
    if empty or not index.source.digest.strip("0"):
        which = some(empty) if empty else "the source"
        yield f"digests are placeholders (of {which}): the folder was not finished; pack the checkpoint again"
    missing = [name for name in index.files if not (folder / name).is_file()]
    if missing:
        yield f"{some(missing)} is listed and missing"
    model = folder / MODEL_FILE
    if MODEL_FILE in index.files and model.is_file() and digest(model.read_bytes()) != index.model_digest:
        yield f"{MODEL_FILE} was changed since packing; the model in {INDEX_FILE} counts"


def _odd_shards(folder: Path, index: PackedIndex) -> Iterator[str]:
    """Shards that are not as the index says, and arrays that none of them holds."""
    found: set[str] = set()
    is_whole = True
    for shard in index.shards:
        try:
            read, tensors = read_header(folder / shard.name)
        except WeightError as error:
            is_whole = False
            yield str(error).removesuffix(".")
            continue
        if read.bytes != shard.bytes:
            yield f"{shard.name} has {read.bytes} bytes and {INDEX_FILE} says {shard.bytes}"
        found.update(tensor.name for tensor in tensors)
    needed = {name for entry in index.weights.values() for name in array_names(index, entry)}
    if is_whole and needed - found:
        yield f"no shard holds {some(needed - found)}"
