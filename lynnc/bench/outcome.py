"""Everything that one benchmark found, and its records.

In: what was measured so far. Out: ``Record`` values; a run that was stopped gives those of what it had measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lynnc.bench.census import Census
from lynnc.bench.kernels import KernelTime
from lynnc.bench.prompts import PromptKernels, PromptTime
from lynnc.bench.records import Record, Setting, Value
from lynnc.bench.session import LoadTime, MemoryUse, StepTime
from lynnc.runtime.peers.llamabench import PeerSpeed
from lynnc.target import Device


@dataclass(slots=True)
class Outcome:
    """Grows while the benchmark runs."""

    loads: tuple[LoadTime, ...] = ()
    memory: MemoryUse | None = None
    census: Census | None = None
    steps: list[StepTime] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    prompts: list[PromptTime] = field(default_factory=list)
    prompt_kernels: list[PromptKernels] = field(default_factory=list)
    peers: tuple[PeerSpeed, ...] = ()


def records_of(outcome: Outcome, setting: Setting, device: Device) -> list[Record]:
    """A record for each figure; limits are those of ``device``."""
    return [
        *_load_records(outcome, setting),
        *(record for step in outcome.steps for record in _step_records(step, setting)),
        *(record for kernel in outcome.kernels for record in _kernel_records(kernel, setting)),
        *(record for prompt in outcome.prompts for record in _prompt_records(prompt, setting)),
        *(record for step in outcome.prompt_kernels for record in _prompt_kernel_records(step, setting, device)),
        *_peer_records(outcome, setting),
    ]


def _load_records(outcome: Outcome, setting: Setting) -> Iterator[Record]:
    for load in outcome.loads:
        if load.is_made:
            yield setting.rate("generate_bytes_per_s", load.timing, load.bytes, "B/s")
        else:
            yield setting.rate("load_bytes_per_s", load.timing, load.bytes, "B/s", cold=load.is_cold)
    if outcome.memory:
        for what, count, is_host in outcome.memory.needs:
            yield setting.count("memory_bytes", count, "B", what=what, host=is_host)
        yield setting.count("packed_bytes", outcome.memory.packed, "B")
        yield setting.count("resident_bytes", outcome.memory.taken, "B", what="all, by the GPU's free memory")
    if outcome.census:
        yield setting.count("graph_nodes", outcome.census.nodes, "nodes", program=outcome.census.program)


def _step_records(step: StepTime, setting: Setting) -> Iterator[Record]:
    where: dict[str, Value] = {"rows": step.rows, "context": step.context}
    yield setting.time("decode_step_us", step.step, **where)
    yield setting.rate("decode_tokens_per_s", step.step, step.rows, "tokens/s", **where)
    if step.wall:
        yield setting.rate("decode_tokens_per_s_with_host", step.wall, step.rows, "tokens/s", **where)
    if step.host:
        yield setting.time("host_us_per_token", step.host, **where)


def _kernel_records(kernel: KernelTime, setting: Setting) -> Iterator[Record]:
    where: dict[str, Value] = {
        "op": kernel.label,
        "kernel": kernel.kernel,
        "launches": kernel.count,
        "bytes": round(kernel.bytes),
    }
    yield setting.time("kernel_us", kernel.alone, **where)
    if kernel.marginal is not None:
        yield setting.count("kernel_marginal_us", kernel.marginal * 1e6, "us", **where)


def _prompt_records(prompt: PromptTime, setting: Setting) -> Iterator[Record]:
    where: dict[str, Value] = {"tokens": prompt.length, "steps": prompt.steps}
    yield setting.time("prefill_first_token_us", prompt.first_token, **where)
    yield setting.time("prefill_gpu_us", prompt.gpu, **where)
    yield setting.rate("prefill_tokens_per_s", prompt.first_token, prompt.length, "tokens/s", **where)
    yield setting.count("prefill_first_use_us", prompt.first_use * 1e6, "us", **where)
    over = {"workspace, inputs and outputs": prompt.memory, "shrank during prompts": prompt.shrank}
    for what, size in over.items():
        yield setting.count("prefill_memory_bytes", size, "B", what=what, **where)


def _prompt_kernel_records(step: PromptKernels, setting: Setting, device: Device) -> Iterator[Record]:
    for kernel in step.kernels:
        limit, seconds = kernel.limit(device)
        where: dict[str, Value] = {
            "tokens": step.length,
            "program": step.program,
            "rows": step.rows,
            "op": kernel.label,
            "kernel": kernel.kernel,
            "launches": kernel.count,
            "bytes": round(kernel.bytes),
            "flops": round(kernel.flops),
            "limit": limit,
            "of_limit": round(seconds / kernel.alone.median, 4),
        }
        yield setting.time("prefill_kernel_us", kernel.alone, **where)


def _peer_records(outcome: Outcome, setting: Setting) -> Iterator[Record]:
    for peer in outcome.peers:
        build = f"{peer.build} {peer.backends}".strip()
        where: dict[str, Value] = {"context": peer.context, "build": build}
        yield setting.mean("peer_tokens_per_s", peer.tokens_per_second, peer.samples, "tokens/s", **where)
