"""The values of a graph while it runs, as they lie in memory.

In: a graph, weights, states and the rows of a step. Out: a ``Run``, which ops of any kind read and write by the names
of tensors. Views share the memory of their base; a tensor whose columns stand in another order is given and taken in
the natural one.

Example::

    run = Run(graph, weights, states, rows=1)
    run.put("token", torch.tensor([[7]]))
    run.get("token")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lynnc.columnorder import ColumnOrder, columns_at_places, places_of_columns
from lynnc.ir import Graph
from lynnc.tensors import DType, T, Tensor

TORCH_DTYPE = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.I32: torch.int32}

Weights = Mapping[str, torch.Tensor]
"""Dequantised FP32 values by weight name: [rows], [rows, columns] or [experts, rows, columns]."""


@dataclass(slots=True)
class Run:
    """Values while a graph runs, as they lie in memory; a view reads and writes the memory of its base."""

    graph: Graph
    weights: Weights
    states: dict[str, torch.Tensor]
    rows: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, None] = field(default_factory=dict)
    _views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the tensors asked for so far: making one costs as much as an op on one row."""

    def _view(self, name: str) -> torch.Tensor:
        if name not in self._views:
            tensor = self.graph.tensors[name]
            root = self.graph.tensors[tensor.base or name]
            if root.name not in self.values:
                self.values[root.name] = torch.zeros(self._rows(root), root.width, dtype=TORCH_DTYPE[root.dtype])
            self._views[name] = _columns(self.values[root.name], tensor)
        return self._views[name]

    def _rows(self, root: Tensor) -> int:
        rows = root.shape[0]
        if isinstance(rows, int):  # comparing a number with a symbol is slow
            return rows
        return self.rows if rows == T else int(rows.subs(T, self.rows))

    def get(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype and shape, columns in their natural order."""
        return natural(self.graph.tensors[name], self._view(name))

    def f32(self, name: str) -> torch.Tensor:
        """The tensor as FP32."""
        return self.get(name).float()

    def flat(self, name: str) -> torch.Tensor:
        """FP32 ``[T, width]``."""
        return self.get(name).flatten(1).float()

    def index(self, name: str) -> torch.Tensor:
        """An I32 ``[T, 1]`` input as int64 ``[T]``."""
        return self._view(name)[:, 0].long()

    def put(self, name: str, value: torch.Tensor) -> None:
        """Rounds ``value`` to the tensor's dtype and stores it."""
        tensor = self.graph.tensors[name]
        value = in_memory(tensor, value)
        if tensor.base is None and name not in self.values:
            rounded = value.reshape(self._rows(tensor), tensor.width).to(TORCH_DTYPE[tensor.dtype], copy=True)
            self.values[name] = rounded.contiguous()
        else:
            target = self._view(name)
            target.copy_(value.reshape(target.shape))
        self.written[name] = None


def _columns(root: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """A tensor's part ``[rows, *columns]`` of the memory ``[rows, width]`` that it lies in."""
    columns = root if tensor.base is None else root[:, tensor.offset : tensor.offset + tensor.width]
    shaped: torch.Tensor = columns if len(tensor.shape) == 2 else columns.unflatten(1, list(map(int, tensor.shape[1:])))
    return shaped


def natural(tensor: Tensor, values: torch.Tensor) -> torch.Tensor:
    """What lies in a tensor's memory, [rows, *columns], with its columns in their natural order."""
    if tensor.order is ColumnOrder.NATURAL:
        return values
    return values.flatten(1)[:, places_of_columns(tensor.width)].reshape(values.shape)


def in_memory(tensor: Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values [rows, *columns] as they stand in a tensor's memory."""
    if tensor.order is ColumnOrder.NATURAL:
        return values
    return values.flatten(1)[:, columns_at_places(tensor.width)].reshape(values.shape)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """FP32 values rounded to BF16 and back."""
    return x.bfloat16().float()
