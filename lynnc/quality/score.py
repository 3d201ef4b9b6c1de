"""How well a model predicts a text: its surprise at every token, in nats and in bits per byte.

In: an engine, the tokens of a text and the bytes of those that are scored. Out: a ``Score``. The text runs in windows
that overlap, and every token is scored once, with as much context as its window gives; but for the first one, which
nothing precedes.

Example::

    score = score_text(engine, ids, size, Windows(context=512, stride=256))
    score.bits_per_byte
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lynnc.engines.engine import Engine
from lynnc.errors import OptionError

OnScored = Callable[[int, int], None]
"""Called with tokens scored, and all that will be."""
PIECE = 64
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Tokens of a window, and by how many each goes on from the one before."""

    context: int
    stride: int

    def __post_init__(self) -> None:
        if not 1 <= self.stride < self.context:
            raise OptionError(
                f"Windows of {self.context} tokens cannot go on by {self.stride}: give a stride of 1 to "
                f"{self.context - 1}."
            )

    def over(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Begin and end of each window over so many tokens, and the first token in it that is scored there."""
        first = 1
        while first < count:
            begin = 0 if first == 1 else first - (self.context - self.stride)
            end = min(begin + self.context, count)
            yield begin, end, first
            first = end


@dataclass(frozen=True, slots=True)
class Score:
    """``nll`` is the sum, over so many tokens of so many bytes, of the negative logarithm of each one's probability, in
    nats."""

    tokens: int
    bytes: int
    nll: float

    @property
    def mean_nll(self) -> float:
        """Nats a token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """Among how many equally likely tokens the choice is as hard."""
        return math.exp(self.mean_nll)

    @property
    def bits_per_byte(self) -> float:
        """Bits that code a byte of the text; does not depend on the tokenizer."""
        return self.nll / math.log(2) / self.bytes


def score_text(
    engine: Engine, ids: Sequence[int], size: int, windows: Windows, on_scored: OnScored | None = None
) -> Score:
    """Scores a text; ``size`` are the bytes behind its first token. Each window begins a new sequence of the engine.
    OptionError for a text of fewer than two tokens, and for tokens or a context that the engine does not have."""
    if len(ids) < 2:
        raise OptionError(f"A text of {len(ids)} tokens has none to predict: give a longer one.")
    nll = 0.0
    for begin, end, first in windows.over(len(ids)):
        engine.reset()
        for start in range(begin, end - 1, PIECE):
            stop = min(start + PIECE, end - 1)
            logits, skipped = engine.append(ids[start:stop]), max(first - 1 - start, 0)
            nll += surprise(logits[skipped:], ids[start + 1 + skipped : stop + 1])
            if on_scored:
                on_scored(max(stop, first - 1), len(ids) - 1)
    return Score(len(ids) - 1, size, nll)


def surprise(logits: torch.Tensor, following: Sequence[int]) -> float:
    """The sum of the negative logarithms of the probabilities that logits FP32 [n, vocabulary] give to n tokens."""
    chosen = torch.tensor(list(following), dtype=torch.int64)[:, None]
    return float((torch.logsumexp(logits.double(), dim=-1, keepdim=True) - logits.double().gather(1, chosen)).sum())
