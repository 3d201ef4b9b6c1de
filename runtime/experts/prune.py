"""Chooses the experts to keep, from how often and how strongly a text's tokens chose each.

In: ``Routing`` and ``Rules``: how many experts stay in all, which layers are not cut, how few a layer may keep. Out:
the kept experts of each layer, ascending. Needs no torch.

An expert's score is what its layer would lose: its share of the layer's choices, its share of the layer's gate mass, or
the mean of both. Shares make layers comparable. Choices alone overrate experts that many tokens choose with next to no
weight; gate mass alone overrates the few tokens that an expert has to itself; the mean needs both to be small.

The lowest scores of all layers together go first, except where a layer is protected or down to its minimum. No other
choice of as many experts under these rules keeps a higher sum of scores. Of equal scores the later layer's goes first,
and in a layer the expert of the higher number.

Example::

    kept = choose_experts(routing, Rules(budget=9230, minimum=8, protected=frozenset({0, 1})))
    cuts(routing, kept)[5].gate_mass              # 0.993: the share of layer 5's gate mass that stays
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum

from lynnc.errors import OptionError
from lynnc.runtime.experts.expertspec import Kept
from lynnc.runtime.experts.routingfile import LayerRouting, Routing


class Measure(StrEnum):
    """What an expert is scored by."""

    BOTH = "both"
    GATE_MASS = "gate-mass"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Rules:
    """``budget`` experts stay in all layers together; ``protected`` layers keep all of theirs, and every other one at
    least ``minimum``, or all if it has fewer."""

    budget: int
    minimum: int
    protected: frozenset[int] = frozenset()
    measure: Measure = Measure.BOTH


@dataclass(frozen=True, slots=True)
class Cut:
    """Experts before and after, and the shares of gate mass and of choices that stay, of a layer or of all."""

    experts: int
    kept: int
    gate_mass: float
    choices: float


def choose_experts(routing: Routing, rules: Rules) -> Kept:
    """Exactly ``rules.budget`` experts; see the module's docstring. OptionError for rules that cannot be kept."""
    _check_rules(routing, rules)
    least = _least(routing, rules)
    _check_budget(routing, rules, least)
    kept = [set(range(experts)) for experts in routing.experts]
    excess = sum(routing.experts) - rules.budget
    for _, layer, expert in _worst_first(routing, rules.measure):
        if not excess:
            break
        if len(kept[layer]) > least[layer]:
            kept[layer].remove(expert)
            excess -= 1
    return tuple(tuple(sorted(ids)) for ids in kept)


def scores(layer: LayerRouting, measure: Measure) -> tuple[float, ...]:
    """The score of each expert of a layer: a share between 0 and 1."""
    choices, mass = sum(layer.counts), fsum(layer.gate_mass)
    by_count = [chosen / choices for chosen in layer.counts]
    by_mass = [weight / mass for weight in layer.gate_mass]
    if measure is Measure.COUNT:
        return tuple(by_count)
    if measure is Measure.GATE_MASS:
        return tuple(by_mass)
    return tuple((a + b) / 2 for a, b in zip(by_count, by_mass, strict=True))


def cuts(routing: Routing, kept: Kept) -> tuple[Cut, ...]:
    """What the choice does to each layer."""
    return tuple(_cut((layer,), (ids,)) for layer, ids in zip(routing.layers, kept, strict=True))


def total_cut(routing: Routing, kept: Kept) -> Cut:
    """What the choice does to all layers together."""
    return _cut(routing.layers, kept)


def _cut(layers: Sequence[LayerRouting], kept: Kept) -> Cut:
    pairs = list(zip(layers, kept, strict=True))
    choices = sum(layer.counts[expert] for layer, ids in pairs for expert in ids)
    mass = fsum(layer.gate_mass[expert] for layer, ids in pairs for expert in ids)
    return Cut(
        experts=sum(layer.experts for layer in layers),
        kept=sum(map(len, kept)),
        gate_mass=mass / fsum(weight for layer in layers for weight in layer.gate_mass),
        choices=choices / sum(sum(layer.counts) for layer in layers),
    )


def _worst_first(routing: Routing, measure: Measure) -> list[tuple[float, int, int]]:
    ranked = [
        (score, layer, expert)
        for layer, facts in enumerate(routing.layers)
        for expert, score in enumerate(scores(facts, measure))
    ]
    return sorted(ranked, key=lambda entry: (entry[0], -entry[1], -entry[2]))


def _least(routing: Routing, rules: Rules) -> tuple[int, ...]:
    """The fewest experts that each layer may keep."""
    return tuple(
        experts if layer in rules.protected else min(experts, rules.minimum)
        for layer, experts in enumerate(routing.experts)
    )


def _check_rules(routing: Routing, rules: Rules) -> None:
    last = len(routing.layers) - 1
    for layer in sorted(rules.protected):
        if not 0 <= layer <= last:
            raise OptionError(f"Layer {layer} cannot be protected: {routing.file} has layers 0 to {last}.")
    if rules.minimum < routing.top_k:
        raise OptionError(
            f"A minimum of {rules.minimum} experts is too small: a token selects {routing.top_k} in each layer, "
            f"so keep at least {routing.top_k}."
        )


def _check_budget(routing: Routing, rules: Rules, least: Sequence[int]) -> None:
    total = sum(routing.experts)
    if rules.budget > total:
        raise OptionError(
            f"A budget of {rules.budget:,} experts exceeds the {total:,} that {routing.file} counts: "
            f"keep at most {total:,}."
        )
    if rules.budget < sum(least):
        protected = sum(routing.experts[layer] for layer in rules.protected)
        raise OptionError(
            f"A budget of {rules.budget:,} experts is too small: {len(rules.protected)} protected layers keep "
            f"{protected:,} and {len(least) - len(rules.protected)} others at least {sum(least) - protected:,} "
            f"({rules.minimum} in each): keep at least {sum(least):,}, or protect less."
        )
