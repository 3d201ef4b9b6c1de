"""The whole way from a model to a plan.

In: a ``ModelSpec``, a target, options, a kernel store. Out: a ``Compiled`` plan with its files, ready to be saved.

Example::

    compiled = compile_model(load_model("tiny-moe"), Request(find_target("sm_90")), Store(path))
    save_plan(compiled.plan, compiled.files, Path("tiny-moe.sm_90.plan"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from lynnc.activations import settle_activations
from lynnc.artifact import Artifact, digest
from lynnc.buffers import dim_text
from lynnc.build import build_graph
from lynnc.choose import choose_all
from lynnc.compile import KernelSource, Progress, compile_kernels
from lynnc.deviceidentity import identity_of
from lynnc.fields import Place
from lynnc.ir import Graph
from lynnc.layout import LAYOUT, weight_entries
from lynnc.lower import KernelCall, Lowered, lower
from lynnc.model import ModelSpec
from lynnc.modelfile import dump_model
from lynnc.modelshape import from_dict
from lynnc.passes import check_pass_names, run_passes
from lynnc.plan import KernelEntry, Options, Plan, StateEntry
from lynnc.planfile import PLAN_FILE, kernel_file
from lynnc.programs import program_rows
from lynnc.recordfiles import load_records
from lynnc.records import Records
from lynnc.store import Store
from lynnc.target import Device, Target
from lynnc.tensors import T
from lynnc.tools import find_tools
from lynnc.verify import verify
from lynnc.version import VERSION

CompileAll = Callable[[Sequence[KernelSource]], Mapping[str, Artifact]]
"""Machine code by key for all of some kernels, or an error."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile for: a target, maybe a device, and options.

    Without ``records``, those that ship for the device count: a library call does not depend on the user's folder.
    """

    target: Target
    device: Device | None = None
    options: Options = field(default_factory=Options)
    with_ptx: bool = False
    records: Records | None = None

    @property
    def known_records(self) -> Records:
        """The records that choices are made by."""
        if self.records is not None:
            return self.records
        return load_records(identity_of(self.device)) if self.device else Records()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, the bytes of its files by relative path, and the graphs it was made from by program.

    ``note`` says why a precision that the model declares is not used, or is empty; ``records`` are those that counted.
    """

    plan: Plan
    files: Mapping[str, bytes]
    graphs: Mapping[str, Graph]
    note: str = ""
    records: Records = field(default_factory=Records)


def fused_graph(spec: ModelSpec, program: str, without: tuple[str, ...] = ()) -> Graph:
    """The fused graph of a program (``decode/1`` .. ``decode/8``, ``prefill/N`` or ``prefill``)."""
    return run_passes(model_graph(spec, program), without)


def model_of(plan: Plan, folder: Path = Path()) -> ModelSpec:
    """The model that a plan was compiled from; ``folder`` is the plan's, for messages."""
    return from_dict(plan.model, Place(str(folder / PLAN_FILE), "model"))


def graph_of(plan: Plan, program: str) -> Graph:
    """The fused graph that a program of a plan was compiled from."""
    return fused_graph(model_of(plan), program, plan.options.without)


def model_graph(spec: ModelSpec, program: str) -> Graph:
    """The model stage graph of a program; OptionError for a name that is no program."""
    rows = program_rows(program)
    graph = build_graph(spec, T if rows is None else rows)
    return verify(replace(graph, program=program))


def lower_programs(spec: ModelSpec, request: Request) -> dict[str, tuple[Graph, Lowered]]:
    """Every program of the options, fused, chosen and bound to kernels; nothing is compiled yet."""
    request, _ = settle(spec, request)
    check_pass_names(request.options.without)
    records = request.known_records
    lowered = {}
    for program in request.options.programs:
        graph = fused_graph(spec, program, request.options.without)
        choices = choose_all(graph, request.target, records, request.options.knobs)
        lowered[program] = (graph, lower(graph, choices, request.target, request.options.prefill_rows))
    return lowered


def settle(spec: ModelSpec, request: Request) -> tuple[Request, str]:
    """The request with the passes left out that its target cannot serve, and a note of what this means, or ``""``."""
    settled = settle_activations(spec, request.target, request.options.without)
    return replace(request, options=replace(request.options, without=settled.without)), settled.note


def compile_model(
    spec: ModelSpec, request: Request, store: Store, jobs: int | None = None, on_progress: Progress | None = None
) -> Compiled:
    """Compiles every kernel of every program, each once."""
    return compile_model_by(spec, request, lambda sources: compile_kernels(sources, store, jobs, on_progress))


def compile_model_by(spec: ModelSpec, request: Request, compile_all: CompileAll) -> Compiled:
    """The same by whatever compiles kernels: the tuner's processes are at work already."""
    request, note = settle(spec, request)
    lowered = lower_programs(spec, request)
    calls: dict[str, KernelCall] = {}
    for _, low in lowered.values():
        calls.update(low.kernels)
    artifacts = compile_all([call.source for call in calls.values()])
    files: dict[str, bytes] = {}
    kernels = {}
    for key, call in sorted(calls.items()):
        kernels[key] = replace(call.entry, artifact=public_facts(artifacts[key]))
        files.update(_kernel_files(call, artifacts[key], request.with_ptx))
    plan = assemble_plan(spec, request, lowered, kernels, files)
    graphs = {name: graph for name, (graph, _) in lowered.items()}
    return Compiled(plan, files, graphs, note, request.known_records)


def plan_name(spec: ModelSpec, request: Request) -> str:
    """``MODEL.DEVICE``, or ``MODEL.TARGET`` where no device was named."""
    return f"{spec.name}.{request.device.name if request.device else request.target.name}"


def public_facts(artifact: Artifact) -> Mapping[str, object]:
    """What a plan says of a kernel's machine code."""
    return {name: value for name, value in artifact.to_json().items() if name not in ("key", "schema")}


def _kernel_files(call: KernelCall, artifact: Artifact, with_ptx: bool) -> dict[str, bytes]:
    found = {
        kernel_file(call.entry, "cubin"): artifact.read_cubin(),
        kernel_file(call.entry, "py"): call.source.text.encode(),
    }
    if with_ptx:
        found[kernel_file(call.entry, "ptx")] = artifact.ptx_path.read_bytes()
    return found


def assemble_plan(
    spec: ModelSpec,
    request: Request,
    lowered: Mapping[str, tuple[Graph, Lowered]],
    kernels: Mapping[str, KernelEntry],
    files: Mapping[str, bytes],
) -> Plan:
    """The plan of programs that are lowered; ``kernels`` are by key, ``files`` the contents of the folder."""
    graph = next(iter(lowered.values()))[0]
    states = graph.states.values()
    tools = find_tools()
    ptxas = tools.ptxas_for(request.target.capability)
    return Plan(
        name=plan_name(spec, request),
        lynnc=VERSION,
        arch=request.target.arch,
        target=request.target.name,
        device=request.device.name if request.device else "",
        tools={"triton": tools.triton_version or "", "ptxas": ptxas.version if ptxas else ""},
        options=request.options,
        model=yaml.safe_load(dump_model(spec)),
        model_digest=digest(dump_model(spec).encode()),
        layout=LAYOUT,
        weights=weight_entries(graph.weights.values()),
        states={s.name: StateEntry(s.name, s.dtype.value, tuple(map(dim_text, s.shape))) for s in states},
        kernels=kernels,
        programs={name: low.program for name, (_, low) in lowered.items()},
        files={name: digest(data) for name, data in sorted(files.items())},
    )
