"""Base and candidate side by side: the same tokens through both, with the time that each took.

In: two engines of models that can be compared. Out: a ``Pair``, and logits of both for the same tokens.

Example::

    pair = Pair(Timed(base), Timed(candidate))
    pair.reset()
    base_logits, candidate_logits = pair.read([5, 17, 300])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from lynnc.engines.engine import Engine
from lynnc.errors import OptionError
from lynnc.model import ModelSpec

PIECE = 64
"""Tokens whose logits are held at once."""

OnProgress = Callable[[int, int, str], None]
"""Called with units done, units in all, and what is next."""


@runtime_checkable
class HasMemory(Protocol):
    """An engine that knows what it holds."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, states and workspace."""


@runtime_checkable
class HasPrefill(Protocol):
    """An engine that reads a prompt by other machine code than single tokens."""

    def begin(self, prompt: Sequence[int]) -> torch.Tensor:
        """Appends a prompt; FP32 logits [vocabulary] of what follows its last token."""


@dataclass(slots=True)
class Timed:
    """An engine, and how long its steps took: prompts by token, single tokens one by one."""

    engine: Engine
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: list[float] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of tokens of a prompt."""
        logits, seconds = self._append(tokens)
        self.prompt_tokens += len(tokens)
        self.prompt_seconds += seconds
        return logits

    def begin(self, prompt: Sequence[int]) -> torch.Tensor:
        """Logits [1, vocabulary] of what follows a prompt, which is read in the engine's own way."""
        engine = self.engine
        if not isinstance(engine, HasPrefill):
            return [self.read(piece) for piece in pieces_of(prompt)][-1][-1:]
        logits, seconds = timed(lambda: engine.begin(prompt))
        self.prompt_tokens += len(prompt)
        self.prompt_seconds += seconds
        return logits[None]

    def step(self, token: int) -> torch.Tensor:
        """Logits of one token that goes on with the sequence."""
        logits, seconds = self._append([token])
        self.steps.append(seconds)
        return logits

    def _append(self, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
        return timed(lambda: self.engine.append(tokens))


def timed(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What is computed, and the seconds until it is there."""
    started = time.perf_counter()
    logits = compute()
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits, time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines whose logits and hidden states can be compared."""

    base: Timed
    candidate: Timed

    def reset(self) -> None:
        """Begins a new sequence in both."""
        self.base.engine.reset()
        self.candidate.engine.reset()

    def read(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of both on the base's device: FP32 [n, vocabulary]."""
        base = self.base.read(tokens)
        return base, self.candidate.read(tokens).to(base.device)

    @property
    def has_prefill(self) -> bool:
        """Whether a side reads prompts by machine code of their own."""
        return isinstance(self.base.engine, HasPrefill) or isinstance(self.candidate.engine, HasPrefill)

    def begin(self, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [1, vocabulary] of both behind a prompt, which each reads in its own way."""
        base = self.base.begin(prompt)
        return base, self.candidate.begin(prompt).to(base.device)

    def step(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for one token that follows."""
        base = self.base.step(token)
        return base, self.candidate.step(token).to(base.device)


def check_alike(base: ModelSpec, candidate: ModelSpec) -> None:
    """OptionError unless both have one vocabulary, and layers and hidden states that correspond."""
    facts = (
        ("a vocabulary of", base.vocabulary, candidate.vocabulary),
        ("a hidden size of", base.hidden, candidate.hidden),
        ("the layers", base.layers, candidate.layers),
    )
    for what, ours, theirs in facts:
        if ours != theirs:
            shown = [", ".join(value) if isinstance(value, tuple) else f"{value:,}" for value in (ours, theirs)]
            raise OptionError(
                f"The base {base.name} has {what} {shown[0]} and the candidate {candidate.name} {shown[1]}: compare "
                "two forms of one model."
            )


def pieces_of(tokens: Sequence[int], size: int = PIECE) -> Iterator[Sequence[int]]:
    """The tokens, at most so many at a time."""
    for first in range(0, len(tokens), size):
        yield tokens[first : first + size]


def is_finite(logits: torch.Tensor) -> torch.Tensor:
    """Rows [n] without NaN and infinity."""
    return logits.isfinite().all(dim=-1)
