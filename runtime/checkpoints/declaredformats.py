"""What the metadata says of each module, compared with what is stored.

In: ``Recognised``. Out: a ``WeightError`` where the two contradict each other, and notes where they merely differ: the
stored bits always count, so a difference changes no value.

Example::

    DeclaredFormats(recognised).check(stored, "model.layers.3.self_attn.q_proj")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lynnc.errors import WeightError
from lynnc.runtime.checkpoints.declared import ANY_LINEAR, Recognised
from lynnc.runtime.checkpoints.modulenames import ModuleNames, split_prefix
from lynnc.runtime.checkpoints.stored import Stored
from lynnc.runtime.checkpoints.tensorclasses import LINEAR_CLASSES, tensor_class
from lynnc.tensors import Format


class DeclaredFormats:
    """The declared format of each module, and the list of those that are not quantised."""

    def __init__(self, recognised: Recognised) -> None:
        self._ignored = ModuleNames(recognised.ignored)
        self._any_linear = recognised.declared.get(ANY_LINEAR)
        named = {name: fmt for name, fmt in recognised.declared.items() if name != ANY_LINEAR}
        self._named = {
            fmt: ModuleNames(name for name in named if named[name] is fmt) for fmt in dict.fromkeys(named.values())
        }
        self._says_something = bool(recognised.declared)

    def check(self, stored: Stored, module: str) -> None:
        """WeightError for quantised values of a module that is declared unquantised, or of another format."""
        if not stored.is_quantised or not self._says_something:
            return
        if self._ignored.mean(module):
            raise WeightError(
                f"{stored.data} is stored as {stored.format}, but the checkpoint's metadata lists {module} among the "
                "modules that are not quantised: correct the list, or use a checkpoint that agrees with itself."
            )
        declared = self._format(module)
        if declared not in (None, stored.format):
            raise WeightError(
                f"{stored.data} is stored as {stored.format}, but the checkpoint's metadata declares {module} as "
                f"{declared}: correct the metadata, or use a checkpoint that agrees with itself."
            )

    def notes(self, modules: Iterable[tuple[str, Stored]]) -> Iterator[str]:
        """A line for each tensor class with modules that are declared quantised and stored plain, or the reverse."""
        plain: dict[str, list[str]] = {}
        quantised: dict[str, list[str]] = {}
        for module, stored in modules:
            found = tensor_class(split_prefix(module)[1])
            if found is None or not self._says_something:
                continue
            declared = self._format(module)
            if declared is None and stored.is_quantised:
                quantised.setdefault(found, []).append(module)
            elif declared is not None and not stored.is_quantised and not self._ignored.cover(module):
                plain.setdefault(found, []).append(module)
        for found, names in plain.items():
            yield f"{found}: {len(names)} modules are declared quantised but stored plain, such as {names[0]}"
        for found, names in quantised.items():
            yield f"{found}: {len(names)} modules are stored quantised but not declared so, such as {names[0]}"

    def _format(self, module: str) -> Format | None:
        """The format that is declared for a module; one that is named goes before the class of all projections."""
        for fmt, names in self._named.items():
            if names.cover(module):
                return fmt
        return self._any_linear if tensor_class(split_prefix(module)[1]) in LINEAR_CLASSES else None
