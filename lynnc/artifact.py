"""One compiled kernel: machine code and what a launch must know about it.

In: what the compiler process reports. Out: a frozen ``Artifact`` with a JSON form; its cubin and PTX are files that are
read when asked for.

Example::

    artifact.symbol, artifact.threads, artifact.shared_bytes     # "kernel", 128, 4096
    [parameter.type for parameter in artifact.parameters]        # ["*bf16", "i32", "*i8", "*i8"]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lynnc.errors import CompileError

ARTIFACT_SCHEMA = 1
"""Grows when the record or the way of compiling changes; part of every key."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter. Triton appends ``hidden`` ones, scratch pointers that are null when their size is 0."""

    name: str
    type: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Artifact:
    """A cubin with its launch facts.

    Scratch sizes are bytes a block, ``spill_bytes`` stack and local memory of a thread. ``parameters`` are in cubin
    order and hold what a launch passes: no constants, but the hidden trailing pointers.
    """

    key: str
    symbol: str
    arch: str
    num_warps: int
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    global_scratch_bytes: int
    global_scratch_align: int
    profile_scratch_bytes: int
    profile_scratch_align: int
    pdl: bool
    parameters: tuple[Parameter, ...]
    triton: str
    ptxas: str
    cubin_sha256: str
    ptx_sha256: str
    folder: Path = field(default=Path(), compare=False, repr=False)

    @property
    def cubin_path(self) -> Path:
        """The machine code."""
        return self.folder / f"{self.key}.cubin"

    @property
    def ptx_path(self) -> Path:
        """The PTX that ptxas read."""
        return self.folder / f"{self.key}.ptx"

    def read_cubin(self) -> bytes:
        """The machine code; CompileError if it was removed or changed since it was looked up."""
        try:
            data = self.cubin_path.read_bytes()
        except OSError:
            data = b""
        if digest(data) != self.cubin_sha256:
            raise CompileError(f"{self.cubin_path} was removed or changed during this command: run it again.")
        return data

    def to_json(self) -> dict[str, object]:
        """Plain values for ``json.dumps``; the same for the same kernel wherever it lies."""
        values = asdict(self)
        del values["folder"]
        return {"schema": ARTIFACT_SCHEMA, **values, "parameters": [asdict(p) for p in self.parameters]}

    @staticmethod
    def from_json(values: object) -> Artifact:
        """The inverse of ``to_json``; ValueError for another schema, missing or extra fields and wrong types."""
        if not isinstance(values, dict) or values.get("schema") != ARTIFACT_SCHEMA:
            raise ValueError("not an artifact of this schema")
        data = _checked({name: value for name, value in values.items() if name != "schema"}, ARTIFACT_FIELDS)
        rows = [_checked(row, PARAMETER_FIELDS) for row in data.pop("parameters")]
        return Artifact(parameters=tuple(Parameter(**row) for row in rows), **data)


ARTIFACT_FIELDS: Mapping[str, str] = MappingProxyType(
    {f.name: str(f.type) for f in fields(Artifact) if f.name != "folder"}
)
PARAMETER_FIELDS: Mapping[str, str] = MappingProxyType({f.name: str(f.type) for f in fields(Parameter)})
CLASSES: Mapping[str, type] = MappingProxyType({"str": str, "int": int, "bool": bool})


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _checked(values: object, expected: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(values, dict) or values.keys() != expected.keys():
        raise ValueError("artifact fields are missing or unknown")
    for name, kind in expected.items():
        if type(values[name]) is not CLASSES.get(kind, list):
            raise ValueError(f"artifact field {name} has the wrong type")
    return dict(values)
