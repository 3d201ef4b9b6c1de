"""``lynnc gate``: whether a change of a plan or of weights may ship."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from lynnc.cli.gatereport import print_report
from lynnc.cli.output import note, print_json, warn
from lynnc.cli.parameters import json_option
from lynnc.cli.progress import steps_bar
from lynnc.cli.tokens import TOKENIZER_FILE, encode, load_tokenizer
from lynnc.errors import OptionError
from lynnc.modelfile import read_text
from lynnc.outputfile import check_file, write_file
from lynnc.quality.divergence import HeldOut
from lynnc.quality.document import document_of
from lynnc.quality.gate import Material, Report, Settings, run_gate
from lynnc.quality.pair import Pair, Timed, check_alike
from lynnc.quality.prompts import HELDOUT_FILE, encode_prompts, read_prompts, shipped_heldout
from lynnc.quality.sides import AUTO, Side, find_side, open_side
from lynnc.quality.thresholds import KINDS, Thresholds, read_thresholds
from lynnc.runtime.weights.devices import check_device

USUAL = Settings()
INTERPRETED_CONTEXT = 2048
"""Context if not given where a side is interpreted, which is slow; else it is the models' own."""
FEW_PROMPTS = 40
FEW_TOKENS = 640


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    base: Path
    candidate: Path
    kind: str
    thresholds: Path | None
    weights: Path | None
    base_weights: Path | None
    candidate_weights: Path | None
    prompts: Path | None
    tokens: int
    text: Path | None
    text_tokens: int
    tokenizer: Path | None
    context: int | None
    device: str
    output: Path | None
    force: bool
    as_json: bool


@click.command("gate", epilog="Example: lynnc gate packed lynn.plan --candidate-weights packed --kind fusion")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(list(KINDS)), default="fusion", show_default=True, help="Kind of change.")
@click.option("--thresholds", type=click.Path(path_type=Path), help="JSON file of other limits, by kind of change.")
@click.option("--weights", type=click.Path(path_type=Path), help="Packed folder of the weights of plans.")
@click.option("--base-weights", type=click.Path(path_type=Path), help="The same for BASE alone.")
@click.option("--candidate-weights", type=click.Path(path_type=Path), help="The same for CANDIDATE alone.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON list of prompts; lynnc's own if not given.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=USUAL.tokens,
    show_default=True,
    metavar="N",
    help="Tokens to generate behind each prompt.",
)
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 held-out text; lynnc's own if not given.")
@click.option(
    "--text-tokens",
    type=click.IntRange(min=2),
    default=4096,
    show_default=True,
    metavar="N",
    help="Most tokens of it to run.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help=f"{TOKENIZER_FILE}; that of BASE if not given.")
@click.option(
    "--context",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Most tokens of a sequence; {INTERPRETED_CONTEXT} if a side is interpreted, else the model's own.",
)
@click.option(
    "--device",
    default=AUTO,
    show_default=True,
    metavar="NAME",
    help="Where to run: cpu, which interprets plans too; cuda; auto takes a GPU where there is one.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write the report to, as JSON.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Say PASS or FAIL for CANDIDATE as a replacement of BASE, and where it goes wrong.

    Each of the two is a plan, a packed folder, or a Hugging Face checkpoint, which is the unquantised reference. Both
    generate behind the same prompts, read the same held-out text, and are compared layer by layer. Exits with 0 for
    PASS and 1 for FAIL.
    """
    if not run(Arguments(**options)).passed:
        ctx.exit(1)


def run(arguments: Arguments) -> Report:
    """Checks everything that needs no weights first, so that mistakes show at once."""
    if arguments.output:
        check_file(arguments.output, arguments.force)
    if arguments.device != AUTO:
        check_device(arguments.device)
    thresholds = read_thresholds(arguments.kind, arguments.thresholds)
    base = find_side(arguments.base, arguments.base_weights or arguments.weights, arguments.device)
    candidate = find_side(arguments.candidate, arguments.candidate_weights or arguments.weights, arguments.device)
    check_alike(base.spec, candidate.spec)
    context = choose_context(arguments, base, candidate)
    material = _material(arguments, base, candidate, context)
    report = _measure(arguments, (base, candidate), context, material, thresholds)
    document = document_of(report, base, candidate)
    if arguments.output:
        write_file(arguments.output, json.dumps(document, indent=1, allow_nan=False) + "\n", arguments.force)
    if arguments.as_json:
        print_json(document)
    else:
        print_report(report, base, candidate)
    return report


def choose_context(arguments: Arguments, base: Side, candidate: Side) -> int:
    """The context of both; OptionError for one that a model does not have, or that leaves no room for a prompt."""
    most = min(side.spec.max_context for side in (base, candidate))
    if arguments.context and arguments.context > most:
        raise OptionError(f"--context {arguments.context} is more than the {most} of the models: give at most that.")
    usual = most if base.gpu and candidate.gpu else min(most, INTERPRETED_CONTEXT)
    context = arguments.context or usual
    if context <= arguments.tokens:
        raise OptionError(
            f"A context of {context} has no room for a prompt and --tokens {arguments.tokens}: generate fewer tokens."
        )
    return context


def _material(arguments: Arguments, base: Side, candidate: Side, context: int) -> Material:
    tokenizer = load_tokenizer(_tokenizer_file(arguments, base, candidate))
    whole = read_heldout(arguments.text, tokenizer)
    heldout = whole.first(arguments.text_tokens)
    if len(heldout.ids) < FEW_TOKENS:
        note(f"{len(heldout.ids)} tokens of text are so few that the intervals of their means say little.")
    prompts = read_prompts(arguments.prompts)
    if len(prompts) < FEW_PROMPTS:
        note(f"{len(prompts)} prompts are fewer than the {FEW_PROMPTS} that a decision to ship should rest on.")
    room = context - arguments.tokens
    if len(whole.ids) < room:
        note(f"{whole.name} has {len(whole.ids):,} tokens and is repeated to fill prompts of up to {room:,}.")
    material = Material(encode_prompts(prompts, partial(encode, tokenizer), whole.ids, room), heldout)
    largest = max(max(ids, default=0) for ids in (heldout.ids, *(prompt.ids for prompt in material.prompts)))
    if largest >= base.spec.vocabulary:
        raise OptionError(
            f"The tokenizer gives the token {largest}, outside the vocabulary of {base.spec.vocabulary:,} of "
            f"{base.spec.name}: use the tokenizer of this model."
        )
    return material


def _tokenizer_file(arguments: Arguments, base: Side, candidate: Side) -> Path:
    """``--tokenizer``, or the base's, or the candidate's; a warning if the two folders have different ones."""
    if arguments.tokenizer:
        return arguments.tokenizer
    found = [side.files / TOKENIZER_FILE for side in (base, candidate) if (side.files / TOKENIZER_FILE).is_file()]
    if not found:
        raise OptionError(f"Neither {base.files} nor {candidate.files} holds a {TOKENIZER_FILE}: give --tokenizer.")
    if len({path.read_bytes() for path in found}) > 1:
        warn(f"the two folders have different tokenizers: both sides read what {found[0]} makes of the text.")
    return found[0]


def read_heldout(path: Path | None, tokenizer: Tokenizer) -> HeldOut:
    """A text's tokens with the bytes of each. A character that several tokens share counts for the first of them."""
    content = shipped_heldout() if path is None else read_text(path)
    encoding: Any = tokenizer.encode(content, add_special_tokens=False)
    sizes, done = [], 0
    for _, end in encoding.offsets:
        sizes.append(len(content[done:end].encode()))
        done = max(done, end)
    return HeldOut(HELDOUT_FILE if path is None else path.name, tuple(encoding.ids), tuple(sizes))


def _measure(
    arguments: Arguments, sides: tuple[Side, Side], context: int, material: Material, thresholds: Thresholds
) -> Report:
    settings = Settings(
        tokens=arguments.tokens,
        sequence=min(USUAL.sequence, context),
        followed_prompt=min(USUAL.followed_prompt, context // 2),
        followed_steps=min(USUAL.followed_steps, context // 2),
    )
    with ExitStack() as stack:
        engines = []
        for side in sides:
            engines.append(open_side(side, context, arguments.device))
            stack.callback(engines[-1].close)
        pair = Pair(Timed(engines[0]), Timed(engines[1]))
        with steps_bar("gate") as on_progress:
            return run_gate(pair, material, settings, thresholds, on_progress)
