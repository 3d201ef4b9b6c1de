"""Single output files that appear whole or not at all: the check beforehand, and the rename at the end.

In: a path and the text for it. Out: the file, or an ``OutputError`` that names the option to change. Caches put their
entries in place with ``place_file``, which replaces whatever is there.

Example::

    check_file(path, force=False)                 # before the work
    write_file(path, text, force=False)           # after it
    place_file(cache / name, data)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lynnc.errors import OutputError

LONGEST_PREFIX = 40
"""Letters; a name may have 255 bytes, of which a letter takes up to four."""


def check_file(path: Path, force: bool = False, option: str = "--output") -> None:
    """OutputError if the path is taken (with ``force``: by something other than a file) or its folder is missing or
    cannot be written."""
    with _worded(path, option):
        if path.is_dir():
            raise OutputError(f"{path} is a folder: choose another {option}.")
        if _is_taken(path) and not force:
            raise OutputError(f"{path} exists already: choose another {option} or pass --force to replace it.")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise OutputError(f"{path} cannot be written ({folder} is not a folder): choose another {option}.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"{path} cannot be written (no permission in {folder}): choose another {option}.")


def write_file(path: Path, text: str, force: bool = False, option: str = "--output") -> None:
    """Writes UTF-8 text beside ``path`` and renames it there; OutputError like ``check_file``."""
    check_file(path, force, option)
    with _worded(path, option):
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=_prefix(path), delete=False) as file:
            scratch = Path(file.name)
        try:
            scratch.write_text(text, "utf-8")
            scratch.chmod(0o644)
            scratch.replace(path)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()


@contextlib.contextmanager
def _worded(path: Path, option: str) -> Iterator[None]:
    """What the system refuses about a path, such as a name that is too long, as an OutputError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{path} cannot be written ({why}): choose another {option}.") from error


def _is_taken(path: Path) -> bool:
    """Whether anything has the name, if only a link to nothing; OSError if nothing can have it."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _prefix(path: Path) -> str:
    """Of the scratch file's name, which may be no longer than others."""
    return f".{path.name[:LONGEST_PREFIX]}."


def place_file(path: Path, data: bytes) -> None:
    """Puts a whole file in place, whatever was there, or raises OSError.

    Some network file systems refuse to rename onto an existing file; there the file is not whole at every moment, so
    its reader must notice a half-written one.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_prefix(path), delete=False) as file:
        temporary = Path(file.name)
    try:
        temporary.write_bytes(data)
        temporary.chmod(0o644)
        try:
            temporary.replace(path)
        except OSError:
            _make_way(path)
            shutil.copyfile(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _make_way(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
