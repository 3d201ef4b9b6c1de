"""The names of a model's tensors as one checkpoint spells them.

In: the keys of a checkpoint and the model. Out: the key of each name of the model's graph, and which part of it an
expert is, where a layer's experts are one tensor. A checkpoint has one prefix for its text model, and one layout for
the experts of a layer; anything else is refused.

Example::

    names.find("model.layers.0.mlp.experts.3.up_proj.weight")
    # Place("model.language_model.layers.0.mlp.experts.gate_up_proj", expert=3, half=1)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lynnc.errors import WeightError
from lynnc.model import ModelSpec
from lynnc.runtime.checkpoints.modulenames import PREFIXES
from lynnc.runtime.checkpoints.skipped import skip_reason

HEAD = "lm_head.weight"
EMBED = "embed_tokens.weight"
_TEXT = ("layers.", "embed_tokens.", "norm.")
"""How names of the text model go on behind the prefix."""
_HEAD_PREFIXES = ("", "language_model.", *PREFIXES)
_EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts\.)(?:(\d+)\.)?(gate|up|down|gate_up)_proj(?:\.weight)?")
_FUSED = {"gate": ("gate_up", 0), "up": ("gate_up", 1), "down": ("down", None)}
"""Where an expert's projection stands in the tensors of a layer: gate rows first, then up rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A key, and for an expert in a tensor of all experts its number, and which half of its rows (None: all)."""

    key: str
    expert: int | None = None
    half: int | None = None


class TextNames:
    """Finds names; WeightError for a checkpoint that mixes prefixes, or layouts of experts in a layer."""

    def __init__(self, folder: Path, keys: Iterable[str], spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._keys = frozenset(key for key in keys if skip_reason(key) is None)
        self.prefix = self._find_prefix()
        self.head = self._find_head()
        self._fused: dict[tuple[int, str], str] = {}
        self._numbers: dict[int, set[int]] = {}
        self._find_experts()

    def find(self, name: str) -> Place:
        """The place of a name of the graph; WeightError if the checkpoint lacks it."""
        rest = name.removeprefix(self._spec.tensor_prefix)
        if name == HEAD:
            return Place(self._head_key())
        expert = _EXPERT.fullmatch(rest)
        if expert is not None and expert[3] is not None and (fused := self._fused_place(expert)):
            return fused
        key = f"{self.prefix}{rest}"
        if key not in self._keys:
            raise WeightError(f"{self._folder} lacks {key}{self._hint(expert)}.")
        return Place(key)

    def rest(self, key: str) -> str:
        """A key of the text model without its prefix."""
        return HEAD if key == self.head else key.removeprefix(self.prefix)

    def expert_numbers(self, layer: int) -> frozenset[int] | None:
        """The experts that have tensors of their own in a layer; None for one that is stored as a whole."""
        found = self._numbers.get(layer)
        return frozenset(found) if found is not None else None

    def fused_keys(self, layer: int) -> tuple[str, ...]:
        """The tensors that hold all experts of a layer."""
        return tuple(key for (found, _), key in self._fused.items() if found == layer)

    def _find_prefix(self) -> str:
        found: dict[str, dict[str, str]] = {}
        for key in self._keys:
            for prefix in dict.fromkeys((*PREFIXES, self._spec.tensor_prefix)):
                if key.startswith(prefix) and key.removeprefix(prefix).startswith(_TEXT):
                    found.setdefault(prefix, {})[key.removeprefix(prefix)] = key
                    break
        if not found:
            some = ", ".join(sorted(self._keys)[:3])
            raise WeightError(f"{self._folder} holds no text model lynnc knows, but {some}: name another checkpoint.")
        if len(found) > 1:
            self._refuse_prefixes(found)
        return next(iter(found))

    def _refuse_prefixes(self, found: Mapping[str, Mapping[str, str]]) -> None:
        first, second, *_ = found.values()
        twice = sorted(first.keys() & second.keys())
        what = "the same tensor as" if twice else "tensors as"
        shown = (first[twice[0]], second[twice[0]]) if twice else (min(first.values()), min(second.values()))
        raise WeightError(f"{self._folder} holds {what} {shown[0]} and {shown[1]}: remove those of one prefix.")

    def _find_head(self) -> str | None:
        found = [f"{prefix}{HEAD}" for prefix in _HEAD_PREFIXES if f"{prefix}{HEAD}" in self._keys]
        if len(found) > 1:
            raise WeightError(f"{self._folder} holds {found[0]} and {found[1]}: remove one of the two.")
        return found[0] if found else None

    def _head_key(self) -> str:
        if self.head is None:
            raise WeightError(
                f"{self._folder} lacks {HEAD} and the model does not tie it to the embeddings: copy all shards, or set "
                "tied_embeddings (tie_word_embeddings in config.json) if they are one tensor."
            )
        return self.head

    def _find_experts(self) -> None:
        for key in self._keys:
            found = _EXPERT.fullmatch(key.removeprefix(self.prefix))
            if found is None:
                continue
            layer, number, part = int(found[2]), found[3], found[4]
            if number is not None:
                self._numbers.setdefault(layer, set()).add(int(number))
            elif (layer, part) in self._fused:
                raise WeightError(f"{self._folder} holds {self._fused[layer, part]} and {key}: remove one of the two.")
            else:
                self._fused[layer, part] = key
        for (layer, _), key in self._fused.items():
            if layer in self._numbers:
                raise WeightError(
                    f"{self._folder} holds the experts of layer {layer} twice, in {key} and one by one: remove one."
                )

    def _fused_place(self, expert: re.Match[str]) -> Place | None:
        part, half = _FUSED[expert[4]]
        key = self._fused.get((int(expert[2]), part))
        return None if key is None else Place(key, int(expert[3]), half)

    def _hint(self, expert: re.Match[str] | None) -> str:
        """What a missing tensor may be due to."""
        numbers = self.expert_numbers(int(expert[2])) if expert is not None else None
        if expert is not None and numbers is not None:
            return f", and has {len(numbers)} experts in layer {expert[2]}: copy all shards, or use its own model file"
        return ": copy all of its shards, or use the model file of this checkpoint"
