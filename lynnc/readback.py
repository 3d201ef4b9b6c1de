"""What a step leaves in GPU memory, as torch tensors, by the names of its graph.

In: an executor, and a program of its plan. Out: a ``Readback``: the program, its graph, and the values of
tensors, states and weights as they are now. Needs torch; the graph is built again from the plan's model and options, so
the plan must have been compiled by this version of lynnc.

Example::

    step = readback_of(executor, "decode/2", rows=2)
    executor.launch(step.program, rows_of([7, 8], executor.lengths[0]))
    step.tensor("logits")                               # FP32 [2, vocabulary]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lynnc.compiler import graph_of
from lynnc.errors import PlanError
from lynnc.ir import Graph
from lynnc.plan import Program
from lynnc.runtime.executor import Executor
from lynnc.runtime.tensors import DeviceTensor
from lynnc.runtime.weights.arrays import PackedWeight, unpack_weight
from lynnc.stepvalues import TORCH_DTYPE, in_memory, natural
from lynnc.tensors import DType, T, Weight


@dataclass(frozen=True, slots=True)
class Readback:
    """A program in GPU memory, and its graph. Tensors share memory: one is what its name says from the launch
    that writes it to the last one that reads it."""

    executor: Executor
    program: Program
    graph: Graph
    rows: int
    places: Mapping[str, int] | None = None
    """Where the program's tensors lie, if not in the executor's workspace."""

    def address(self, name: str) -> int:
        """Of a tensor with memory of its own."""
        return (self.places or self.executor.memory.addresses.of(self.program))[name]

    def tensor_rows(self, name: str) -> int:
        """Rows of a tensor in this step."""
        rows = self.graph.tensors[name].shape[0]
        return rows if isinstance(rows, int) else int(rows.subs(T, self.rows))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype and shape, in the natural order of columns, or those of its base that it views."""
        tensor = self.graph.tensors[name]
        base = self.graph.tensors[tensor.base or name]
        whole = self._download(self.address(base.name), base.dtype, (self.tensor_rows(base.name), base.width))
        columns = whole[:, tensor.offset : tensor.offset + tensor.width]
        shaped: torch.Tensor = columns.unflatten(1, [int(size) for size in tensor.shape[1:]])
        return natural(tensor, shaped)

    def write(self, name: str, values: torch.Tensor) -> None:
        """Fills the first rows of a tensor with memory of its own; values [n, ...] are rounded to its dtype."""
        tensor = self.graph.tensors[name]
        stored = in_memory(tensor, values).detach().cpu().to(TORCH_DTYPE[tensor.dtype]).contiguous()
        device = self.executor.device
        device.upload(self.address(name), stored.data_ptr(), stored.nbytes)
        device.synchronize()

    def state(self, name: str) -> torch.Tensor:
        """A state of all slots."""
        tensor = self.executor.tensor(name)
        return self._download(tensor.address, DType(tensor.dtype), tensor.shape)

    def weight(self, weight: Weight, device: str = "cpu") -> torch.Tensor:
        """FP32 values of a weight from its arrays, on a device of torch."""
        arrays: dict[str, torch.Tensor] = {}
        for array in self.executor.plan.weights[weight.name].arrays:
            address = self.executor.memory.addresses.weights[weight.name, array.array]
            data = bytearray(array.bytes)
            self.executor.memory.read_into(data, address)
            stored = torch.frombuffer(data, dtype=_STORED[array.dtype]).reshape(array.shape)
            arrays[array.array] = stored.to(device)
        return unpack_weight(PackedWeight(weight, arrays))

    def _download(self, address: int, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        values = DeviceTensor("", dtype.value, shape, address, self.executor.device).read()
        return torch.frombuffer(values, dtype=TORCH_DTYPE[dtype]).reshape(shape)


def readback_of(executor: Executor, name: str, rows: int) -> Readback:
    """A program in steps of that many rows; PlanError if the plan lacks it or another lynnc compiled it."""
    plan, program = executor.plan, executor.program(name)
    graph = graph_of(plan, program.name)
    if [op.name for op in graph.ops] != [launch.op for launch in program.launches]:
        raise PlanError(f"{plan.name} was compiled by another lynnc ({plan.lynnc}): compile the plan again.")
    return Readback(executor, program, graph, rows)


_STORED: Mapping[str, torch.dtype] = {
    "i64": torch.int64,
    "u8": torch.uint8,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}
