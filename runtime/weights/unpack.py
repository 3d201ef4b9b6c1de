"""From a packed folder back to a Hugging Face checkpoint of the values that its weights stand for.

In: a packed folder. Out: a folder of the text model that ``transformers`` loads, in BF16 or FP32, shard by shard. Names
and shapes are those of the family's published checkpoints. Where layers differ in their experts, ``transformers``
cannot load the folder, but ``lynnc pack`` can.

Example::

    report = unpack(Path("packed"), Path("unpacked"), dtype="f32")
    report.tensors, report.notes
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lynnc.errors import ModelError, OptionError, OutputError, WeightError
from lynnc.hfconfig import EXPERT_SPEC, read_json
from lynnc.model import ModelSpec
from lynnc.outputfolder import check_folder, check_room, place_folder, settled
from lynnc.runtime.checkpoints.checkpoint import CONFIG, INDEX
from lynnc.runtime.weights.packedfile import Packed, open_packed
from lynnc.runtime.weights.packedindex import MODEL_FILE
from lynnc.runtime.weights.textconfig import differences, text_config
from lynnc.runtime.weights.texttensors import HEAD, TextTensor, group_shards, read_values, text_tensors
from lynnc.version import VERSION

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "f32": torch.float32})
"""Types that values can be written in; vectors that a model keeps in FP32 stay so."""
SHARD_BYTES = 2_000_000_000
ORIGIN_FILE = "lynnc-unpacked.json"
"""Says what a folder was unpacked from; only a folder that has it is ever replaced."""
_NOT_COPIED = (CONFIG, MODEL_FILE)

Progress = Callable[[int, int, str], None]
"""Called with the bytes written so far, the bytes in all, and the tensor that is next."""


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What was written: tensors, bytes, shards, seconds; whether ``transformers`` can load it; what is worth saying."""

    spec: ModelSpec
    dtype: str
    tensors: int
    bytes: int
    shards: tuple[str, ...]
    seconds: float
    is_loadable: bool
    notes: tuple[str, ...]


def unpack(
    packed_folder: Path,
    output: Path,
    dtype: str = "bf16",
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress | None = None,
) -> UnpackReport:
    """Writes the checkpoint, in ``bf16`` or ``f32``; ``output`` appears whole or not at all. WeightError for a packed
    folder that cannot be read, OutputError for an output that exists or cannot be written."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype}: choose {' or '.join(DTYPES)}.")
    output = settled(output)
    check_folder(output, ORIGIN_FILE, "lynnc unpack", force, inputs=(packed_folder,))
    started = time.perf_counter()
    packed = open_packed(packed_folder)
    is_tied = _is_tied(packed)
    config = text_config(_read_config(packed), packed.spec, str(DTYPES[dtype]).removeprefix("torch."), is_tied)
    tensors = text_tensors(packed, DTYPES[dtype], is_tied)
    shards = group_shards(tensors, shard_bytes)
    copied = _copied(packed)
    texts = {CONFIG: _json(config), INDEX: _json(_index(shards)), ORIGIN_FILE: _json(_origin(packed, dtype))}
    if packed.spec.moe and _is_uneven(packed.spec):
        texts[EXPERT_SPEC] = _json(_expert_spec(packed.spec.moe.experts))
    total = sum(tensor.bytes for tensor in tensors)
    check_room(output, total)
    with _output(output, force) as fresh:
        _write_shards(packed, shards, fresh, on_progress)
        for path in copied:
            shutil.copyfile(path, fresh / path.name)
        for name, text in texts.items():
            (fresh / name).write_text(text, "utf-8")
    return UnpackReport(
        spec=packed.spec,
        dtype=dtype,
        tensors=len(tensors),
        bytes=total,
        shards=tuple(shards),
        seconds=time.perf_counter() - started,
        is_loadable=not _is_uneven(packed.spec),
        notes=tuple(_notes(packed, config, is_tied)),
    )


def _is_uneven(spec: ModelSpec) -> bool:
    """Whether layers differ in their number of experts."""
    return spec.moe is not None and len(set(spec.moe.experts)) > 1


def _is_tied(packed: Packed) -> bool:
    """Whether embedding table and output projection stand for the same values: in two formats, they do not."""
    return packed.spec.tied_embeddings and packed.weights["embed"].format is packed.weights[HEAD].format


def _notes(packed: Packed, config: Mapping[str, object], is_tied: bool) -> Iterator[str]:
    spec, weights = packed.spec, packed.weights
    if spec.moe and _is_uneven(spec):
        least, most = min(spec.moe.experts), max(spec.moe.experts)
        yield f"layers have {least} to {most} experts, which transformers cannot load; lynnc pack can"
    if spec.tied_embeddings and not is_tied:
        formats = f"{weights['embed'].format} and {weights[HEAD].format}"
        yield f"the tied embedding table and output projection are packed as {formats}, so both are written, untied"
    yield from differences(config, spec)


def _read_config(packed: Packed) -> Mapping[str, object]:
    try:
        return read_json(packed.folder / CONFIG)
    except ModelError as error:
        raise WeightError(f"{error}, or pack the checkpoint again.") from error


def _index(shards: Mapping[str, tuple[TextTensor, ...]]) -> dict[str, object]:
    total = sum(tensor.bytes for group in shards.values() for tensor in group)
    weight_map = {tensor.name: shard for shard, group in shards.items() for tensor in group}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _origin(packed: Packed, dtype: str) -> dict[str, object]:
    index = packed.index
    source = {"kind": index.source.kind, "detail": index.source.detail, "digest": index.source.digest}
    model = {"name": packed.spec.name, "digest": index.model_digest}
    return {"lynnc": VERSION, "model": model, "source": source, "dtype": dtype}


def _expert_spec(experts: tuple[int, ...]) -> dict[str, object]:
    by_layer = {str(layer): count for layer, count in enumerate(experts)}
    return {"hf_vanilla_compatible": False, "remaining_experts_by_layer": by_layer}


def _json(content: Mapping[str, object]) -> str:
    try:
        return json.dumps(content, indent=2, sort_keys=True) + "\n"
    except RecursionError as error:
        raise WeightError(f"{CONFIG} is nested too deep: pack the checkpoint again.") from error


def _copied(packed: Packed) -> tuple[Path, ...]:
    """Tokenizer and generation files of the packed folder."""
    names = [name for name in packed.index.files if name not in _NOT_COPIED]
    for name in names:
        if Path(name).name != name or not (packed.folder / name).is_file():
            raise WeightError(f"{packed.folder} lacks its file {name}: pack the checkpoint again.")
    return tuple(packed.folder / name for name in names)


def _write_shards(
    packed: Packed, shards: Mapping[str, tuple[TextTensor, ...]], folder: Path, on_progress: Progress | None
) -> None:
    done, total = 0, sum(tensor.bytes for group in shards.values() for tensor in group)
    for name, group in shards.items():
        values: dict[str, torch.Tensor] = {}
        for tensor in group:
            if on_progress:
                on_progress(done, total, tensor.name)
            values[tensor.name] = read_values(packed, tensor)
            done += tensor.bytes
        save_file(values, folder / name, {"format": "pt"})
        (folder / name).chmod(0o644)
    if on_progress:
        on_progress(done, total, "")


@contextmanager
def _output(folder: Path, force: bool) -> Iterator[Path]:
    """A folder to fill, which gets the name ``folder`` afterwards, or goes away on an error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir()
            yield fresh
            place_folder(fresh, folder, force)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{folder} cannot be written ({why}): choose another --output or make room.") from error
