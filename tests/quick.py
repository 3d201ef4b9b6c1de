"""Triton's interpreter without what it repeats: three to seven times faster, the same arithmetic.

For each call of a function inside a kernel it patches the language again, for each integer sum it computes a second one
to find overflow and then does not look at it (assertions are off), and for each value it makes its type anew. Here a
launch patches once, sums are not doubled, equal types are one object, and one text is read once in a process.

Example::

    with quick_interpreter():
        kernel[(8,)](x, out)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter

from lynnc import simulate


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Until the end of the block, launches are quick."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lynnc-tests-")))
        read = cache(lambda text: import_source(text, folder))
        for owner, name, value in (
            (builder, "options", replace(builder.options, sanitize_overflow=False)),
            (interpreter, "_patch_lang", _PatchedOnce(interpreter._patch_lang)),
            (interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype)),
            (semantic, "binary_op_type_checking_impl", _settled(semantic.binary_op_type_checking_impl, semantic)),
            (semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value)),
            (tl.block_type, "__init__", _fill_block_type(tl.block_type.__init__)),
            (tl.block_type, "with_element_ty", _with_element_type),
            (tl.block_type, "to_ir", lambda block, _builder: block),
            (tl.tensor, "__init__", _fill_tensor),
            (simulate, "import_source", lambda text, _folder: read(text)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


import_source = simulate.import_source


class _PatchedOnce:
    """Stands for ``interpreter._patch_lang``: patches at the launch, does nothing inside it."""

    def __init__(self, patch_language: Any) -> None:
        self.patch_language = patch_language
        self.scope: Any = None

    def __call__(self, _function: Any) -> _PatchedOnce | _Nothing:
        if self.scope is not None:
            return _Nothing()
        self.scope = self.patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        return self

    def restore(self) -> None:
        self.scope.restore()
        self.scope = None


class _Nothing:
    def restore(self) -> None:
        pass


def _remembered(numpy_type: Any) -> Any:
    """``interpreter._get_np_dtype`` makes a table of all types at each call."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = numpy_type(kind)
        return found

    return find


def _settled(settle: Any, semantic: Any) -> Any:
    """Two tensors of one of the usual types keep it, so there is nothing to cast."""

    def quick(left: Any, right: Any, *arguments: Any, **options: Any) -> Any:
        is_usual = isinstance(left, tl.tensor) and left.dtype.name in ("fp32", "int32", "int64")
        if is_usual and isinstance(right, tl.tensor) and right.dtype.name == left.dtype.name:
            return semantic.broadcast_impl_value(left, right)
        return settle(left, right, *arguments, **options)

    return quick


def _broadcast(broadcast: Any) -> Any:
    """Blocks of one shape, which nearly all are, need no search for a common one."""

    def quick(left: Any, right: Any) -> Any:
        first, second = left.type, right.type
        if first.is_block() and second.is_block() and first.shape.values == second.shape.values:
            return left, right
        return broadcast(left, right)

    return quick


def _fill_block_type(fill: Any) -> Any:
    known: dict[tuple[int, ...], Any] = {}

    def quick(block: Any, element: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (id(element), *sizes)  # what is known keeps its element, so no other gets that number
        if key in known:
            block.__dict__.update(known[key].__dict__)
        else:
            fill(block, element, shape)
            known[key] = block

    return quick


def _with_element_type(block: Any, element: Any) -> Any:
    known = block.__dict__.setdefault("of_element", {})
    found = known.get(id(element))
    if found is None:
        found = known[id(element)] = tl.block_type(element, block.shape)
        found.of_element = known
    return found


def _fill_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """``tl.tensor.__init__`` with the shape of an earlier tensor of that type."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    if "as_constants" not in kind.__dict__:
        shape = kind.shape.values if kind.is_block() else []
        count = 1
        for size in shape:
            count *= size
        kind.as_constants = tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(count)
    tensor.shape, tensor.numel = kind.as_constants
