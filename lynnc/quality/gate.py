"""The whole gate: both sides on prompts, on held-out text, and layer by layer; the verdict; and where a fault lies.

In: a pair of engines, prompts and text as token ids, thresholds. Out: a ``Report``.

Example::

    report = run_gate(pair, Material(prompts, heldout), Settings(), read_thresholds("fusion"))
    report.passed, str(report.location)                # False, "layers.1: layers.1.experts_up (ExpertsUp, ...) at ..."
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lynnc.quality.costs import Costs, measure_costs
from lynnc.quality.culprit import culprit_of_section, find_culprit
from lynnc.quality.divergence import HeldOut, compare_on_text
from lynnc.quality.drift import Drift, first_leaving, trace_drift
from lynnc.quality.greedy import PromptRun, allowance, first_wrong, run_greedy
from lynnc.quality.pair import PIECE, OnProgress, Pair
from lynnc.quality.prompts import Encoded
from lynnc.quality.thresholds import Thresholds
from lynnc.quality.verdict import Check, Findings, Location, judge


@dataclass(frozen=True, slots=True)
class Material:
    """What both sides read."""

    prompts: tuple[Encoded, ...]
    heldout: HeldOut


@dataclass(frozen=True, slots=True)
class Settings:
    """``tokens`` to generate behind each prompt; tokens of a sequence of held-out text; tokens of the sequence that is
    followed layer by layer, first ``followed_prompt`` at once and then ``followed_steps`` one by one."""

    tokens: int = 128
    sequence: int = 512
    followed_prompt: int = 64
    followed_steps: int = 32


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict and everything behind it. ``location`` is None if all checks hold, or if neither a layer
    leaves its band nor an op differs much."""

    thresholds: Thresholds
    settings: Settings
    findings: Findings
    checks: tuple[Check, ...]
    location: Location | None
    base: Costs
    candidate: Costs

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.is_ok for check in self.checks)

    def widest(self, run: PromptRun) -> float:
        """The widest gap between logits that the measured noise explains in a prompt."""
        return allowance(self.findings.greedy.noise, self.thresholds, run.noise)


def run_gate(
    pair: Pair,
    material: Material,
    settings: Settings,
    thresholds: Thresholds,
    on_progress: OnProgress | None = None,
) -> Report:
    """Measures and judges. The order matters: states that earlier sequences left are there when drift is measured."""
    step = _Steps(material, settings, on_progress)
    greedy = run_greedy(pair, material.prompts, settings.tokens, step)
    text = compare_on_text(pair, material.heldout, settings.sequence, step)
    costs = [measure_costs(side) for side in (pair.base, pair.candidate)]
    step("layer by layer")
    followed = material.heldout.ids[: settings.followed_prompt + settings.followed_steps]
    drift = trace_drift(pair, followed, min(settings.followed_prompt, max(len(followed) // 2, 1)))
    findings = Findings(greedy, text, drift)
    checks = judge(findings, thresholds)
    location = None
    if not all(check.is_ok for check in checks):
        step("where the fault lies")
        location = locate(pair, material, settings, findings, thresholds)
    return Report(thresholds, settings, findings, checks, location, *costs)


def locate(
    pair: Pair, material: Material, settings: Settings, findings: Findings, thresholds: Thresholds
) -> Location | None:
    """The first place that leaves its band, in the sequence that was followed or in one that showed a fault. If none
    does, the first op that differs by more than ``op_l2``; None if there is no such op either."""
    for name, drift in _suspects(pair, material, settings, findings, thresholds):
        leaving = first_leaving(drift, thresholds)
        if leaving:
            return Location(leaving, find_culprit(pair, drift, leaving, thresholds), name)
    drift = findings.drift
    for place in drift.places:
        culprit = culprit_of_section(pair, drift, place.section, thresholds)
        if culprit:
            return Location(place, culprit, _beginning(material))
    return None


def _beginning(material: Material) -> str:
    return f"the beginning of {material.heldout.name}"


def _suspects(
    pair: Pair, material: Material, settings: Settings, findings: Findings, thresholds: Thresholds
) -> Iterator[tuple[str, Drift]]:
    yield _beginning(material), findings.drift
    greedy = findings.greedy
    widest = {run.prompt.name: allowance(greedy.noise, thresholds, run.noise) for run in greedy.runs}
    wrong = next((run for run in greedy.runs if first_wrong(run, widest[run.prompt.name])), greedy.noisiest)
    for run in (wrong,) if wrong is greedy.noisiest else (wrong, greedy.noisiest):
        yield f"the prompt {run.prompt.name}", trace_drift(pair, (*run.prompt.ids, *run.ids), len(run.prompt.ids))
    text = findings.text
    worst = text.first_damaged if text.first_damaged >= 0 else text.worst
    first = worst - worst % settings.sequence
    # Over a few tokens alone, the usual noise may leave the band.
    last = min(max(worst + 1, first + PIECE), first + settings.sequence)
    tokens = material.heldout.ids[first:last]
    where = f"tokens {first:,} to {first + len(tokens) - 1:,} of {material.heldout.name}"
    yield where, trace_drift(pair, tokens, len(tokens))


class _Steps:
    """Counts what is done: each prompt, each sequence of text, and following the layers."""

    def __init__(self, material: Material, settings: Settings, on_progress: OnProgress | None) -> None:
        sequences = -(-(len(material.heldout.ids) - 1) // settings.sequence)
        self._total = len(material.prompts) + sequences + 1
        self._begun, self._report = -1, on_progress

    def __call__(self, name: str) -> None:
        """Something begins, so what was before is done."""
        self._begun = min(self._begun + 1, self._total)
        if self._report:
            self._report(self._begun, self._total, name)
