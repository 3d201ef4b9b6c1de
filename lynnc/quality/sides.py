"""The two sides of a gate as they are named on the command line, and the engines that run them.

In: a folder (of ``lynnc pack``, of ``lynnc compile``, or a Hugging Face checkpoint) and a device. Out: its model
without reading weights, then an ``Engine``. On a GPU a plan runs as it was compiled; elsewhere its graph is
interpreted.

Example::

    side = find_side(Path("lynn.plan"), weights=Path("packed"))
    side.spec.vocabulary, open_side(side, context=2048, device="cpu").label
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path

import torch

from lynnc.compiler import model_of
from lynnc.engines.engine import Engine
from lynnc.engines.interpreted import open_interpreted
from lynnc.engines.planned import open_planned
from lynnc.engines.reference import open_reference, unquantised
from lynnc.errors import DeviceError, OptionError
from lynnc.model import ModelSpec
from lynnc.planfile import PLAN_FILE, read_plan
from lynnc.runtime.checkpoints.checkpoint import CONFIG, open_checkpoint
from lynnc.runtime.weights.packedfile import open_packed
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.runtime.weights.resolve import configured_model
from lynnc.tools import detect_gpu

AUTO = "auto"


class SideKind(StrEnum):
    """What a folder is."""

    PACKED = "packed folder"
    PLAN = "plan"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Side:
    """A folder, the packed folder of a plan's weights, and the model; ``gpu``: whether a plan runs as machine code."""

    folder: Path
    kind: SideKind
    spec: ModelSpec
    weights: Path | None = None
    gpu: bool = False

    @property
    def how(self) -> str:
        """How it is computed."""
        if self.kind is SideKind.PLAN:
            return "compiled, on the GPU" if self.gpu else "the plan's graph in torch"
        return "the model's graph in torch"

    @property
    def files(self) -> Path:
        """The folder that may hold a tokenizer."""
        return self.weights or self.folder


def find_side(folder: Path, weights: Path | None, device: str = AUTO) -> Side:
    """What a folder is. OptionError for none of the three, or a plan without weights; the errors of what it holds."""
    kind = _kind(folder)
    if kind is SideKind.PACKED:
        return Side(folder, kind, open_packed(folder).spec)
    if kind is SideKind.CHECKPOINT:
        return Side(folder, kind, unquantised(configured_model(open_checkpoint(folder))))
    if weights is None:
        raise OptionError(f"{folder} is a plan, which has no weights of its own: give its packed folder as --weights.")
    plan = read_plan(folder)
    spec = model_of(plan, folder)
    return Side(folder, kind, spec, weights, gpu=device != "cpu" and detect_gpu() is not None)


def _kind(folder: Path) -> SideKind:
    for name, kind in ((PLAN_FILE, SideKind.PLAN), (INDEX_FILE, SideKind.PACKED), (CONFIG, SideKind.CHECKPOINT)):
        if (folder / name).is_file():
            return kind
    raise OptionError(
        f"{folder} is neither a plan nor a packed folder nor a checkpoint: name a folder of `lynnc compile`, of "
        "`lynnc pack`, or of Hugging Face."
    )


def open_side(side: Side, context: int, device: str = AUTO) -> Engine:
    """The engine of a side with its weights, for sequences of ``context`` tokens."""
    if side.gpu:
        return _open_compiled(side, context)
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if side.kind is SideKind.PACKED:
        return open_interpreted(side.folder, context, device)
    if side.kind is SideKind.CHECKPOINT:
        return open_reference(side.folder, context, device)
    assert side.weights is not None, "find_side asks for them"
    return open_planned(side.folder, side.weights, context, device)


def _open_compiled(side: Side, context: int) -> Engine:
    """Imported here, because only a GPU needs the driver's bindings."""
    try:
        opened: Engine = import_module("lynnc.engines.compiled").open_compiled(side.folder, side.weights, context)
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"A plan on the GPU needs the Python module {error.name}: run `pip install -e '.[runtime]'`, or pass "
            "--device cpu to interpret the plan's graph."
        ) from None
    return opened
