"""How the page writes numbers.

In: a number. Out: text with its unit. Example: ``time_text(5.73e-6)`` is ``5.73 µs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from lynnc.units import duration


def time_text(seconds: float) -> str:
    """``5.73 µs``."""
    return duration(seconds).replace("us", "µs") if seconds else "0 µs"


def percent(share: float) -> str:
    """``12.3 %``; what is there at all is never shown as nothing."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def number_text(value: float) -> str:
    """A whole number with its thousands parted."""
    return f"{value:,.0f}"


def pairs_text(values: Mapping[str, object]) -> str:
    """``BLOCK_N=8 num_warps=4``."""
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))
