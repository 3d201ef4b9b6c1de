"""The tables of ``lynnc bench --prefill``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from lynnc.bench.kernels import KernelTime
from lynnc.bench.prompts import PromptKernels, PromptTime
from lynnc.cli.benchreport import spread
from lynnc.cli.output import amount, duration, number, print_table, size, text
from lynnc.target import Device


def print_prompts(prompts: Sequence[PromptTime]) -> None:
    """Time to the first token, its share on the GPU, and the memory that prompts take beside weights and states."""
    names = ("tokens", "first token", "tokens/s", "on the GPU", "first use")
    columns = [*map(number, names), text("steps"), text("spread of the first token")]
    rows = [
        [
            f"{found.length:,}",
            duration(found.first_token.median),
            f"{found.length / found.first_token.median:,.0f}",
            duration(found.gpu.median),
            duration(found.first_use),
            found.steps,
            spread(found.first_token),
        ]
        for found in prompts
    ]
    print_table("prompts", columns, rows)
    last = prompts[-1]
    click.echo(
        f"beside weights and states: {size(last.memory)} of workspace, inputs and outputs; while prompts ran the GPU's "
        f"free memory shrank by {size(max(found.shrank for found in prompts))}"
    )


def print_prompt_kernels(found: PromptKernels, prompt: PromptTime, device: Device) -> None:
    """Each kernel's time, its share of all kernels', and how much of it the limit that binds would take."""
    total = sum(kernel.total for kernel in found.kernels)
    names = ("launches", "bytes", "FLOPs", "alone", "all launches", "share")
    columns = [text("op"), text("kernel"), *map(number, names), text("limit"), number("of the limit")]
    rows = [_cells(kernel, total, device) for kernel in found.kernels]
    step = f"{found.program}, {found.rows} tokens"
    print_table(f"kernels of the last step ({step}) of {found.length:,} tokens, {device.name}", columns, rows)
    click.echo(f"kernels alone add up to {duration(total)}; {prompt.steps}: {duration(prompt.gpu.median)} on the GPU")


def _cells(kernel: KernelTime, total: float, device: Device) -> list[str]:
    limit, seconds = kernel.limit(device)
    return [
        kernel.label,
        kernel.kernel,
        str(kernel.count),
        size(kernel.bytes),
        amount(kernel.flops),
        duration(kernel.alone.median),
        duration(kernel.total),
        f"{100 * kernel.total / total:.1f} %",
        limit,
        f"{100 * seconds / kernel.alone.median:.0f} %",
    ]
