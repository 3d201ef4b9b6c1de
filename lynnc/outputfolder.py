"""Output folders that appear whole or not at all: the check beforehand, and the swap at the end.

In: the folder asked for, and a finished one beside it. Out: the folder in its place, or an ``OutputError``.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from lynnc.errors import OutputError


def check_folder(folder: Path, marker: str, kind: str, force: bool = False) -> None:
    """OutputError if the folder exists (with ``force``: if it lacks the file ``marker`` that such a folder holds), or
    if nothing can be written there; ``kind`` is the word for it in the message."""
    if os.path.lexists(folder) and not force:
        raise folder_exists(folder)
    if os.path.lexists(folder) and not (folder / marker).is_file():
        raise OutputError(f"{folder} is not a {kind} folder and will not be replaced: choose another --output.")
    parent = next(above for above in folder.absolute().parents if above.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "no permission to write there" if parent.is_dir() else "not a folder"
        raise OutputError(f"{folder} cannot be written ({parent}: {why}): choose another --output.")


def folder_exists(folder: Path) -> OutputError:
    """The error for a folder that exists and was not to be replaced."""
    return OutputError(f"{folder} exists already: choose another --output or pass --force to replace it.")


def swap_folder(fresh: Path, folder: Path, old: Path) -> None:
    """Puts ``fresh`` in the place of ``folder``; another process may be doing the same, and then either one's stays."""
    for _ in range(100):
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            fresh.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            # An interrupt between the two renames must not take the former plan with it.
            if old.exists() and not folder.exists():
                old.rename(folder)
    raise OSError(f"{folder} keeps being replaced by another process")
