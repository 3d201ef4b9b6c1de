"""From a fused graph and its choices to a program: launches with kernels, grids and arguments.

In: a fused graph, one choice for each op, a target. Out: a ``plan.Program`` and a ``KernelCall`` for each kernel key.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from lynnc.buffers import dim_text, place_tensors
from lynnc.choose import KernelChoice
from lynnc.compile import KernelSource
from lynnc.errors import GraphError
from lynnc.ir import Graph, Op
from lynnc.kernels.kernel import Binding, Source
from lynnc.plan import Argument, KernelEntry, Launch, Program
from lynnc.programs import most_rows
from lynnc.render import render
from lynnc.target import Target
from lynnc.tensors import T

PREFILL_ROWS = 2048
"""Rows of a prefill step: longer prompts run chunk by chunk."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel as one or more launches use it: source to compile, and the entry that the plan keeps."""

    source: KernelSource
    entry: KernelEntry


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program and the kernels it launches, by key."""

    program: Program
    kernels: Mapping[str, KernelCall]


@dataclass(frozen=True, slots=True)
class BoundOps:
    """Launches of some ops, and the kernels that they need, by key."""

    launches: tuple[Launch, ...]
    kernels: Mapping[str, KernelCall]


def bind_ops(graph: Graph, chosen: Iterable[tuple[Op, KernelChoice]], target: Target) -> BoundOps:
    """Binds ops of a graph to their kernels; equal kernels of different layers get one key."""
    calls: dict[object, KernelCall] = {}
    launches = []
    for op, choice in chosen:
        binding = choice.kernel.bind(graph, op, choice.knobs)
        facts = _call_facts(op, choice, binding)
        call = calls.get(facts) or _call(graph, op, choice, binding, target)
        calls[facts] = call
        grid = (dim_text(binding.grid[0]), dim_text(binding.grid[1]), dim_text(binding.grid[2]))
        launches.append(Launch(op.name, op.kind, call.entry.key, grid, _arguments(binding)))
    return BoundOps(tuple(launches), MappingProxyType({call.entry.key: call for call in calls.values()}))


def lower(graph: Graph, choices: Sequence[KernelChoice], target: Target, prefill_rows: int = PREFILL_ROWS) -> Lowered:
    """The program of a graph with one choice for each of its ops."""
    bound = bind_ops(graph, zip(graph.ops, choices, strict=True), target)
    max_rows = (most_rows(graph.program) or prefill_rows) if graph.rows == T else int(graph.rows)
    places, workspace = place_tensors(graph, max_rows)
    program = Program(
        name=graph.program,
        rows=dim_text(graph.rows),
        max_rows=max_rows,
        workspace_bytes=workspace,
        inputs=graph.inputs,
        outputs=graph.outputs,
        tensors=places,
        launches=bound.launches,
    )
    return Lowered(program, bound.kernels)


def _call_facts(op: Op, choice: KernelChoice, binding: Binding) -> object:
    """All that a kernel call is made from inside one program: the same for the same op of most layers."""
    return (
        op.kind,
        choice.kernel.name,
        choice.origin,
        tuple(choice.problem.items()),
        tuple(choice.knobs.items()),
        tuple((arg.parameter, arg.type) for arg in binding.args),
        tuple((name, type(value), value) for name, value in binding.constants.items()),
        tuple(binding.structure.items()),
    )


def _arguments(binding: Binding) -> tuple[Argument, ...]:
    return tuple(
        Argument(
            parameter=arg.parameter,
            type=arg.type,
            kind=arg.source.value,
            name=arg.name if arg.source is not Source.NULL else "",
            array=arg.array if arg.source is Source.WEIGHT else "",
            value=dim_text(arg.value),
        )
        for arg in binding.args
    )


def _call(graph: Graph, op: Op, choice: KernelChoice, binding: Binding, target: Target) -> KernelCall:
    kernel = choice.kernel
    label = f"{op.kind} ({_facts(choice.problem)})"
    knobs = dict(choice.knobs)
    signature = tuple((arg.parameter, arg.type) for arg in binding.args)
    constants = tuple(binding.constants.items())
    structure = {"interpret": False, "pdl": target.has_pdl, **binding.structure}
    _check_parameters(kernel.template, op, [name for name, _ in signature], [name for name, _ in constants])
    header = {
        "op": op.kind,
        "problem": _facts(choice.problem),
        "choice": _facts(choice.knobs),
        "constants": _facts(binding.constants),
        "target": target.name,
    }
    source = KernelSource(
        template=kernel.template,
        text=render(kernel.template, structure, header),
        signature=signature,
        constants=constants,
        target=target,
        num_warps=knobs["num_warps"],
        num_stages=knobs["num_stages"],
        max_registers=knobs.get("maxnreg", 0),
        pdl=target.has_pdl,
        label=label,
    )
    entry = KernelEntry(
        key=source.key,
        name=kernel.name,
        template=kernel.template,
        label=label,
        origin=choice.origin,
        structure=structure,
        signature=dict(signature),
        constants=dict(constants),
        problem=choice.problem,
        knobs=knobs,
        artifact={},
    )
    return KernelCall(source, entry)


def _facts(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(values.items()))


@cache
def _parameters(template: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run-time and ``tl.constexpr`` parameters of a template's ``kernel``, in order."""
    text = render(template, {"interpret": True, "pdl": False}, {})
    head = re.search(r"^def kernel\(.*?\):$", text, re.DOTALL | re.MULTILINE)
    assert head is not None, f"{template} defines no kernel"
    kernel = ast.parse(f"{head[0]} pass").body[0]  # the body is long, and parsing it slow
    assert isinstance(kernel, ast.FunctionDef)
    constant = [arg.arg for arg in kernel.args.args if arg.annotation is not None]
    return tuple(arg.arg for arg in kernel.args.args if arg.annotation is None), tuple(constant)


def _check_parameters(template: str, op: Op, signature: list[str], constants: list[str]) -> None:
    runtime, constant = _parameters(template)
    if signature != list(runtime) or set(constants) != set(constant):
        wrong = sorted(set(signature) ^ set(runtime) | set(constants) ^ set(constant))
        names = ", ".join(wrong) or "order"
        raise GraphError(f"{op.name}: the binding and {template} disagree on the parameters {names}.")
