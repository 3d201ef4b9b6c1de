"""What the tests of packing share: a checkpoint, and packing it, in one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Flavour, Written, write_checkpoint
from reference import Case

from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.unfinished import partial_folder
from lynnc.tensors import Format

PLAIN = Flavour("plain")
DIVIDED = Flavour("compressed-tensors")
MULTIPLIED = Flavour("modelopt", label="modelopt")


def written(folder: Path, model: str = "tiny-moe", flavour: Flavour = PLAIN) -> Written:
    return write_checkpoint(folder / "checkpoint", Case(model), flavour)


def packed_to(folder: Path, **options: Any) -> Path:
    pack(PackRequest(folder / "checkpoint", folder / "packed", **options))
    return folder / "packed"


class Stopped(Exception):
    """Raised in the middle of a run."""


def pack_some(checkpoint: Path, output: Path, weights: int, **options: Any) -> None:
    """A run that ends once so many weights are finished."""
    journal = partial_folder(output) / "journal.jsonl"

    def stop(done: int, total: int, name: str) -> None:
        if journal.read_text().count("\n") == weights:
            raise Stopped

    with pytest.raises(Stopped):
        pack(PackRequest(checkpoint, output, **options), stop)


def with_formats(model: str, **formats: Format) -> ModelSpec:
    spec = load_model(model)
    return replace(spec, precision=replace(spec.precision, formats={**spec.precision.formats, **formats}))
