"""Output folders that appear whole or not at all: the check beforehand, and the swap at the end.

In: the folder asked for, and a finished one beside it. Out: the folder in its place, or an ``OutputError``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lynnc.errors import OutputError

NAME_BYTES = 240
"""Longest name of an output: file systems allow 255 bytes, and what is not finished has a longer name beside it."""


def settled(path: Path) -> Path:
    """The absolute path without ``.``, ``..`` and links on the way, so that renaming it cannot change what it means.

    A link at the end stays one. OutputError if the current folder is gone.
    """
    try:
        if path.name in ("", ".."):
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent)) / path.name
    except OSError as error:
        raise _cannot_be_written(path, error.strerror or str(error)) from error


def check_folder(folder: Path, marker: str, kind: str, force: bool = False, inputs: Sequence[Path] = ()) -> None:
    """OutputError if the folder exists (with ``force``: if it lacks the file ``marker`` that such a folder holds), if
    it is or holds one of the ``inputs`` or is a link, or if nothing can be written there; ``kind`` is the word for it
    in the message."""
    try:
        _check_inputs(folder, inputs)
        _check_existing(folder, marker, kind, force)
        _check_parent(folder)
    except OSError as error:
        raise _cannot_be_written(folder, error.strerror or str(error)) from error


def _check_inputs(folder: Path, inputs: Sequence[Path]) -> None:
    """Replacing a folder must not take with it what is read."""
    place = os.path.realpath(folder)
    for read in inputs:
        if Path(os.path.realpath(read)).is_relative_to(place):
            raise OutputError(
                f"{folder} is or holds {read}, which is read, and will not be replaced: choose another --output."
            )


def _check_existing(folder: Path, marker: str, kind: str, force: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        raise OutputError(f"{folder} is a symbolic link and will not be replaced: choose another --output.")
    if not force:
        raise folder_exists(folder)
    if not (folder / marker).is_file():
        raise OutputError(f"{folder} is not a {kind} folder and will not be replaced: choose another --output.")


def _check_parent(folder: Path) -> None:
    if len(os.fsencode(folder.name)) > NAME_BYTES:
        raise _cannot_be_written(folder, f"a name of over {NAME_BYTES} bytes")
    parent = _existing_parent(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "no permission to write there" if parent.is_dir() else "not a folder"
        raise _cannot_be_written(folder, f"{parent}: {why}")


def _existing_parent(folder: Path) -> Path:
    return next(above for above in folder.absolute().parents if above.exists())


def check_room(folder: Path, need: int, unit: str = "GB") -> None:
    """OutputError if the file system of a folder that is to be has fewer than ``need`` bytes free, in GB or MB."""
    scale = {"GB": 1e9, "MB": 1e6}[unit]
    try:
        parent = _existing_parent(folder)
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise _cannot_be_written(folder, error.strerror or str(error)) from error
    if need > free:
        raise OutputError(
            f"{folder} needs {need / scale:,.1f} {unit} and {parent} has {free / scale:,.1f} {unit} free: choose "
            "another --output or make room."
        )


def _cannot_be_written(folder: Path, why: str) -> OutputError:
    return OutputError(f"{folder} cannot be written ({why}): choose another --output.")


def folder_exists(folder: Path) -> OutputError:
    """The error for a folder that exists and was not to be replaced."""
    return OutputError(f"{folder} exists already: choose another --output or pass --force to replace it.")


def place_folder(fresh: Path, folder: Path, force: bool) -> None:
    """Gives ``fresh`` the name ``folder``; OutputError if that exists, unless ``force`` replaces it."""
    if force:
        swap_folder(fresh, folder)
        return
    try:
        fresh.rename(folder)
    except OSError as error:
        raise folder_exists(folder) if folder.exists() else error from None


def swap_folder(fresh: Path, folder: Path) -> None:
    """Puts ``fresh`` in the place of ``folder``, which is deleted; another process may be doing the same, and then
    either one's stays."""
    scratch = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)
    old = Path(scratch) / "old"
    try:
        _swap(fresh, folder, old)
    finally:
        # Where the former folder could not be put back, it is all there is: it stays in the scratch folder.
        if folder.exists():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            with suppress(OSError):
                Path(scratch).rmdir()


def _swap(fresh: Path, folder: Path, old: Path) -> None:
    for _ in range(100):
        try:
            with suppress(FileNotFoundError):
                folder.rename(old)
            fresh.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            # An interrupt between the two renames must not take the former folder with it.
            if old.exists() and not folder.exists():
                old.rename(folder)
    raise OSError(f"{folder} keeps being replaced by another process")
