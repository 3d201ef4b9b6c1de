"""A plan for the GPU of this machine, made for one run of a command.

In: a model and what the driver says of the GPU. Out: a plan folder that is gone when the command ends. The kernels stay
in the store, so the next run finds them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from lynnc.cli.output import warn
from lynnc.cli.progress import compile_bar
from lynnc.compiler import Request, compile_model
from lynnc.errors import OptionError
from lynnc.model import ModelSpec
from lynnc.plan import Options
from lynnc.planfile import save_plan
from lynnc.runtime.device import DeviceFacts
from lynnc.store import Store
from lynnc.target import DEVICES, Device, default_device, find_device, find_target


def device_of(facts: DeviceFacts, name: str | None = None) -> Device:
    """The device of that name, or the one that the driver's name holds, or the usual one of the architecture.

    OptionError for a name of another architecture than the GPU's.
    """
    target = find_target(str(facts.capability))
    if name:
        chosen = find_device(name)
        if chosen.target != target:
            raise OptionError(
                f"--device {name} is {chosen.target.name} and {facts.name} is {target.name}: name a device "
                "of that architecture, or leave it out."
            )
        return chosen
    words = facts.name.lower().split()
    names = {*words, *(first + second for first, second in pairwise(words))}
    alike = (device for device in DEVICES.values() if device.name in names and device.target == target)
    return next(alike, default_device(target))


@contextmanager
def compile_here(spec: ModelSpec, device: Device, programs: tuple[str, ...], store: Path) -> Iterator[Path]:
    """A plan of some programs of the model."""
    request = Request(device.target, device, Options(programs=programs))
    with tempfile.TemporaryDirectory(prefix="lynnc-") as scratch:
        with compile_bar() as on_progress:
            compiled = compile_model(spec, request, Store(store), None, on_progress)
        if compiled.note:
            warn(compiled.note)
        folder = Path(scratch) / "here.plan"
        save_plan(compiled.plan, compiled.files, folder)
        yield folder
