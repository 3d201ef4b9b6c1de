"""What a run of ``lynnc pack`` that has not finished leaves beside the packed folder, and how far it came.

In: the folder that is to be, or is. Out: ``Unfinished``, or None.

Example::

    find_unfinished(Path("packed"))       # Unfinished(folder=".packed.partial", weights=12, weights_in_all=327, ...)
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOURNAL = "journal.jsonl"
"""A line for each finished weight."""
REQUEST = "request.json"
"""What was asked for, with the draft of the index."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Finished weights and their bytes, and both in all."""

    folder: Path
    weights: int
    weights_in_all: int
    bytes: int
    bytes_in_all: int

    def __str__(self) -> str:
        gigabytes = f"{self.bytes / 1e9:.2f} of {self.bytes_in_all / 1e9:.2f} GB"
        weights = f"{self.weights} of {self.weights_in_all} weights ({gigabytes})"
        return f"{self.folder} holds {weights} of a run of `lynnc pack` that has not finished"


def partial_folder(folder: Path) -> Path:
    """Where an unfinished run keeps its files."""
    return folder.with_name(f".{folder.name}.partial")


def find_unfinished(folder: Path) -> Unfinished | None:
    """What lies beside ``folder``, or in it if it is a partial folder itself; None for nothing that can be read."""
    try:
        partial = folder if (folder / REQUEST).is_file() else partial_folder(folder.absolute())
        request: Any = json.loads((partial / REQUEST).read_text("utf-8"))
        sizes = {
            name: sum(array["bytes"] for array in entry["arrays"])
            for name, entry in request["draft"]["weights"].items()
        }
        lines = (partial / JOURNAL).read_text("utf-8").splitlines() if (partial / JOURNAL).is_file() else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finished = {name for name in map(_weight_of, lines) if name in sizes}
    return Unfinished(partial, len(finished), len(sizes), sum(sizes[name] for name in finished), sum(sizes.values()))


def _weight_of(line: str) -> str | None:
    """The weight of a line; the last line of a killed run may be cut."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(line)["weight"])
    return None
