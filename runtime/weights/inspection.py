"""What a folder of weights is and holds: a checkpoint, a packed folder, or what a run of ``lynnc pack`` left.

In: a folder. Out: an ``Inspection``, or a ``WeightError`` for a folder that is none of these. Only headers and JSON are
read, so it takes a moment for any size, and torch is not needed.

Example::

    found = inspect_folder(Path("packed"))
    found.kind, [row.bits for row in found.rows]             # "packed", [16.0, 4.5, ...]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.checkpoint import open_checkpoint
from lynnc.runtime.weights.inspectcheckpoint import inspect_checkpoint
from lynnc.runtime.weights.inspected import Inspection
from lynnc.runtime.weights.inspectpacked import inspect_packed
from lynnc.runtime.weights.packedindex import INDEX_FILE
from lynnc.runtime.weights.unfinished import find_unfinished


def inspect_folder(folder: Path) -> Inspection:
    """Counts what the folder holds. WeightError if it is neither checkpoint nor packed folder, not whole, or not to be
    read."""
    try:
        return _inspect(folder)
    except OSError as error:
        raise WeightError(f"{folder} cannot be read ({error.strerror or error}): mend that or name another.") from error


def _inspect(folder: Path) -> Inspection:
    unfinished = find_unfinished(folder)
    if (folder / INDEX_FILE).is_file():
        found = inspect_packed(folder)
    elif unfinished and (unfinished.folder == folder or not folder.exists()):
        raise WeightError(f"{unfinished}: run the same command again, it goes on where it stopped.")
    else:
        found = inspect_checkpoint(open_checkpoint(folder))
    return replace(found, odd=(*found.odd, str(unfinished))) if unfinished else found
