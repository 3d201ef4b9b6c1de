"""The values of a checkpoint by one name each, however many tensors store them.

In: a checkpoint and what its metadata declares. Out: ``Stored`` records by key. A key is the name that the values would
have unquantised: ``model.layers.0.mlp.down_proj.weight``, whose data may lie in ``.weight_packed``, ``.weight_scale``
and ``.weight_global_scale``. ``check_stored`` refuses what has another type or shape than its format asks for.

Example::

    catalogue(checkpoint, recognised)["lm_head.weight"].tensors     # ("lm_head.weight", "lm_head.weight_scale", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import LYNN_FILE, Checkpoint
from lynnc.runtime.checkpoints.declared import Recognised, SourceKind, mapping
from lynnc.runtime.checkpoints.shardheader import StoredTensor
from lynnc.tensors import GROUP, Format

E4M3 = "F8_E4M3"
PLAIN_DTYPES = ("BF16", "F16", "F32")
_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""Tile to whose multiples some tools pad block scales."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Values of ``shape`` and the tensors that hold them; BF16 stands for every plain type.

    ``divides`` says that the global scale is a divisor.
    """

    key: str
    format: Format
    shape: tuple[int, ...]
    data: str
    scale: str | None = None
    global_scale: str | None = None
    divides: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint that the values are made of."""
        return tuple(name for name in (self.data, self.scale, self.global_scale) if name is not None)

    @property
    def is_quantised(self) -> bool:
        """Whether the values are more than one plain tensor."""
        return self.format is not Format.BF16


def catalogue(checkpoint: Checkpoint, recognised: Recognised) -> Mapping[str, Stored]:
    """Everything that a checkpoint stores, by key; scales are no values of their own.

    WeightError where two tensors have one key, or a manifest names a tensor that is not there.
    """
    quantised: dict[str, Stored] = {}
    for stored in _QUANTISED[recognised.kind](checkpoint):
        quantised[stored.key] = stored
    taken = {name for stored in quantised.values() for name in stored.tensors}
    for name, tensor in checkpoint.tensors.items():
        if name in taken:
            continue
        if name in quantised:
            raise WeightError(
                f"{checkpoint.folder} holds {name} twice, plain and as {quantised[name].data}: remove one of them."
            )
        quantised[name] = Stored(name, Format.BF16, tensor.shape, name)
    return MappingProxyType(quantised)


def _none(checkpoint: Checkpoint) -> Iterator[Stored]:
    return iter(())


def _lynn(checkpoint: Checkpoint) -> Iterator[Stored]:
    """The manifest alone says which tensors belong together: early packs name them in another way."""
    for key, entry in mapping(checkpoint.side_files[LYNN_FILE].get("quantized_tensors")).items():
        match entry:
            case {
                "packed_key": str(data),
                "scale_key": str(scale),
                "global_scale_key": str(global_scale),
                "original_shape": [*sizes],
            } if sizes and all(type(size) is int and size > 0 for size in sizes):
                yield Stored(key, Format.NVFP4_FP16, tuple(sizes), data, scale, global_scale, divides=True)
            case _:
                raise WeightError(f"{checkpoint.folder / LYNN_FILE} does not describe {key} in full: pack it again.")
        for name in (data, scale, global_scale):
            if name not in checkpoint.tensors:
                raise WeightError(
                    f"{checkpoint.folder} lacks {name}, which {LYNN_FILE} names for {key}: copy all of its shards."
                )


def _compressed_tensors(checkpoint: Checkpoint) -> Iterator[Stored]:
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            scales = f"{base}_scale", f"{base}_global_scale"
            yield Stored(base, Format.NVFP4, _unpacked(tensor), name, *scales, divides=True)


def _modelopt(checkpoint: Checkpoint) -> Iterator[Stored]:
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith(".weight"):
            continue
        if tensor.dtype == "U8":
            yield Stored(name, Format.NVFP4, _unpacked(tensor), name, f"{name}_scale", f"{name}_scale_2")
        elif tensor.dtype == E4M3:
            yield Stored(name, Format.FP8, tensor.shape, name, None, f"{name}_scale")


def _unpacked(tensor: StoredTensor) -> tuple[int, ...]:
    """The shape of the values of a tensor with two codes a byte."""
    return (*tensor.shape[:-1], 2 * tensor.shape[-1]) if tensor.shape else ()


_QUANTISED: Mapping[SourceKind, Callable[[Checkpoint], Iterator[Stored]]] = MappingProxyType(
    {
        SourceKind.PLAIN: _none,
        SourceKind.LYNN: _lynn,
        SourceKind.COMPRESSED_TENSORS: _compressed_tensors,
        SourceKind.MODELOPT: _modelopt,
    }
)
"""What each kind of checkpoint stores in more than one tensor."""


def check_stored(checkpoint: Checkpoint, stored: Stored) -> None:
    """WeightError if a tensor is missing, or has another type or shape than the format asks for."""
    for name in stored.tensors:
        if name not in checkpoint.tensors:
            raise WeightError(f"{checkpoint.folder} holds {stored.data} without {name}: copy all of its shards.")
    data = checkpoint.tensors[stored.data]
    if stored.format is Format.FP8:
        _check_rank(data)
        _check_single(checkpoint, stored)
    elif stored.format.is_packed:
        _check_packed(checkpoint, stored, data)
        _check_single(checkpoint, stored)
    elif data.dtype not in PLAIN_DTYPES:
        raise WeightError(
            f"{stored.data} is of type {data.dtype}, which holds no plain values ({', '.join(PLAIN_DTYPES)}), and "
            "nothing says how it is quantised: use a checkpoint in a supported format."
        )


def _check_packed(checkpoint: Checkpoint, stored: Stored, data: StoredTensor) -> None:
    rows, columns = prod(stored.shape[:-1]), stored.shape[-1] if stored.shape else 0
    if data.dtype != "U8":
        raise WeightError(f"{stored.data} is of type {data.dtype} where codes are U8: repair the checkpoint.")
    _check_rank(data)
    if columns % GROUP:
        raise WeightError(
            f"{stored.data} holds rows of {columns} columns, which is no multiple of the {GROUP} that share a scale: "
            "no kernel reads it."
        )
    if data.shape != (rows, columns // 2):
        raise WeightError(
            f"{stored.data} has the shape {list(data.shape)} where {[rows, columns // 2]} is needed for values of "
            f"{list(stored.shape)}: repair the checkpoint."
        )
    assert stored.scale is not None
    _check_scales(checkpoint.tensors[stored.scale], stored.format, (rows, columns // GROUP))


def _check_rank(data: StoredTensor) -> None:
    if len(data.shape) != 2:
        raise WeightError(
            f"{data.name} has the shape {list(data.shape)}, and quantised matrices have two dimensions: repair the "
            "checkpoint."
        )


def _check_scales(scale: StoredTensor, fmt: Format, expected: tuple[int, int]) -> None:
    dtype = E4M3 if fmt is Format.NVFP4 else "F16"
    if scale.dtype != dtype:
        raise WeightError(f"{scale.name} is of type {scale.dtype} where block scales are {dtype}: repair it.")
    if scale.shape == expected:
        return
    padded = (-(-expected[0] // _TILE_ROWS) * _TILE_ROWS, -(-expected[1] // _TILE_COLUMNS) * _TILE_COLUMNS)
    if scale.shape == padded:
        raise WeightError(
            f"{scale.name} has the shape {list(scale.shape)} where {list(expected)} is needed: its scales are padded "
            "to tiles (swizzled), an order that only one engine reads; export the checkpoint without."
        )
    raise WeightError(
        f"{scale.name} has the shape {list(scale.shape)} where {list(expected)} is needed, one scale for each "
        f"{GROUP} columns: repair the checkpoint."
    )


def _check_single(checkpoint: Checkpoint, stored: Stored) -> None:
    """The scale of a whole tensor is one FP32 number."""
    assert stored.global_scale is not None
    scale = checkpoint.tensors[stored.global_scale]
    if scale.dtype != "F32":
        raise WeightError(
            f"{scale.name} is of type {scale.dtype} where a tensor's scale is F32: repair the checkpoint."
        )
    if prod(scale.shape) != 1:
        raise WeightError(
            f"{scale.name} has the shape {list(scale.shape)}, and only one scale for each tensor is supported, not one "
            "for each channel or block."
        )
