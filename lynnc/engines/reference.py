"""A Hugging Face checkpoint as it stands, in torch: the reference that a quantised model is held against.

In: a checkpoint folder. Out: an ``Engine`` on the checkpoint's own values: plain ones rounded to BF16 and quantised no
further, those of a quantised checkpoint as they decode.

Example::

    engine = open_reference(Path("Qwen3.6-35B-A3B"), context=4096, device="cuda")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from lynnc.engines.interpreted import Interpreted
from lynnc.model import ModelSpec
from lynnc.runtime.weights.arrays import convert
from lynnc.runtime.weights.assign import AssignedWeight, PartReader, assign
from lynnc.runtime.weights.matrix import PlainMatrix, decode
from lynnc.runtime.weights.resolve import resolve
from lynnc.tensors import Format


class Widened(Mapping[str, torch.Tensor]):
    """Values kept as they are stored and made FP32 when one is asked for: half the memory for BF16."""

    def __init__(self, stored: Mapping[str, torch.Tensor]) -> None:
        self.stored = stored

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored[name].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


@dataclass(slots=True)
class Reference(Interpreted):
    """An interpreted engine whose weights are widened when they are used."""

    weights: Widened

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights as they are kept, and of the states."""
        return sum(held.nbytes for held in (*self.weights.stored.values(), *self._states.values()))


def open_reference(folder: Path, context: int | None = None, device: str = "cpu") -> Reference:
    """The model of a checkpoint without further quantisation. WeightError or ModelError if it is not understood."""
    with closing(resolve(folder, None, None)) as resolved:
        spec = resolved.spec if resolved.source.is_quantised else unquantised(resolved.spec)
        reader = PartReader(resolved.source)
        assignment = assign(resolved.source, spec, resolved.kept)
        stored = {item.weight.name: _read(item, reader).to(device) for item in assignment.weights}
    label = f"{spec.name}, checkpoint interpreted"
    return Reference(spec, Widened(stored), label, context or spec.max_context, device=device)


def unquantised(spec: ModelSpec) -> ModelSpec:
    """The model with every tensor class in BF16."""
    formats = MappingProxyType(dict.fromkeys(spec.precision.formats, Format.BF16))
    return replace(spec, precision=replace(spec.precision, formats=formats))


def _read(item: AssignedWeight, reader: PartReader) -> torch.Tensor:
    """A weight in its shape; its parts stand one below the other, expert by expert."""
    parts = []
    for part in item.each_part():
        matrix = convert(reader.read(part), item.weight.format, part.located.tensors[0])
        # The memory behind what a reader gives may go with its file.
        parts.append(matrix.values.clone() if isinstance(matrix, PlainMatrix) else decode(matrix))
    return torch.cat(parts).reshape(item.weight.shape)
