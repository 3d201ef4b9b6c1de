"""What a checkpoint's metadata declares: the record that recognising one makes, and how it refuses.

In: values of JSON files. Out: ``Recognised``, or a ``WeightError`` that says what was found and what is supported.

Example::

    Recognised(SourceKind.PLAIN, "Hugging Face, BF16", "bf16")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NoReturn

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import Checkpoint
from lynnc.tensors import Format

ANY_LINEAR = "Linear"
"""The class of modules that tools name when they mean every projection."""
SUPPORTED = (
    "BF16, FP16 or FP32; Lynn-native NVFP4; compressed-tensors nvfp4-pack-quantized; or ModelOpt NVFP4, W4A16_NVFP4 or "
    "MIXED_PRECISION (of these and FP8 with one scale for each tensor)"
)


class SourceKind(StrEnum):
    """A way of storing a checkpoint's weights."""

    PLAIN = "plain"
    LYNN = "lynn"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


@dataclass(frozen=True, slots=True)
class Recognised:
    """The kind, a line on it, and the precision in which activations are declared to meet 4-bit weights.

    ``declared`` has the formats by names of modules, or ``ANY_LINEAR``; ``ignored`` are names of modules that are not
    quantised in spite of it. Names are as the tool wrote them: ``ModuleNames`` understands them.
    """

    kind: SourceKind
    detail: str
    activations: str
    declared: Mapping[str, Format] = field(default_factory=lambda: MappingProxyType({}))
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def refuse(checkpoint: Checkpoint, what: str) -> NoReturn:
    """Raises the error for a checkpoint that is not understood."""
    raise WeightError(f"{checkpoint.folder} {what}, which lynnc does not read: use a checkpoint in {SUPPORTED}.")


def mapping(value: object) -> Mapping[str, object]:
    """An object of a JSON file; anything else counts as empty."""
    return value if isinstance(value, Mapping) else MappingProxyType({})


def names(checkpoint: Checkpoint, value: object, what: str) -> tuple[str, ...]:
    """A list of names, empty for null."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse(checkpoint, f"has metadata whose {what} is no list of names")
    return tuple(value)


def settle_activations(found: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """The precision of activations where layers declare several, which is the most exact one, and a note of it."""
    if len(set(found)) < 2:
        return next(iter(found), "bf16"), ()
    most_exact = next(name for name in ("bf16", "fp8", "nvfp4") if name in found)
    return most_exact, (f"layers declare {' and '.join(sorted(set(found)))} activations: all get {most_exact}",)
