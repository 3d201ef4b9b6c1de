"""The roofline of a program: FLOPs for a byte of each kernel, and the FLOPs a second that it could reach and did.

In: the kernels of a program, with a device. Out: a ``Chart``. The roof is the device's bandwidth and its peak; a ring
is what a launch could reach at most, with the time of the launch itself; a diamond is what was measured. Kernels
without FLOPs, such as the embedding, have no place on it and stand in the table alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lynnc.report.kernels import KernelUse
from lynnc.report.svg import Chart, Logarithmic, Shape, circle, coordinate, diamond, line, polyline, words
from lynnc.target import Device
from lynnc.units import amount

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 22, 44
NEAR = 13
"""Least distance of a label from marks and other labels."""
FAR_BELOW = 8
"""Where every kernel has so many times fewer FLOPs for a byte than the ridge, the peak is left out of the picture."""
PLACES = tuple(
    (dx * reach, dy * reach)
    for reach in (14, 20, 27, 35, 44, 56, 70)
    for dx, dy in ((1, 0), (-1, 0), (1, 0.5), (-1, 0.5), (1, -0.5), (-1, -0.5))
)
"""Where a label may stand beside its point, the nearest first."""


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel's place: FLOPs for a byte, and FLOPs a second at most and as measured."""

    use: KernelUse
    intensity: float
    limit: float
    reached: float | None


def points_of(uses: Sequence[KernelUse]) -> tuple[Point, ...]:
    """The kernels that compute something."""
    return tuple(
        Point(
            use=use,
            intensity=use.mean.intensity,
            limit=use.mean.flops / use.mean.seconds,
            reached=use.mean.flops / use.timing.median if use.timing else None,
        )
        for use in uses
        if use.mean.flops and use.mean.bytes
    )


def roofline_chart(name: str, uses: Sequence[KernelUse], device: Device) -> Chart:
    """The chart of one program."""
    points = points_of(uses)
    x, y = _scales(points, device)
    shapes = [*_axes(x, y), *_roof(x, y, device)]
    measured = sum(1 for point in points if point.reached)
    about = (
        f"{len(points)} kernels under a roof of {device.bandwidth_bytes_per_s / 1e12:g} TB/s and "
        f"{device.flops_per_s / 1e12:g} TFLOP/s, {measured} of them measured; the table below has every figure."
    )
    shapes += _marks(points, x, y)
    return Chart(name, f"Roofline on {device.name}", about, WIDTH, HEIGHT, tuple(shapes))


def _scales(points: Sequence[Point], device: Device) -> tuple[Logarithmic, Logarithmic]:
    """Axes that hold every mark, and the ridge of the roof unless all are far below it."""
    ridge = device.flops_per_s / device.bandwidth_bytes_per_s
    lowest = min((point.intensity for point in points), default=1.0)
    highest = max((point.intensity for point in points), default=1.0)
    right = highest * FAR_BELOW if highest * FAR_BELOW < ridge else max(highest, ridge) * 3
    top = min(device.flops_per_s, right * device.bandwidth_bytes_per_s)
    rates = [rate for point in points for rate in (point.limit, point.reached) if rate]
    x = Logarithmic(lowest / 2, right, LEFT, WIDTH - RIGHT)
    y = Logarithmic(min([*rates, top / 100]) / 2, max([*rates, top]) * 1.5, HEIGHT - BOTTOM, TOP)
    return x, y


def _axes(x: Logarithmic, y: Logarithmic) -> Iterator[Shape]:
    for tick in x.ticks():
        yield line("grid", x(tick), TOP, x(tick), HEIGHT - BOTTOM)
        yield words("tick middle", x(tick), HEIGHT - BOTTOM + 16, f"{tick:,g}")
    for tick in y.ticks():
        yield line("grid", LEFT, y(tick), WIDTH - RIGHT, y(tick))
        yield words("tick end", LEFT - 6, y(tick) + 4, _rate(tick))
    yield words("axis middle", (WIDTH + LEFT) / 2, HEIGHT - 6, "FLOPs for each byte moved")
    yield words("axis", 2, TOP - 8, "FLOP/s")


def _rate(value: float) -> str:
    """A power of ten: ``100 T``, ``1 P``."""
    return f"{value / 1e15:g} P" if value >= 1e15 else amount(value).replace(".00", "")


def _roof(x: Logarithmic, y: Logarithmic, device: Device) -> Iterator[Shape]:
    """The slope of the bandwidth, and the peak as far as it is in the picture."""
    bandwidth, peak = device.bandwidth_bytes_per_s, device.flops_per_s
    foot, ridge = max(x.low, y.low / bandwidth), min(peak / bandwidth, x.high)
    corners = [(x(foot), y(foot * bandwidth)), (x(ridge), y(ridge * bandwidth))]
    yield polyline("roof", (*corners, (x(x.high), corners[1][1])))
    middle = (foot * ridge) ** 0.5
    yield words("note end", x(middle) - 10, y(middle * bandwidth) - 8, f"{bandwidth / 1e12:g} TB/s")
    if ridge < x.high:
        yield words("note end", WIDTH - RIGHT - 4, corners[1][1] - 6, f"{peak / 1e12:g} TFLOP/s")
    else:
        start = f"{peak / 1e12:g} TFLOP/s from {peak / bandwidth:.0f} FLOP/B on"
        yield words("note end", WIDTH - RIGHT - 4, HEIGHT - BOTTOM - 8, start)


def _marks(points: Sequence[Point], x: Logarithmic, y: Logarithmic) -> Iterator[Shape]:
    """Rings and diamonds first, so that no label is hidden; then the kernels' numbers."""
    labels: list[tuple[float, float, float, float, str]] = []
    taken = [(x(point.intensity), y(rate)) for point in points for rate in (point.limit, point.reached) if rate]
    for point in points:
        px, limit = x(point.intensity), y(point.limit)
        name = f"kernel {point.use.number}, {point.use.label}"
        place = f"{coordinate(round(point.intensity, 2))} FLOP/B"
        if point.reached:
            reached = y(point.reached)
            yield line("drop", px, limit, px, reached)
            yield diamond("measured", px, reached, 5, f"{name}: measured {amount(point.reached)}FLOP/s at {place}")
        yield circle("limit", px, limit, 4.5, f"{name}: at most {amount(point.limit)}FLOP/s at {place}")
        at = (px, y(point.reached) if point.reached else limit)
        labels.append((*at, *_free_place(at, taken), str(point.use.number)))
    for px, py, lx, ly, text in labels:
        if abs(lx - px) + abs(ly - py) > 16:
            yield line("leader", px, py, lx, ly)
        yield words("number middle", lx, ly + 4, text)


def _free_place(at: tuple[float, float], taken: list[tuple[float, float]]) -> tuple[float, float]:
    """The nearest place beside a point that is clear of all marks and labels; it is taken then."""
    candidates = [(at[0] + dx, at[1] + dy) for dx, dy in PLACES]

    def clearance(place: tuple[float, float]) -> float:
        others = [(place[0] - px) ** 2 + (place[1] - py) ** 2 for px, py in taken]
        return min(others, default=NEAR**2)

    free = (place for place in candidates if clearance(place) >= NEAR**2 * 0.8 and LEFT < place[0] < WIDTH - RIGHT)
    chosen = next(free, max(candidates, key=clearance))
    taken.append(chosen)
    return chosen
