"""Writes a model of a shape as a GGUF file full of random blocks, piece by piece.

In: a ``GgufModel`` and a path. Out: a file that llama.cpp loads: hyperparameters, a vocabulary of the right size
without texts (llama.cpp's own ``no_vocab``), and tensors whose values have the size of a living model's, so that
nothing overflows and routers spread over all experts. Needs the ``gguf`` package of the extra ``bench``.

Example::

    write_gguf(gguf_model(load_model("tiny-moe")), Path("tiny-moe.gguf"), seed=1)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from math import prod, sqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lynnc.errors import OptionError, OutputError
from lynnc.runtime.peers.ggufshape import BLOCKS, GgufModel, GgufTensor

Array: TypeAlias = np.ndarray[Any, Any]
Progress: TypeAlias = Callable[[int, int], None]
"""Bytes written so far, and bytes in all."""

PIECE = 1 << 25
"""Bytes, or FP32 numbers, that are made at a time."""
ROOM = 1 << 26
"""Bytes left free beside the tensors: for the header and padding."""
MOSTLY_Q4_K_M = 15
"""``general.file_type`` of the mixture."""


@dataclass(frozen=True, slots=True)
class BlockScales:
    """FP16 numbers of a block of random bytes. ``rms`` is that of a block's values where its scale is 1; ``fields`` are
    places in bytes and factors of the scale."""

    rms: float
    fields: tuple[tuple[int, float], ...]


SCALES: Mapping[str, BlockScales] = {
    # A scale and a least value, each times 6 random bits: 7.5 makes the mean 0.
    "Q4_K": BlockScales(258.32, ((0, 1.0), (2, 7.5))),
    "Q5_0": BlockScales(sqrt(85.5), ((0, 1.0),)),
    "Q6_K": BlockScales(sqrt(341.5 * 5461.5), ((208, 1.0),)),
    "Q8_0": BlockScales(sqrt(5461.5), ((0, 1.0),)),
}
SPREADS: Mapping[str, tuple[float, float]] = {
    "norm": (1.0, 0.2),
    "decay": (-0.5, 0.1),
    "bias": (0.0, 0.5),
    "conv": (0.0, 0.5),
}
"""Mean and deviation of the small tensors, by role; what llama.cpp calls ``ssm_a`` is the decay's negative rate."""


def write_gguf(model: GgufModel, path: Path, seed: int, on_progress: Progress | None = None) -> None:
    """Writes the file; OutputError if it does not fit or cannot be written, OptionError without the gguf package."""
    gguf = _library()
    check_room(model, path.parent)
    try:
        with closing(gguf.GGUFWriter(path, model.architecture)) as writer:
            _describe(gguf, writer, model)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _write_tensors(writer, model, seed, on_progress)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}): choose another folder for the peer's model."
        ) from error


def check_room(model: GgufModel, folder: Path) -> None:
    """OutputError if the file would not fit into the folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be used ({error.strerror}): choose another folder for the peer's model."
        ) from error
    if free < model.bytes + ROOM:
        raise OutputError(
            f"{folder} has {free / 1e9:.1f} GB free and the peer's model takes {(model.bytes + ROOM) / 1e9:.1f} GB: "
            "make room or choose another folder for it."
        )


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise OptionError(
            "The gguf package, which writes the model for a peer, is missing: run `pip install -e '.[bench]'` "
            "or leave --peer out."
        ) from error


def _describe(gguf: Any, writer: Any, model: GgufModel) -> None:
    """Everything but the tensors' contents."""
    writer.add_name(model.name)
    writer.add_file_type(MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")
    for key, value in model.hyperparameters.items():
        name = f"{model.architecture}.{key}"
        if isinstance(value, tuple):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor in model.tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, kind)


def _write_tensors(writer: Any, model: GgufModel, seed: int, on_progress: Progress | None) -> None:
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    source = np.random.SFC64(seed)
    done = 0
    for tensor in model.tensors:
        for piece in tensor_pieces(tensor, source):
            piece.tofile(file)
            done += piece.nbytes
            if on_progress:
                on_progress(done, model.bytes)
        writer.write_padding(file, tensor.bytes)


def tensor_pieces(tensor: GgufTensor, source: np.random.SFC64) -> Iterator[Array]:
    """A tensor's bytes in order, as arrays of at most ``PIECE`` bytes or numbers."""
    elements, size = BLOCKS[tensor.type]
    blocks = prod(tensor.shape) // elements
    most = PIECE // size
    for first in range(0, blocks, most):
        count = min(most, blocks - first)
        if tensor.type in SCALES:
            yield _blocks(SCALES[tensor.type], tensor.shape[-1], count, size, source)
        else:
            yield _numbers(tensor, count, source)


def _blocks(scales: BlockScales, columns: int, count: int, size: int, source: np.random.SFC64) -> Array:
    """Blocks of random bytes ``[count, size]`` with the scales set so that a row has length 1."""
    found: Array = source.random_raw(-(-count * size // 8)).view(np.uint8)[: count * size].reshape(count, size)
    for offset, factor in scales.fields:
        number = np.array([factor / scales.rms / sqrt(columns)], np.float16)
        found[:, offset : offset + 2] = number.view(np.uint8)
    return found


def _numbers(tensor: GgufTensor, count: int, source: np.random.SFC64) -> Array:
    mean, deviation = SPREADS.get(tensor.role, (0.0, 1 / sqrt(tensor.shape[-1])))
    found = mean + deviation * np.random.Generator(source).standard_normal(count, np.float32)
    return found.astype(np.float16 if tensor.type == "F16" else np.float32)
