"""What the tests of `lynnc run` and `lynnc eval` share: a packed folder with a tokenizer, a plan on a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import Flavour, Written, write_checkpoint
from executing import executor_on, meaning_device, plan_of
from meaning import few_splits
from packing import packed_to
from reference import Case
from texts import byte_tokenizer
from tokenizers import AddedToken

from lynnc.cli import engines
from lynnc.engines.compiled import Compiled, compiled_engine
from lynnc.planfile import save_plan
from lynnc.runtime.budget import Room
from lynnc.runtime.loading.packedfolder import PackedFolder

END = 256
"""The one special token, ``<end>``; token N below it is byte N."""


@dataclass(frozen=True)
class Made:
    """A packed folder, and the checkpoint with the model of ``transformers`` that it was made of: the same values."""

    folder: Path
    written: Written


def make_packed(folder: Path) -> Made:
    """A packed tiny model with a tokenizer."""
    written = write_checkpoint(folder / "checkpoint", Case("tiny-moe"), Flavour("modelopt", label="modelopt"))
    packed = packed_to(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(packed / "tokenizer.json"))
    return Made(packed, written)


@contextmanager
def on_simulated_gpu(folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """A plan of the folder's model without machine code in ``folder``, and a simulated GPU that runs its meaning."""
    plan = plan_of(engines.packed_model(made))
    save_plan(plan, {}, folder)
    opened = []

    def open_compiled(_plan: Path, weights: Path, context: int, gpu: int, progress: object) -> Compiled:
        room = Room(1, context)
        opened.append(compiled_engine(executor_on(plan, PackedFolder(weights), room, meaning_device(plan, room))))
        return opened[-1]

    monkeypatch.setattr(engines, "open_compiled", open_compiled)
    with few_splits():
        yield opened
