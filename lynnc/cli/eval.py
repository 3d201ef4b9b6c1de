"""``lynnc eval``: how well a packed model predicts a text."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from lynnc.cli.engines import EngineChoice, context_of, engine_options, open_engine, packed_model
from lynnc.cli.output import print_json
from lynnc.cli.parameters import json_option
from lynnc.cli.tokens import tokenizer_of
from lynnc.errors import OptionError
from lynnc.modelfile import read_text
from lynnc.quality.score import OnScored, Score, Windows, score_text

PROGRAMS = ("decode/1", "decode/8")
USUAL_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    folder: Path
    text: Path
    tokens: int | None
    context: int | None
    stride: int | None
    plan: Path | None
    device: str
    store: Path | None
    as_json: bool


@click.command("eval", epilog="Example: lynnc eval models/lynn-mini --text sample.txt")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), required=True, help="UTF-8 text to predict.")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Only the first N tokens of it.")
@click.option(
    "--context",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Tokens of a window; {USUAL_CONTEXT}, or what the model has, if not given.",
)
@click.option("--stride", type=click.IntRange(min=1), metavar="N", help="Tokens from window to window; half of one.")
@engine_options
@json_option
def command(**options: Any) -> None:
    """Measure how well the model of FOLDER, a packed folder of `lynnc pack`, predicts a text: bits per byte and
    perplexity.

    The text runs in windows that overlap; every token is scored once, with as much context as its window gives.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks everything that needs no weights first, so that mistakes show at once."""
    spec, tokenizer = packed_model(arguments.folder), tokenizer_of(arguments.folder)
    context = context_of(spec, arguments.context, USUAL_CONTEXT)
    windows = Windows(context, arguments.stride or max(1, context // 2))
    ids, size = _tokens(tokenizer, read_text(arguments.text), arguments.tokens)
    if len(ids) < 2:
        raise OptionError(f"{arguments.text} has {len(ids)} tokens, too few to predict one: give a longer text.")
    choice = EngineChoice(arguments.folder, arguments.plan, arguments.device, arguments.store)
    with open_engine(choice, context, PROGRAMS) as engine, scoring_bar() as on_scored:
        started = time.perf_counter()
        score = score_text(engine, ids, size, windows, on_scored)
        _report(score, windows, engine.label, time.perf_counter() - started, arguments)


def _tokens(tokenizer: Tokenizer, text: str, most: int | None) -> tuple[tuple[int, ...], int]:
    """Tokens of a text, or of its beginning, and the bytes behind the first of them."""
    encoding: Any = tokenizer.encode(text, add_special_tokens=False)
    ends = [end for _, end in encoding.offsets]
    is_cut = most is not None and most < len(ends)
    behind = text[ends[0] : ends[most - 1] if is_cut and most else len(text)] if ends else ""
    return tuple(encoding.ids[:most]), len(behind.encode())


@contextmanager
def scoring_bar() -> Iterator[OnScored | None]:
    """Gives what is called with the tokens that are scored, or None."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _report(score: Score, windows: Windows, label: str, seconds: float, arguments: Arguments) -> None:
    if arguments.as_json:
        means = {"bits_per_byte": score.bits_per_byte, "perplexity": score.perplexity, "mean_nll": score.mean_nll}
        print_json({**means, **asdict(score), **asdict(windows), "engine": label, "seconds": seconds})
        return
    click.echo(
        f"{arguments.text}: {score.bits_per_byte:.4f} bits per byte, perplexity {score.perplexity:.3f} a token "
        f"(mean NLL {score.mean_nll:.4f})"
    )
    click.echo(
        f"{score.tokens:,} tokens, {score.bytes:,} bytes, windows of {windows.context} by {windows.stride}, "
        f"{score.tokens / seconds:,.1f} tokens/s; {label}"
    )
