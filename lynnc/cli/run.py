"""``lynnc run``: a packed model goes on with a text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from lynnc.cli.engines import EngineChoice, context_of, engine_options, open_engine, packed_model
from lynnc.cli.output import note, print_json
from lynnc.cli.parameters import json_option
from lynnc.cli.tokens import encode, stop_tokens, tokenizer_of
from lynnc.engines.engine import Engine
from lynnc.errors import OptionError
from lynnc.generation import Wish, generate
from lynnc.modelfile import read_text
from lynnc.sampling import Sampling
from lynnc.textstream import TextStream

PROGRAMS = ("decode/1", "prefill")
USUAL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    folder: Path
    prompt: str | None
    prompt_file: Path | None
    tokens: int
    context: int | None
    plan: Path | None
    device: str
    store: Path | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    ignore_eos: bool
    as_json: bool


@dataclass(slots=True)
class Outcome:
    """What was made. ``ids`` hold the stop token, the text does not; ``stopped`` says why there is no more: ``eos``,
    ``tokens`` (as many as were asked for), ``context`` (it is full) or ``interrupted``."""

    engine: str
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str = "tokens"
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float | None = None


@click.command("run", epilog='Example: lynnc run models/lynn-mini --prompt "def fibonacci(n):"')
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="Text to go on with; - reads it from standard input.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="UTF-8 file of that text.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=USUAL_TOKENS,
    show_default=True,
    metavar="N",
    help="Most tokens to make.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    metavar="N",
    help="Most tokens of prompt and text together; as many as are needed if not given.",
)
@engine_options
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Choose tokens by chance; 0, the likeliest, if not given.",
)
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Only of the K likeliest.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="P",
    help="Only of the fewest likeliest with the probability P.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of chance; 0 if not given.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the token that ends a text.")
@json_option
def command(**options: Any) -> None:
    """Let the model of FOLDER, a packed folder of `lynnc pack`, go on with a text.

    On a GPU a plan is compiled first, if none is given; without a GPU the model is interpreted. The text is shown while
    it is made, the speed on standard error.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks everything that needs no weights first, so that mistakes show at once."""
    sampling = _sampling(arguments)
    prompt = _prompt(arguments)
    spec, tokenizer = packed_model(arguments.folder), tokenizer_of(arguments.folder)
    stops = frozenset() if arguments.ignore_eos else stop_tokens(arguments.folder)
    ids = encode(tokenizer, prompt)
    if not ids:
        raise OptionError("The prompt is empty: write some text.")
    context = context_of(spec, arguments.context, len(ids) + arguments.tokens)
    if len(ids) >= context:
        raise OptionError(
            f"The prompt has {len(ids)} tokens, which leaves no room in a context of {context}: shorten it, or allow a "
            f"longer context (--context, of {spec.max_context} at most)."
        )
    wish = Wish(min(arguments.tokens, context - len(ids)), stops, sampling)
    choice = EngineChoice(arguments.folder, arguments.plan, arguments.device, arguments.store)
    with open_engine(choice, context, PROGRAMS) as engine:
        outcome = Outcome(engine.label, ids, stopped="tokens" if wish.tokens == arguments.tokens else "context")
        _generate(engine, wish, TextStream(tokenizer, ids), outcome, is_shown=not arguments.as_json)
    _report(outcome, arguments)


def _prompt(arguments: Arguments) -> str:
    if (arguments.prompt is None) is (arguments.prompt_file is None):
        raise OptionError("Nothing, or too much, to go on with: give either --prompt or --prompt-file.")
    if arguments.prompt_file:
        return read_text(arguments.prompt_file)
    if arguments.prompt != "-":
        return arguments.prompt or ""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"Byte {error.start} of standard input is not UTF-8 text: give UTF-8.") from None


def _sampling(arguments: Arguments) -> Sampling:
    given = {"--top-k": arguments.top_k, "--top-p": arguments.top_p, "--seed": arguments.seed}
    idle = next((name for name, value in given.items() if value is not None), None)
    if not arguments.temperature and idle:
        raise OptionError(f"{idle} has no effect on the likeliest token: give --temperature above 0, or leave it out.")
    return Sampling(
        temperature=arguments.temperature or 0.0,
        top_k=arguments.top_k or 0,
        top_p=1.0 if arguments.top_p is None else arguments.top_p,
        seed=arguments.seed or 0,
    )


def _generate(engine: Engine, wish: Wish, stream: TextStream, outcome: Outcome, is_shown: bool) -> None:
    """Fills the outcome, also up to a Ctrl-C; shows text as it comes."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if is_shown and piece:
            click.echo(piece, nl=False)

    times = [time.perf_counter()]
    try:
        for token in generate(engine, outcome.prompt_ids, wish):
            times.append(time.perf_counter())
            outcome.ids.append(token)
            if token in wish.stops:
                outcome.stopped = "eos"
            else:
                show(stream.push(token))
    except KeyboardInterrupt:
        outcome.stopped = "interrupted"
    show(stream.flush())
    show("" if "".join(pieces).endswith("\n") else "\n")
    outcome.text = "".join(pieces[:-1])
    _set_times(outcome, times)


def _set_times(outcome: Outcome, times: Sequence[float]) -> None:
    """The first token comes with the prompt, so the rate is that of the others."""
    if len(times) > 1:
        outcome.prompt_seconds, outcome.seconds = times[1] - times[0], times[-1] - times[1]
    if outcome.seconds:
        outcome.tokens_per_second = (len(times) - 2) / outcome.seconds


def _report(outcome: Outcome, arguments: Arguments) -> None:
    if arguments.as_json:
        print_json(asdict(outcome))
    elif outcome.ids:
        rate = f" at {outcome.tokens_per_second:,.1f} tokens/s" if outcome.tokens_per_second else ""
        prompt = f"the prompt of {len(outcome.prompt_ids)} in {outcome.prompt_seconds:.2f} s"
        note(f"{len(outcome.ids)} tokens{rate}, {prompt}; {outcome.engine}.")
    if outcome.stopped == "context":
        note(f"the context is full: {len(outcome.prompt_ids) + len(outcome.ids)} tokens.")
    if outcome.stopped == "interrupted":
        raise click.Abort
