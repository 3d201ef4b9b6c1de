"""The CUDA driver's functions, and how their failures become errors.

In: what a function of ``cuda.bindings.driver`` returned. Out: its results without the status, or a ``DeviceError`` of
one sentence. The package is imported when it is first needed: reading a plan needs no GPU.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from lynnc.errors import DeviceError, OptionError


@functools.cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``; an error of one sentence if it, or the driver itself, is not there."""
    try:
        found = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise OptionError(
            "Running a plan needs the Python package cuda-bindings: install lynnc with its extra, as in "
            "`pip install -e '.[runtime]'`."
        ) from error
    try:
        found.cuDriverGetVersion()
    except RuntimeError as error:
        raise DeviceError("No CUDA driver was found on this machine: plans run where an NVIDIA GPU is.") from error
    return found


def check(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """What a driver call returned, without the status; DeviceError, saying ``what`` failed, if it did."""
    status, *values = result
    if int(status) == 0:
        return tuple(values)
    name = getattr(status, "name", str(status)).removeprefix("CUDA_ERROR_").lower().replace("_", " ")
    raise DeviceError(f"{what[0].upper()}{what[1:]} failed: {name}{_ADVICE.get(name, '')}.")


_ADVICE = {
    "out of memory": "; free GPU memory that other programs hold, or choose a smaller context or fewer slots",
    "no binary for gpu": "; compile the plan for this GPU's architecture",
    "no device": "; plans run where an NVIDIA GPU is",
    "launch failed": "; load the plan again, with debug to learn which launch it was",
    "illegal address": "; load the plan again, with debug to learn which launch it was",
}
