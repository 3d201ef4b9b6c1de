"""``lynnc inspect``: what a checkpoint or a packed folder is, holds, and has that is odd."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lynnc.cli.output import number, print_json, print_table, size, text, warn
from lynnc.cli.parameters import json_option
from lynnc.runtime.weights.inspected import ClassRow, Inspection, compact_experts
from lynnc.runtime.weights.inspection import inspect_folder


@click.command("inspect", epilog="Example: lynnc inspect Qwen3.6-35B-A3B")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def command(folder: Path, as_json: bool) -> None:
    """Say what FOLDER holds: a checkpoint in safetensors, or weights that `lynnc pack` wrote.

    Counts tensors, bytes and bits by tensor class, and names what deserves a look. Bits of a weight include its
    share of the scales. Only headers are read: damaged values do not show here, but to `lynnc pack --verify-only`.
    """
    found = inspect_folder(folder)
    if found.refused:
        warn(f"this checkpoint cannot be packed: {found.refused}")
    if as_json:
        print_json(_document(found, folder))
        return
    _print(found, folder)


def _document(found: Inspection, folder: Path) -> dict[str, object]:
    model = found.model
    return {
        "folder": folder,
        "kind": found.kind,
        "detail": found.detail,
        "model": {"name": model.name, "family": str(model.family), "layers": len(model.layers)} if model else None,
        "activations": found.activations,
        "classes": [asdict(row) | {"bits": round(row.bits, 4)} for row in found.rows],
        "experts": list(found.experts),
        "shards": [asdict(shard) for shard in found.shards],
        "skipped": [asdict(row) for row in found.skipped],
        "odd": list(found.odd),
        "refused": found.refused,
        **{name.replace(" ", "_"): value for name, value in found.facts.items()},
    }


def _print(found: Inspection, folder: Path) -> None:
    click.echo(f"{folder}: {found.kind}, {found.detail}")
    if found.model:
        model = found.model
        click.echo(f"model: {model.name}, family {model.family}, {len(model.layers)} layers, hidden {model.hidden}")
    if found.experts:
        click.echo(f"experts: {compact_experts(found.experts)}")
    click.echo(f"activations: {found.activations}")
    for name, value in found.facts.items():
        click.echo(f"{name}: {value}")
    click.echo(_shards_line(found))
    _print_rows(found)
    for row in found.skipped:
        held = f" ({size(row.bytes)})" if row.bytes is not None else ""
        tensors = f"{row.tensors} tensor" + ("s" if row.tensors > 1 else "")
        click.echo(f"skipped: {tensors}{held}, {row.reason}")
    for remark in found.odd:
        click.echo(f"odd: {remark}")


def _shards_line(found: Inspection) -> str:
    sizes = [shard.bytes for shard in found.shards]
    if len(sizes) == 1:
        return f"shards: 1 of {size(sizes[0])}"
    return f"shards: {len(sizes)} of {size(min(sizes))} to {size(max(sizes))}, {size(sum(sizes))} in all"


def _print_rows(found: Inspection) -> None:
    is_packed = found.kind == "packed"
    formats = [text("checkpoint"), text("packed")] if is_packed else [text("format")]
    count = number("matrices" if is_packed else "tensors")
    columns = [text("class"), *formats, count, number("elements"), number("bytes"), number("bits")]
    print_table("By tensor class", columns, [_cells(row, is_packed) for row in (*found.rows, _total(found))])


def _cells(row: ClassRow, is_packed: bool) -> list[str]:
    formats = [row.stored, row.packed] if is_packed else [row.stored]
    return [row.tensor_class, *formats, str(row.count), f"{row.elements:,}", size(row.bytes), f"{row.bits:.2f}"]


def _total(found: Inspection) -> ClassRow:
    rows = found.rows
    counted = (sum(row.count for row in rows), sum(row.elements for row in rows), sum(row.bytes for row in rows))
    return ClassRow("all", "", "", *counted)
