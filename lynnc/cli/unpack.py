"""``lynnc unpack``: packed weights back to a Hugging Face checkpoint of the values that they stand for."""

from __future__ import annotations

from pathlib import Path

import click

from lynnc.cli.output import print_json, size, warn
from lynnc.cli.parameters import json_option, shard_bytes, shard_size_option
from lynnc.cli.progress import bytes_bar
from lynnc.runtime.weights.unpack import DTYPES, SHARD_BYTES, UnpackReport, unpack


@click.command("unpack", epilog="Example: lynnc unpack packed -o unpacked --dtype bf16")
@click.argument("packed", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Checkpoint folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(tuple(DTYPES)),
    default="bf16",
    show_default=True,
    help="Type of the values: bf16 rounds them once, f32 keeps them exactly.",
)
@shard_size_option(
    SHARD_BYTES, "Most gigabytes of a shard, which memory must hold; a larger tensor has one of its own."
)
@click.option("--force", is_flag=True, help="Replace a folder that `lynnc unpack` wrote before.")
@json_option
def command(packed: Path, output: Path, dtype: str, shard_size: float, force: bool, as_json: bool) -> None:
    """Write the values that the packed weights in PACKED stand for as a Hugging Face checkpoint.

    The folder holds the text model alone, and transformers loads it with AutoModelForCausalLM. Gate vectors that a
    model keeps in FP32 stay so.
    """
    with bytes_bar("unpacking") as on_progress:
        report = unpack(packed, output, dtype, force, shard_bytes(shard_size), on_progress)
    for remark in report.notes:
        warn(remark)
    if as_json:
        print_json(_document(report, output))
        return
    shards = f"{len(report.shards)} shard" + ("s" if len(report.shards) > 1 else "")
    rate = report.bytes / report.seconds if report.seconds else 0.0
    click.echo(
        f"{output}: {report.spec.name} as {report.tensors} tensors, {size(report.bytes)} in {shards}, in "
        f"{report.seconds:.1f} s ({size(rate)}/s)"
    )


def _document(report: UnpackReport, output: Path) -> dict[str, object]:
    return {
        "checkpoint": output,
        "model": report.spec.name,
        "dtype": report.dtype,
        "tensors": report.tensors,
        "bytes": report.bytes,
        "shards": list(report.shards),
        "seconds": round(report.seconds, 3),
        "transformers_loads": report.is_loadable,
        "notes": list(report.notes),
    }
