"""``lynnc prune``: from routing statistics to the experts that each layer keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import click

from lynnc.artifact import digest
from lynnc.cli.output import number, print_json, print_table, text
from lynnc.cli.parameters import complete_models, json_option
from lynnc.cli.subject import find_model
from lynnc.errors import ModelError, OptionError
from lynnc.fields import Place, word
from lynnc.model import ModelSpec
from lynnc.modelfile import dump_model
from lynnc.outputfile import check_file, write_file
from lynnc.runtime.experts.expertspec import ExpertSpec, Kept, expert_spec_text
from lynnc.runtime.experts.prune import Cut, Measure, Rules, choose_experts, cuts, total_cut
from lynnc.runtime.experts.routingfile import Routing, merge_routing, read_routing, routing_text
from lynnc.version import VERSION

WRITE_MODEL = "--write-model"
LAYERS = re.compile(r"(?P<first>[0-9]{1,6})(-(?P<last>[0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was typed, by the names of the options."""

    stats: Sequence[Path]
    budget: int | None
    cut: int | None
    keep_share: float | None
    protect: Sequence[str]
    protect_first: int
    min_experts: int | None
    by: str
    output: Path | None
    model: str | None
    write_model: Path | None
    force: bool
    as_json: bool


@click.command("prune", epilog="Example: lynnc prune --stats routing.json --cut 1010 --protect-first 2 -o experts.json")
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Statistics of `lynnc routing`; may be repeated for several texts.",
)
@click.option("--budget", type=click.IntRange(min=1), metavar="N", help="Keep N experts in all layers together.")
@click.option("--cut", type=click.IntRange(min=0), metavar="N", help="Cut N experts in all layers together.")
@click.option(
    "--keep-share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    metavar="SHARE",
    help="Keep at least this share of all experts, such as 0.9.",
)
@click.option("--protect", multiple=True, metavar="LAYERS", help="Layers that are not cut, such as 0,1,38-39.")
@click.option("--protect-first", type=click.IntRange(min=0), default=0, metavar="N", help="Protect the first N layers.")
@click.option(
    "--min-experts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep at least N experts in each layer; as many as a token selects if not given.",
)
@click.option(
    "--by",
    type=click.Choice([str(measure) for measure in Measure]),
    default=str(Measure.BOTH),
    show_default=True,
    help="What an expert is worth: its share of its layer's choices, of its gate mass, or the mean of both.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File of the kept experts to write.")
@click.option("--model", shell_complete=complete_models, help=f"Model that {WRITE_MODEL} starts from.")
@click.option(WRITE_MODEL, type=click.Path(path_type=Path), help="Model file with the new counts to write.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def command(**options: Any) -> None:
    """Choose the experts to keep: those that the tokens of a text miss least go first.

    Give one of --budget, --cut and --keep-share. Without --output, nothing is written. `lynnc pack --experts` takes
    the file; --write-model makes the model file that `lynnc compile` needs for the result.
    """
    run(Arguments(**options))


def run(arguments: Arguments) -> None:
    """Checks the outputs first, then chooses, reports and writes."""
    _check_outputs(arguments)
    statistics = [read_routing(path) for path in arguments.stats]
    routing = merge_routing(statistics)
    model = find_model(arguments.model) if arguments.model else None
    if model:
        _check_model(model, routing)
    rules = Rules(
        budget=_budget(arguments, sum(routing.experts)),
        minimum=routing.top_k if arguments.min_experts is None else arguments.min_experts,
        protected=_protected(arguments, len(routing.layers)),
        measure=Measure(arguments.by),
    )
    kept = choose_experts(routing, rules)
    _write(arguments, _specification(kept, routing, statistics, rules), model)
    _report(arguments, routing, kept, rules)


def _check_outputs(arguments: Arguments) -> None:
    if (arguments.model is None) is not (arguments.write_model is None):
        raise OptionError(f"--model and {WRITE_MODEL} go together: give both or neither.")
    if arguments.output:
        check_file(arguments.output, arguments.force)
    if arguments.write_model:
        check_file(arguments.write_model, arguments.force, WRITE_MODEL)
        if arguments.write_model.suffix not in (".yaml", ".yml"):
            raise OptionError(f"{WRITE_MODEL} {arguments.write_model} does not end in .yaml, as a model file must.")
        word(arguments.write_model.stem, Place(f"{WRITE_MODEL} {arguments.write_model}", "the file's name"))


def _check_model(model: ModelSpec, routing: Routing) -> None:
    if model.moe is None:
        raise ModelError(f"{model.name} has no experts to cut: name the model that {routing.file} is of.")
    facts = (("layers", len(model.layers), len(routing.layers)), ("top_k", model.moe.top_k, routing.top_k))
    experts = zip(model.moe.experts, routing.experts, strict=False)
    layers = tuple((f"experts in layer {layer}", ours, theirs) for layer, (ours, theirs) in enumerate(experts))
    for name, ours, theirs in (*facts, *layers):
        if ours != theirs:
            raise ModelError(
                f"{model.name} has {name} {ours} but {routing.file} counts {theirs}: name the model it is of."
            )


def _budget(arguments: Arguments, total: int) -> int:
    given = [value for value in (arguments.budget, arguments.cut, arguments.keep_share) if value is not None]
    if len(given) != 1:
        raise OptionError("How many experts stay is not clear: give exactly one of --budget, --cut and --keep-share.")
    if arguments.budget is not None:
        return arguments.budget
    if arguments.cut is not None:
        if arguments.cut >= total:
            raise OptionError(f"--cut {arguments.cut:,} leaves none of the {total:,} experts: cut fewer.")
        return total - arguments.cut
    # The decimal number that was typed, not the binary one nearest to it: 0.55 of 100 is 55.
    share = repr(arguments.keep_share)
    if share == "nan":
        raise OptionError("--keep-share nan is no share of the experts: give a number above 0, and at most 1.")
    return ceil(Fraction(share) * total)


def _protected(arguments: Arguments, layers: int) -> frozenset[int]:
    if arguments.protect_first > layers:
        raise OptionError(f"--protect-first {arguments.protect_first} exceeds the {layers} layers: protect fewer.")
    found = set(range(arguments.protect_first))
    for entry in (part.strip() for given in arguments.protect for part in given.split(",")):
        named = LAYERS.fullmatch(entry)
        if not named:
            raise OptionError(f"--protect {entry!r} names no layers: write numbers and ranges, such as 0,1,38-39.")
        low, high = int(named["first"]), int(named["last"] or named["first"])
        if low > high or high >= layers:
            raise OptionError(f"--protect {entry} is no range of the layers 0 to {layers - 1}: correct it.")
        found.update(range(low, high + 1))
    return frozenset(found)


def _specification(kept: Kept, routing: Routing, statistics: Sequence[Routing], rules: Rules) -> ExpertSpec:
    source = {
        "lynnc": VERSION,
        "model": routing.model,
        "text": routing.text.name,
        "tokens": routing.text.tokens,
        "statistics": [digest(routing_text(one).encode()) for one in statistics],
        "by": str(rules.measure),
        "budget": rules.budget,
        "min_experts": rules.minimum,
        "protected_layers": sorted(rules.protected),
    }
    return ExpertSpec(tuple(map(len, kept)), kept, routing.experts, source)


def _write(arguments: Arguments, spec: ExpertSpec, model: ModelSpec | None) -> None:
    if arguments.write_model and model and model.moe:
        total, left = sum(model.moe.experts), sum(spec.counts)
        pruned = replace(
            model,
            name=arguments.write_model.stem,
            description=f"{model.name} with {total - left:,} of its {total:,} experts pruned",
            representative=False,
            moe=replace(model.moe, experts=spec.counts),
        )
        write_file(arguments.write_model, dump_model(pruned), arguments.force, WRITE_MODEL)
    if arguments.output:
        write_file(arguments.output, expert_spec_text(spec), arguments.force)


def _report(arguments: Arguments, routing: Routing, kept: Kept, rules: Rules) -> None:
    rows, whole = cuts(routing, kept), total_cut(routing, kept)
    if arguments.as_json:
        layers = [{"layer": n, "protected": n in rules.protected, **asdict(row)} for n, row in enumerate(rows)]
        files = {"output": arguments.output, "model_file": arguments.write_model}
        print_json({**asdict(whole), "by": str(rules.measure), "layers": layers, **files})
        return
    columns = [text("layer"), number("experts"), number("kept"), number("cut")]
    columns += [number("gate mass kept"), number("choices kept"), text("")]
    cells = [_cells(str(n), row, n in rules.protected) for n, row in enumerate(rows)]
    title = f"{routing.model} by {routing.text.name}, {routing.text.tokens:,} tokens"
    print_table(title, columns, [*cells, _cells("all", whole, False)])
    written = " and ".join(str(path) for path in (arguments.output, arguments.write_model) if path)
    said = f"{whole.kept:,} of {whole.experts:,} experts kept, {whole.experts - whole.kept:,} cut"
    click.echo(f"{written}: {said}" if written else f"{said}; nothing was written, for want of --output")


def _cells(layer: str, row: Cut, is_protected: bool) -> list[str]:
    counts = [f"{count:,}" for count in (row.experts, row.kept, row.experts - row.kept)]
    shares = [f"{100 * share:.2f} %" for share in (row.gate_mass, row.choices)]
    return [layer, *counts, *shares, "protected" if is_protected else ""]
