"""``lynnc doctor``: what this machine can compile and run, and why not."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from lynnc.cli.output import print_json, print_table, text
from lynnc.doctor import Checkup, TargetFact, check_up
from lynnc.store import default_store_path


@click.command("doctor", epilog="Example: lynnc doctor")
@click.option("--store", type=click.Path(path_type=Path), help="Folder of compiled kernels to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def command(ctx: click.Context, store: Path | None, as_json: bool) -> None:
    """Check Python, Triton and its programs, the GPU and the store; exits with 1 if nothing can be compiled."""
    checkup = check_up(store or default_store_path(os.environ))
    if as_json:
        print_json({**asdict(checkup), "can_compile": checkup.can_compile})
    else:
        _print(checkup)
    if not checkup.can_compile:
        ctx.exit(1)


def _print(checkup: Checkup) -> None:
    click.echo(f"lynnc {checkup.lynnc}, Python {checkup.python_version} ({checkup.python_path})")
    triton = checkup.triton_version
    click.echo(f"Triton {triton} ({checkup.triton_folder})" if triton else "Triton is not installed")
    torch = checkup.torch_version
    click.echo(f"torch {torch} (tests only)" if torch else "torch is not installed; only tests need it")
    click.echo(_gpu_line(checkup))
    store = checkup.store
    click.echo(f"store {store.path}: {'can' if store.is_writable else 'CANNOT'} be written")
    click.echo()
    columns = [text("program"), text("version"), text("path")]
    print_table("Programs", columns, [[tool.name, tool.version or "does not run", tool.path] for tool in checkup.tools])
    columns = [text("target"), text("assembler"), text("compiles"), text("FP4 MMA")]
    print_table("Targets", columns, [_cells(target) for target in checkup.targets])


def _gpu_line(checkup: Checkup) -> str:
    gpu = checkup.gpu
    if gpu is None:
        return "no GPU or no driver here: plans can be compiled, not run"
    return (
        f"{gpu.count} x {gpu.name}, sm_{gpu.capability}, {gpu.sm_count} multiprocessors, "
        f"{gpu.memory_bytes / 1024**3:.0f} GiB, driver for CUDA {gpu.driver_cuda}"
    )


def _cells(target: TargetFact) -> list[str]:
    fp4 = "yes" if target.has_fp4_mma else f"no: {target.fp4_reason}"
    return [target.name, target.assembler, "yes" if target.is_served else f"no: {target.reason}", fp4]
