"""What the compiler knows of a kernel: its template, the ops it computes, its knobs, constraints and arguments.

One ``Kernel`` record joins all of it; ``lynnc.kernels.table`` lists the records. The reference of every kernel is the
interpreter's meaning of the op it computes (``lynnc.interpret``), which has the same inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from lynnc.ir import Graph, Op, primitive_ops
from lynnc.target import Target
from lynnc.tensors import Dim, DType, Format, Weight

Knobs = Mapping[str, int]
"""Values of a kernel's tunables by name; ``num_warps`` and ``num_stages`` among them."""

Problem = Mapping[str, int | str]
"""What decides legality and speed of an op, never the rows of the step: a row's bits must not depend on them."""

POINTER = {DType.BF16: "*bf16", DType.F32: "*fp32", DType.I32: "*i32"}
FORMAT_CODE = {Format.NVFP4: 0, Format.NVFP4_FP16: 1, Format.FP8: 2, Format.BF16: 3}
"""As ``templates/project.py.jinja`` numbers the formats."""
DATA_POINTER = {
    Format.NVFP4: "*i64",
    Format.NVFP4_FP16: "*i64",
    Format.FP8: "*u8",
    Format.BF16: "*bf16",
    Format.F32: "*fp32",
}


OpKind = TypeVar("OpKind", bound=Op)


class Source(StrEnum):
    """Where a launch argument comes from."""

    TENSOR = "tensor"
    WEIGHT = "weight"
    STATE = "state"
    VALUE = "value"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Arg:
    """One run-time argument: a pointer to a tensor, weight array or state, or an integer in T and S.

    Pointers are always the start of the root buffer, which is aligned to 256 bytes; offsets are constants or integers.
    """

    parameter: str
    type: str
    source: Source
    name: str = ""
    array: str = "data"
    value: Dim = 0


@dataclass(frozen=True, slots=True)
class Binding:
    """How one op calls its kernel: arguments in the template's order, constants, Jinja variables and the grid."""

    args: tuple[Arg, ...]
    constants: Mapping[str, int | float | bool]
    grid: tuple[Dim, Dim, Dim]
    structure: Mapping[str, object] = field(default_factory=dict)


class Knob(Protocol):
    """One tunable."""

    @property
    def values(self) -> tuple[int, ...]:
        """Every value a tuner may try, in rising order."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few listed values."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """A power of two from ``low`` to ``high``."""

    low: int
    high: int

    @property
    def values(self) -> tuple[int, ...]:
        """The powers of two in the range."""
        found, value = [], self.low
        while value <= self.high:
            found.append(value)
            value *= 2
        return tuple(found)


Constraint = Callable[[Problem, Knobs, Target], str | None]
"""Says why knobs do not fit a problem on a target, or None if they do."""


class Family(StrEnum):
    """Which programs a kernel serves."""

    DECODE = "decode"
    PREFILL = "prefill"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: see the module's docstring."""

    name: str
    patterns: tuple[str, ...]
    family: Family
    space: Mapping[str, Knob]
    default: Callable[[Problem, Target], Knobs]
    problem: Callable[[Graph, Op], Problem]
    bind: Callable[[Graph, Op, Knobs], Binding]
    constraints: tuple[Constraint, ...] = ()

    @property
    def template(self) -> str:
        """File of the kernel's text in ``lynnc.templates``."""
        return f"{self.name}.py.jinja"

    def refusal(self, problem: Problem, knobs: Knobs, target: Target) -> str | None:
        """Why the knobs are not legal here: outside the space, or a constraint's reason."""
        if set(knobs) != set(self.space):
            return f"{self.name} has the knobs {', '.join(sorted(self.space))}, not {', '.join(sorted(knobs))}"
        for name, knob in self.space.items():
            if knobs[name] not in knob.values:
                return f"{name}={knobs[name]} is not one of {', '.join(map(str, knob.values))}"
        return next((why for check in self.constraints if (why := check(problem, knobs, target))), None)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place: its root tensor, the column it starts at and the elements from row to row."""

    root: str
    offset: int
    stride: int


def placed(graph: Graph, tensor: str) -> Placed:
    """Where a tensor or view lies."""
    view = graph.tensors[tensor]
    root = graph.tensors[view.base] if view.base else view
    return Placed(root.name, view.offset, root.width)


def tensor_arg(graph: Graph, parameter: str, tensor: str, pointer: str | None = None) -> Arg:
    """Pointer to a tensor's root; ``pointer`` overrides its type, such as ``*i64`` for four BF16 at a time."""
    root = placed(graph, tensor).root
    return Arg(parameter, pointer or POINTER[graph.tensors[root].dtype], Source.TENSOR, root)


def weight_args(weight: Weight, names: tuple[str, str, str]) -> tuple[Arg, Arg, Arg]:
    """Data, block scales and global scales of a weight; null pointers for arrays that its format lacks."""
    arrays = weight.bytes_by_array()
    scale_type = "*fp16" if weight.format is Format.NVFP4_FP16 else "*u8"
    types = {"data": DATA_POINTER[weight.format], "scale": scale_type, "global": "*fp32"}
    first, second, third = (
        Arg(parameter, types[array], Source.WEIGHT if array in arrays else Source.NULL, weight.name, array)
        for parameter, array in zip(names, types, strict=True)
    )
    return first, second, third


def part_rows(weight: Weight) -> int:
    """Rows that share a global scale, as a constant: a weight of one part has one, however many rows a layer has."""
    return weight.part_rows if len(weight.parts) > 1 else 1 << 30


def state_arg(graph: Graph, parameter: str, state: str) -> Arg:
    """Pointer to a state's first slot."""
    return Arg(parameter, POINTER[graph.states[state].dtype], Source.STATE, state)


def value_arg(parameter: str, value: Dim) -> Arg:
    """A 32-bit integer, possibly a function of T and S."""
    return Arg(parameter, "i32", Source.VALUE, value=value)


def null_arg(parameter: str, pointer: str) -> Arg:
    """A pointer that the chosen structure never reads."""
    return Arg(parameter, pointer, Source.NULL)


def vector_arg(graph: Graph, parameter: str, weight: str) -> Arg:
    """Pointer to the data of a weight that is never packed."""
    return weight_args(graph.weights[weight], (parameter, "", ""))[0]


def place_constants(graph: Graph, tensor: str, prefix: str) -> Mapping[str, int]:
    """Row stride and first column of a tensor, as constants ``PREFIX_STRIDE`` and ``PREFIX_OFFSET``."""
    place = placed(graph, tensor)
    return {f"{prefix}_STRIDE": place.stride, f"{prefix}_OFFSET": place.offset}


def body_of(op: Op, kind: type[OpKind]) -> list[OpKind]:
    """The ops of one kind in a launch, in order."""
    return [inner for inner in primitive_ops(op) if isinstance(inner, kind)]


def find(op: Op, kind: type[OpKind]) -> OpKind | None:
    """The first op of a kind in a launch, if there is one."""
    return next(iter(body_of(op, kind)), None)


def need(op: Op, kind: type[OpKind]) -> OpKind:
    """The first op of a kind in a launch whose pattern always has one."""
    found = find(op, kind)
    assert found is not None, f"{op.name} has no {kind.__name__}"
    return found


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not less than ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: Dim, divisor: int) -> Dim:
    """``ceil(value / divisor)`` of an integer or a symbol."""
    return (value + divisor - 1) // divisor
