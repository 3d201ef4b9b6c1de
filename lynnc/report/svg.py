"""Shapes of a chart, and scales that place numbers on it. The template turns shapes into SVG.

In: numbers. Out: ``Chart`` values in the coordinates of their own view box; colours are classes of the page's CSS.

Example::

    scale = Linear(0, 256, 200, 20)
    rect("gdn", x=40, y=scale(256), width=12, height=200 - scale(256), title="layer 0: 256 experts")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Shape:
    """One SVG element; ``title`` shows when it is pointed at."""

    tag: str
    attributes: Mapping[str, str]
    text: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Shapes with what a reader who does not see them is told; ``name`` is unique on the page."""

    name: str
    title: str
    description: str
    width: int
    height: int
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """Places values from ``low`` to ``high`` between two coordinates."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self, count: int = 5) -> tuple[float, ...]:
        """Round values, about ``count`` of them."""
        step = round_step((self.high - self.low) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return tuple(index * step for index in range(first, last + 1))


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """The same by decades; ``low`` and ``high`` are above zero."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> tuple[float, ...]:
        """Powers of ten."""
        exponents = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        return tuple(10.0**exponent for exponent in exponents)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in STEPS if step * power >= least * (1 - 1e-9))


def coordinate(value: float) -> str:
    """A coordinate with as many digits as show."""
    return f"{value:.1f}".removesuffix(".0")


def rect(name: str, x: float, y: float, width: float, height: float, title: str = "") -> Shape:
    """A rectangle."""
    place = {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0)}
    return _shape("rect", name, place, title=title)


def line(name: str, x1: float, y1: float, x2: float, y2: float) -> Shape:
    """A straight line."""
    return _shape("line", name, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})


def circle(name: str, x: float, y: float, radius: float, title: str = "") -> Shape:
    """A circle."""
    return _shape("circle", name, {"cx": x, "cy": y, "r": radius}, title=title)


def words(name: str, x: float, y: float, text: str) -> Shape:
    """Text; where it is anchored is a matter of its class."""
    return _shape("text", name, {"x": x, "y": y}, text=text)


def polyline(name: str, points: tuple[tuple[float, float], ...]) -> Shape:
    """Joined lines."""
    path = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    return Shape("polyline", {"class": name, "points": path})


def diamond(name: str, x: float, y: float, radius: float, title: str = "") -> Shape:
    """A square on its corner."""
    corners = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y))
    path = " ".join(f"{coordinate(a)},{coordinate(b)}" for a, b in corners)
    return Shape("polygon", {"class": name, "points": path}, title=title)


def _shape(tag: str, name: str, place: Mapping[str, float], text: str = "", title: str = "") -> Shape:
    return Shape(tag, {"class": name, **{key: coordinate(value) for key, value in place.items()}}, text, title)
