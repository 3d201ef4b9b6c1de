"""Tensors in GPU memory, lent without a copy to whoever reads the CUDA array interface, and taken the same way."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from math import prod
from typing import Any

from lynnc.errors import OptionError
from lynnc.runtime.device import Device

TYPES = {"f32": ("<f4", "f", 4), "i32": ("<i4", "i", 4), "bf16": ("<u2", "H", 2)}
"""By dtype: name in the array interface, code in Python's arrays, bytes. BF16 has no name there: its bits as U16."""


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """Memory of the GPU with a type and a shape, row-major; valid as long as its executor is open."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    device: Device

    @property
    def bytes(self) -> int:
        """All of it."""
        return prod(self.shape) * TYPES[self.dtype][2]

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        # The executor's stream does not wait for others nor they for it: what is lent has been computed.
        self.device.synchronize()
        return {
            "shape": self.shape,
            "typestr": TYPES[self.dtype][0],
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def read(self) -> array[Any]:
        """A copy in host memory, flat: floats, integers, or the bits of BF16."""
        _, code, size = TYPES[self.dtype]
        values = array(code, bytes(prod(self.shape) * size))
        address, _ = values.buffer_info()
        self.device.download(address, self.address, len(values) * size)
        self.device.synchronize()
        return values


def ints_of(tokens: Any, device: Device) -> list[int]:
    """Token numbers from a sequence, or from I32 in GPU memory; OptionError for anything else there."""
    interface = getattr(tokens, "__cuda_array_interface__", None)
    if interface is None:
        return [int(token) for token in tokens]
    if interface["typestr"] != "<i4" or interface.get("strides") is not None:
        raise OptionError(f"Tokens on the GPU must be dense I32, not {interface['typestr']}: convert them.")
    found = (ctypes.c_int32 * prod(interface["shape"]))()
    device.synchronize_all()
    device.download(ctypes.addressof(found), int(interface["data"][0]), ctypes.sizeof(found))
    device.synchronize()
    return list(found)
