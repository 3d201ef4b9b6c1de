"""Runs a program's launches from their source: with Triton's interpreter on the CPU, or just in time on a GPU.

In: a lowered program, packed weights and states as torch tensors. Out: the program's tensors. On the CPU the process
must have been started with ``TRITON_INTERPRET=1``: Triton decides when it is imported. There inline PTX and
programmatic launch are replaced by their plain twins with the same rounding points (``interpret`` in the templates).
On a GPU it serves to compare kernels without the runtime, launch by launch.

Example::

    simulator = Simulator(entries, packed_weights, states, context=64)
    values = simulator.run(program, step_inputs([7]))
    values["logits"]
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton

from lynnc.dims import evaluate
from lynnc.errors import OptionError
from lynnc.plan import Argument, KernelEntry, Program, TensorPlace
from lynnc.render import render

Packed = Mapping[tuple[str, str], torch.Tensor]
"""Arrays of the packed weights by weight name and array (data, scale, global)."""

_TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}
POINTER_DTYPE = {
    "*i64": torch.int64,
    "*i32": torch.int32,
    "*u8": torch.uint8,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
}
"""What a kernel's pointer of each type points to."""
POISON = 0xFF
"""Byte that fresh workspace holds: a NaN in FP32 and BF16 pairs, so a value that nothing wrote shows."""


class Simulator:
    """Holds kernels, weights and states; ``run`` executes one step of a program."""

    def __init__(
        self,
        kernels: Mapping[str, KernelEntry],
        weights: Packed,
        states: Mapping[str, torch.Tensor],
        context: int,
        device: str = "cpu",
    ) -> None:
        if (device == "cpu") != triton.knobs.runtime.interpret:
            state = "needs" if device == "cpu" else "must not have"
            raise OptionError(f"The simulator on {device} {state} TRITON_INTERPRET=1 before the process starts.")
        self.kernels = kernels
        self.device = device
        self.weights = {key: array.to(device) for key, array in weights.items()}
        self.states = {name: state.to(device) for name, state in states.items()}
        self.context = context
        self._functions: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="lynnc-simulate-")

    def run(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors that still have their memory after the step; workspace is poisoned before it."""
        rows = inputs["token"].shape[0]
        memory = _Memory(program, rows, self.context, self.device)
        for name in program.inputs:
            memory.typed(name).copy_(inputs[name])
        for launch in program.launches:
            entry = self.kernels[launch.kernel]
            grid = tuple(evaluate(size, rows, self.context) for size in launch.grid)
            args = {arg.parameter: self._value(arg, memory, rows) for arg in launch.args}
            self.function(entry)[grid](**args, **entry.constants, **self._launch_options(entry))
        return {place.name: memory.typed(place.name) for place in program.tensors}

    def _value(self, arg: Argument, memory: _Memory, rows: int) -> Any:
        if arg.kind == "value":
            return evaluate(arg.value, rows, self.context)
        if arg.kind == "null":
            return torch.zeros(1, dtype=POINTER_DTYPE[arg.type], device=self.device)
        if arg.kind == "tensor":
            return memory.raw(arg.name).view(POINTER_DTYPE[arg.type])
        found = self.weights[arg.name, arg.array] if arg.kind == "weight" else self.states[arg.name]
        return found.reshape(-1).view(POINTER_DTYPE[arg.type])

    def _launch_options(self, entry: KernelEntry) -> dict[str, object]:
        if self.device == "cpu":
            return {}
        knobs = entry.knobs
        pdl = bool(entry.structure["pdl"])
        return {
            "num_warps": knobs["num_warps"],
            "num_stages": knobs["num_stages"],
            "maxnreg": knobs.get("maxnreg") or None,
            "launch_pdl": pdl,
            "enable_fp_fusion": True,
        }

    def function(self, entry: KernelEntry) -> Any:
        """A kernel's function for this device: Triton's object that a grid and arguments start."""
        if entry.key not in self._functions:
            structure = dict(entry.structure)
            if self.device == "cpu":
                structure.update(interpret=True, pdl=False)
            text = render(entry.template, structure, {})
            kernel = import_source(text, Path(self._folder.name)).kernel
            if self.device != "cpu":
                # Integers are no constants ahead of time either: one machine code for any number of rows.
                integers = [name for name, kind in entry.signature.items() if kind == "i32"]
                kernel = triton.jit(kernel.fn, do_not_specialize=integers)
            self._functions[entry.key] = kernel
        return self._functions[entry.key]


class _Memory:
    """One step's workspace, inputs and outputs as bytes."""

    def __init__(self, program: Program, rows: int, context: int, device: str) -> None:
        self.places: dict[str, TensorPlace] = {place.name: place for place in program.tensors}
        self.workspace = torch.full((program.workspace_bytes,), POISON, dtype=torch.uint8, device=device)
        self.own = {
            place.name: torch.full((place.bytes,), POISON, dtype=torch.uint8, device=device)
            for place in program.tensors
            if place.offset is None
        }
        self.rows, self.context = rows, context

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes."""
        place = self.places[name]
        if place.offset is None:
            return self.own[name]
        return self.workspace[place.offset : place.offset + place.bytes]

    def typed(self, name: str) -> torch.Tensor:
        """The tensor in its dtype and shape for this step's rows."""
        place = self.places[name]
        shape = [evaluate(dim, self.rows, self.context) for dim in place.shape]
        count = torch.Size(shape).numel()
        return self.raw(name).view(_TORCH[place.dtype])[:count].view(shape)


def import_source(text: str, folder: Path) -> Any:
    """The module of a rendered source; Triton reads functions from a real file."""
    name = f"lynnc_kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
