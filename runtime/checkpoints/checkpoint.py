"""A checkpoint folder as its metadata describes it: tensors, shards, configuration, side files.

In: a folder of safetensors shards, with or without ``model.safetensors.index.json``. Out: a ``Checkpoint``, or a
``WeightError`` that names file and tensor. Headers and JSON alone are read, so neither torch nor safetensors is needed;
``tensorreader`` reads the data.

Example::

    checkpoint = open_checkpoint(Path("Qwen3.6-35B-A3B"))
    checkpoint.tensors["lm_head.weight"].shape          # (248320, 2048)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from lynnc.errors import ModelError, WeightError
from lynnc.hfconfig import EXPERT_SPEC, read_expert_spec, read_json
from lynnc.runtime.checkpoints.shardheader import Shard, StoredTensor, read_header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
LYNN_FILE = "lynn_quant_manifest.json"
SIDE_FILES = (MODELOPT_FILE, LYNN_FILE, EXPERT_SPEC)
"""Files that say how weights are stored, or how many experts are left."""
SUFFIX = ".safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".npz", ".h5")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by name, shards in the order of their names, ``config.json``, and the side files that exist.

    ``unlisted`` are tensors of a shard that the index does not name, with their shard: nobody may leave them out
    silently. A tensor that the index places in another shard is no part of the checkpoint where it lies twice.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    shards: tuple[Shard, ...]
    config: Mapping[str, object]
    side_files: Mapping[str, Mapping[str, object]]
    unlisted: Mapping[str, str]

    @property
    def expert_counts(self) -> Mapping[str, int] | None:
        """Experts left in each layer, by its number as text, where a side file says so; raises ``ModelError``."""
        return read_expert_spec(self.folder / EXPERT_SPEC) if EXPERT_SPEC in self.side_files else None


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. WeightError for a folder that holds none, or one that is incomplete or damaged."""
    files = _find_files(folder)
    config = _read_json(folder / CONFIG)
    side_files = {name: _read_json(folder / name) for name in SIDE_FILES if _has_file(folder / name)}
    weight_map = _weight_map(folder) if _has_file(folder / INDEX) else None
    names = sorted({*files, *(weight_map or {}).values()})
    headers = [read_header(folder / name, name) for name in names]
    found = tuple(tensor for _, tensors in headers for tensor in tensors)
    tensors = _only(folder, found) if weight_map is None else _mapped(folder, found, weight_map)
    unlisted = {tensor.name: tensor.shard for tensor in found if tensor.name not in tensors}
    return Checkpoint(
        folder=folder,
        tensors=MappingProxyType(tensors),
        shards=tuple(shard for shard, _ in headers),
        config=config,
        side_files=MappingProxyType(side_files),
        unlisted=MappingProxyType(unlisted),
    )


def _find_files(folder: Path) -> list[str]:
    """Names of the shards that lie in the folder."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        what = "is a file" if folder.exists() else "does not exist"
        raise WeightError(f"{folder} {what}: name the folder of a checkpoint.") from None
    except OSError as error:
        raise WeightError(f"{folder} cannot be read ({error.strerror}): check the path and its rights.") from error
    shards = [name for name in names if name.endswith(SUFFIX)]
    if not shards and INDEX not in names:
        others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
        found = ", ".join(others[:3]) or "no weights at all"
        raise WeightError(f"{folder} holds no *{SUFFIX} but {found}: name a checkpoint in safetensors format.")
    return shards


def _has_file(path: Path) -> bool:
    """Whether there is a file; WeightError for anything else of that name: opening a pipe would wait for a writer."""
    try:
        if path.is_file():
            return True
        is_other = path.exists()
    except OSError as error:
        raise WeightError(f"{path} cannot be read ({error.strerror}): check the path and its rights.") from error
    if is_other:
        raise WeightError(f"{path} is no regular file: put the file there, or remove it.")
    return False


def _read_json(path: Path) -> Mapping[str, object]:
    _has_file(path)
    try:
        return read_json(path)
    except ModelError as error:
        raise WeightError(f"{error}.") from error


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Shard by tensor, as the index says."""
    place = folder / INDEX
    content = _read_json(place).get("weight_map")
    if not isinstance(content, Mapping) or not content:
        raise WeightError(f"{place} holds no weight_map: write the index again, or remove it if one shard is all.")
    paths: dict[str, str] = {}
    for tensor, shard in content.items():
        if not isinstance(shard, str) or shard not in paths:
            paths[str(shard)] = _shard_path(place, str(tensor), shard)
    return {str(tensor): paths[shard] for tensor, shard in content.items()}


def _shard_path(place: Path, tensor: str, shard: object) -> str:
    """A shard's path below the folder; a link there may lead out of it, as download caches are made of links."""
    if not isinstance(shard, str) or not shard.endswith(SUFFIX) or "\\" in shard:
        raise WeightError(f"{place} places {tensor} in {shard!r}, which is no *{SUFFIX} file: write the index again.")
    path = PurePosixPath(shard)
    if path.is_absolute() or ".." in path.parts:
        raise WeightError(f"{place} places {tensor} in {shard!r}, outside of the folder: write the index again.")
    if not _has_file(place.parent / shard):
        raise WeightError(f"{place.parent} lacks the shard {shard}, which holds {tensor}: copy the shard there.")
    return str(path)


def _only(folder: Path, found: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of shards without an index: each stands in one of them."""
    tensors: dict[str, StoredTensor] = {}
    for tensor in found:
        if tensor.name in tensors:
            raise WeightError(
                f"{folder} holds {tensor.name} twice, in {tensors[tensor.name].shard} and {tensor.shard}, and no "
                f"{INDEX} to say which counts: remove one of the shards."
            )
        tensors[tensor.name] = tensor
    return tensors


def _mapped(folder: Path, found: Iterable[StoredTensor], weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Tensors where the index places them."""
    tensors = {tensor.name: tensor for tensor in found if weight_map.get(tensor.name) == tensor.shard}
    for name, shard in weight_map.items():
        if name not in tensors:
            raise WeightError(
                f"{folder / shard} lacks {name}, which {INDEX} places there: copy shard and index again, together."
            )
    return tensors
