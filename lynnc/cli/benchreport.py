"""The tables of ``lynnc bench``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from lynnc.bench.census import Census
from lynnc.bench.kernels import KernelTime
from lynnc.bench.session import LoadTime, MemoryUse, StepTime
from lynnc.bench.timing import Timing
from lynnc.cli.output import duration, number, print_table, size, text
from lynnc.runtime.peers.llamabench import PeerSpeed
from lynnc.target import Device


def spread(timing: Timing) -> str:
    """Least and greatest."""
    return f"{duration(timing.least)} to {duration(timing.greatest)}"


def print_loads(loads: Sequence[LoadTime]) -> None:
    """Times of loading, and the rate of the weights."""
    columns = [text("load"), number("time"), number("weights/s"), text("spread")]
    rows = [
        [
            load.label,
            duration(load.timing.median),
            f"{size(load.bytes / load.timing.median)}/s",
            spread(load.timing),
        ]
        for load in loads
    ]
    print_table("loading", columns, rows)


def print_memory(use: MemoryUse) -> None:
    """Bytes by class, and what that is of the packed weights."""
    rows = [[what, size(count), "host" if is_host else "GPU"] for what, count, is_host in use.needs]
    print_table("memory", [text("class"), number("bytes"), text("where")], rows)
    share = use.resident_weights / use.packed if use.packed else 0.0
    click.echo(f"weights in memory: {share:.4f} of the packed bytes; the GPU's free memory shrank by {size(use.taken)}")


def print_steps(steps: Sequence[StepTime]) -> None:
    """Decode steps, and the tokens a second that they make."""
    names = ("context", "rows", "step", "tokens/s", "with host", "host alone")
    columns = [*map(number, names), text("spread of the step")]
    rows = [
        [
            f"{found.context:,}",
            str(found.rows),
            duration(found.step.median),
            f"{found.rows / found.step.median:,.1f}",
            f"{1 / found.wall.median:,.1f}" if found.wall else "",
            duration(found.host.median) if found.host else "",
            spread(found.step),
        ]
        for found in steps
    ]
    print_table("decode", columns, rows)


def print_kernels(kernels: Sequence[KernelTime], step: float, device: Device, context: int) -> None:
    """Each kernel's time, and its parts: bytes at the device's bandwidth, launching, and the rest."""
    names = ("launches", "bytes", "alone", "bandwidth", "of the device", "all launches", "bytes need", "launches need")
    columns = [text("op"), text("kernel"), *map(number, names), number("rest"), number("step without")]
    rows = [_kernel_cells(kernel, device) for kernel in kernels]
    total = sum(kernel.total for kernel in kernels)
    print_table(f"kernels at context {context}, {device.name}", columns, rows)
    click.echo(f"kernels alone add up to {duration(total)}, the step takes {duration(step)}")


def _kernel_cells(kernel: KernelTime, device: Device) -> list[str]:
    seconds = kernel.alone.median
    moving = kernel.bytes / device.bandwidth_bytes_per_s
    rest = kernel.total - kernel.count * (moving + device.launch_overhead_s)
    less = (kernel.marginal or 0.0) * kernel.count
    marginal = "" if kernel.marginal is None else f"{'-' if less > 0 else '+'}{duration(abs(less))}"
    return [
        kernel.label,
        kernel.kernel,
        str(kernel.count),
        size(kernel.bytes),
        duration(seconds),
        f"{size(kernel.bytes / seconds)}/s",
        f"{100 * moving / seconds:.0f} %",
        duration(kernel.total),
        duration(kernel.count * moving),
        duration(kernel.count * device.launch_overhead_s),
        duration(max(rest, 0.0)),
        marginal,
    ]


def print_census(census: Census) -> None:
    """Launches of a step by kernel."""
    names = ("launches", "blocks", "threads", "registers")
    columns = [text("op"), text("kernel"), *map(number, names), text("programmatic")]
    rows = [
        [
            row.label,
            row.kernel,
            str(row.launches),
            str(row.blocks),
            str(row.threads),
            str(row.registers),
            "yes" if row.has_pdl else "no",
        ]
        for row in census.rows
    ]
    print_table(f"{census.program}: {census.nodes} nodes in the graph", columns, rows)


def print_peer(peers: Sequence[PeerSpeed], steps: Sequence[StepTime]) -> None:
    """The peer's speed beside ours, measured in this call, and which build on what it was."""
    ours = {found.context: 1 / found.step.median for found in steps if found.rows == 1}
    names = ("context", "llama.cpp", "spread", "lynnc", "ratio")
    columns = [*map(number, names), text("build"), text("backends"), text("device")]
    rows = [
        [
            f"{peer.context:,}",
            f"{peer.tokens_per_second:,.1f}",
            f"{peer.spread:.1f}",
            f"{ours[peer.context]:,.1f}",
            f"{ours[peer.context] / peer.tokens_per_second:.2f}",
            peer.build or "not said",
            peer.backends or "not said",
            peer.device,
        ]
        for peer in peers
        if peer.context in ours
    ]
    print_table("tokens/s beside llama.cpp", columns, rows)
