"""Reads and writes plan folders: ``plan.json`` and ``kernels/``, whole or not at all, checked by digest.

In: a plan with its files, or a folder. Out: the folder (by rename), or a ``Plan``. Needs only the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from lynnc.artifact import digest
from lynnc.errors import OutputError, PlanError
from lynnc.plan import SCHEMA, Plan

PLAN_FILE = "plan.json"
TEXT_DEPTH = 4
"""Levels of plan.json that are broken into lines: plan, programs, program, launches."""


def save_plan(plan: Plan, contents: Mapping[str, bytes], folder: Path, force: bool = False) -> None:
    """Writes the folder; ``contents`` are its files by relative path, as ``plan.files`` lists them.

    OutputError if it exists and ``force`` is off, or if it cannot be written. A folder of the same name is replaced
    only after the new one is complete.
    """
    check_output(folder, force)
    text = plan_text(sealed(plan)).encode()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "new"
            _write_files(fresh, {**contents, PLAN_FILE: text})
            if force:
                _swap(fresh, folder, Path(scratch) / "old")
            else:
                _place(fresh, folder, text)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{folder} cannot be written ({why}): choose another --output.") from error


def check_output(folder: Path, force: bool = False) -> None:
    """OutputError if ``save_plan`` would refuse the folder: worth asking before a compilation of minutes."""
    if os.path.lexists(folder) and not force:
        raise _exists(folder)
    if os.path.lexists(folder) and not (folder / PLAN_FILE).is_file():
        raise OutputError(f"{folder} is not a plan folder and will not be replaced: choose another --output.")
    parent = next(above for above in folder.absolute().parents if above.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "no permission to write there" if parent.is_dir() else "not a folder"
        raise OutputError(f"{folder} cannot be written ({parent}: {why}): choose another --output.")


def _exists(folder: Path) -> OutputError:
    return OutputError(f"{folder} exists already: choose another --output or pass --force to replace it.")


def sealed(plan: Plan) -> Plan:
    """The plan with the digest of its own text, so that a change by hand or by accident shows."""
    bare = replace(plan, digest="")
    return replace(plan, digest=digest(plan_text(bare).encode()))


def plan_text(plan: Plan) -> str:
    """``plan.json``: sorted keys, so equal plans are equal bytes; each launch and tensor on a line of its own."""
    return _text(plan, TEXT_DEPTH, "") + "\n"


def _text(value: Any, depth: int, margin: str) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = _shallow(value)
    if depth == 0 or not value or isinstance(value, str) or not isinstance(value, Mapping | tuple):
        return _ENCODER.encode(value)
    inner = margin + " "
    if isinstance(value, tuple):
        lines = [f"{inner}{_text(item, depth - 1, inner)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{margin}]"
    lines = [f"{inner}{_ENCODER.encode(key)}: {_text(value[key], depth - 1, inner)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"


def _shallow(value: Any) -> dict[str, Any]:
    """A record or mapping as a dictionary, its values as they are."""
    if isinstance(value, Mapping):
        return dict(value)
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _names_of(kind)}


_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False, default=_shallow)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _place(fresh: Path, folder: Path, text: bytes) -> None:
    """Puts ``fresh`` where nothing was; another process may have been faster, which is well if its plan is the same."""
    try:
        fresh.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise
        with suppress(OSError):
            if (folder / PLAN_FILE).read_bytes() == text:
                return
        raise _exists(folder) from error


def _swap(fresh: Path, folder: Path, old: Path) -> None:
    """Puts ``fresh`` in the place of ``folder``; another process may be doing the same, and then either one's stays."""
    for _ in range(100):
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            fresh.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            # An interrupt between the two renames must not take the former plan with it.
            if old.exists() and not folder.exists():
                old.rename(folder)
    raise OSError(f"{folder} keeps being replaced by another process")


def load_plan(folder: str | os.PathLike[str], arch: str | None = None) -> Plan:
    """The plan in a folder, with every file checked against its digest.

    PlanError, saying what to run, if it is missing, damaged, of another schema, or, where ``arch`` is given (such as
    ``sm_90a``), made for another architecture.
    """
    path = Path(folder)
    plan = read_plan(path)
    if arch is not None and plan.arch != arch:
        raise PlanError(
            f"{path} is for {plan.arch} and this GPU is {arch}: run `lynnc compile {plan.model_name} "
            f"--target {arch.rstrip('abcdef')}`."
        )
    for name, expected in plan.files.items():
        try:
            data = (path / name).read_bytes()
        except OSError as error:
            raise PlanError(f"{path / name} cannot be read ({error.strerror}): {_again(plan)}.") from error
        if digest(data) != expected:
            raise PlanError(f"{path / name} was changed since it was compiled: {_again(plan)}.")
    return plan


def read_plan(path: Path) -> Plan:
    """``plan.json`` alone, without reading the kernels."""
    try:
        data = json.loads((path / PLAN_FILE).read_text())
    except FileNotFoundError as error:
        what = f"{path} is not a plan folder (no {PLAN_FILE} in it)"
        raise PlanError(f"{what}: name one that `lynnc compile` made.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path / PLAN_FILE} cannot be read ({error}): compile the model again.") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise PlanError(f"{path} has plan schema {schema} and this lynnc reads {SCHEMA}: compile the model again.")
    try:
        plan = typing.cast(Plan, _decode(Plan, data))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path / PLAN_FILE} is damaged ({error}): compile the model again.") from error
    if sealed(plan).digest != plan.digest:
        raise PlanError(f"{path / PLAN_FILE} was changed since it was compiled: {_again(plan)}.")
    return plan


def _again(plan: Plan) -> str:
    return f"run `lynnc compile {plan.model_name} --target {plan.target}` again"


def _decode(kind: Any, data: Any) -> Any:
    """JSON values as a value of ``kind``: a dataclass, a tuple or mapping of such, or a plain value of that type."""
    if type(data) is kind:
        return data
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _decode_record(kind, data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"a list was expected, not {data!r}")
        kinds = [parameters[0]] * len(data) if parameters[-1] is Ellipsis else parameters
        return tuple(_decode(item, value) for item, value in zip(kinds, data, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise TypeError(f"an object was expected, not {data!r}")
        return {key: _decode(parameters[1], value) for key, value in data.items()}
    if origin in (typing.Union, types.UnionType):
        return _decode_union(parameters, data)
    if kind is object:
        return data
    if kind is float and type(data) is int:
        return float(data)
    raise TypeError(f"{kind.__name__} was expected, not {data!r}")


def _decode_record(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not {data!r}")
    hints = _hints(kind)
    if data.keys() != hints.keys():
        raise KeyError(f"{kind.__name__} has other fields: {', '.join(sorted(data.keys() ^ hints.keys()))}")
    return kind(**{name: _decode(hints[name], value) for name, value in data.items()})


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names_of(kind)}


def _decode_union(parameters: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in parameters:
        return None
    for member in parameters:
        if isinstance(member, type) and type(data) is member:
            return data
    raise TypeError(f"one of {', '.join(str(member) for member in parameters)} was expected, not {data!r}")
