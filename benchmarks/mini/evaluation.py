"""What a model of this folder is worth on the held-out text, by ``transformers`` and in BF16 arithmetic.

In: a model and its multi-token prediction head. Out: an ``Evaluation``.

Example::

    with Recorder(model, head) as recorder:
        evaluate(model, head, recorder, HeldOut.of(text, tokenizer, 1024, "cuda")).bits_per_byte
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from network import MtpHead, Recorder
from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Tokens of a text, its length in bytes, and how many tokens are read at once."""

    tokens: torch.Tensor
    bytes: int
    window: int

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer, window: int, device: str) -> HeldOut:
        """A text on a device."""
        return cls(torch.tensor(tokenizer.encode(text).ids, device=device), len(text.encode()), window)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``mtp_agreement`` is how often the head's guess of the second next token is the model's own greedy choice: the
    share of drafted tokens that speculation would accept."""

    bits_per_byte: float
    mtp_agreement: float


@torch.no_grad()
def evaluate(model: Any, head: MtpHead, recorder: Recorder, held: HeldOut) -> Evaluation:
    """Windows stand alone, each behind token 0, which ends a document."""
    bits, guesses, agreed = 0.0, 0, 0
    for window in held.tokens.split(held.window):
        tokens = F.pad(window[None], (1, 0))
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits, second = both_logits(model, head, recorder, tokens)
        bits += float(cross_entropy(logits, tokens[:, 1:], "sum")) / math.log(2)
        chosen, guessed = logits.argmax(-1)[0], second.argmax(-1)[0]
        agreed += int((guessed[:-1] == chosen[1:]).sum())
        guesses += len(chosen) - 1
    recorder.take_routers()
    return Evaluation(bits / held.bytes, agreed / guesses)


def both_logits(
    model: Any, head: MtpHead, recorder: Recorder, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the next token and the one after it, for all [B, n + 1] ``tokens`` but the last."""
    first = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return first, head(model, recorder.hidden, tokens[:, 1:])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """In FP32, over all positions."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
