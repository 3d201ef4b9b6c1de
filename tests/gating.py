"""What the tests of the gate share: a tiny model on both sides, prompts and text as random tokens, and one run.

In: a candidate engine. Out: the gate's report on it.

Example::

    gate(engine_of(make(MOE)), "bit-exact").passed                    # True: the same values on both sides
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from reference import Case, Reference, make
from tokenizers import Tokenizer, models, pre_tokenizers

from lynnc.engines.interpreted import Interpreted
from lynnc.quality.divergence import HeldOut
from lynnc.quality.gate import Material, Report, Settings, run_gate
from lynnc.quality.pair import Pair, Timed
from lynnc.quality.prompts import Encoded
from lynnc.quality.thresholds import KINDS, Thresholds
from lynnc.quality.verdict import Check

CONTEXT = 128
MOE, FULL, DENSE = Case("tiny-moe"), Case("tiny-full"), Case("tiny-dense")
SHORT = Settings(tokens=4, sequence=40, followed_prompt=24, followed_steps=4)


@dataclass(frozen=True)
class Expected:
    """What a report must name."""

    section: str
    op: str
    inner: str


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 384, (count,), generator=generator).tolist())


@cache
def material(prompts: int = 3, tokens: int = 81) -> Material:
    """Prompts of 6, 11, ... tokens and a text whose tokens stand for 3 bytes each."""
    encoded = (Encoded(f"prompt-{index}", "prose", random_ids(6 + 5 * index, index)) for index in range(prompts))
    return Material(tuple(encoded), HeldOut("text", random_ids(tokens, 99), (3,) * tokens))


def engine_of(
    reference: Reference, values: Mapping[str, torch.Tensor] | None = None, label: str = "candidate"
) -> Interpreted:
    """An engine on a mapping of its own, by which its runs are known from those of others."""
    return Interpreted(reference.spec, dict(values or reference.values), label, CONTEXT)


def jittered(reference: Reference, size: float) -> Interpreted:
    """Every matrix with relative noise of that size."""
    generator = torch.Generator().manual_seed(7)
    values = {
        name: value * (1 + size * torch.randn(value.shape, generator=generator)) if value.dim() > 1 else value
        for name, value in reference.values.items()
    }
    return engine_of(reference, values)


@cache
def usual_base(case: Case) -> Interpreted:
    """The case's own values; one engine for all tests, since its graphs take a while to build."""
    return engine_of(make(case), label="base")


def gate(
    candidate: Interpreted, kind: str | Thresholds = "fusion", base: Interpreted | None = None, case: Case = MOE
) -> Report:
    """The report on a candidate, against the case's own values if no base is given."""
    pair = Pair(Timed(base or usual_base(case)), Timed(candidate))
    return run_gate(pair, material(), SHORT, KINDS[kind] if isinstance(kind, str) else kind)


def check_of(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.is_ok]


def assert_caught(report: Report, expected: Expected) -> None:
    """FAIL, with section and op."""
    assert not report.passed and report.location is not None, failed(report)
    culprit = report.location.culprit
    assert culprit is not None, report.location
    assert (report.location.section, culprit.op, culprit.inner) == (expected.section, expected.op, expected.inner)


def tiny_thresholds(kind: str, **limits: float) -> Thresholds:
    """Limits for a model of random weights, whose most likely tokens are hardly more likely than the others."""
    return replace(KINDS[kind], **limits)


def byte_tokenizer(path: Path) -> None:
    """A ``tokenizer.json`` with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(path))
