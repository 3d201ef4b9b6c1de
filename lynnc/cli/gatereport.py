"""The tables of ``lynnc gate``.

In: a report. Out: text on standard output, the verdict last.
"""

from __future__ import annotations

import math
from collections import Counter

import click

from lynnc.cli.output import Column, duration, number, print_table, size, text
from lynnc.quality.bootstrap import Interval
from lynnc.quality.document import speedup_of, verdict_of
from lynnc.quality.gate import Report
from lynnc.quality.greedy import Flip, Outcome, PromptRun, classify, first_wrong, outcome_of
from lynnc.quality.sides import Side
from lynnc.quality.verdict import Check

MOST_ROWS = 12
"""Layers that are shown in full; of more, those that use most of their band."""


def print_report(report: Report, base: Side, candidate: Side) -> None:
    """Every table, then the verdict."""
    _print_prompts(report)
    _print_text(report)
    _print_drift(report)
    _print_costs(report, base, candidate)
    columns = [text("check"), number("value"), text(""), number("limit"), text("verdict"), text("where")]
    print_table(f"Checks for {report.thresholds.kind}", columns, [_check(check) for check in report.checks])
    _print_verdict(report, speedup_of(report, base, candidate))


def _print_prompts(report: Report) -> None:
    runs = report.findings.greedy.runs
    counts = Counter((run.prompt.kind, outcome_of(run, report.widest(run))) for run in runs)
    kinds = dict.fromkeys(run.prompt.kind for run in runs)
    rows = [[kind, *(str(counts[kind, outcome]) for outcome in Outcome)] for kind in kinds]
    columns: list[Column] = [text("prompts"), *(number(str(outcome)) for outcome in Outcome)]
    print_table(f"Greedy ids, {report.settings.tokens} behind each of {len(runs)} prompts", columns, rows)
    noise = report.findings.greedy.noise
    click.echo(
        f"noise of the logits: RMS {noise.rms:.3g} ({_shown(noise.relative)} of the base's), largest "
        f"{noise.largest:.3g}, over {noise.positions:,} positions; that of a prompt explains gaps up to "
        f"{max(map(report.widest, runs), default=0.0):.3g}\n"
    )
    differing = [run for run in runs if run.flips]
    columns = [text("prompt"), number("position"), number("margin"), number("gap"), text("")]
    print_table("Where they part", columns, [_difference(run, report) for run in differing])


def _difference(run: PromptRun, report: Report) -> list[str]:
    """The first difference; of a wrong prompt the first that is wrong."""
    shown: Flip = first_wrong(run, report.widest(run)) or run.flips[0]
    outcome = classify(shown, report.widest(run))
    return [run.prompt.name, str(shown.position), _shown(shown.margin), _shown(shown.gap), str(outcome)]


def _print_text(report: Report) -> None:
    found = report.findings.text
    rows = [
        ["KL, nats a token", *_interval(found.kl)],
        ["KL, largest", _shown(found.max_kl), "", ""],
        ["agreement of top-1", *_interval(found.agreement)],
        ["bits per byte, base", *_interval(found.base_bits)],
        ["bits per byte, candidate", *_interval(found.candidate_bits)],
        ["bits per byte, increase", *_interval(found.increase)],
    ]
    columns = [text("measure"), number("value"), number("from"), number("to")]
    print_table(f"Held-out text, {found.tokens:,} tokens, 95 %", columns, rows)


def _interval(found: Interval) -> list[str]:
    return [_shown(found.mean), _shown(found.low), _shown(found.high)]


def _print_drift(report: Report) -> None:
    places, thresholds = report.findings.drift.places, report.thresholds
    shown = places
    if len(places) > MOST_ROWS:
        worst = sorted(places, key=lambda place: _order(place.l2 / max(thresholds.band(place.depth), 1e-30)))
        kept = {place.section for place in worst[-MOST_ROWS:]}
        shown = tuple(place for place in places if place.section in kept)
    columns = [text("behind"), number("relative L2"), number("band"), number("cosine"), number("worst token"), text("")]
    rows = [
        [
            place.section,
            _shown(place.l2),
            _shown(thresholds.band(place.depth)),
            f"{place.cosine:.6f}",
            _shown(place.worst_l2),
            "" if place.is_within(thresholds) else "leaves the band",
        ]
        for place in shown
    ]
    title = f"Hidden state over {len(report.findings.drift.tokens)} tokens"
    print_table(title + (f", the {MOST_ROWS} worst places" if shown != places else ""), columns, rows)


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _print_costs(report: Report, base: Side, candidate: Side) -> None:
    columns = [text("side"), text("folder"), text("computed by")]
    columns += [number("weights"), number("memory"), number("prompt tokens/s"), number("step")]
    sides = (("base", base, report.base), ("candidate", candidate, report.candidate))
    rows = [
        [
            name,
            str(side.folder),
            side.how,
            size(costs.weight_bytes),
            "-" if costs.memory_bytes is None else size(costs.memory_bytes),
            f"{costs.prompt_rate:,.1f}",
            duration(costs.step_seconds),
        ]
        for name, side, costs in sides
    ]
    print_table("Costs in this run", columns, rows)


def _check(check: Check) -> list[str]:
    verdict = "ok" if check.is_ok else "FAIL"
    return [
        check.name,
        _shown(check.value),
        ">=" if check.is_least else "<=",
        _shown(check.limit),
        verdict,
        check.where,
    ]


def _print_verdict(report: Report, speedup: float | None) -> None:
    failed = [check.name for check in report.checks if not check.is_ok]
    if not failed:
        gain = f"; a step is {speedup:.3f} times as fast as the base's" if speedup else ""
        click.echo(f"\n{verdict_of(report)}: every check for {report.thresholds.kind} holds{gain}")
        return
    click.echo(f"\n{verdict_of(report)}: {'; '.join(failed)}")
    found = report.location
    if found is None:
        click.echo("no layer leaves its band and no single op differs much: the difference is spread over the model")
        return
    if found.culprit is None:
        click.echo(
            f"the hidden state leaves its band first behind {found.section}, on {found.sequence}; no op that can be "
            "seen differs by much, so the cause may lie in a layer before"
        )
        return
    click.echo(f"first in {found.section}, in the op {found.culprit}, {found.culprit.amount}, on {found.sequence}")


def _shown(value: float) -> str:
    return f"{value:.4g}"
