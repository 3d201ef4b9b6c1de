"""How far a candidate may be from its base, by the kind of change; what each limit means is in docs/quality.md.

In: the name of a kind, maybe a JSON file of other limits. Out: a frozen ``Thresholds``, or an error that names the file
and the field.

Example::

    read_thresholds("quantisation", Path("mine.json"))      # {"quantisation": {"mean_kl": 0.05}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from lynnc.errors import ModelError
from lynnc.fields import Field, Place, Section, describe
from lynnc.modelfile import read_text


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of one kind of change; each is the most that is allowed, but ``agreement``, the least.

    ``wrong_share`` and ``divergent_share``: prompts whose greedy ids part without, or with, the excuse of a small
    margin. ``margin_multiple``: a margin is small below so many times the measured noise of the logits, or below
    ``resolution`` times the RMS of the base's logits, which BF16 in the hidden state cannot tell from none. ``noise``:
    that noise (RMS) over the RMS of the base's logits, both less their mean; beyond it noise excuses no more.
    ``mean_kl`` and ``max_kl``: nats. ``agreement``: share of positions with the same most likely token.
    ``bits_per_byte``: increase. ``layer_l2``: relative L2 error of the hidden state that one layer may add;
    ``most_l2``: that all may. ``op_l2``: relative L2 error from which on an op is named; it decides nothing.
    """

    kind: str
    wrong_share: float
    divergent_share: float
    margin_multiple: float
    resolution: float
    noise: float
    mean_kl: float
    max_kl: float
    agreement: float
    bits_per_byte: float
    layer_l2: float
    most_l2: float
    op_l2: float

    def band(self, depth: int) -> float:
        """Largest relative L2 error of the hidden state after ``depth`` layers: independent errors add in squares."""
        return min(self.layer_l2 * math.sqrt(max(depth, 1)), self.most_l2)

    def least_cosine(self, depth: int) -> float:
        """Smallest cosine there: an error of the band's size across the hidden state costs half as much as this."""
        return 1.0 - self.band(depth) ** 2


KINDS: Mapping[str, Thresholds] = MappingProxyType(
    {
        kind.kind: kind
        for kind in (
            Thresholds(
                kind="bit-exact",
                wrong_share=0.0,
                divergent_share=0.0,
                margin_multiple=0.0,
                resolution=0.0,
                noise=0.0,
                mean_kl=0.0,
                max_kl=0.0,
                agreement=1.0,
                bits_per_byte=0.0,
                layer_l2=0.0,
                most_l2=0.0,
                op_l2=0.0,
            ),
            Thresholds(
                kind="tuning",
                wrong_share=0.05,
                divergent_share=0.3,
                margin_multiple=6.0,
                resolution=0.005,
                noise=0.03,
                mean_kl=1e-3,
                max_kl=0.15,
                agreement=0.985,
                bits_per_byte=0.001,
                layer_l2=0.01,
                most_l2=0.05,
                op_l2=0.02,
            ),
            Thresholds(
                kind="fusion",
                wrong_share=0.05,
                divergent_share=0.4,
                margin_multiple=6.0,
                resolution=0.005,
                noise=0.04,
                mean_kl=2e-3,
                max_kl=0.3,
                agreement=0.98,
                bits_per_byte=0.002,
                layer_l2=0.015,
                most_l2=0.08,
                op_l2=0.03,
            ),
            Thresholds(
                kind="compilation",
                wrong_share=0.05,
                divergent_share=0.8,
                margin_multiple=6.0,
                resolution=0.005,
                noise=0.1,
                mean_kl=8e-3,
                max_kl=1.0,
                agreement=0.95,
                bits_per_byte=0.008,
                layer_l2=0.02,
                most_l2=0.1,
                op_l2=0.03,
            ),
            Thresholds(
                kind="quantisation",
                wrong_share=0.05,
                divergent_share=1.0,
                margin_multiple=6.0,
                resolution=0.005,
                noise=0.3,
                mean_kl=0.1,
                max_kl=6.0,
                agreement=0.88,
                bits_per_byte=0.03,
                layer_l2=0.12,
                most_l2=0.35,
                op_l2=0.35,
            ),
        )
    }
)
"""Defaults, from the strictest kind to the loosest."""


def read_thresholds(kind: str, path: Path | None = None) -> Thresholds:
    """The limits of a kind, with those that the file gives for it. ModelError for a file that is not understood."""
    if path is None:
        return KINDS[kind]
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the thresholds are not JSON ({error}); correct the file") from None
    found = _FILE.read(content, Place(str(path)))[kind] or {}
    return replace(KINDS[kind], **{name: value for name, value in found.items() if value is not None})


def _limit(value: object, place: Place) -> float:
    """A finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        place.fail(f"is {describe(value)}", "write a finite number of 0 or more")
    return float(value)


_LIMITS = Section(
    {item.name: Field(_limit, None) for item in fields(Thresholds) if item.name != "kind"}, default=None, noun="limit"
)
_FILE = Section(dict.fromkeys(KINDS, _LIMITS), noun="kind of change")
