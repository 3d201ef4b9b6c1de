"""Reads a packed folder: its index, and each weight's arrays, parts and values.

In: a folder that ``lynnc pack`` wrote. Out: a ``Packed``. Shards are read through safetensors, one weight (or one
expert of it) at a time.

Example::

    packed = open_packed(Path("packed"))
    packed.values("layers.0.out_weight")              # FP32 [rows, columns], as the checkpoint's own tools decode it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from lynnc.build import build_graph
from lynnc.errors import WeightError
from lynnc.fields import Place
from lynnc.layout import LAYOUT, weight_entries
from lynnc.model import ModelSpec
from lynnc.modelshape import from_dict
from lynnc.runtime.weights.arrays import PackedWeight, part_matrix, unpack_weight
from lynnc.runtime.weights.digests import stored_bytes
from lynnc.runtime.weights.matrix import Matrix
from lynnc.runtime.weights.packedindex import (
    DIVISOR,
    INDEX_FILE,
    PackedIndex,
    array_name,
    array_names,
    read_index,
)
from lynnc.tensors import Weight


@dataclass(frozen=True, slots=True)
class Packed:
    """An open packed folder: index, model, the graph's weights by name, and the shard of each array."""

    folder: Path
    index: PackedIndex
    spec: ModelSpec
    weights: Mapping[str, Weight]
    shard_of: Mapping[str, str]
    _checked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def arrays(self, weight: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        """The arrays of a weight, or of one of its experts, on the CPU, as they lie in the shard; ``check`` says
        whether they are what was packed."""
        names = [array for array in ("data", "scale", "global", DIVISOR) if array_name(weight, array) in self.shard_of]
        shard = self.shard_of[array_name(weight, "data")]
        try:
            with safe_open(self.folder / shard, framework="pt") as file:
                slices = {array: file.get_slice(array_name(weight, array)) for array in names}
                return {array: found[:] if expert is None else found[expert] for array, found in slices.items()}
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self.folder / shard} cannot be read ({error}): pack the checkpoint again.") from error

    def check(self, weight: str) -> None:
        """WeightError if an array of the weight is not what was packed, by its digest; each weight is read once."""
        if weight not in self._checked:
            self._check(weight, self.arrays(weight))

    def _check(self, weight: str, arrays: Mapping[str, torch.Tensor]) -> None:
        if weight in self._checked:
            return
        for array, values in arrays.items():
            name = array_name(weight, array)
            if xxhash.xxh3_128_hexdigest(stored_bytes(values)) != self.index.digests.get(name):
                path = self.folder / self.shard_of[name]
                raise WeightError(
                    f"{path}: {name} was changed since packing: copy the folder again, or pack the checkpoint again."
                )
        self._checked.add(weight)

    def matrix(self, weight: str, part: int, expert: int = 0) -> Matrix:
        """One part (of one expert) of a weight, as it is stored. WeightError if the weight's arrays are damaged."""
        self.check(weight)
        described = self.weights[weight]
        arrays = self.arrays(weight, expert if len(described.shape) == 3 else None)
        first_row = sum(item.rows for item in described.parts[:part])
        return part_matrix(described, arrays, first_row, described.parts[part].rows)

    def values(self, weight: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """FP32 values of a weight in its shape, as the checkpoint's own tools decode them. WeightError if its
        arrays are damaged."""
        arrays = self.arrays(weight)
        self._check(weight, arrays)
        placed = {name: array.to(device) for name, array in arrays.items()}
        return unpack_weight(PackedWeight(self.weights[weight], placed))


def open_packed(folder: Path) -> Packed:
    """The packed folder with index and headers checked: layout, model, weights, shards and sizes. WeightError if any
    is missing, damaged or unlike what the model needs."""
    index = read_index(folder)
    if index.layout != LAYOUT:
        raise WeightError(
            f"{folder} has layout {index.layout} and this lynnc reads {LAYOUT}: pack the checkpoint again."
        )
    spec = from_dict(index.model, Place(str(folder / INDEX_FILE), "model"))
    _check_experts(folder, index, spec)
    weights = build_graph(spec, 1).weights
    if weight_entries(weights.values()) != dict(index.weights):
        raise WeightError(f"{folder / INDEX_FILE} lists other weights than its model has: pack the checkpoint again.")
    shard_of: dict[str, str] = {}
    for shard in index.shards:
        shard_of.update(dict.fromkeys(_check_shard(folder, index, shard.name, shard.bytes), shard.name))
    missing = [name for entry in index.weights.values() for name in array_names(index, entry) if name not in shard_of]
    if missing:
        raise WeightError(f"{folder} lacks {missing[0]} ({len(missing)} arrays in all): pack the checkpoint again.")
    return Packed(folder, index, spec, weights, MappingProxyType(shard_of))


def _check_experts(folder: Path, index: PackedIndex, spec: ModelSpec) -> None:
    """The kept experts of each pruned layer are ascending numbers, as many as the model has there."""
    counts = {str(layer): count for layer, count in enumerate(spec.moe.experts)} if spec.moe else {}
    for layer, kept in index.experts.items():
        is_ascending = tuple(sorted({*kept})) == kept and all(number >= 0 for number in kept)
        if counts.get(layer) != len(kept) or not is_ascending:
            where = f"{folder / INDEX_FILE}: the experts of layer {layer}"
            raise WeightError(f"{where} are not those of its model: pack the checkpoint again.")


def _check_shard(folder: Path, index: PackedIndex, name: str, size: int) -> tuple[str, ...]:
    """Names of a shard's arrays."""
    path = folder / name
    again = "copy the packed folder again, or pack the checkpoint again"
    try:
        if not path.is_file():
            raise WeightError(f"{path} is missing: {again}.")
        if path.stat().st_size != size:
            raise WeightError(f"{path} has {path.stat().st_size} bytes and {INDEX_FILE} says {size}: {again}.")
        with safe_open(path, framework="pt") as file:
            names, metadata = tuple(file.keys()), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is no safetensors file ({error}): {again}.") from error
    if metadata.get("source_digest") != index.source.digest or metadata.get("model_digest") != index.model_digest:
        raise WeightError(f"{path} belongs to another packed folder: {again}.")
    return names
