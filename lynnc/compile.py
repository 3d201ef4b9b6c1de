"""From Triton source to machine code, in parallel, without a GPU and each kernel only once.

In: ``KernelSource`` values, rendered text and all that the code depends on. Out: an ``Artifact`` for each key, from the
store or from compiler processes.

Example::

    source = KernelSource("gemv", text, (("x", "*bf16"), ("rows", "i32")), (("BLOCK", 128),), find_target("sm_90"))
    artifacts = compile_kernels([source], Store(path))
    artifacts[source.key].registers
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lynnc.artifact import ARTIFACT_SCHEMA, Artifact, Parameter, digest
from lynnc.compile_pool import Reply, run_requests
from lynnc.errors import CompileError
from lynnc.store import Store
from lynnc.target import Target, check_tools
from lynnc.tools import Tools, find_tools, tool_version

__all__ = [
    "Artifact",
    "Constant",
    "KernelSource",
    "Outcome",
    "Parameter",
    "Progress",
    "compile_each",
    "compile_kernels",
]

Constant = int | float | bool | None
Outcome = Artifact | CompileError
Progress = Callable[[int, int, str], None]
"""Called with kernels done, kernels in all, and the label of the one just done."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel to compile: ``text`` holds one ``@triton.jit def kernel(...)``.

    ``signature`` gives the type of each run-time parameter (``*bf16``, ``i32``; ``i32:16`` promises a multiple of 16;
    every pointer is taken to be aligned to 16 bytes) and ``constants`` the value of each ``tl.constexpr``. ``label``
    says in messages what the kernel does and is no part of the key. ``max_registers`` of a thread is 0 to leave it to
    ptxas, which does not know how many blocks should be resident. ``pdl`` counts only where the target has it.
    """

    template: str
    text: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    target: Target
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0
    pdl: bool = False
    label: str = ""

    @property
    def launches_early(self) -> bool:
        """Whether it is compiled and launched with programmatic dependent launch."""
        return self.pdl and self.target.has_pdl

    @property
    def key(self) -> str:
        """SHA-256 over everything that the machine code depends on, tool versions included."""
        tools = find_tools()
        ptxas = tools.ptxas_for(self.target.capability)
        parts = {
            "schema": ARTIFACT_SCHEMA,
            "triton": tools.triton_version,
            "ptxas": ptxas.version if ptxas else None,
            "template": self.template,
            "text": self.text,
            "signature": sorted(self.signature),
            "constants": sorted(self.constants, key=lambda constant: constant[0]),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "max_registers": self.max_registers,
            "pdl": self.launches_early,
            "arch": self.target.arch,
        }
        return digest(json.dumps(parts, sort_keys=True).encode())


def compile_kernels(
    sources: Sequence[KernelSource], store: Store, jobs: int | None = None, on_progress: Progress | None = None
) -> dict[str, Artifact]:
    """Artifacts by key for all sources; CompileError at the first kernel that fails, TargetError for unfit tools."""
    artifacts: dict[str, Artifact] = {}
    with closing(_outcomes(sources, store, jobs, on_progress)) as outcomes:
        for key, outcome in outcomes:
            if isinstance(outcome, CompileError):
                raise outcome
            artifacts[key] = outcome
    return {source.key: artifacts[source.key] for source in sources}


def compile_each(
    sources: Sequence[KernelSource], store: Store, jobs: int | None = None, on_progress: Progress | None = None
) -> dict[str, Outcome]:
    """Like ``compile_kernels``, but a kernel that fails is there as its error and the others go on: for the tuner."""
    outcomes = dict(_outcomes(sources, store, jobs, on_progress))
    return {source.key: outcomes[source.key] for source in sources}


def _outcomes(
    sources: Sequence[KernelSource], store: Store, jobs: int | None, on_progress: Progress | None
) -> Generator[tuple[str, Outcome], None, None]:
    unique: dict[str, KernelSource] = {}
    for source in sources:
        unique.setdefault(source.key, source)
    found = {key: artifact for key, source in unique.items() if (artifact := look_up(source, key, store))}
    missing = {key: source for key, source in unique.items() if key not in found}
    with closing(_compile(missing, store, jobs or len(os.sched_getaffinity(0)))) as compiled:
        for done, (key, outcome) in enumerate(chain(found.items(), compiled), start=1):
            if on_progress:
                on_progress(done, len(unique), unique[key].label or unique[key].template)
            yield key, outcome


def look_up(source: KernelSource, key: str, store: Store) -> Artifact | None:
    """The artifact of a source from the store, if it is there."""
    artifact = store.load(key)
    return artifact if artifact and artifact.arch == source.target.arch else None


def _compile(
    missing: Mapping[str, KernelSource], store: Store, jobs: int
) -> Generator[tuple[str, Outcome], None, None]:
    if not missing:
        return
    tools = find_tools()
    for target in {source.target for source in missing.values()}:
        check_tools(target, tools)
    keys = sorted(missing, key=lambda key: (-len(missing[key].text), key))  # the longest first: they end last
    requests = [request_of(missing[key], key, tools) for key in keys]
    with (
        tempfile.TemporaryDirectory(prefix="lynnc-compile-") as scratch,
        closing(run_requests(requests, jobs, Path(scratch))) as replies,
    ):
        for reply in replies:
            key = keys[reply.index]
            yield key, finish(missing[key], key, reply, store)


def request_of(source: KernelSource, key: str, tools: Tools) -> dict[str, object]:
    """What a compiler process is asked for."""
    cuobjdump = tools.program("cuobjdump")
    assert cuobjdump is not None, "check_tools asks for it"
    return {
        "name": key,
        "text": source.text,
        "signature": source.signature,
        "constants": source.constants,
        "capability": source.target.capability,
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "max_registers": source.max_registers,
        "pdl": source.launches_early,
        "cuobjdump": str(cuobjdump.path),
        "triton_folder": str(tools.triton_folder),
    }


def finish(source: KernelSource, key: str, reply: Reply, store: Store) -> Outcome:
    """Checks what came back and stores it; a kernel that cannot be used is a CompileError, returned and not raised."""
    target = source.target
    what = f"Kernel {source.label or 'without a label'} (template {source.template}, target {target.name})"
    if reply.error:
        return CompileError(f"{what} does not compile: {reply.error}; mend the template or choose other knobs.")
    facts: dict[str, Any] = dict(reply.fields)
    needed, limit = facts["shared_bytes"], target.shared_memory_limit
    if needed > limit:
        return CompileError(
            f"{what} needs {needed:,} bytes of shared memory where a block may have {limit:,}: "
            "choose smaller tiles or fewer stages."
        )
    if facts["arch"] != target.arch:
        return CompileError(f"{what} came out as {facts['arch']} code: install Triton again from its published wheel.")
    cubin, ptx = (_take(reply.folder / f"{key}.{kind}") for kind in ("cubin", "ptx"))
    facts["parameters"] = tuple(Parameter(**row) for row in facts["parameters"])
    facts["ptxas"] = tool_version(Path(facts["ptxas"]))
    artifact = Artifact(key=key, cubin_sha256=digest(cubin), ptx_sha256=digest(ptx), **facts)
    return store.save(artifact, cubin, ptx)


def _take(path: Path) -> bytes:
    data = path.read_bytes()
    path.unlink()
    return data
