"""Where the time of a step must go: formulas of bytes and FLOPs, and the speed that they allow at most on a device.

In: a model, a device, a context. Out: a ``Step``, in which launches of equal cost are one ``Group`` each, and a
``Ceiling`` for several row counts. Nothing is measured: times are bytes over bandwidth or FLOPs over peak, plus an
assumed launch.

Example::

    step = explain_step(load_model("qwen3.6-35b-a3b"), "decode/1", Question(find_device("h200"), context=4096))
    step.ceiling.tokens_per_s, step.groups[0].cost.bytes        # sympy in T and S
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import sympy

from lynnc.build import build_graph
from lynnc.cost import Cost, Estimate, costs, estimate, evaluate_formula
from lynnc.ir import Graph
from lynnc.model import ModelSpec
from lynnc.passes import run_passes
from lynnc.programs import PREFILL, most_rows, program_rows
from lynnc.target import Device
from lynnc.tensors import T
from lynnc.verify import verify

DECODE_ROWS = (1, 2, 4, 8)
PREFILL_ROWS = (16, 64, 512, 2048)

_DECODE_T = sympy.Symbol("T", positive=True)
"""Rows of a decode step as a symbol; not ``T``, which stands for prefill when a graph is built."""


@dataclass(frozen=True, slots=True)
class Question:
    """On what device, and at which context S (positions in the slot after the step), with which passes left out."""

    device: Device
    context: int = 4096
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` launches of equal kind and cost; ``name`` has ``*`` for the layer, cost and estimate are of one launch.

    A merged group has more than one of ``shapes``: its cost is the most frequent one, its estimate the mean.
    """

    name: str
    kind: str
    count: int
    cost: Cost
    estimate: Estimate
    shapes: int = 1

    @property
    def seconds(self) -> float:
        """Time of all its launches."""
        return self.count * self.estimate.seconds


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A whole step of ``rows`` tokens; ``context`` is at least ``rows``. Bytes by what they belong to."""

    program: str
    rows: int
    context: int
    launches: int
    weight_bytes: float
    state_bytes: float
    activation_bytes: float
    flops: float
    launch_s: float
    seconds: float

    @property
    def bytes(self) -> float:
        """All bytes of a step."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens that go through the model in a second, at most."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Step:
    """One step, group by group, and its sum."""

    groups: tuple[Group, ...]
    ceiling: Ceiling


def explain_step(spec: ModelSpec, program: str, question: Question, rows: int = max(PREFILL_ROWS)) -> Step:
    """One program's step; ``rows`` counts for ``prefill`` only, ``prefill/N`` has N. OptionError for another name."""
    decode_rows = program_rows(program)
    graph = _graph(spec, decode_rows is None, question.without)
    return _step(group_ops(graph), program, decode_rows or most_rows(program) or rows, question)


def ceilings(spec: ModelSpec, question: Question) -> tuple[Ceiling, ...]:
    """Steps of 1, 2, 4 and 8 tokens in decode, and of 16, 64, 512 and 2048 in prefill."""
    decode = group_ops(_graph(spec, False, question.without))
    prefill = group_ops(_graph(spec, True, question.without))
    steps = [_step(decode, f"decode/{rows}", rows, question) for rows in DECODE_ROWS]
    steps += [_step(prefill, PREFILL, rows, question) for rows in PREFILL_ROWS]
    return tuple(step.ceiling for step in steps)


def _graph(spec: ModelSpec, is_prefill: bool, without: tuple[str, ...]) -> Graph:
    return run_passes(verify(build_graph(spec, T if is_prefill else _DECODE_T)), without)


@dataclass(frozen=True, slots=True)
class CostGroup:
    """Launches of equal kind and cost, before a device is known."""

    name: str
    kind: str
    count: int
    cost: Cost


def group_ops(graph: Graph) -> tuple[CostGroup, ...]:
    """The launches of a fused graph by kind and cost, in order of first use; formulas are in ``T`` and ``S``."""
    found: dict[tuple[str, str, Cost], int] = {}
    formulas = costs(graph)
    for op in graph.ops:
        key = (re.sub(r"^layers\.\d+\.", "layers.*.", op.name), op.kind, formulas[op.name])
        found[key] = found.get(key, 0) + 1
    return tuple(CostGroup(name, kind, count, _in_t(formula)) for (name, kind, formula), count in found.items())


def _in_t(formula: Cost) -> Cost:
    parts = (formula.weight_bytes, formula.state_bytes, formula.activation_bytes, formula.flops)
    return Cost(*(sympy.sympify(part).subs(_DECODE_T, T) for part in parts))


def _step(groups: Sequence[CostGroup], program: str, rows: int, question: Question) -> Step:
    context = max(question.context, rows)
    lines = tuple(
        Group(group.name, group.kind, group.count, group.cost, estimate(group.cost, rows, context, question.device))
        for group in groups
    )

    def total(part: str) -> float:
        return sum(line.count * evaluate_formula(getattr(line.cost, part), rows, context) for line in lines)

    ceiling = Ceiling(
        program=program,
        rows=rows,
        context=context,
        launches=sum(line.count for line in lines),
        weight_bytes=total("weight_bytes"),
        state_bytes=total("state_bytes"),
        activation_bytes=total("activation_bytes"),
        flops=total("flops"),
        launch_s=sum(line.count * line.estimate.launch_s for line in lines),
        seconds=sum(line.seconds for line in lines),
    )
    return Step(lines, ceiling)


def merge_shapes(groups: Sequence[Group]) -> tuple[Group, ...]:
    """One group for each op, whatever the layer: in a pruned model the experts' costs differ from layer to layer."""
    by_op: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        by_op.setdefault((group.name, group.kind), []).append(group)
    return tuple(_merged(same) if len(same) > 1 else same[0] for same in by_op.values())


def _merged(groups: Sequence[Group]) -> Group:
    usual = max(groups, key=lambda group: group.count)
    counts = [group.count for group in groups]

    def mean(part: str) -> float:
        return fmean([getattr(group.estimate, part) for group in groups], weights=counts)

    estimate_of_one = Estimate(mean("bytes"), mean("flops"), mean("memory_s"), mean("compute_s"), mean("launch_s"))
    return replace(usual, count=sum(counts), estimate=estimate_of_one, shapes=len(groups))


def without_launches(ceiling: Ceiling) -> Ceiling:
    """The same step if launching cost nothing: what a single kernel for everything could reach at most."""
    return replace(ceiling, launch_s=0.0, seconds=ceiling.seconds - ceiling.launch_s)
