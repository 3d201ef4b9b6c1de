"""Runs plans on a GPU. Imports neither passes nor templates nor the tuner, nor torch.

Example::

    import lynnc.runtime

    with lynnc.runtime.load("lynn.plan", "packed") as executor:
        print(executor.prefill([9707]), executor.decode(20))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lynnc.runtime.budget import Room
    from lynnc.runtime.executor import Executor
    from lynnc.runtime.loader import load
    from lynnc.runtime.loading.weightsource import BorrowedWeights
    from lynnc.runtime.rows import Row

__all__ = ["BorrowedWeights", "Executor", "Room", "Row", "load"]

_HOME = {
    "BorrowedWeights": "lynnc.runtime.loading.weightsource",
    "Executor": "lynnc.runtime.executor",
    "Room": "lynnc.runtime.budget",
    "Row": "lynnc.runtime.rows",
    "load": "lynnc.runtime.loader",
}


def __getattr__(name: str) -> Any:
    """The names above, imported when first asked for: who packs weights needs no GPU's package."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOME[name]), name)
