"""The measured knobs of a device through the quality gate, against the defaults of its architecture.

In: a model and a device with records. Out: records of the gate ``--kind tuning``: a plan with the device's knobs
against one with defaults, on the same random weights. The model may be cut to its first layers, which have the shapes
of all.

Example::

    python benchmarks/tuned_gates.py qwen3.6-35b-a3b --device h200 --layers 8 --output tuned.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent / "mini"))
from gates import Case, Report, judge_all, lynnc

from lynnc.modelfile import dump_model, load_model
from lynnc.target import find_device

PROGRAMS = "decode/1,decode/8,prefill"
TOKENIZER = Path(__file__).parents[1] / "models" / "lynn-mini" / "tokenizer.json"
"""Any tokenizer with a smaller vocabulary than the model's will do: the weights mean nothing."""
EFFORT = ("--tokens", 32, "--text-tokens", 1024)
"""A large vocabulary makes every logit row a megabyte, which torch compares on the host."""
UNTRAINED = {"divergent_share": 1.0, "agreement": 0.95}
"""Limits that do not hold for random weights: such a model is never sure of the next token."""


@click.command()
@click.argument("model")
@click.option("--device", default="h200", show_default=True, help="Device whose records are judged.")
@click.option("--layers", default=8, show_default=True, help="Layers of the model that are kept.")
@click.option("--context", default=2048, show_default=True, help="Most tokens of a sequence.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(model: str, device: str, layers: int, context: int, output: Path | None) -> None:
    """Judge the knobs that were measured on DEVICE, on the first layers of MODEL."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        spec = load_model(model)
        file = scratch / "model.yaml"
        experts = spec.moe and replace(spec.moe, experts=spec.moe.experts[:layers])
        file.write_text(dump_model(replace(spec, layers=spec.layers[:layers], moe=experts)))
        tuned, usual, packed = (scratch / part for part in ("tuned.plan", "default.plan", "packed"))
        lynnc("compile", file, "--device", device, "--programs", PROGRAMS, "-o", tuned)
        lynnc("compile", file, "--target", find_device(device).target.name, "--programs", PROGRAMS, "-o", usual)
        folder = Path(__file__).parent / "random_folder.py"
        subprocess.run([sys.executable, str(folder), str(tuned), str(packed)], check=True, stdout=subprocess.DEVNULL)
        case = Case(f"records {device}", (str(usual), str(tuned), "--weights", str(packed), "--kind", "tuning"))
        said = f"python benchmarks/tuned_gates.py {model} --device {device} --layers {layers} --context {context}"
        limits = scratch / "limits.json"
        limits.write_text(json.dumps({"tuning": UNTRAINED}))
        common = ("--tokenizer", TOKENIZER, "--context", context, "--thresholds", limits, *EFFORT)
        judge_all([case], scratch, common, 1, Report(output, spec.name, said))


if __name__ == "__main__":
    main()
