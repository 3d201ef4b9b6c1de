"""What this machine can compile and run, and why not.

In: the environment's store path. Out: a ``Checkup`` of plain facts. Neither triton nor torch is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from lynnc.errors import TargetError
from lynnc.target import TARGETS, Target, check_tools
from lynnc.tools import Gpu, Tools, detect_gpu, find_tools
from lynnc.version import VERSION


@dataclass(frozen=True, slots=True)
class ToolFact:
    """A program and its version."""

    name: str
    version: str
    path: str


@dataclass(frozen=True, slots=True)
class TargetFact:
    """Whether the tools serve a target, by which assembler, and whether with FP4 MMA; reasons where not."""

    name: str
    assembler: str
    is_served: bool
    reason: str
    has_fp4_mma: bool
    fp4_reason: str


@dataclass(frozen=True, slots=True)
class StoreFact:
    """The folder of compiled kernels and whether it, or a folder to make it in, can be written."""

    path: str
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that ``lynnc doctor`` reports. ``torch_version`` is empty without torch, which only tests need."""

    lynnc: str
    python_version: str
    python_path: str
    triton_version: str
    triton_folder: str
    torch_version: str
    tools: tuple[ToolFact, ...]
    targets: tuple[TargetFact, ...]
    gpu: Gpu | None
    store: StoreFact

    @property
    def can_compile(self) -> bool:
        """Whether there is any target that the tools serve."""
        return any(target.is_served for target in self.targets)


def check_up(store: Path) -> Checkup:
    """Looks at this machine."""
    tools = find_tools()
    return Checkup(
        lynnc=VERSION,
        python_version=platform.python_version(),
        python_path=sys.executable,
        triton_version=tools.triton_version or "",
        triton_folder=str(tools.triton_folder or ""),
        torch_version=_version("torch"),
        tools=tuple(ToolFact(tool.name, tool.version, str(tool.path)) for tool in tools.programs),
        targets=tuple(_target_fact(target, tools) for target in TARGETS.values()),
        gpu=detect_gpu(),
        store=StoreFact(str(store), _is_writable(store)),
    )


def _target_fact(target: Target, tools: Tools) -> TargetFact:
    assembler = tools.ptxas_for(target.capability)
    reason, fp4_reason = _refusal(target, tools, fp4_mma=False), _refusal(target, tools, fp4_mma=True)
    name = f"{assembler.name} {assembler.version}" if assembler else ""
    return TargetFact(target.name, name, not reason, reason, not fp4_reason, fp4_reason)


def _refusal(target: Target, tools: Tools, *, fp4_mma: bool) -> str:
    try:
        check_tools(target, tools, fp4_mma=fp4_mma)
    except TargetError as error:
        return str(error)
    return ""


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _is_writable(folder: Path) -> bool:
    """Whether the folder can be written, or made where it is missing."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
