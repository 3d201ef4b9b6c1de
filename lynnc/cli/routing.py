"""``lynnc routing``: how the tokens of a text choose their experts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lynnc.cli.output import note, number, print_json, print_table
from lynnc.cli.parameters import json_option
from lynnc.cli.tokens import TOKENIZER_FILE, read_token_ids, tokenize
from lynnc.errors import OptionError
from lynnc.outputfile import check_file, write_file
from lynnc.runtime.experts.routing import OnProgress, PackedValues, RunSettings, Tokens, collect_routing
from lynnc.runtime.experts.routingfile import LayerRouting, Routing, routing_text
from lynnc.runtime.weights.devices import check_device
from lynnc.runtime.weights.packedfile import open_packed

DEFAULTS = RunSettings()


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    packed: Path
    output: Path
    text: Path | None
    tokenizer: Path | None
    token_ids: Path | None
    tokens: int | None
    chunk: int
    sequence: int
    device: str
    force: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """A layer's choices in four numbers; ``busiest`` is a share of the tokens, ``half_mass`` the fewest experts that
    hold half of the gate mass."""

    layer: int
    experts: int
    never_chosen: int
    busiest: float
    half_mass: int


@click.command("routing", epilog="Example: lynnc routing packed --text sample.txt --device cuda -o routing.json")
@click.argument("packed", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Statistics file to write.")
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to run.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help=f"{TOKENIZER_FILE} for --text; the one in PACKED if not given.",
)
@click.option(
    "--token-ids",
    type=click.Path(path_type=Path),
    help="Token ids instead of a text: a JSON list, or one on each line.",
)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Run the first N tokens; all if not given.")
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=DEFAULTS.chunk,
    show_default=True,
    metavar="N",
    help="Tokens of a step.",
)
@click.option(
    "--sequence",
    type=click.IntRange(min=1),
    default=DEFAULTS.sequence,
    show_default=True,
    metavar="N",
    help="Tokens after which the context starts anew, at the latest at the model's own limit.",
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Where to run: cpu, cuda, cuda:1.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def command(**options: Any) -> None:
    """Run a text through the model of PACKED, a folder of `lynnc pack`, and count its choices of experts.

    The result is what `lynnc prune` chooses from. The model runs as its graph is defined, not through compiled
    kernels: exact, layer by layer, with one layer's weights in memory at a time, and slow.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks everything that needs no weights first, so that mistakes show at once."""
    check_file(arguments.output, arguments.force)
    check_device(arguments.device)
    _check_source(arguments)
    packed = open_packed(arguments.packed)
    tokens = _tokens(arguments)
    settings = RunSettings(arguments.chunk, arguments.sequence, arguments.device)
    with tokens_bar(len(packed.spec.layers)) as on_progress:
        started = time.perf_counter()
        routing = collect_routing(packed.spec, PackedValues(packed, settings.device), tokens, settings, on_progress)
        seconds = time.perf_counter() - started
    write_file(arguments.output, routing_text(routing), arguments.force)
    _report(routing, seconds, arguments)


def _check_source(arguments: Arguments) -> None:
    if (arguments.text is None) is (arguments.token_ids is None):
        raise OptionError("Nothing, or too much, to run: give either --text or --token-ids.")
    if arguments.token_ids and arguments.tokenizer:
        raise OptionError("--tokenizer has no effect on --token-ids: leave it out, or give --text.")


def _tokens(arguments: Arguments) -> Tokens:
    if arguments.token_ids:
        source, ids = arguments.token_ids, read_token_ids(arguments.token_ids)
    else:
        assert arguments.text is not None, "checked before"
        source, ids = arguments.text, tokenize(arguments.text, _tokenizer(arguments))
    if arguments.tokens and len(ids) < arguments.tokens:
        note(f"{source} has {len(ids):,} tokens, fewer than --tokens {arguments.tokens}: all are run.")
    return Tokens(source.name, ids[: arguments.tokens])


def _tokenizer(arguments: Arguments) -> Path:
    found = arguments.tokenizer or arguments.packed / TOKENIZER_FILE
    if not arguments.tokenizer and not found.is_file():
        raise OptionError(f"{arguments.packed} holds no {TOKENIZER_FILE}: give --tokenizer, or --token-ids.")
    return found


@contextmanager
def tokens_bar(layers: int) -> Iterator[OnProgress | None]:
    """Gives what is called with the tokens that have passed a layer, or None; shows the rate of all layers."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("counting"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        started = time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            rate = done / layers / (time.perf_counter() - started)
            progress.update(task, completed=done, total=total, description=f"{rate:,.1f} tokens/s")

        yield on_progress


def summarize_layer(index: int, layer: LayerRouting, tokens: int) -> LayerSummary:
    """The four numbers of a layer."""
    half, held, taken = sum(layer.gate_mass) / 2, 0.0, 0
    for mass in sorted(layer.gate_mass, reverse=True):
        if held >= half:
            break
        held, taken = held + mass, taken + 1
    return LayerSummary(index, layer.experts, layer.counts.count(0), max(layer.counts) / tokens, taken)


def _report(routing: Routing, seconds: float, arguments: Arguments) -> None:
    rows = [summarize_layer(index, layer, routing.text.tokens) for index, layer in enumerate(routing.layers)]
    if arguments.as_json:
        facts = {"output": str(arguments.output), "model": routing.model, "text": asdict(routing.text)}
        print_json({**facts, "seconds": round(seconds, 3), "layers": [asdict(row) for row in rows]})
        return
    columns = [number("layer"), number("experts"), number("never chosen")]
    columns += [number("busiest, of tokens"), number("experts of half the gate mass")]
    print_table(f"{routing.model} on {routing.text.name}", columns, [_cells(row) for row in rows])
    click.echo(
        f"{arguments.output}: {routing.text.tokens:,} tokens through {len(rows)} layers in {seconds:.1f} s "
        f"({routing.text.tokens / seconds:,.1f} tokens/s)"
    )


def _cells(row: LayerSummary) -> list[str]:
    return [str(row.layer), str(row.experts), str(row.never_chosen), f"{100 * row.busiest:.1f} %", str(row.half_mass)]
