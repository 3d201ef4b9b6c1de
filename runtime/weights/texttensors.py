"""The tensors of a checkpoint that holds the text model alone, and the packed parts that fill each.

In: an open packed folder. Out: ``TextTensor`` records in the order of the weights, in names and shapes of the family's
published checkpoints; each can be filled a few rows at a time.

Example::

    tensors = text_tensors(packed, torch.bfloat16, is_tied=False)
    tensors[0].name, read_values(packed, tensors[0]).shape         # "model.embed_tokens.weight", [384, 128]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from lynnc.errors import WeightError
from lynnc.model import ModelSpec
from lynnc.runtime.weights.arrays import part_matrix
from lynnc.runtime.weights.matrix import Matrix, decode, row_windows, select_rows
from lynnc.runtime.weights.packedfile import Packed
from lynnc.runtime.weights.packedindex import fill_shards
from lynnc.runtime.weights.quantise import find_not_finite
from lynnc.runtime.weights.textconfig import TEXT_MODELS
from lynnc.tensors import Format, Weight

WINDOW = 1 << 19
"""Values that are decoded at once: few enough to stay in the caches of a core."""
HEAD, HEAD_TENSOR = "lm_head", "lm_head.weight"
"""The output projection, as a weight and as a tensor."""


@dataclass(frozen=True, slots=True)
class TextTensor:
    """A tensor to write: name, shape and type in the checkpoint, and the parts of a weight that fill it, stacked along
    the rows, expert by expert (None: the weight has none)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Weight
    parts: tuple[int, ...]
    experts: tuple[int | None, ...] = (None,)

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def text_tensors(packed: Packed, dtype: torch.dtype, is_tied: bool) -> tuple[TextTensor, ...]:
    """Every tensor of the text model, in ``dtype`` but for vectors that a model keeps in FP32; without an output
    projection if that is the embedding table."""
    return tuple(_tensors(packed, dtype, is_tied))


def _tensors(packed: Packed, dtype: torch.dtype, is_tied: bool) -> Iterator[TextTensor]:
    for weight in packed.weights.values():
        kept = torch.float32 if weight.format is Format.F32 else dtype
        if len(weight.shape) == 3 and TEXT_MODELS[packed.spec.family].has_fused_experts:
            yield _fused(packed.spec, weight, kept)
        elif weight.name != HEAD or not is_tied:
            yield from _split(packed.spec, weight, kept)


def _fused(spec: ModelSpec, weight: Weight, dtype: torch.dtype) -> TextTensor:
    """All experts of a layer in one tensor: ``gate_up_proj`` [E, 2 I, D] or ``down_proj`` [E, D, I]."""
    block = _name(spec, weight.parts[0].source).partition(".{expert}.")[0]
    name = "gate_up_proj" if len(weight.parts) > 1 else "down_proj"
    parts, experts = tuple(range(len(weight.parts))), tuple(range(weight.experts))
    return TextTensor(f"{block}.{name}", weight.shape, dtype, weight, parts, experts)


def _split(spec: ModelSpec, weight: Weight, dtype: torch.dtype) -> Iterator[TextTensor]:
    """A tensor for each part (of each expert)."""
    experts = tuple(range(weight.experts)) if len(weight.shape) == 3 else (None,)
    for expert in experts:
        for index, part in enumerate(weight.parts):
            name = HEAD_TENSOR if weight.name == HEAD else _name(spec, part.source).format(expert=expert)
            yield TextTensor(name, _shape(name, weight, part.rows), dtype, weight, (index,), (expert,))


def _shape(name: str, weight: Weight, rows: int) -> tuple[int, ...]:
    if len(weight.shape) == 1:
        return (rows,)
    return (rows, 1, weight.columns) if name.endswith(".conv1d.weight") else (rows, weight.columns)


def _name(spec: ModelSpec, source: str) -> str:
    """The name in a checkpoint of the text model alone."""
    return f"model.{source.removeprefix(spec.tensor_prefix)}"


def group_shards(tensors: tuple[TextTensor, ...], shard_bytes: int) -> Mapping[str, tuple[TextTensor, ...]]:
    """Tensors by shard, in their order, up to ``shard_bytes`` each; a larger tensor has a shard of its own."""
    groups = fill_shards(tensors, lambda tensor: tensor.bytes, shard_bytes)
    count = len(groups)
    return {f"model-{index:05}-of-{count:05}.safetensors": tuple(group) for index, group in enumerate(groups, 1)}


def read_values(packed: Packed, tensor: TextTensor) -> torch.Tensor:
    """The tensor's values, decoded a few rows at a time, so that FP32 values of the whole are never held beside it.

    WeightError if the packed arrays are damaged, or a value is too large for the type.
    """
    weight = tensor.weight
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    rows = values.reshape(-1, weight.columns)
    starts = [sum(part.rows for part in weight.parts[:index]) for index in tensor.parts]
    position = 0
    packed.check(weight.name)
    for expert in tensor.experts:
        arrays = packed.arrays(weight.name, expert)
        for index, start in zip(tensor.parts, starts, strict=True):
            count = weight.parts[index].rows
            is_whole = _decode_into(part_matrix(weight, arrays, start, count), rows[position : position + count])
            if not is_whole:
                raise WeightError(f"{tensor.name} holds a value too large for BF16: use --dtype f32.")
            position += count
    return values


def _decode_into(matrix: Matrix, rows: torch.Tensor) -> bool:
    """Fills the rows; False if rounding made a number infinite."""
    for window in row_windows(matrix, WINDOW):
        values, rounded = decode(select_rows(matrix, window)), rows[window]
        rounded.copy_(values)
        if find_not_finite(rounded) is not None and bool((rounded.isinf() & values.isfinite()).any()):
            return False
    return True
