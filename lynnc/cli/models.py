"""``lynnc models``: the models that come with lynnc."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from lynnc.build import build_graph
from lynnc.cli.output import amount, number, print_json, print_table, size, text
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model, shipped_models


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One shipped model; ``parameters`` and ``packed_bytes`` are of its language model, without an MTP head."""

    name: str
    family: str
    layers: int
    experts: int
    parameters: int
    packed_bytes: int
    representative: bool
    description: str


@click.command("models", epilog="Example: lynnc models")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def command(as_json: bool) -> None:
    """List the models that come with lynnc; any other is given as the path of its model file."""
    rows = [model_row(load_model(name)) for name in shipped_models()]
    if as_json:
        print_json({"models": [asdict(row) for row in rows]})
        return
    columns = [text("model"), text("family"), number("layers"), number("experts"), number("parameters")]
    columns += [number("packed"), text("expert map"), text("description")]
    print_table("Models", columns, [_cells(row) for row in rows])


def model_row(spec: ModelSpec) -> ModelRow:
    """Sizes of a model; ``experts`` counts those of all layers, 0 for a dense model."""
    weights = build_graph(spec, 1).weights.values()
    return ModelRow(
        name=spec.name,
        family=str(spec.family),
        layers=len(spec.layers),
        experts=sum(spec.moe.experts) if spec.moe else 0,
        parameters=sum(weight.experts * weight.rows * weight.columns for weight in weights),
        packed_bytes=sum(weight.bytes for weight in weights),
        representative=spec.representative,
        description=spec.description,
    )


def _cells(row: ModelRow) -> list[str]:
    experts = f"{row.experts:,}" if row.experts else "dense"
    expert_map = "representative" if row.representative else "exact" if row.experts else ""
    return [
        row.name,
        row.family,
        str(row.layers),
        experts,
        amount(row.parameters),
        size(row.packed_bytes),
        expert_map,
        row.description,
    ]
