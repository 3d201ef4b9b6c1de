"""What ``lynnc tune`` was asked for: its options, checked against each other before anything is done."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lynnc.autotune.budget import parse_duration
from lynnc.cli.parameters import parse_passes, parse_programs
from lynnc.errors import OptionError
from lynnc.outputfile import check_file
from lynnc.target import Device, find_device
from lynnc.tools import detect_gpu

USUAL_BUDGET = "10m"
SEEDS = 2**32
"""Different seeds of a sampler."""
REHEARSED_DEVICE = "h200"
"""Whose figures the made-up device of ``--rehearse`` has."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    model: str | None
    device: str | None
    devices: str | None
    budget: str | None
    trials: int | None
    kernels: str | None
    programs: str
    without: Sequence[str]
    seed: int
    storage: str | None
    study: str | None
    resume: bool
    search_only: bool
    simulate: str | None
    rehearse: bool
    records: str
    records_folder: Path | None
    store: Path | None
    output: Path | None
    force: bool
    export_to: Path | None
    import_from: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """The same, understood: ``gpus`` by number, ``simulated`` is a device that is not here."""

    model: str
    gpus: tuple[int, ...]
    simulated: Device | None
    seconds: float | None
    trials: int | None
    budget: str
    programs: tuple[str, ...]
    kernels: tuple[str, ...]
    without: tuple[str, ...]


def wish_of(arguments: Arguments) -> Wish:
    """The wish; OptionError for options that do not go together."""
    if arguments.model is None:
        raise OptionError("lynnc tune needs a model: name a shipped one (`lynnc models`) or a model file.")
    _check_given(arguments)
    if arguments.output:
        check_file(arguments.output, arguments.force)
    if arguments.study is not None and not re.fullmatch(r"[\w.+-]+", arguments.study):
        raise OptionError(f"--study {arguments.study}: use letters, digits, '.', '-', '_' and '+' alone.")
    if arguments.search_only and not (arguments.study and arguments.storage):
        raise OptionError("--search-only helps another command: give the --storage and --study of that one.")
    if arguments.simulate and arguments.rehearse:
        raise OptionError("--simulate and --rehearse are two things: leave one of them out.")
    gpus = _gpus(arguments)
    if arguments.simulate and (arguments.device or arguments.devices):
        raise OptionError(f"--simulate {arguments.simulate} needs no GPU: leave --device and --devices out.")
    budget = arguments.budget or (USUAL_BUDGET if arguments.trials is None else None)
    words = (budget, f"{arguments.trials} candidate{'s' * (arguments.trials > 1)}" if arguments.trials else None)
    return Wish(
        model=arguments.model,
        gpus=gpus,
        simulated=find_device(arguments.simulate) if arguments.simulate else None,
        seconds=parse_duration(budget) if budget else None,
        trials=arguments.trials,
        budget=", ".join(filter(None, words)),
        programs=parse_programs(arguments.programs),
        kernels=tuple(name.strip() for name in arguments.kernels.split(",")) if arguments.kernels else (),
        without=parse_passes(arguments.without),
    )


def _check_given(arguments: Arguments) -> None:
    """OptionError for options that were given and are empty, as by a variable of a script that is not set."""
    given = {
        "--device": arguments.device,
        "--devices": arguments.devices,
        "--budget": arguments.budget,
        "--kernels": arguments.kernels,
        "--storage": arguments.storage,
        "--simulate": arguments.simulate,
    }
    for option, text in given.items():
        if text is not None and not text.strip():
            raise OptionError(f"{option} is empty: give a value, or leave {option} out.")


def _gpus(arguments: Arguments) -> tuple[int, ...]:
    """Numbers of the GPUs of ``--device`` or ``--devices``."""
    if arguments.device and arguments.devices:
        raise OptionError("--device is one GPU and --devices are several: leave one of them out.")
    if arguments.devices == "all":
        gpu = detect_gpu()
        return tuple(range(gpu.count)) if gpu else (0,)
    option, text = ("--devices", arguments.devices) if arguments.devices else ("--device", arguments.device or "cuda:0")
    numbers = [re.fullmatch(r"cuda(?::(\d+))?", part.strip()) for part in text.split(",")]
    if not all(numbers) or (option == "--device" and len(numbers) > 1):
        raise OptionError(f"{option} {text}: write GPUs by their numbers, such as cuda:0.")
    gpus = tuple(int(found[1] or 0) for found in numbers if found)
    if len(set(gpus)) < len(gpus):
        raise OptionError(f"{option} {text}: name each GPU once.")
    return gpus
