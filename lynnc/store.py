"""Compiled kernels on disk, by the content of what they were compiled from.

In: an ``Artifact`` with its cubin and PTX. Out: the same artifact, for every later run that asks for its key. An entry
is three files, ``KEY.cubin``, ``KEY.ptx`` and ``KEY.json``, each put in place whole, the JSON last; the JSON holds the
key, the schema and the digests of the others. Whatever does not fit together is a miss: two writers, a crash or a
damaged disk cost a compilation, never a wrong kernel.

Example::

    store = Store(default_store_path(os.environ))       # the command line only: nothing else reads the environment
    artifact = store.load(source.key) or store.save(compiled, cubin, ptx)
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lynnc.artifact import Artifact, digest
from lynnc.errors import OutputError
from lynnc.outputfile import place_file


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The user's ``$XDG_CACHE_HOME/lynnc``, or ``~/.cache/lynnc``."""
    cache = environment.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path(environment.get("HOME", "~")).expanduser() / ".cache"
    return folder / "lynnc"


def default_store_path(environment: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/lynnc/store``, or ``~/.cache/lynnc/store``."""
    return cache_folder(environment) / "store"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


class Store:
    """Entries below ``root``; if it cannot be written, ``warn`` is told once and a temporary folder takes new ones."""

    def __init__(self, root: Path, warn: Callable[[str], None] = _warn) -> None:
        self.root = root
        self._warn = warn
        self._fallback: Path | None = None

    def load(self, key: str) -> Artifact | None:
        """The artifact of that key, or None if no intact entry of this schema exists."""
        roots = (self.root,) if self._fallback is None else (self._fallback, self.root)
        return next((artifact for root in roots if (artifact := _load(root / key[:2], key))), None)

    def save(self, artifact: Artifact, cubin: bytes, ptx: bytes) -> Artifact:
        """Put an entry in place, whatever was there; returns the artifact with its folder."""
        reason = ""
        if self._fallback is None:
            try:
                return _save(self.root / artifact.key[:2], artifact, cubin, ptx)
            except OSError as error:
                reason = error.strerror or str(error)
        try:
            self._fallback = self._fallback or self._fall_back(reason)
            return _save(self._fallback / artifact.key[:2], artifact, cubin, ptx)
        except OSError as error:
            raise OutputError(
                f"Neither {self.root} nor {tempfile.gettempdir()} can be written ({error.strerror}): "
                "free some space or give another folder with --store."
            ) from error

    def _fall_back(self, reason: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="lynnc-store-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._warn(
            f"The store {self.root} cannot be written ({reason}), so kernels compiled now are forgotten "
            "at exit: give a writable folder with --store."
        )
        return folder


def _load(folder: Path, key: str) -> Artifact | None:
    try:
        values = json.loads((folder / f"{key}.json").read_bytes())
        artifact = replace(Artifact.from_json(values), folder=folder)
        intact = (
            artifact.key == key
            and digest(artifact.cubin_path.read_bytes()) == artifact.cubin_sha256
            and digest(artifact.ptx_path.read_bytes()) == artifact.ptx_sha256
        )
    except (OSError, ValueError, RecursionError):
        return None
    return artifact if intact else None


def _save(folder: Path, artifact: Artifact, cubin: bytes, ptx: bytes) -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    placed = replace(artifact, folder=folder)
    place_file(placed.cubin_path, cubin)
    place_file(placed.ptx_path, ptx)
    text = json.dumps(artifact.to_json(), indent=1, sort_keys=True) + "\n"
    place_file(folder / f"{artifact.key}.json", text.encode())
    return placed
