"""What `lynnc run`, `lynnc gate` and `lynnc eval` need of a model: logits of one sequence, wherever they are computed.

In: token ids, some at a time. Out: FP32 logits for each of them, and what the residual stream held after each layer.

Example::

    engine = open_interpreted(Path("models/lynn-mini"))
    logits = engine.append([12, 7, 300])               # FP32 [3, vocabulary]
    engine.append([int(logits[-1].argmax())])          # the sequence goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lynnc.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Trace:
    """Logits FP32 [n, vocabulary] of n tokens, and the residual stream FP32 [layers + 1, n, hidden]: the embedding,
    then what each layer left."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Engine(Protocol):
    """A model with its weights and the states of one sequence. ``label`` names it in reports and ``context`` is the
    most tokens that a sequence may have."""

    spec: ModelSpec
    label: str
    context: int

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""

    def reset(self) -> None:
        """Begins a new sequence."""

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends tokens; FP32 logits [n, vocabulary] of what follows each. OptionError if they do not fit."""

    def trace(self, tokens: Sequence[int]) -> Trace:
        """The same with the residual stream after each layer; slower."""

    def close(self) -> None:
        """Gives its memory back."""
