"""A plan for the GPU of this machine, made for one run of a command.

In: a model and what the driver says of the GPU. Out: a plan folder that is gone when the command ends. The kernels stay
in the store, so the next run finds them. Records of the GPU, the user's own too, decide the knobs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lynnc.cli.knownrecords import known_records
from lynnc.cli.output import note, warn
from lynnc.cli.progress import compile_bar
from lynnc.compiler import Request, compile_model
from lynnc.deviceidentity import identify, identity_of, named_device
from lynnc.errors import OptionError
from lynnc.model import ModelSpec
from lynnc.plan import Options
from lynnc.planfile import save_plan
from lynnc.records import Records
from lynnc.runtime.device import DeviceFacts
from lynnc.store import Store
from lynnc.summary import knob_rows
from lynnc.target import Device, default_device, find_device, find_target


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
    alike = named_device(facts.name)
    return alike if alike and alike.target == target else default_device(target)


def records_of(facts: DeviceFacts, name: str | None = None) -> Records:
    """The records of the GPU itself, or of the device of that name."""
    gpu = identify(facts.name, facts.capability, facts.sm_count, facts.l2_bytes)
    return known_records(identity_of(device_of(facts, name)) if name else gpu)


@contextmanager
def compile_here(
    spec: ModelSpec, device: Device, records: Records, programs: tuple[str, ...], store: Path
) -> Iterator[Path]:
    """A plan of some programs of the model; a note says so if the user's own records have a part in it."""
    request = Request(device.target, device, Options(programs=programs), records=records)
    with tempfile.TemporaryDirectory(prefix="lynnc-") as scratch:
        with compile_bar() as on_progress:
            compiled = compile_model(spec, request, Store(store), None, on_progress)
        if compiled.note:
            warn(compiled.note)
        for row in knob_rows(compiled):
            if row.is_users:
                note(f"knobs of {sum(row.launches.values())} launches are from the records in {row.file}.")
        folder = Path(scratch) / "here.plan"
        save_plan(compiled.plan, compiled.files, folder)
        yield folder
