"""Names of modules as quantisation tools write them, matched against the tensors of a checkpoint.

In: entries of an ignore list, or of a list of quantised layers. Out: whether they mean a module. Tools disagree in
three ways, all of which resolve here: in the prefix (``model.`` or ``model.language_model.``), in the name of
projections that some engines fuse (``qkv_proj`` for q, k and v), and in how an entry is written: a name, a wildcard
(``*.mlp.gate``), or ``re:`` and an expression that matches from the start of the name.

Example::

    names = ModuleNames(("lm_head", "model.layers.0.linear_attn.in_proj_ba", "re:.*mlp.gate$"))
    names.mean("model.language_model.layers.0.linear_attn.in_proj_a")          # True
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from lynnc.errors import WeightError

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""Where tools place the text model, the most specific first."""
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
        "in_proj_qkvzba": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)
"""Projections by the name under which an engine fuses them."""
_FUSED_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {part: tuple(name for name, parts in FUSED.items() if part in parts) for parts in FUSED.values() for part in parts}
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT_IN_ENTRY = re.compile(r"experts.*[\d\[(]")


def split_prefix(name: str) -> tuple[str, str]:
    """A name's prefix, empty for one outside of the text model, and the rest."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return prefix, name.removeprefix(prefix)


class ModuleNames:
    """A list of entries; WeightError for an expression that is none."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(dict.fromkeys(entries))
        self._names = frozenset(split_prefix(entry)[1] for entry in self.entries if not _is_pattern(entry))
        self._patterns = tuple(_compile(entry) for entry in self.entries if _is_pattern(entry))
        # Wildcards are slow against the names of thousands of experts, which they seldom tell apart.
        self._tells_experts_apart = any(_EXPERT_IN_ENTRY.search(entry) for entry in self.entries)
        self._answers: dict[str, bool] = {}

    def mean(self, module: str) -> bool:
        """Whether an entry is this module, by any of its spellings.

        A pattern that matches a projection itself does not mean its neighbours, even if the name under which an engine
        fuses them matches too: ``*in_proj_b*`` is not in_proj_a.
        """
        if not self._tells_experts_apart:
            module = _EXPERT.sub(".experts.0.", module)
        if module not in self._answers:
            fused_experts = _EXPERT.sub(".experts.", module)
            self._answers[module] = self._mean(module) or (fused_experts != module and self._mean(fused_experts))
        return self._answers[module]

    def cover(self, module: str) -> bool:
        """Whether an entry is this module or one that it is part of."""
        while module:
            if self.mean(module):
                return True
            module = module.rpartition(".")[0]
        return False

    def _mean(self, module: str) -> bool:
        fused = dict(_fused_spellings(module))
        if any(split_prefix(name)[1] in self._names for name in (module, *fused)):
            return True
        for pattern in self._patterns:
            if _matches(pattern, module):
                return True
            for name, parts in fused.items():
                if _matches(pattern, name) and not any(_matches(pattern, part) for part in parts):
                    return True
        return False


def _fused_spellings(module: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules that an engine fuses this one into, each with all that it fuses there."""
    parent, _, leaf = module.rpartition(".")
    for name in _FUSED_OF.get(leaf, ()):
        yield f"{parent}.{name}", tuple(f"{parent}.{part}" for part in FUSED[name])


def _matches(pattern: re.Pattern[str], module: str) -> bool:
    prefix, rest = split_prefix(module)
    return any(pattern.match(f"{each}{rest}") for each in (PREFIXES if prefix else ("",)))


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or any(sign in entry for sign in "*?[")


def _compile(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry[3:] if entry.startswith("re:") else fnmatch.translate(entry))
    except re.error as error:
        raise WeightError(
            f"the checkpoint's metadata lists {entry!r}, which is no expression ({error}): correct it there."
        ) from None
