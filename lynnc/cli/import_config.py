"""``lynnc import-config``: a published ``config.json`` to a model file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from lynnc.cli.output import note, warn
from lynnc.errors import ModelError, OutputError
from lynnc.hfconfig import EXPERT_SPEC, import_config, read_expert_spec, read_json
from lynnc.model import ModelSpec
from lynnc.modelfile import dump_model
from lynnc.outputfile import check_file, write_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@click.command("import-config", epilog="Example: lynnc import-config config.json -o mine.yaml")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Model file to write.")
@click.option("--name", help="Name of the model; the output's file name if not given.")
@click.option(
    "--experts",
    type=click.Path(path_type=Path),
    help=f"Experts left in each layer of a pruned checkpoint; {EXPERT_SPEC} beside CONFIG if it is there.",
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def command(config: Path, output: Path, name: str | None, experts: Path | None, force: bool) -> None:
    """Write a model file from the CONFIG (config.json) of a published checkpoint."""
    _check_output(output, force)
    published = read_json(config)
    spec = import_config(
        published,
        name=_name(name, output),
        experts=_expert_counts(config, experts),
        file=str(config),
        experts_file=str(experts or config.parent / EXPERT_SPEC),
    )
    if "quantization_config" in published:
        warn(f"{config} has a quantization_config, which is not read: check the precision section of {output}.")
    write_file(output, dump_model(spec), force)
    click.echo(f"{output}: {_summary(spec)}")


def _check_output(output: Path, force: bool) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise OutputError(f"{output} does not end in .yaml: a model file must, so choose another --output.")
    check_file(output, force)


def _name(name: str | None, output: Path) -> str:
    chosen = name or output.stem
    if not NAME.fullmatch(chosen):
        raise ModelError(f"{chosen!r} is no model name: give letters, digits, '.', '_' and '-' with --name.")
    return chosen


def _expert_counts(config: Path, experts: Path | None) -> Mapping[str, int] | None:
    """The counts that were named, else those beside the configuration: without them a pruned checkpoint looks whole."""
    if experts is not None:
        return read_expert_spec(experts)
    beside = config.parent / EXPERT_SPEC
    if not beside.exists():
        return None
    note(f"experts of each layer taken from {beside}.")
    return read_expert_spec(beside)


def _summary(spec: ModelSpec) -> str:
    experts = f", {sum(spec.moe.experts):,} experts" if spec.moe else ""
    return f"{spec.name}, family {spec.family}, {len(spec.layers)} layers{experts}"
