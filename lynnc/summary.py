"""What a compiled plan is made of, as rows for a table or for JSON.

In: a ``Compiled`` plan and a context. Out: a ``Summary``: a row for each distinct kernel and each program, the formats
of the weights, and the sizes of weights and states. Bytes a launch are those it must move at least (``lynnc.cost``).

Example::

    summary = summarize(compiled, context=4096)
    [row.kernel for row in summary.kernels if row.spill_bytes]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from lynnc.compiler import Compiled
from lynnc.cost import Cost, costs, evaluate_formula
from lynnc.dims import evaluate
from lynnc.plan import Launch, Plan, Program

THOUSAND = 1000
DECODE = "decode/"
QUANTISED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "QuantisedLinear": frozenset({"QuantisedLinear", "QuantisedLinearResidual"}),
        "QuantisedGroupedLinear": frozenset({"QuantisedGroupedUp", "QuantisedGroupedDown"}),
    }
)
"""Ops with 4-bit activations, and the kinds of launches that hold them."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel. ``launches`` counts those of a step by program; grid and bytes are of its first program, and where
    launches differ ``grid`` holds the range and ``bytes_per_launch`` the mean."""

    key: str
    op: str
    kernel: str
    launches: Mapping[str, int]
    grid: str
    num_warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    bytes_per_launch: float
    origin: str


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One program: launches of a step, of one layer of each mixer, and outside the layers; and its workspace."""

    name: str
    max_rows: int
    launches: int
    launches_per_layer: Mapping[str, int]
    launches_outside: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class KnobRow:
    """Where knobs come from (``default``, ``option``, or a record and its file or folder), and for how many launches
    of a step of each program; ``is_users`` where the user's own records say so."""

    origin: str
    file: str
    is_users: bool
    launches: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """The formats in which the weights of a tensor class are stored, and their bytes."""

    tensor_class: str
    formats: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of a slot: a fixed part, a part for each 1,000 positions, and all of it at the model's longest context."""

    fixed_bytes: int
    bytes_per_1k: int
    max_context: int
    bytes_at_max: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that ``lynnc compile`` reports of a plan; ``note`` says why declared activations are not followed."""

    name: str
    arch: str
    activations: str
    note: str
    context: int
    weight_bytes: int
    state: StateSize
    precision: tuple[PrecisionRow, ...]
    programs: tuple[ProgramRow, ...]
    kernels: tuple[KernelRow, ...]
    knobs: tuple[KnobRow, ...]


def summarize(compiled: Compiled, context: int) -> Summary:
    """The summary of a plan; bytes a launch are taken at S = ``context`` and T = the program's most rows."""
    plan = compiled.plan
    precision = plan.model["precision"]
    assert isinstance(precision, Mapping)
    return Summary(
        name=plan.name,
        arch=plan.arch,
        activations=_activations(plan, str(precision["activations"])),
        note=compiled.note,
        context=context,
        weight_bytes=sum(array.bytes for weight in plan.weights.values() for array in weight.arrays),
        state=state_size(plan),
        precision=tuple(precision_rows(plan)),
        programs=tuple(_program_row(plan, program) for program in plan.programs.values()),
        kernels=tuple(_kernel_rows(compiled, context)),
        knobs=knob_rows(compiled),
    )


def knob_rows(compiled: Compiled) -> tuple[KnobRow, ...]:
    """Launches of a plan by where their knobs come from, the most frequent first."""
    plan = compiled.plan
    counts: dict[str, Counter[str]] = {}
    for program in plan.programs.values():
        for launch in program.launches:
            counts.setdefault(plan.kernels[launch.kernel].origin, Counter())[program.name] += 1
    found = [_knob_row(compiled, origin, launches) for origin, launches in counts.items()]
    return tuple(sorted(found, key=lambda row: (-sum(row.launches.values()), row.origin)))


def _knob_row(compiled: Compiled, origin: str, launches: Mapping[str, int]) -> KnobRow:
    known = compiled.records.known_as(origin)
    return KnobRow(origin, known.file if known else "", bool(known and known.is_user), dict(launches))


def _activations(plan: Plan, declared: str) -> str:
    """The precision that launches use; what the model declares where the plan does not follow it."""
    kinds = {launch.kind for program in plan.programs.values() for launch in program.launches}
    used = [op for op, launches in QUANTISED.items() if kinds & launches]
    if used:
        return f"nvfp4 in {' and '.join(used)}, bf16 elsewhere"
    return "bf16" if declared == "bf16" else f"bf16 (the model allows {declared})"


def spilling_decode_kernels(summary: Summary) -> tuple[KernelRow, ...]:
    """Kernels of decode programs whose threads keep values in local memory: slow, and worth other knobs."""
    rows = summary.kernels
    return tuple(row for row in rows if row.spill_bytes and any(name.startswith(DECODE) for name in row.launches))


def state_size(plan: Plan) -> StateSize:
    """Bytes of one slot's states."""
    longest = plan.longest_context
    fixed, at_1k, at_max = (
        sum(state.bytes(context) for state in plan.states.values()) for context in (0, THOUSAND, longest)
    )
    return StateSize(fixed, at_1k - fixed, longest, at_max)


def precision_rows(plan: Plan) -> Iterator[PrecisionRow]:
    """Formats and bytes of each tensor class, in the order of the plan's weights."""
    formats: dict[str, set[str]] = {}
    sizes: Counter[str] = Counter()
    for weight in plan.weights.values():
        formats.setdefault(weight.tensor_class, set()).add(weight.format)
        sizes[weight.tensor_class] += sum(array.bytes for array in weight.arrays)
    for tensor_class, found in formats.items():
        yield PrecisionRow(tensor_class, tuple(sorted(found)), sizes[tensor_class])


def mixers(plan: Plan) -> tuple[str, ...]:
    """The token mixer of each layer."""
    layers = plan.model["layers"]
    assert isinstance(layers, Mapping)
    return tuple(layers["pattern"]) * int(layers["repeat"])


def _program_row(plan: Plan, program: Program) -> ProgramRow:
    by_layer = Counter(_layer(launch) for launch in program.launches)
    outside = by_layer.pop(None, 0)
    per_layer: dict[str, int] = {}
    for layer, mixer in enumerate(mixers(plan)):
        per_layer[mixer] = max(per_layer.get(mixer, 0), by_layer[layer])
    return ProgramRow(
        program.name, program.max_rows, len(program.launches), per_layer, outside, program.workspace_bytes
    )


def _layer(launch: Launch) -> int | None:
    found = re.match(r"layers\.(\d+)\.", launch.op)
    return int(found.group(1)) if found else None


def _kernel_rows(compiled: Compiled, context: int) -> Iterator[KernelRow]:
    plan = compiled.plan
    uses: dict[str, dict[str, list[Launch]]] = {}
    for program in plan.programs.values():
        for launch in program.launches:
            uses.setdefault(launch.kernel, {}).setdefault(program.name, []).append(launch)
    firsts = {next(iter(by_program)) for by_program in uses.values()}
    formulas = {program: costs(compiled.graphs[program]) for program in firsts}
    for key, by_program in uses.items():
        entry, first = plan.kernels[key], next(iter(by_program))
        program, launches = plan.programs[first], by_program[first]
        yield KernelRow(
            key=key,
            op=launches[0].kind,
            kernel=entry.name,
            launches={name: len(found) for name, found in by_program.items()},
            grid=_grid_text(launches, program.max_rows, context),
            num_warps=_fact(entry.artifact, "num_warps"),
            registers=_fact(entry.artifact, "registers"),
            shared_bytes=_fact(entry.artifact, "shared_bytes"),
            spill_bytes=_fact(entry.artifact, "spill_bytes"),
            bytes_per_launch=_mean_bytes(formulas[first], launches, program.max_rows, context),
            origin=entry.origin,
        )


def _fact(artifact: Mapping[str, object], name: str) -> int:
    value = artifact[name]
    assert isinstance(value, int)
    return value


def _grid_text(launches: list[Launch], rows: int, context: int) -> str:
    grids = {launch.grid for launch in launches}
    sizes = [tuple(evaluate(size, rows, context) for size in grid) for grid in grids]
    return " x ".join(_range_text(axis) for axis in zip(*sizes, strict=True))


def _range_text(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"


def _mean_bytes(formulas_by_op: Mapping[str, Cost], launches: list[Launch], rows: int, context: int) -> float:
    return fmean(evaluate_formula(formulas_by_op[launch.op].bytes, rows, context) for launch in launches)
