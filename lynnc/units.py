"""Sizes, counts and times as people read them.

In: a number in bytes, things or seconds. Out: text with a unit. Example: ``size(1.66e9)`` is ``1.66 GB``.
"""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units, as data sheets give bandwidth: ``1.66 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """A count in decimal units: ``6.71 G``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """A short time: ``3.14 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"
