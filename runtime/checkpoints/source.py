"""A checkpoint as a source of a model's weights: from a name of the model's graph to a ``Matrix``.

In: a checkpoint, what its metadata declares, and the model. Names are those of the graph, with the checkpoint's number
of an expert filled in; the checkpoint may spell them with another prefix, and may fuse the experts of a layer. Out:
``Located`` for each name, matrices, the reasons for tensors left out, or a ``WeightError`` that names the tensor.

Example::

    with closing(open_source(folder, spec)) as source:
        located = source.locate("model.layers.3.mlp.experts.12.gate_proj.weight")
        decode(source.read(located))                # FP32 [rows, columns]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch

from lynnc.errors import WeightError
from lynnc.model import ModelSpec
from lynnc.runtime.checkpoints.checkpoint import Checkpoint, open_checkpoint
from lynnc.runtime.checkpoints.declared import Recognised, SourceKind
from lynnc.runtime.checkpoints.declaredformats import DeclaredFormats
from lynnc.runtime.checkpoints.located import Located, read_matrix
from lynnc.runtime.checkpoints.recognise import recognise
from lynnc.runtime.checkpoints.skipped import TIED_HEAD, skip_reason
from lynnc.runtime.checkpoints.stored import Stored, catalogue, check_stored
from lynnc.runtime.checkpoints.tensorclasses import tensor_class
from lynnc.runtime.checkpoints.tensorreader import Index, TensorReader
from lynnc.runtime.checkpoints.textnames import EMBED, Place, TextNames
from lynnc.runtime.weights.matrix import Matrix
from lynnc.tensors import Format

__all__ = ["Located", "Source", "open_source"]

_COMPARED_ROWS = 4096
"""Rows of the two tables that are compared at once."""


def open_source(folder: Path, spec: ModelSpec) -> Source:
    """The source in a folder; WeightError for a checkpoint that is damaged, not understood, or of another model."""
    checkpoint = open_checkpoint(folder)
    return Source(checkpoint, recognise(checkpoint), spec)


class Source:
    """A checkpoint's weights under the names of a model's graph. Only ``read`` and ``check_tied`` read data."""

    def __init__(self, checkpoint: Checkpoint, recognised: Recognised, spec: ModelSpec) -> None:
        self.checkpoint, self.recognised, self.spec = checkpoint, recognised, spec
        self._catalogue = catalogue(checkpoint, recognised)
        self._names = TextNames(checkpoint.folder, self._catalogue, spec)
        self._declared = DeclaredFormats(recognised)
        self._reader = TensorReader(checkpoint)

    @property
    def is_quantised(self) -> bool:
        """Whether the metadata says that weights are quantised."""
        return self.recognised.kind is not SourceKind.PLAIN

    def locate(self, name: str) -> Located:
        """Where a matrix or vector lies. WeightError if it is missing, or not stored as its format asks for."""
        place = self._names.find(name)
        stored = self._catalogue[place.key]
        check_stored(self.checkpoint, stored)
        self._declared.check(stored, self._module(name))
        rows, columns = self._matrix_shape(stored, place)
        return Located(
            name=name,
            key=place.key,
            tensors=stored.tensors,
            format=stored.format,
            dtype=self.checkpoint.tensors[stored.data].dtype,
            rows=rows,
            columns=columns,
            index=_index(stored, place),
            divides=stored.divides,
        )

    def read(self, located: Located) -> Matrix:
        """The matrix as stored. WeightError for a scale that is no positive finite number, with its place."""
        return read_matrix(self._reader, self._catalogue[located.key], located)

    def experts(self, layer: int) -> int:
        """Routed experts of a layer, by the rows of its router. WeightError if the experts are not as many."""
        router = self.locate(f"{self.spec.tensor_prefix}layers.{layer}.mlp.gate.weight")
        numbers = self._names.expert_numbers(layer)
        if numbers is not None and numbers != frozenset(range(router.rows)):
            odd = min(numbers.symmetric_difference(range(router.rows)))
            what = f"lacks expert {odd}" if odd < router.rows else f"has expert {odd}"
            raise WeightError(
                f"{self.checkpoint.folder} {what} in layer {layer}, whose router {router.key} has {router.rows} rows: "
                "copy all of its shards."
            )
        for key in self._names.fused_keys(layer):
            if self._catalogue[key].shape[:1] != (router.rows,):
                raise WeightError(
                    f"{key} holds {[*self._catalogue[key].shape]} for the experts of layer {layer}, whose router has "
                    f"{router.rows} rows: one of the two belongs to another checkpoint."
                )
        return router.rows

    def skipped(self) -> Mapping[str, str]:
        """Tensors that are left out on purpose, each with the reason."""
        return self._skipped

    def notes(self) -> tuple[str, ...]:
        """What a user should know of the metadata, or of where it differs from what is stored."""
        modules = ((key.removesuffix(".weight"), stored) for key, stored in self._text_keys().items())
        return (*self.recognised.notes, *self._declared.notes(modules))

    def formats_by_class(self) -> Mapping[str, frozenset[Format]]:
        """The formats in which each tensor class is stored, by the names of ``TENSOR_CLASSES``; BF16 is any plain."""
        found: dict[str, set[Format]] = {}
        for key, stored in self._text_keys().items():
            name = tensor_class(self._names.rest(key))
            if name is not None:
                found.setdefault(name, set()).add(stored.format)
        if self.spec.tied_embeddings and "embed" in found:
            found["lm_head"] = found["embed"]
        return MappingProxyType({name: frozenset(formats) for name, formats in found.items()})

    def check_tied(self) -> None:
        """WeightError if the model ties its output projection to the embeddings and the checkpoint has another one."""
        head = self._names.head
        if not self.spec.tied_embeddings or head is None:
            return
        table, tied = (self._catalogue[key] for key in (f"{self._names.prefix}{EMBED}", head))
        check_stored(self.checkpoint, table)
        same = not table.is_quantised and not tied.is_quantised and self._are_equal(table.data, tied.data)
        if not same:
            raise WeightError(
                f"{head} differs from {table.key} in {self.checkpoint.folder}, though the model ties the two: set "
                "tied_embeddings to false (tie_word_embeddings in config.json), or remove the tensor."
            )

    def close(self) -> None:
        """Closes the files and gives back the memory of what was read; ``read`` opens them again."""
        self._reader.close()

    @cached_property
    def _skipped(self) -> Mapping[str, str]:
        reasons = {name: reason for name in self.checkpoint.tensors if (reason := skip_reason(name))}
        for key, stored in self._catalogue.items():
            reason = skip_reason(key)
            if self.spec.tied_embeddings and key == self._names.head:
                reason = TIED_HEAD
            if reason:
                reasons |= dict.fromkeys(stored.tensors, reason)
        return MappingProxyType({name: reasons[name] for name in sorted(reasons) if name in self.checkpoint.tensors})

    def _text_keys(self) -> Mapping[str, Stored]:
        return {key: stored for key, stored in self._catalogue.items() if stored.data not in self._skipped}

    def _module(self, name: str) -> str:
        """The module of a name of the graph, in the checkpoint's spelling; experts one by one."""
        rest = name.removeprefix(self.spec.tensor_prefix)
        return f"{self._names.prefix if rest != name else ''}{rest}".removesuffix(".weight")

    def _matrix_shape(self, stored: Stored, place: Place) -> tuple[int, int]:
        """Rows and columns of a vector, a matrix, a convolution ``[channels, 1, width]``, or an expert's part."""
        shape = stored.shape
        if place.expert is not None:
            return self._expert_shape(stored, place)
        if len(shape) == 3 and shape[1] == 1 and not stored.is_quantised:
            return shape[0], shape[2]
        if len(shape) not in (1, 2) or (stored.is_quantised and len(shape) == 1):
            raise WeightError(
                f"{stored.data} has the shape {[*shape]} where a matrix or vector is needed: repair the checkpoint."
            )
        return (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)

    def _expert_shape(self, stored: Stored, place: Place) -> tuple[int, int]:
        shape = stored.shape
        if len(shape) != 3 or (place.half is not None and shape[1] % 2):
            what = "[experts, rows, columns]" if place.half is None else "[experts, gate and up rows, columns]"
            raise WeightError(
                f"{stored.data} has the shape {[*shape]} where {what} is needed for all experts of a layer: repair "
                "the checkpoint."
            )
        if place.expert is not None and place.expert >= shape[0]:
            raise WeightError(
                f"{stored.data} holds {shape[0]} experts and expert {place.expert} is asked for: use the model file of "
                "this checkpoint."
            )
        return shape[1] // (1 if place.half is None else 2), shape[2]

    def _are_equal(self, first: str, second: str) -> bool:
        one, other = self.checkpoint.tensors[first], self.checkpoint.tensors[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        parts = [(slice(start, start + _COMPARED_ROWS),) for start in range(0, one.shape[0], _COMPARED_ROWS)]
        return all(torch.equal(self._reader.read(first, part), self._reader.read(second, part)) for part in parts)


def _index(stored: Stored, place: Place) -> Index:
    """The part of the data, and of its block scales, that a place means."""
    if place.expert is None:
        return ()
    rows = stored.shape[1]
    start, end = (0, rows) if place.half is None else (place.half * rows // 2, (place.half + 1) * rows // 2)
    if not stored.is_quantised:
        return (place.expert,) if place.half is None else (place.expert, slice(start, end))
    first = place.expert * rows
    return (slice(first + start, first + end),)
