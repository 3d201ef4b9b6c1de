"""A gate's report as one JSON document; its fields are described in docs/quality.md.

In: a ``Report`` and what the two sides are. Out: plain values. What is no number becomes a text (``"nan"``, ``"inf"``),
since JSON has none of these.

Example::

    json.dumps(document_of(report, base, candidate), indent=2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path

from lynnc.quality.costs import Costs
from lynnc.quality.gate import Report
from lynnc.quality.greedy import PromptRun, first_wrong, outcome_of
from lynnc.quality.sides import Side
from lynnc.version import VERSION

SCHEMA = 1


def document_of(report: Report, base: Side, candidate: Side) -> dict[str, object]:
    """The whole report."""
    drift = report.findings.drift
    found: dict[str, object] = {
        "schema": SCHEMA,
        "lynnc": VERSION,
        "verdict": verdict_of(report),
        "kind": report.thresholds.kind,
        "thresholds": asdict(report.thresholds),
        "settings": asdict(report.settings),
        "base": _side(base, report.base),
        "candidate": _side(candidate, report.candidate),
        "speedup": speedup_of(report, base, candidate),
        "checks": [{**asdict(check), "is_ok": check.is_ok} for check in report.checks],
        "location": _location(report),
        "greedy": {
            "noise": asdict(report.findings.greedy.noise),
            "prompts": [_prompt(run, report.widest(run)) for run in report.findings.greedy.runs],
        },
        "text": asdict(report.findings.text),
        "drift": {"tokens": len(drift.tokens), "places": [asdict(place) for place in drift.places]},
    }
    return {name: plain(value) for name, value in found.items()}


def verdict_of(report: Report) -> str:
    """PASS or FAIL."""
    return "PASS" if report.passed else "FAIL"


def speedup_of(report: Report, base: Side, candidate: Side) -> float | None:
    """How many times as fast the candidate's single tokens are. None for a candidate that fails, which gains nothing,
    and where a side is interpreted: its speed says nothing about kernels."""
    if not (report.passed and base.gpu and candidate.gpu and report.candidate.step_seconds):
        return None
    return report.base.step_seconds / report.candidate.step_seconds


def _side(side: Side, costs: Costs) -> dict[str, object]:
    weights = str(side.weights) if side.weights else None
    facts = {"folder": str(side.folder), "kind": str(side.kind), "weights": weights, "model": side.spec.name}
    return {**facts, "how": side.how, **asdict(costs)}


def _location(report: Report) -> dict[str, object] | None:
    found = report.location
    if found is None:
        return None
    culprit = asdict(found.culprit) if found.culprit else None
    return {"section": found.section, "sequence": found.sequence, "place": asdict(found.place), "op": culprit}


def _prompt(run: PromptRun, widest: float) -> dict[str, object]:
    wrong = first_wrong(run, widest)
    return {
        "name": run.prompt.name,
        "kind": run.prompt.kind,
        "tokens": len(run.prompt.ids),
        "noise": run.noise.relative if run.noise.positions else None,
        "allowance": widest,
        "outcome": str(outcome_of(run, widest)),
        "ids": list(run.ids),
        "differences": len(run.flips),
        "first": asdict(run.flips[0]) if run.flips else None,
        "first_wrong": asdict(wrong) if wrong else None,
    }


def plain(value: object) -> object:
    """A value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
