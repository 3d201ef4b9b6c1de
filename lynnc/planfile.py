"""Reads and writes plan folders: ``plan.json`` and ``kernels/``, whole or not at all, checked by digest.

In: a plan with its files, or a folder. Out: the folder (by rename), or a ``Plan``. Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import tempfile
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from lynnc.artifact import digest
from lynnc.errors import OutputError, PlanError
from lynnc.jsonform import decode, encode, shallow
from lynnc.outputfolder import check_folder, folder_exists, settled, swap_folder
from lynnc.plan import SCHEMA, KernelEntry, Plan

PLAN_FILE = "plan.json"
TEXT_DEPTH = 4
"""Levels of plan.json that are broken into lines: plan, programs, program, launches."""


def save_plan(plan: Plan, contents: Mapping[str, bytes], folder: Path, force: bool = False) -> None:
    """Writes the folder; ``contents`` are its files by relative path, as ``plan.files`` lists them.

    OutputError if it exists and ``force`` is off, or if it cannot be written. A folder of the same name is replaced
    only after the new one is complete.
    """
    folder = settled(folder)
    check_output(folder, force)
    text = plan_text(sealed(plan)).encode()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "new"
            _write_files(fresh, {**contents, PLAN_FILE: text})
            if force:
                swap_folder(fresh, folder)
            else:
                _place(fresh, folder, text)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{folder} cannot be written ({why}): choose another --output.") from error


def check_output(folder: Path, force: bool = False) -> None:
    """OutputError if ``save_plan`` would refuse the folder: worth asking before a compilation of minutes."""
    check_folder(settled(folder), PLAN_FILE, "plan", force)


def sealed(plan: Plan) -> Plan:
    """The plan with the digest of its own text, so that a change by hand or by accident shows."""
    bare = replace(plan, digest="")
    return replace(plan, digest=digest(plan_text(bare).encode()))


def plan_text(plan: Plan) -> str:
    """``plan.json``: sorted keys, so equal plans are equal bytes; each launch and tensor on a line of its own."""
    return _text(plan, TEXT_DEPTH, "") + "\n"


def _text(value: Any, depth: int, margin: str) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = shallow(value)
    if depth == 0 or not value or isinstance(value, str) or not isinstance(value, Mapping | tuple):
        return encode(value)
    inner = margin + " "
    if isinstance(value, tuple):
        lines = [f"{inner}{_text(item, depth - 1, inner)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{margin}]"
    lines = [f"{inner}{encode(key)}: {_text(value[key], depth - 1, inner)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"


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
        raise folder_exists(folder) from error


def kernel_file(entry: KernelEntry, suffix: str) -> str:
    """Relative path of one of a kernel's files: ``cubin``, ``py`` (rendered source) or ``ptx``."""
    return f"kernels/{entry.name}-{entry.key[:16]}.{suffix}"


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
        plan = typing.cast(Plan, decode(Plan, data))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path / PLAN_FILE} is damaged ({error}): compile the model again.") from error
    if sealed(plan).digest != plan.digest:
        raise PlanError(f"{path / PLAN_FILE} was changed since it was compiled: {_again(plan)}.")
    return plan


def _again(plan: Plan) -> str:
    return f"run `lynnc compile {plan.model_name} --target {plan.target}` again"
