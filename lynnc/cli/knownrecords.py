"""Which records the command line lets count: its options, and what they find for a GPU.

In: a destination or a GPU, and what was typed. Out: ``Records`` from the package and from the user's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lynnc.deviceidentity import Identity
from lynnc.recordfiles import RecordChoice, check_records_readable, default_records_folder, load_records
from lynnc.records import Records

Function = TypeVar("Function", bound=Callable[..., Any])


def records_options(function: Function) -> Function:
    """``--records`` and ``--records-folder``."""
    choice = click.option(
        "--records",
        type=click.Choice([choice.value for choice in RecordChoice]),
        default=RecordChoice.ALL.value,
        show_default=True,
        help="Records that knobs are taken from: those that ship, those of `lynnc tune` here, both or neither.",
    )
    return choice(records_folder_option(function))


def records_folder_option(function: Function) -> Function:
    """``--records-folder``."""
    return click.option(
        "--records-folder",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the records made here; ~/.cache/lynnc/records if not given.",
    )(function)


def records_folder(given: Path | None) -> Path:
    """``--records-folder``, or the user's cache folder as the environment names it."""
    return given or default_records_folder(os.environ)


def known_records(device: Identity | None, choice: str = RecordChoice.ALL, folder: Path | None = None) -> Records:
    """The records that count for a GPU; OptionError if the user's were named by ``folder`` and cannot be read."""
    chosen = RecordChoice(choice)
    if folder and chosen in (RecordChoice.ALL, RecordChoice.USER):
        check_records_readable(folder)
    return load_records(device, records_folder(folder), chosen)
