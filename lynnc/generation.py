"""The tokens that a model makes of a prompt.

In: an engine, a prompt's tokens, and a ``Wish``. Out: tokens, each as soon as it is chosen.

Example::

    for token in generate(engine, [12, 7, 300], Wish(tokens=20, stops=frozenset({2}))):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lynnc.engines.compiled import Compiled
from lynnc.engines.engine import Engine
from lynnc.sampling import GREEDY, Sampler, Sampling


@dataclass(frozen=True, slots=True)
class Wish:
    """How many tokens at most, tokens that end the text, and how tokens are chosen."""

    tokens: int
    stops: frozenset[int] = field(default_factory=frozenset)
    sampling: Sampling = GREEDY


def generate(engine: Engine, prompt: Sequence[int], wish: Wish) -> Iterator[int]:
    """Appends the prompt to the engine's sequence, then gives tokens up to the first of ``stops``, which is given too.

    On a GPU, greedy tokens are chosen there and follow each other without the host. OptionError if the prompt and all
    tokens but the last do not fit the context.
    """
    if isinstance(engine, Compiled) and wish.sampling.is_greedy:
        source = engine.decode(prompt, wish.tokens)
    else:
        source = _chosen(engine, prompt, Sampler(wish.sampling))
    for token in islice(source, wish.tokens):
        yield token
        if token in wish.stops:
            return


def _chosen(engine: Engine, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
    logits = engine.begin(prompt) if isinstance(engine, Compiled) else engine.append(prompt)[-1]
    while True:
        token = sampler.choose(logits)
        yield token
        logits = engine.append([token])[-1]
