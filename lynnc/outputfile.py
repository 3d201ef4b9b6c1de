"""Single output files that appear whole or not at all: the check beforehand, and the rename at the end.

In: a path and the text for it. Out: the file, or an ``OutputError`` that names the option to change.

Example::

    check_file(path, force=False)                 # before the work
    write_file(path, text, force=False)           # after it
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from lynnc.errors import OutputError


def check_file(path: Path, force: bool = False, option: str = "--output") -> None:
    """OutputError if the path is taken (with ``force``: by something other than a file) or its folder is missing or
    cannot be written."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder: choose another {option}.")
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path} exists already: choose another {option} or pass --force to replace it.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written ({folder} is not a folder): choose another {option}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written (no permission in {folder}): choose another {option}.")


def write_file(path: Path, text: str, force: bool = False, option: str = "--output") -> None:
    """Writes UTF-8 text beside ``path`` and renames it there; OutputError like ``check_file``."""
    check_file(path, force, option)
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", delete=False) as file:
            scratch = Path(file.name)
        try:
            scratch.write_text(text, "utf-8")
            scratch.chmod(0o644)
            scratch.replace(path)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path} cannot be written ({why}): choose another {option}.") from error
