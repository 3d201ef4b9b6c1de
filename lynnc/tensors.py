"""What the ops of a graph name: activations, weights and states, with their element types and sizes.

Sizes that differ from step to step are sympy expressions in the rows ``T`` and the context ``S``, all others are
numbers. ``lynnc/ir.py`` has the grammar of a graph's text.

Example::

    str(Tensor("x", DType.BF16, (T, 2048)))           # x: bf16[T, 2048]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import sympy

from lynnc.columnorder import ColumnOrder

T = sympy.Symbol("T", integer=True, positive=True)
"""Rows (tokens) in the step."""
S = sympy.Symbol("S", integer=True, positive=True)
"""Context: positions that a slot's key/value cache holds."""

Dim: TypeAlias = sympy.Expr | int


class DType(StrEnum):
    """Element type of an activation or state."""

    BF16 = "bf16"
    F32 = "f32"
    I32 = "i32"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return 2 if self is DType.BF16 else 4


class Format(StrEnum):
    """How a weight is stored. ``nvfp4``: E2M1 codes, a scale for each 16 columns, one FP32 scale for each part."""

    NVFP4 = "nvfp4"
    NVFP4_FP16 = "nvfp4-fp16"
    FP8 = "fp8"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def is_packed(self) -> bool:
        """Whether values are 4-bit codes in 64-bit words."""
        return self in (Format.NVFP4, Format.NVFP4_FP16)


GROUP = 16
"""Columns that share one NVFP4 block scale."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation of shape ``[rows, *columns]``; a view if ``base`` is set, starting at column ``offset`` of it."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    base: str | None = None
    offset: int = 0
    order: ColumnOrder = ColumnOrder.NATURAL

    @property
    def width(self) -> int:
        """Elements of one row."""
        product = 1
        for columns in self.shape[1:]:
            product *= int(columns)
        return product

    def __str__(self) -> str:
        shape = ", ".join(str(dim) for dim in self.shape)
        view = f" = {self.base}[:, {self.offset}:{self.offset + self.width}]" if self.base else ""
        order = "" if self.order is ColumnOrder.NATURAL else f" in the order of {self.order}"
        return f"{self.name}: {self.dtype}[{shape}]{view}{order}"


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor inside a weight: its name in the checkpoint and the rows it fills (for each expert)."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant matrix ``[experts?, rows, columns]`` or vector ``[rows]``, made of parts stacked along the rows.

    Each part of a packed weight keeps its own global scale: index ``row // part_rows`` of ``[experts *] rows /
    part_rows`` FP32 values, where ``part_rows`` is the greatest common divisor of the parts' rows.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    tensor_class: str
    activations: str = "bf16"
    """Precision in which activations are declared to meet it in prefill."""

    @property
    def experts(self) -> int:
        """Matrices of the weight: 1 but for expert weights."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """Rows of one matrix, or elements of a vector."""
        return self.shape[-2] if len(self.shape) > 1 else self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of one matrix; 1 for a vector."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def part_rows(self) -> int:
        """Rows that are certain to share one global scale."""
        return int(sympy.igcd(*(part.rows for part in self.parts))) if len(self.parts) > 1 else self.rows

    def bytes_by_array(self) -> Mapping[str, int]:
        """Bytes of each array that stores the weight: ``data``, ``scale`` (one for each group), ``global``."""
        elements = self.experts * self.rows * self.columns
        if self.format.is_packed:
            scale_bytes = 1 if self.format is Format.NVFP4 else 2
            scales = self.experts * self.rows * (self.columns // GROUP)
            return {"data": elements // 2, "scale": scales * scale_bytes, "global": self.global_scales * 4}
        if self.format is Format.FP8:
            return {"data": elements, "global": self.global_scales * 4}
        return {"data": elements * (4 if self.format is Format.F32 else 2)}

    @property
    def global_scales(self) -> int:
        """FP32 scales over all experts and parts."""
        return self.experts * (self.rows // self.part_rows)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.bytes_by_array().values())

    def __str__(self) -> str:
        sources = " + ".join(f"{part.source}[{part.rows}]" for part in self.parts)
        declared = f", {self.activations} activations" if self.activations != "bf16" else ""
        return f"{self.name}: {self.format}{list(self.shape)} = {sources}{declared}"


@dataclass(frozen=True, slots=True)
class State:
    """Memory of one sequence (slot) that lives between steps, of shape ``[slot, *shape]``."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of one slot; a function of S for a key/value cache."""
        return sympy.Integer(self.dtype.bytes) * sympy.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[slot, {', '.join(str(dim) for dim in self.shape)}]"
