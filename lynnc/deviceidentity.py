"""Which GPU it is, in words that are the same on every machine: what tells the records of one GPU from another's.

In: what the driver says of a GPU, or a device of the table. Out: an ``Identity``. Its name is a safe file name; a GPU
that is a device of the table, by its name and by what it has, bears the table's name and figures.

Example::

    identify("NVIDIA GeForce RTX 5090", 120, 170, 96 << 20).name              # "rtx5090"
    identify("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 82, 64 << 20).name    # "rtx-5090-laptop-gpu"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lynnc.target import DEVICES, Device, find_target

LONGEST_NAME = 64
NAMELESS = "gpu"
VENDOR_WORDS = frozenset({"nvidia", "geforce", "tesla", "quadro"})
OTHER_NAMES: Mapping[str, str] = MappingProxyType({"gb10": "spark", "rtxpro6000blackwell": "r6000"})
"""Devices of the table whose driver says something else, without vendor words and spaces."""
L2_TOLERANCE = 0.25
"""Data sheets and drivers disagree on L2 by this part at most: an H200 has 50 or 60 MB."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One kind of GPU. ``arch`` is the target's, such as ``sm_90a``; ``shared_memory_limit`` is bytes of a block."""

    name: str
    arch: str
    sm_count: int
    shared_memory_limit: int
    l2_bytes: int


def identity_of(device: Device) -> Identity:
    """The identity of a device of the table."""
    target = device.target
    return Identity(device.name, target.arch, device.sm_count, target.shared_memory_limit, device.l2_bytes)


def identify(name: str, capability: int, sm_count: int, l2_bytes: int) -> Identity:
    """The identity of a GPU by what its driver says; TargetError for an architecture that lynnc does not know."""
    target = find_target(str(capability))
    device = named_device(name)
    if device and device.target == target and _is_same_chip(device, sm_count, l2_bytes):
        return identity_of(device)
    own = safe_name(name)
    if own.replace("-", "") in DEVICES:  # a part of the chip, or another under its name
        own = f"{own}-{sm_count}sm"
    return Identity(own, target.arch, sm_count, target.shared_memory_limit, l2_bytes)


def device_of_identity(identity: Identity) -> Device | None:
    """The device of the table that an identity is, or None."""
    device = DEVICES.get(identity.name)
    return device if device and identity_of(device) == identity else None


def named_device(name: str) -> Device | None:
    """The device of the table whose name a driver's name holds, whatever else it says; None if there is none."""
    words = _words(name)
    for length in range(len(words), 0, -1):
        for start in range(len(words) - length + 1):
            run = "".join(words[start : start + length])
            device = DEVICES.get(OTHER_NAMES.get(run, run))
            if device:
                return device
    return None


def safe_name(name: str) -> str:
    """A driver's name as a file name: lower case letters, digits and single hyphens, without the vendor's words."""
    text = "-".join(_words(name))[:LONGEST_NAME].strip("-")
    return text or NAMELESS


def _words(name: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", name).lower()
    return [word for word in re.findall(r"[a-z0-9]+", plain) if word not in VENDOR_WORDS]


def _is_same_chip(device: Device, sm_count: int, l2_bytes: int) -> bool:
    return sm_count == device.sm_count and abs(l2_bytes / device.l2_bytes - 1) <= L2_TOLERANCE
