"""What a packed folder says of itself: ``lynnc-weights.json``, and where each array lies in the shards.

In: weights of a graph, and where their parts came from. Out: frozen records with a JSON form. A shard is a safetensors
file whose arrays start at multiples of 256 bytes, so that a loader copies the whole of it to the GPU as it is; gaps are
arrays named ``padding.N``, since the file format allows none.

Example::

    layouts = place_arrays(weights, with_divisor={"layers.0.out_weight"}, shard_bytes=4 << 30)
    layouts[0].arrays[0]          # ArrayPlace(name="embed.data", dtype="BF16", shape=(384, 128), offset=0, bytes=98304)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lynnc.errors import WeightError
from lynnc.jsonform import decode, shallow
from lynnc.layout import weight_entry
from lynnc.plan import WeightArray, WeightEntry
from lynnc.tensors import Weight

Item = TypeVar("Item")

SCHEMA = 1
"""Grows when the packed folder changes; a folder of another schema is refused."""
INDEX_FILE = "lynnc-weights.json"
MODEL_FILE = "model.yaml"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a checkpoint that whoever serves the model needs; copied as they are."""
ALIGNMENT = 256
"""Bytes at whose multiples every array of a shard starts."""
PADDING = "padding"
DIVISOR = "divisor"
"""Array beside ``global``: what the checkpoint divides by, or 0 where it multiplies. Kernels do not read it."""
_STORED = {"i64": "I64", "u8": "U8", "f16": "F16", "bf16": "BF16", "f32": "F32"}


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """An array in a shard: safetensors type, shape, and its place from the start of the shard's data, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Arrays of one shard in order, without gaps, and the weights that they store."""

    name: str
    weights: tuple[str, ...]
    arrays: tuple[ArrayPlace, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the data, without the header."""
        return self.arrays[-1].offset + self.arrays[-1].bytes


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard file and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part came from: checkpoint tensors (``{expert}`` for the number there) and how they stored it."""

    part: str
    tensors: tuple[str, ...]
    stored: str


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """The checkpoint: recognised kind, what its metadata said, declared activations, digest of all tensors read."""

    kind: str
    detail: str
    activations: str
    digest: str


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """Everything of ``lynnc-weights.json``. ``experts`` holds the checkpoint's numbers of the kept experts by layer,
    for layers that were pruned while packing; ``digests`` is XXH3-128 by array name."""

    lynnc: str
    layout: str
    model: Mapping[str, object]
    model_digest: str
    source: SourceEntry
    experts: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, WeightEntry]
    origins: Mapping[str, tuple[Origin, ...]]
    shards: tuple[ShardEntry, ...]
    digests: Mapping[str, str]
    skipped: Mapping[str, str]
    files: tuple[str, ...]
    scale_search: bool = False
    schema: int = field(default=SCHEMA)


def array_name(weight: str, array: str) -> str:
    """Name of an array in a shard."""
    return f"{weight}.{array}"


def stored_arrays(entry: WeightEntry, has_divisor: bool) -> tuple[WeightArray, ...]:
    """The arrays that store a weight: the plan's, and the divisor where the checkpoint divides."""
    if not has_divisor:
        return entry.arrays
    scale = next(array for array in entry.arrays if array.array == "global")
    return (*entry.arrays, replace(scale, array=DIVISOR))


def array_names(index: PackedIndex, entry: WeightEntry) -> tuple[str, ...]:
    """Names of the arrays that store a weight of the index."""
    has_divisor = array_name(entry.name, DIVISOR) in index.digests
    return tuple(array_name(entry.name, item.array) for item in stored_arrays(entry, has_divisor))


def fill_shards(items: Iterable[Item], bytes_of: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Groups of neighbours of at most so many bytes; what is larger has a group of its own."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        size = bytes_of(item)
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def place_arrays(weights: Iterable[Weight], with_divisor: Collection[str], shard_bytes: int) -> tuple[ShardLayout, ...]:
    """Fills shards in the order of the weights up to ``shard_bytes`` each; a weight is never divided."""

    def size(entry: WeightEntry) -> int:
        arrays = stored_arrays(entry, entry.name in with_divisor)
        return sum(array.bytes + -array.bytes % ALIGNMENT for array in arrays)

    groups = fill_shards(map(weight_entry, weights), size, shard_bytes)
    names = [f"weights-{index:05}-of-{len(groups):05}.safetensors" for index in range(1, len(groups) + 1)]
    return tuple(_lay_out(name, group, with_divisor) for name, group in zip(names, groups, strict=True))


def _lay_out(name: str, entries: list[WeightEntry], with_divisor: Collection[str]) -> ShardLayout:
    places: list[ArrayPlace] = []
    end = 0
    for entry in entries:
        for array in stored_arrays(entry, entry.name in with_divisor):
            stored = array_name(entry.name, array.array)
            places.append(ArrayPlace(stored, _STORED[array.dtype], array.shape, end, array.bytes))
            end += array.bytes
            gap = -end % ALIGNMENT
            if gap:
                places.append(ArrayPlace(f"{PADDING}.{len(places)}", "U8", (gap,), end, gap))
                end += gap
    return ShardLayout(name, tuple(entry.name for entry in entries), tuple(places))


def shard_header(layout: ShardLayout, metadata: Mapping[str, str]) -> bytes:
    """The safetensors header: length, JSON, and spaces up to a multiple of ``ALIGNMENT`` bytes."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    for place in layout.arrays:
        offsets = [place.offset, place.offset + place.bytes]
        content[place.name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def shard_metadata(index: PackedIndex, layout: ShardLayout) -> Mapping[str, str]:
    """What a shard's header says: format, layout, model and source, and of its own weights origins and digests."""
    digests = {place.name: index.digests[place.name] for place in layout.arrays if place.name in index.digests}
    return {
        "format": "lynnc-weights",
        "schema": str(index.schema),
        "layout": index.layout,
        "lynnc": index.lynnc,
        "model": str(index.model["name"]),
        "model_digest": index.model_digest,
        "source": index.source.kind,
        "source_digest": index.source.digest,
        "experts": _line(index.experts),
        "origins": _line({name: index.origins[name] for name in layout.weights}),
        "digests": _line(digests),
    }


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=shallow)


def index_text(index: PackedIndex) -> str:
    """``lynnc-weights.json``: sorted keys, each entry of a table on a line of its own."""
    lines = []
    for name, value in sorted(shallow(index).items()):
        if isinstance(value, Mapping) and name != "model":
            rows = ",\n".join(f"  {json.dumps(key)}: {_line(value[key])}" for key in sorted(value))
            lines.append(f' "{name}": {{\n{rows}\n }}' if rows else f' "{name}": {{}}')
        else:
            lines.append(f' "{name}": {_line(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_index(folder: Path) -> PackedIndex:
    """The index of a packed folder; WeightError if there is none, or it is damaged or of another schema."""
    path = folder / INDEX_FILE
    again = "pack the checkpoint again"
    try:
        data: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        what = f"{folder} is not a packed folder (no {INDEX_FILE} in it)"
        raise WeightError(f"{what}: name one that `lynnc pack` made.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"{path} cannot be read ({error}): {again}.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise WeightError(f"{path} has schema {schema} and this lynnc reads {SCHEMA}: {again}.")
    try:
        index: PackedIndex = decode(PackedIndex, data)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{path} is damaged ({error}): {again}.") from error
    for name in (*index.files, *(shard.name for shard in index.shards)):
        if Path(name).name != name:
            raise WeightError(f"{path} names the file {name!r}, which is not in its folder: {again}.")
    return index
