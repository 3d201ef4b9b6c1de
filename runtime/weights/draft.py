"""The index of a packed folder before anything is packed: all but the digests.

In: what is to be packed, settled. Out: the layout of the shards, a draft of the index whose digests are zeros of the
right length (so that headers keep their length), and the text by which a later run knows that it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import yaml

from lynnc.artifact import digest
from lynnc.jsonform import encode
from lynnc.layout import LAYOUT, weight_entries
from lynnc.modelfile import dump_model
from lynnc.runtime.checkpoints.checkpoint import Checkpoint
from lynnc.runtime.checkpoints.source import Source
from lynnc.runtime.experts.expertspec import Kept
from lynnc.runtime.weights.assign import Assignment
from lynnc.runtime.weights.digests import source_digest
from lynnc.runtime.weights.packedindex import (
    MODEL_FILE,
    PADDING,
    SIDE_FILES,
    PackedIndex,
    ShardEntry,
    ShardLayout,
    SourceEntry,
    place_arrays,
    shard_header,
    shard_metadata,
)
from lynnc.runtime.weights.packedwriter import Finished
from lynnc.runtime.weights.resolve import Resolved
from lynnc.version import VERSION

EMPTY_DIGEST, EMPTY_SOURCE = "0" * 32, "0" * 64


@dataclass(frozen=True, slots=True)
class Draft:
    """Layouts of the shards, the index with empty digests, and the text that tells one request from another."""

    layouts: tuple[ShardLayout, ...]
    index: PackedIndex
    identity: str

    def completed(self, finished: Mapping[str, Finished]) -> PackedIndex:
        """The index with the digests of what was written and read."""
        digests = {name: value for entry in finished.values() for name, value in entry.digests.items()}
        read = source_digest({name: entry.source for name, entry in finished.items()})
        return replace(self.index, digests=digests, source=replace(self.index.source, digest=read))


def draft(resolved: Resolved, assignment: Assignment, shard_bytes: int, search: bool) -> Draft:
    """The draft for a resolved checkpoint."""
    divided = {item.weight.name for item in assignment.weights if item.has_divisor}
    layouts = place_arrays((item.weight for item in assignment.weights), divided, shard_bytes)
    index = _index(resolved, assignment, layouts, search)
    index = replace(index, shards=shard_entries(layouts, index))
    return Draft(layouts, index, encode({"draft": index, "kept": resolved.kept, **_files(resolved.source.checkpoint)}))


def _files(checkpoint: Checkpoint) -> Mapping[str, object]:
    """The checkpoint's files as they are now, and which of them holds each tensor. The time of the last change of state
    cannot be set back, as that of the last change of contents can."""
    shards = []
    for shard in checkpoint.shards:
        state = (checkpoint.folder / shard.name).stat()
        shards.append(
            (shard.name, shard.bytes, shard.header_digest, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
        )
    places = "".join(f"{name} {tensor.shard}\n" for name, tensor in sorted(checkpoint.tensors.items()))
    return {"shards": shards, "places": digest(places.encode())}


def _index(resolved: Resolved, assignment: Assignment, layouts: tuple[ShardLayout, ...], search: bool) -> PackedIndex:
    source = resolved.source
    text = dump_model(resolved.spec)
    files = [name for name in SIDE_FILES if (source.checkpoint.folder / name).is_file()]
    recognised = source.recognised
    return PackedIndex(
        lynnc=VERSION,
        layout=LAYOUT,
        model=yaml.safe_load(text),
        model_digest=digest(text.encode()),
        source=SourceEntry(str(recognised.kind), recognised.detail, recognised.activations, EMPTY_SOURCE),
        experts=_pruned_layers(source, resolved.kept),
        weights=weight_entries(item.weight for item in assignment.weights),
        origins={item.weight.name: item.origins() for item in assignment.weights},
        shards=(),
        digests=empty_digests(layouts),
        skipped=assignment.skipped,
        files=(*files, MODEL_FILE),
        scale_search=search,
    )


def shard_entries(layouts: tuple[ShardLayout, ...], index: PackedIndex) -> tuple[ShardEntry, ...]:
    """The shards with their sizes; headers have that of the index."""
    headers = (len(shard_header(layout, shard_metadata(index, layout))) for layout in layouts)
    return tuple(ShardEntry(layout.name, size + layout.bytes) for layout, size in zip(layouts, headers, strict=True))


def empty_digests(layouts: tuple[ShardLayout, ...]) -> dict[str, str]:
    """A digest of the right length for every array that is no padding."""
    names = (place.name for layout in layouts for place in layout.arrays)
    return {name: EMPTY_DIGEST for name in names if not name.startswith(f"{PADDING}.")}


def _pruned_layers(source: Source, kept: Kept) -> Mapping[str, tuple[int, ...]]:
    """The kept experts of the layers that lose some."""
    found = {str(layer): ids for layer, ids in enumerate(kept) if ids != tuple(range(source.experts(layer)))}
    return MappingProxyType(found)
