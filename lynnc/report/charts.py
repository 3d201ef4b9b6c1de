"""The charts of a layer's experts and of a tuning run.

In: what they show, as tables of the page have it too. Out: ``Chart`` values. The roofline has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lynnc.report.layers import LayerRow
from lynnc.report.svg import Chart, Linear, Shape, circle, line, polyline, rect, words
from lynnc.report.tuning import KernelStudy, TrialRow
from lynnc.report.wording import time_text

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 16, 40
SLICE_WIDTH, SLICE_HEIGHT = 240, 190


def layers_chart(rows: Sequence[LayerRow]) -> Chart:
    """A bar for each layer, as high as it has experts, coloured by its mixer."""
    most = max(row.experts for row in rows)
    y = Linear(0, most * 1.08, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    shapes = [*_grid(y, "experts", "{:,.0f}")]
    for row in rows:
        x = LEFT + row.number * step
        title = f"layer {row.number}, {row.mixer}: {row.experts} experts"
        width = max(step * 0.8, 1.0)
        shapes.append(
            rect(f"bar mixer-{row.mixer}", x + step * 0.1, y(row.experts), width, y(0) - y(row.experts), title)
        )
        if row.number % max(1, len(rows) // 10) == 0:
            shapes.append(words("tick middle", x + step / 2, HEIGHT - BOTTOM + 16, str(row.number)))
    shapes.append(words("axis middle", (WIDTH + LEFT) / 2, HEIGHT - 6, "layer"))
    counts = [row.experts for row in rows]
    about = f"{len(rows)} layers with {min(counts)} to {most} experts, {sum(counts):,} in all."
    return Chart("layers", "Experts in each layer", about, WIDTH, HEIGHT, tuple(shapes))


def _grid(y: Linear, name: str, form: str, width: int = WIDTH) -> Iterator[Shape]:
    """Lines across at round values, with what they stand for on the left."""
    for tick in y.ticks():
        yield line("grid", LEFT, y(tick), width - RIGHT, y(tick))
        yield words("tick end", LEFT - 6, y(tick) + 4, form.format(tick))
    yield words("axis", 2, TOP - 4, name)


def _time_scale(times: Sequence[float], height: int) -> Linear:
    """A scale around the times; dots and lines need no zero below them."""
    low, high = min(times), max(times)
    margin = max(0.15 * (high - low), 0.02 * high)
    return Linear(max(low - margin, 0.0), high + margin, height - BOTTOM, TOP)


def history_chart(name: str, study: KernelStudy) -> Chart:
    """The time of each candidate in the order in which they were tried, and the best so far."""
    timed = study.timed
    times = [trial.seconds * 1e6 for trial in timed] + [study.default_seconds * 1e6, study.best_seconds * 1e6]
    x = Linear(-0.5, max(trial.number for trial in study.trials) + 0.5, LEFT, WIDTH - RIGHT)
    y = _time_scale(times, HEIGHT)
    shapes = [*_grid(y, "µs", "{:g}")]
    shapes += [words("tick middle", x(tick), HEIGHT - BOTTOM + 16, f"{tick:.0f}") for tick in x.ticks(8) if tick >= 0]
    shapes.append(words("axis middle", (WIDTH + LEFT) / 2, HEIGHT - 6, "candidate"))
    default = y(study.default_seconds * 1e6)
    shapes += [
        line("default", LEFT, default, WIDTH - RIGHT, default),
        words("note end", WIDTH - RIGHT - 2, default - 5, "default"),
    ]
    shapes += [circle("trial", x(trial.number), y(trial.seconds * 1e6), 3.5, _trial_title(trial)) for trial in timed]
    shapes.append(polyline("best", tuple((x(number), y(best * 1e6)) for number, best in best_so_far(study))))
    about = (
        f"{len(timed)} candidates were timed; the best takes {time_text(study.best_seconds)}, "
        f"the default {time_text(study.default_seconds)}."
    )
    return Chart(f"{name}-history", f"Trials of {study.kernel}", about, WIDTH, HEIGHT, tuple(shapes))


def best_so_far(study: KernelStudy) -> tuple[tuple[float, float], ...]:
    """Corners of the stair from the first timed trial to the last trial."""
    corners: list[tuple[float, float]] = []
    for trial in study.timed:
        if not corners or trial.seconds < corners[-1][1]:
            corners += [(trial.number, corners[-1][1])] if corners else []
            corners.append((trial.number, trial.seconds))
    if corners:
        corners.append((study.trials[-1].number, corners[-1][1]))
    return tuple(corners)


def slice_charts(name: str, study: KernelStudy) -> tuple[Chart, ...]:
    """For each knob that took several values, the times by its value."""
    knobs = [knob for knob in study.default_knobs if len(_values(study, knob)) > 1]
    knobs.sort(key=lambda knob: -study.importance.get(knob, 0.0))
    return tuple(_slice_chart(name, study, knob) for knob in knobs)


def _values(study: KernelStudy, knob: str) -> tuple[int, ...]:
    return tuple(sorted({trial.knobs[knob] for trial in study.timed if knob in trial.knobs}))


def _slice_chart(name: str, study: KernelStudy, knob: str) -> Chart:
    values = _values(study, knob)
    x = Linear(-0.5, len(values) - 0.5, LEFT, SLICE_WIDTH - RIGHT)
    y = _time_scale([trial.seconds * 1e6 for trial in study.timed], SLICE_HEIGHT)
    shapes = [*_grid(y, "µs", "{:g}", SLICE_WIDTH)]
    shapes += [
        words("tick middle", x(place), SLICE_HEIGHT - BOTTOM + 16, str(value)) for place, value in enumerate(values)
    ]
    shapes.append(words("axis middle", (SLICE_WIDTH + LEFT) / 2, SLICE_HEIGHT - 6, knob))
    shapes += [
        circle("trial", x(values.index(trial.knobs[knob])), y(trial.seconds * 1e6), 3.5, _trial_title(trial))
        for trial in study.timed
        if knob in trial.knobs
    ]
    best = {value: min(t.seconds for t in study.timed if t.knobs.get(knob) == value) for value in values}
    about = "Best by value: " + ", ".join(f"{value}: {time_text(seconds)}" for value, seconds in best.items()) + "."
    return Chart(f"{name}-slice-{knob}", f"Times by {knob}", about, SLICE_WIDTH, SLICE_HEIGHT, tuple(shapes))


def _trial_title(trial: TrialRow) -> str:
    knobs = ", ".join(f"{knob}={value}" for knob, value in trial.knobs.items())
    return f"trial {trial.number}: {time_text(trial.seconds)} ({knobs})"
