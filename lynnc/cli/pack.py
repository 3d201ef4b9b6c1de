"""``lynnc pack``: a checkpoint to packed weights in the layout that plans load."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lynnc.cli.output import note, number, print_json, print_table, size, text, warn
from lynnc.cli.parameters import complete_models, json_option, shard_bytes, shard_size_option
from lynnc.cli.progress import bytes_bar
from lynnc.errors import OptionError
from lynnc.modelfile import load_model
from lynnc.runtime.experts.expertspec import read_expert_spec
from lynnc.runtime.weights.devices import check_device
from lynnc.runtime.weights.pack import SHARD_BYTES, PackReport, PackRequest, pack
from lynnc.runtime.weights.verify import ClassErrors, Verification, verify


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    checkpoint: Path
    output: Path
    model: str | None
    experts: Path | None
    keep_first: bool
    scale_search: bool
    device: str
    shard_size: float
    check: bool
    only_check: bool
    force: bool
    as_json: bool


@click.command("pack", epilog="Example: lynnc pack Qwen3.6-35B-A3B --model qwen3.6-35b-a3b -o packed --verify")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--model",
    shell_complete=complete_models,
    help="Shipped model or model file; from the checkpoint's config.json and the formats found there if not given.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Packed folder to write.")
@click.option(
    "--experts",
    type=click.Path(path_type=Path),
    help="Experts that each layer keeps, as `lynnc prune` writes them; the others are left out.",
)
@click.option("--keep-first", is_flag=True, help="Where --experts gives only counts, keep the lowest numbers.")
@click.option(
    "--scale-search",
    is_flag=True,
    help="Quantise with the block scale of least squared error among a few; slower.",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="Where to quantise: cpu, cuda, cuda:1."
)
@shard_size_option(SHARD_BYTES, "Most gigabytes of a shard; a larger weight has one of its own.")
@click.option("--verify", "check", is_flag=True, help="Afterwards read both sides again and compare every tensor.")
@click.option("--verify-only", "only_check", is_flag=True, help="Compare with a folder that was packed before.")
@click.option("--force", is_flag=True, help="Replace a packed folder that exists.")
@json_option
def command(**options: Any) -> None:
    """Pack CHECKPOINT, a folder of safetensors, into the layout that plans load.

    Reads Hugging Face checkpoints in BF16, FP16 and FP32, compressed-tensors NVFP4, ModelOpt NVFP4 and mixed with FP8,
    and Lynn's own NVFP4. What is quantised keeps its bits; the rest becomes what the model file asks for. A run that
    was killed goes on when it is started again.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Packs, verifies, or both."""
    check_device(arguments.device)
    if arguments.only_check:
        _refuse_packing_options(arguments)
        _report(None, _verified(arguments), arguments)
        return
    request = PackRequest(
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        model=load_model(arguments.model) if arguments.model else None,
        experts=read_expert_spec(arguments.experts) if arguments.experts else None,
        keep_first=arguments.keep_first,
        search=arguments.scale_search,
        device=arguments.device,
        shard_bytes=shard_bytes(arguments.shard_size),
        force=arguments.force,
    )
    with bytes_bar("packing") as on_progress:
        report = pack(request, on_progress)
    for remark in report.notes:
        warn(remark)
    _report(report, _verified(arguments) if arguments.check else None, arguments)


def _refuse_packing_options(arguments: Arguments) -> None:
    given = {
        "--model": arguments.model,
        "--experts": arguments.experts,
        "--keep-first": arguments.keep_first,
        "--scale-search": arguments.scale_search,
        "--force": arguments.force,
    }
    named = [name for name, value in given.items() if value]
    if named:
        raise OptionError(f"--verify-only packs nothing: leave out {' and '.join(named)}.")


def _verified(arguments: Arguments) -> Verification:
    with bytes_bar("verifying") as on_progress:
        return verify(arguments.checkpoint, arguments.output, on_progress)


def _report(report: PackReport | None, verification: Verification | None, arguments: Arguments) -> None:
    if arguments.as_json:
        print_json(_document(report, verification, arguments))
        return
    if report:
        _print_classes(report)
        _print_rest(report, arguments.output)
    if verification:
        _print_verification(verification)


def _document(report: PackReport | None, verification: Verification | None, arguments: Arguments) -> dict[str, object]:
    found: dict[str, object] = {"packed": str(arguments.output)}
    if report:
        found |= {
            "model": report.spec.name,
            "source": asdict(report.index.source),
            "seconds": round(report.seconds, 3),
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "kept_weights": report.kept_weights,
            "pruned_tensors": report.pruned_tensors,
            "skipped": dict(report.index.skipped),
            "notes": list(report.notes),
            "search_gain": report.search_gain,
        }
    if verification:
        found["verification"] = asdict(verification)
    return found


def _print_classes(report: PackReport) -> None:
    by_class: dict[tuple[str, str, str], list[int]] = {}
    for name, entry in report.index.weights.items():
        stored = ", ".join(sorted({origin.stored for origin in report.index.origins[name]}))
        row = by_class.setdefault((entry.tensor_class, stored, entry.format), [0, 0])
        row[0] += 1
        row[1] += sum(array.bytes for array in entry.arrays)
    rows = [[*key, str(count), size(total)] for key, (count, total) in by_class.items()]
    columns = [text("class"), text("checkpoint"), text("packed"), number("weights"), number("bytes")]
    print_table(f"{report.spec.name} from {report.index.source.detail}", columns, rows)


def _print_rest(report: PackReport, output: Path) -> None:
    for reason, count in Counter(report.index.skipped.values()).items():
        note(f"{count} tensors skipped: {reason}.")
    if report.pruned_tensors:
        layers = len(report.index.experts)
        note(f"{report.pruned_tensors} tensors of pruned experts left out in {layers} layers.")
    if report.kept_weights:
        note(f"{report.kept_weights} weights were there already, from a run that did not finish.")
    if report.search_gain is not None:
        click.echo(f"scale search: squared error {report.search_gain:.1%} lower than without")
    rate = report.bytes_read / report.seconds if report.seconds else 0.0
    click.echo(
        f"{output}: {size(report.bytes_written)} in {len(report.index.shards)} shards, from {size(report.bytes_read)} "
        f"in {report.seconds:.1f} s ({size(rate)}/s)"
    )


def _print_verification(verification: Verification) -> None:
    columns = [
        text("class"),
        text("format"),
        number("equal tensors"),
        number("quantised or rounded"),
        number("cosine"),
        number("relative L2"),
        number("worst relative L2"),
        text("worst tensor"),
    ]
    print_table("Compared with the checkpoint", columns, [_cells(row) for row in verification.classes])
    click.echo(
        f"verified: {size(verification.bytes_read)} of the checkpoint read again; every tensor is as it should be"
    )


def _cells(row: ClassErrors) -> list[str]:
    cells = [row.tensor_class, row.format, str(row.exact_tensors), str(row.rounded_tensors)]
    if not row.rounded_tensors:
        return [*cells, "", "", "", ""]
    return [*cells, f"{row.cosine:.6f}", f"{row.relative_l2:.5f}", f"{row.worst_relative_l2:.5f}", row.worst]
