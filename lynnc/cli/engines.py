"""Where a packed model runs: the options that `run` and `eval` share, and the engine that they name.

In: a packed folder, maybe a plan, a device. Out: an ``Engine`` that is closed when the block ends: a compiled plan on a
GPU if there is one, else the interpreter on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from lynnc.cli.localplan import compile_here, device_of, records_of
from lynnc.cli.output import note, size
from lynnc.cli.parameters import store_option, store_path
from lynnc.cli.progress import bytes_bar
from lynnc.engines.compiled import Compiled, open_compiled
from lynnc.engines.engine import Engine
from lynnc.engines.interpreted import Interpreted, open_interpreted
from lynnc.errors import OptionError
from lynnc.fields import Place
from lynnc.model import ModelSpec
from lynnc.modelshape import from_dict
from lynnc.runtime.cudadevice import open_device
from lynnc.runtime.weights.packedindex import INDEX_FILE, read_index
from lynnc.tools import detect_gpu

Function = TypeVar("Function", bound=Callable[..., Any])
F32_BYTES = 4
SHORT_STEPS = 1 << 30
"""Bytes of weights as FP32 up to which an op is too short to be divided: threads would only wait for each other."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What was typed: a packed folder, a plan for the GPU if one was named, the device, the store of kernels."""

    folder: Path
    plan: Path | None
    device: str
    store: Path | None


def engine_options(function: Function) -> Function:
    """``--plan``, ``--device`` and ``--store``."""
    plan = click.option(
        "--plan",
        type=click.Path(path_type=Path),
        help="Plan of `lynnc compile` for the GPU; made on the fly if not given.",
    )
    device = click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="cpu, cuda or cuda:N; auto takes the GPU if there is one.",
    )
    return plan(device(store_option(function)))


def packed_model(folder: Path) -> ModelSpec:
    """The model of a packed folder; WeightError if it is none."""
    return from_dict(read_index(folder).model, Place(str(folder / INDEX_FILE), "model"))


def context_of(spec: ModelSpec, asked: int | None, usual: int) -> int:
    """``--context``, or as much of the usual one as the model has; OptionError for more than that."""
    if asked is not None and asked > spec.max_context:
        raise OptionError(f"--context {asked}: {spec.name} has {spec.max_context} positions; choose no more.")
    return asked or min(usual, spec.max_context)


@contextmanager
def open_engine(choice: EngineChoice, context: int, programs: tuple[str, ...]) -> Iterator[Engine]:
    """The engine; ``programs`` are compiled where no plan was named."""
    gpu = _gpu(choice)
    with ExitStack() as stack:
        engine = _open_cpu(choice, context) if gpu is None else _open_gpu(choice, gpu, context, programs, stack)
        stack.callback(engine.close)
        yield engine


def _gpu(choice: EngineChoice) -> int | None:
    """Number of the GPU, or None for the CPU."""
    kind, colon, number = choice.device.partition(":")
    if choice.device == "cpu":
        if choice.plan:
            raise OptionError("--plan is for a GPU and --device cpu is none: leave one of them out.")
        return None
    if kind == "cuda" and (not colon or number.isdecimal()):
        return int(number or 0)
    if choice.device != "auto":
        raise OptionError(f"--device {choice.device}: there is no such device; write auto, cpu, cuda or cuda:N.")
    if choice.plan:
        return 0
    found = detect_gpu()
    note(f"runs on this machine's {found.name}." if found else "no GPU was found here: runs on the CPU, uncompiled.")
    return 0 if found else None


def _open_cpu(choice: EngineChoice, context: int) -> Interpreted:
    index = read_index(choice.folder)
    weights = sum(prod(weight.shape) for weight in index.weights.values()) * F32_BYTES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights > memory:
        raise OptionError(
            f"{choice.folder} would take {size(weights)} of memory on the CPU, as FP32, and this machine has "
            f"{size(memory)}: run it on a GPU."
        )
    if weights <= SHORT_STEPS:
        torch.set_num_threads(1)
    return open_interpreted(choice.folder, context)


def _open_gpu(choice: EngineChoice, gpu: int, context: int, programs: tuple[str, ...], stack: ExitStack) -> Compiled:
    plan = choice.plan
    if plan is None:
        with closing(open_device(gpu)) as opened:
            device, records = device_of(opened.facts), records_of(opened.facts)
        plan = stack.enter_context(
            compile_here(packed_model(choice.folder), device, records, programs, store_path(choice.store))
        )
    with bytes_bar("loading") as on_bytes:
        progress = (lambda done, total: on_bytes(done, total, "")) if on_bytes else None
        return open_compiled(plan, choice.folder, context, gpu=gpu, progress=progress)
