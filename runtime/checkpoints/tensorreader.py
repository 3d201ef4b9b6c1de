"""Reads tensors of a checkpoint, whole or in part, through safetensors.

In: a ``Checkpoint``, names, and indices. Out: CPU tensors of the stored type. Shards are mapped, so a part of a fused
tensor costs no more than its bytes, and ``close`` gives back the memory of what was mapped. Threads may share a reader.

Example::

    with TensorReader(checkpoint) as reader:
        gate = reader.read("model.layers.0.mlp.experts.gate_up_proj", (3, slice(0, 512)))        # [512, 2048]
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import Checkpoint

Index: TypeAlias = tuple[int | slice, ...]
"""A part of a tensor: a number or a slice for each of its first dimensions."""


class TensorReader:
    """Opens each shard when something of it is first read, and keeps it open until ``close``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all shards; a later ``read`` opens them again."""
        self._open.clear()

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """The tensor, or the part of it that ``index`` selects. WeightError if its shard cannot be read any more."""
        shard = self._checkpoint.tensors[name].shard
        try:
            file = self._shard(shard)
            tensor: torch.Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            path = self._checkpoint.folder / shard
            raise WeightError(f"{path} cannot be read at {name} ({error}): copy the shard again.") from error
        return tensor

    def _shard(self, name: str) -> Any:
        # One look-up, since another thread may close between two.
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = safe_open(self._checkpoint.folder / name, framework="pt")
        return file
