"""Options that several commands share, how their text becomes values, and how a shell completes them.

In: what the user typed. Out: targets, devices, knobs, programs; an ``OptionError`` or ``TargetError`` for the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click

from lynnc.cli.output import note
from lynnc.deviceidentity import Identity, device_of_identity, identify, identity_of
from lynnc.errors import OptionError, TargetError
from lynnc.kernels.kernel import Kernel
from lynnc.kernels.table import KERNELS
from lynnc.modelfile import shipped_models
from lynnc.passes import PIPELINE, check_pass_names
from lynnc.plan import Options, Plan
from lynnc.programs import prefill_programs, program_rows
from lynnc.store import default_store_path
from lynnc.target import DEVICES, TARGETS, Device, Target, default_device, find_device, find_target
from lynnc.tools import detect_gpu

Function = TypeVar("Function", bound=Callable[..., Any])
MOST_GIGABYTES = 1_000_000_000
Completer = Callable[[click.Context, click.Parameter, str], list[str]]


@dataclass(frozen=True, slots=True)
class Destination:
    """What code is made for: a target, the device whose figures count if one was named or is here, and the GPU whose
    records do."""

    target: Target
    device: Device | None = None
    identity: Identity | None = None

    @property
    def measure(self) -> Device:
        """The device whose bandwidth estimates use: the one that was named or is here, or the target's usual one."""
        return self.device or default_device(self.target)


def choose_destination(target: str | None, device: str | None) -> Destination:
    """From ``--target`` and ``--device``, or from the GPU of this machine where neither is given."""
    if device is not None:
        chosen = find_device(device)
        if target is not None and find_target(target) != chosen.target:
            raise OptionError(
                f"--target {target} and --device {device} disagree: {chosen.name} is {chosen.target.name}, "
                "so leave one of them out."
            )
        return Destination(chosen.target, chosen, identity_of(chosen))
    if target is not None:
        return Destination(find_target(target))
    gpu = detect_gpu()
    if gpu is None:
        raise TargetError("No GPU was found here: say what to compile for with --target sm_NN or --device NAME.")
    found = find_target(str(gpu.capability))
    identity = identify(gpu.name, gpu.capability, gpu.sm_count, gpu.l2_bytes)
    here = device_of_identity(identity)
    known_as = f" (device {here.name})" if here else ""
    note(f"for {found.name}, the architecture of this machine's {gpu.name}{known_as}.")
    return Destination(found, here, identity)


def device_of_plan(plan: Plan, name: str, target: str | None, device: str | None) -> Device:
    """``--device`` or ``--target``, else the plan's own. OptionError for another target: a plan's code runs on its own
    only; ``name`` is the plan's for the message."""
    if not target and not device:
        return find_device(plan.device) if plan.device else choose_destination(plan.target, None).measure
    chosen = choose_destination(target, device)
    if chosen.target != find_target(plan.target):
        raise OptionError(
            f"{name} is for {plan.target} and does not run on {chosen.measure.name} ({chosen.target.name}): "
            f"name a device of {plan.target}, or the model."
        )
    return chosen.measure


def parse_programs(text: str) -> tuple[str, ...]:
    """``decode/1,prefill`` as names of programs; OptionError for an unknown one or one given twice."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        program_rows(name)
        if names.count(name) > 1:
            raise OptionError(f"--programs {text}: {name} is given twice; name it once.")
    return names


def parse_passes(texts: Sequence[str]) -> tuple[str, ...]:
    """Names of passes from options that hold one or several each, sorted, so that their order changes nothing."""
    names = sorted({name.strip() for text in texts for name in text.split(",")})
    check_pass_names(names)
    return tuple(names)


def parse_knobs(texts: Sequence[str]) -> dict[str, dict[str, int]]:
    """``linear.BLOCK_N=8`` and its like by kernel and knob; OptionError for unknown ones and bad values."""
    knobs: dict[str, dict[str, int]] = {}
    for text in texts:
        kernel, knob, value = _parse_knob(text)
        of_kernel = knobs.setdefault(kernel.name, {})
        if knob in of_kernel:
            raise OptionError(f"--knob {text}: {kernel.name}.{knob} is given twice; give it once.")
        of_kernel[knob] = value
    return knobs


def _parse_knob(text: str) -> tuple[Kernel, str, int]:
    path, equals, value = text.partition("=")
    kernel_name, dot, knob = path.partition(".")
    if not equals or not dot:
        raise OptionError(f"--knob {text}: write KERNEL.NAME=VALUE, such as linear.num_warps=4.")
    kernels = {kernel.name: kernel for kernel in KERNELS}
    if kernel_name not in kernels:
        raise OptionError(f"--knob {text}: there is no kernel {kernel_name}; {nearest(kernel_name, kernels)}")
    kernel = kernels[kernel_name]
    if knob not in kernel.space:
        raise OptionError(f"--knob {text}: {kernel_name} has no knob {knob}; {nearest(knob, kernel.space)}")
    values = kernel.space[knob].values
    if value not in map(str, values):
        raise OptionError(f"--knob {text}: {knob} is one of {', '.join(map(str, values))}; choose one of them.")
    return kernel, knob, int(value)


def nearest(wanted: str, known: Collection[str]) -> str:
    """Advice for a name that does not exist: what was probably meant, or all that there is."""
    near = get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."


def shard_size_option(usual_bytes: int, text: str) -> Callable[[Function], Function]:
    """``--shard-size``, in gigabytes."""
    return click.option(
        "--shard-size",
        type=click.FloatRange(min=0, min_open=True),
        default=round(usual_bytes / 1e9, 1),
        show_default=True,
        metavar="GB",
        help=text,
    )


def shard_bytes(gigabytes: float) -> int:
    """``--shard-size`` in bytes; OptionError unless it is above 0 and a size that a disk can have."""
    if not 0 < gigabytes <= MOST_GIGABYTES:
        raise OptionError(
            f"--shard-size {gigabytes:g}: give gigabytes above 0 and up to {MOST_GIGABYTES:,}, such as 4."
        )
    return max(1, int(gigabytes * 1e9))


def store_path(given: Path | None) -> Path:
    """``--store``, or the user's cache folder as the environment names it."""
    return given or default_store_path(os.environ)


def _complete_from(names: Callable[[], Sequence[str]]) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shipped models, model files and plan folders."""
    head, _, start = incomplete.rpartition("/")
    folder = Path(head or ("/" if incomplete.startswith("/") else "."))
    found = [name for name in shipped_models() if name.startswith(incomplete)]
    if not folder.is_dir():
        return found
    prefix = incomplete[: len(incomplete) - len(start)]
    for entry in sorted(folder.iterdir()):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        if entry.is_dir():
            found.append(f"{prefix}{entry.name}" + ("" if entry.suffix == ".plan" else "/"))
        elif entry.suffix in (".yaml", ".yml"):
            found.append(f"{prefix}{entry.name}")
    return found


def complete_knobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """``kernel.NAME=VALUE`` for every legal value."""
    known = (f"{k.name}.{name}={value}" for k in KERNELS for name, knob in k.space.items() for value in knob.values)
    return [text for text in known if text.startswith(incomplete)]


def complete_kernels(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The last name of a list of kernels."""
    done, comma, last = incomplete.rpartition(",")
    names = [kernel.name for kernel in KERNELS if kernel.name.startswith(last)]
    return [f"{done}{comma}{name}" for name in names if name not in done.split(",")]


def complete_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Devices of the table."""
    return [name for name in DEVICES if name.startswith(incomplete)]


def complete_programs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The last name of a list of programs."""
    done, comma, last = incomplete.rpartition(",")
    known = Options().programs
    return [f"{done}{comma}{name}" for name in known if name.startswith(last) and name not in done.split(",")]


def complete_program(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The name of one program."""
    return [
        name
        for name in (*(f"decode/{rows}" for rows in range(1, 9)), *prefill_programs(Options().programs))
        if name.startswith(incomplete)
    ]


def destination_options(function: Function) -> Function:
    """``--target`` and ``--device``."""
    device = click.option(
        "--device",
        metavar="NAME",
        shell_complete=_complete_from(lambda: tuple(DEVICES)),
        help="GPU, such as h200 or spark (`lynnc targets` lists them); implies --target.",
    )
    target = click.option(
        "--target",
        metavar="sm_NN",
        shell_complete=_complete_from(lambda: tuple(TARGETS)),
        help="GPU architecture; that of this machine's GPU if neither is given.",
    )
    return target(device(function))


def without_option(function: Function) -> Function:
    """``--without``."""
    return click.option(
        "--without",
        multiple=True,
        metavar="PASS",
        shell_complete=_complete_from(lambda: tuple(step.name for step in PIPELINE)),
        help="Leave out an optimisation; may be repeated, or hold several separated by commas.",
    )(function)


def json_option(function: Function) -> Function:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")(function)


def store_option(function: Function) -> Function:
    """``--store``."""
    return click.option(
        "--store",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of compiled kernels; ~/.cache/lynnc/store if not given.",
    )(function)
