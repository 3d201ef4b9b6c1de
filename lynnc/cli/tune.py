"""``lynnc tune``: finds the best knobs for every kernel of a model on a GPU, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lynnc.cli.knownrecords import records_folder, records_options
from lynnc.cli.output import note
from lynnc.cli.parameters import (
    choose_destination,
    complete_devices,
    complete_kernels,
    complete_models,
    complete_programs,
    json_option,
    store_option,
    without_option,
)
from lynnc.cli.tunewish import SEEDS, Arguments, wish_of
from lynnc.deviceidentity import identity_of
from lynnc.errors import OptionError
from lynnc.plan import Options
from lynnc.recordfiles import export_records, import_records
from lynnc.target import find_device


@click.command("tune", epilog="Example: lynnc tune qwen3.6-35b-a3b --device cuda:0 --budget 10m")
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--device", metavar="cuda:N", help="GPU to measure on; cuda:0 if not given.")
@click.option("--devices", metavar="all|LIST", help="Several GPUs, a worker process on each, such as cuda:0,cuda:1.")
@click.option("--budget", metavar="TIME", help="Time for everything, such as 90s, 10m or 1h; 10m if nothing is given.")
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="Most candidates to measure.")
@click.option(
    "--kernels",
    metavar="LIST",
    shell_complete=complete_kernels,
    help="Kernels to tune, such as linear,experts_up; all if not given.",
)
@click.option(
    "--programs",
    default=",".join(Options().programs),
    show_default=True,
    metavar="LIST",
    shell_complete=complete_programs,
    help="Programs whose kernels are tuned; those of decode share their choices.",
)
@without_option
@click.option("--seed", type=click.IntRange(0, SEEDS - 1), default=0, show_default=True, help="Seed of what is tried.")
@click.option(
    "--storage",
    metavar="FILE|URL",
    help="Where candidates are kept: a journal file, or a URL of SQLite, PostgreSQL or MySQL that several hosts share.",
)
@click.option("--study", metavar="NAME", help="Name of the run; workers that give the same one share it.")
@click.option("--resume", is_flag=True, help="Go on with the last run of this model and device, or with --study.")
@click.option("--search-only", is_flag=True, help="Help another command that has the same --study; decide nothing.")
@click.option(
    "--simulate",
    metavar="NAME",
    shell_complete=complete_devices,
    help="Rank candidates for a GPU that is not here by what the compiler makes of them, such as spark.",
)
@click.option("--rehearse", is_flag=True, help="Try storage and workers on a made-up device; nothing is recorded.")
@records_options
@store_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for `lynnc report --tune`, as JSON.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option(
    "--export",
    "export_to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the records of a device (--simulate names one that is not here) to a file, and do nothing else.",
)
@click.option(
    "--import",
    "import_from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take over records from such a file, and do nothing else.",
)
@json_option
def command(**options: Any) -> None:
    """Find the best knobs for every kernel of MODEL on a GPU, and record them for `lynnc compile`.

    A candidate must be right before it is timed, the default knobs and the best known record are always in the race,
    and winners are confirmed in whole steps. What was finished is kept: an interrupted run goes on with --resume.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Records in and out need neither a GPU nor the tuner; all else does."""
    if arguments.export_to and arguments.import_from:
        raise OptionError("--export and --import are two things: leave one of them out.")
    if arguments.export_to:
        _export(arguments, arguments.export_to)
    elif arguments.import_from:
        note(import_records(arguments.import_from, records_folder(arguments.records_folder)).text)
    else:
        _tune(arguments)


def _export(arguments: Arguments, path: Path) -> None:
    if arguments.simulate:
        device = identity_of(find_device(arguments.simulate))
    else:
        found = choose_destination(None, None).identity
        assert found is not None, "a GPU of this machine has an identity"
        device = found
    count = export_records(path, device, records_folder(arguments.records_folder), arguments.force)
    note(f"{path}: {count} records of {device.name}.")


def _tune(arguments: Arguments) -> None:
    """The tuner's own packages are imported only now: help and completion do without them."""
    wish = wish_of(arguments)
    try:
        from lynnc.cli.tunerun import tune
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "optuna":
            raise
        raise OptionError(
            "lynnc tune needs the Python package optuna: install lynnc with its extra, as in "
            "`pip install -e '.[tune]'`."
        ) from None
    tune(arguments, wish)
