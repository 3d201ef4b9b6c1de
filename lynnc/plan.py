"""The plan: what the runtime loads. Neither torch nor sympy nor Triton is needed to read it.

A plan is a folder: ``plan.json`` (programs, launches, buffers, weights, states, knobs, versions, digests) and
``kernels/`` (machine code and readable source). In: ``load_plan(folder)``. Out: a frozen ``Plan``.

Example::

    plan = load_plan("tiny-moe.sm_90.plan")
    program = plan.programs["decode/1"]
    for launch in program.launches:
        kernel = plan.kernels[launch.kernel]
        grid = [evaluate(size, rows=1, context=512) for size in launch.grid]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from lynnc.dims import Dimension, evaluate

SCHEMA = 2
"""Grows when plan.json changes; a plan of another schema is refused."""
ALIGNMENT = 256
"""Bytes; every tensor starts at a multiple, so kernels may load 16 bytes at a time."""
STATE_BYTES: Mapping[str, int] = {"bf16": 2, "f32": 4, "i32": 4}


def aligned(size: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class WeightArray:
    """One array that stores part of a weight: ``data``, ``scale`` or ``global``. Shape in elements of ``dtype``."""

    array: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A checkpoint tensor (``{expert}`` stands for the expert's number) and the rows it fills."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A weight of the plan in its packed layout; see ``docs/layout.md``."""

    name: str
    format: str
    tensor_class: str
    shape: tuple[int, ...]
    part_rows: int
    parts: tuple[WeightPart, ...]
    arrays: tuple[WeightArray, ...]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """Memory of each slot; a size may hold the context S."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]

    def bytes(self, context: int) -> int:
        """Bytes of one slot at S = ``context``."""
        return prod(evaluate(size, context=context) for size in self.shape) * STATE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a program's workspace (``offset`` in bytes), or, without an offset, an input or output of its own."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]
    bytes: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Argument:
    """A launch argument: ``kind`` is tensor, weight, state, value or null; ``array`` picks one of a weight's arrays."""

    parameter: str
    type: str
    kind: str
    name: str = ""
    array: str = ""
    value: Dimension = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: the op it computes, its kernel's key, the grid in programs and the arguments in order."""

    op: str
    kind: str
    kernel: str
    grid: tuple[Dimension, Dimension, Dimension]
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The launch list of one step kind. ``max_rows`` rows fit its workspace; ``rows`` is T where it may vary."""

    name: str
    rows: Dimension
    max_rows: int
    workspace_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[TensorPlace, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel: how it was rendered and chosen, and, once compiled, the facts of its machine code.

    ``signature`` maps run-time parameters to Triton types, ``constants`` the compile-time ones to values. ``artifact``
    is the record of ``lynnc.artifact`` (registers, shared memory, hidden parameters...), empty before compilation.
    """

    key: str
    name: str
    template: str
    label: str
    origin: str
    structure: Mapping[str, object]
    signature: Mapping[str, str]
    constants: Mapping[str, int | float | bool]
    problem: Mapping[str, int | str]
    knobs: Mapping[str, int]
    artifact: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked of the compiler: passes left out, knobs set by hand, rows of a prefill step, programs in order."""

    without: tuple[str, ...] = ()
    knobs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    prefill_rows: int = 2048
    programs: tuple[str, ...] = (
        *("decode/1", "decode/2", "decode/4", "decode/8"),
        *("prefill/16", "prefill/64", "prefill/512", "prefill"),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything of ``plan.json``; see the module's docstring."""

    name: str
    lynnc: str
    arch: str
    target: str
    device: str
    tools: Mapping[str, str]
    options: Options
    model: Mapping[str, object]
    model_digest: str
    layout: str
    weights: Mapping[str, WeightEntry]
    states: Mapping[str, StateEntry]
    kernels: Mapping[str, KernelEntry]
    programs: Mapping[str, Program]
    files: Mapping[str, str]
    schema: int = SCHEMA
    digest: str = ""
    """SHA-256 of plan.json itself with this field empty; set when the plan is saved."""

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(str(self.model["vocabulary"]))

    @property
    def longest_context(self) -> int:
        """Most positions of one sequence of the model."""
        return int(str(self.model["context"]))

    @property
    def model_name(self) -> str:
        """Name of the model that the plan computes."""
        return str(self.model["name"])
