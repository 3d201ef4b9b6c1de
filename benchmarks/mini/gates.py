"""Every fusion pass and every format through the quality gate, on lynn-mini.

In: the BF16 checkpoint of ``train.py`` and the packed folder made of it. Out: records of each gate: the checkpoint
against its weights in each format, the model's own graph against a plan of all passes, and that plan against one
without each pass. Where there is no GPU, plans are run by their graphs: that judges passes and formats, not kernels.

Example::

    python benchmarks/mini/gates.py trained models/lynn-mini --tokens 16 --text-tokens 1024 --output gates.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import Bench, Record, records_text

from lynnc.model import ModelSpec, PrecisionSpec
from lynnc.modelfile import dump_model, load_model
from lynnc.passes import PIPELINE
from lynnc.tensors import Format
from lynnc.tools import detect_gpu

PACKAGES = ("lynnc", "torch")
FORMATS: Mapping[str, Mapping[str, Format]] = {
    "as shipped, scales searched for": {},
    "as shipped": {},
    "nvfp4": {"": Format.NVFP4},
    "nvfp4, lm_head bf16": {"": Format.NVFP4, "lm_head": Format.BF16},
    "nvfp4-fp16": {"": Format.NVFP4_FP16},
    "fp8": {"": Format.FP8},
}
"""Formats that differ from the model file, by tensor class; "" is every class that is not kept in BF16."""
SEARCHED = "scales searched for"
TARGET = "sm_90"
"""What plans are compiled for."""


@dataclass(frozen=True, slots=True)
class Case:
    """One gate: what it is about, and the arguments of the command."""

    name: str
    arguments: tuple[str, ...]


def lynnc(*arguments: object) -> None:
    """A command of lynnc that must succeed; what it prints is not shown."""
    subprocess.run(command(*arguments), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def command(*arguments: object) -> list[str]:
    """A command of lynnc, run by this Python."""
    return [sys.executable, "-m", "lynnc.cli", *(str(argument) for argument in arguments)]


def passes(packed: Path, scratch: Path, jobs: int) -> Iterator[Case]:
    """The whole pipeline, then each pass of it; ``jobs`` plans are compiled at once."""
    options = ("compile", packed, "--target", TARGET, "--programs", "decode/1,decode/8,prefill", "-o")
    names = [item.name for item in PIPELINE]
    whole, *plans = (scratch / f"{name}.plan" for name in ("whole", *(f"without-{name}" for name in names)))
    lynnc(*options, whole)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda name, plan: lynnc(*options, plan, "--without", name), names, plans))
    kind = "compilation" if detect_gpu() else "fusion"
    yield Case("all passes", (str(packed), str(whole), "--weights", str(packed), "--kind", kind))
    for name, plan in zip(names, plans, strict=True):
        yield Case(f"pass {name}", (str(plan), str(whole), "--weights", str(packed), "--kind", "fusion"))


def formats(trained: Path, spec: ModelSpec, scratch: Path) -> Iterator[Case]:
    """The checkpoint's own values against each format, and against scales that were searched for."""
    for index, (name, changed) in enumerate(FORMATS.items()):
        model, folder = scratch / f"{index}.yaml", scratch / f"packed-{index}"
        model.write_text(dump_model(replace(spec, precision=changed_formats(spec, changed))))
        options = ("--scale-search",) if name.endswith(SEARCHED) else ()
        lynnc("pack", trained, "--model", model, "-o", folder, *options)
        yield Case(f"format {name}", (str(trained), str(folder), "--kind", "quantisation"))


def changed_formats(spec: ModelSpec, changed: Mapping[str, Format]) -> PrecisionSpec:
    """All packed classes in the format under "", if there is one, then the named ones in theirs."""
    packed = {name for name, form in spec.precision.formats.items() if form.is_packed or form is Format.FP8}
    default = {name: changed[""] for name in packed} if "" in changed else {}
    named = {name: form for name, form in changed.items() if name}
    return replace(spec.precision, formats={**spec.precision.formats, **default, **named})


def judge(case: Case, scratch: Path, common: Sequence[object]) -> dict[str, Any]:
    """The report of one gate, with its time; a FAIL is a result like any other."""
    document = scratch / f"{case.name.replace(' ', '-')}.json"
    started = time.perf_counter()
    done = subprocess.run(command("gate", *case.arguments, *common, "-o", document), capture_output=True, text=True)
    if not document.exists():
        raise click.ClickException(f"{case.name}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(document.read_text())
    return {**found, "seconds": time.perf_counter() - started}


def records_of(found: Mapping[str, Any], bench: Bench, said: str) -> Iterator[Record]:
    """The verdict (1 for PASS), the time of the gate, and every value that has a limit."""
    yield bench.record("passes", [float(found["verdict"] == "PASS")], "of 1", said)
    yield bench.record("seconds", [found["seconds"]], "s", said)
    for check in found["checks"]:
        yield bench.record(f"{check['name']}, limit {check['limit']:g}", [float(check["value"])], check["name"], said)


@dataclass(frozen=True, slots=True)
class Report:
    """Where the records go, the model that they are about, and the command that makes them again."""

    output: Path | None
    model: str
    said: str


def judge_all(cases: Sequence[Case], scratch: Path, common: Sequence[object], jobs: int, report: Report) -> None:
    """Runs the gates, ``jobs`` at once, and writes what is known after each."""
    records: list[Record] = []
    with ThreadPoolExecutor(jobs) as pool:
        for case, found in zip(cases, pool.map(lambda case: judge(case, scratch, common), cases), strict=True):
            gpu = detect_gpu()
            how = {"model": report.model, "case": case.name, "how": found["candidate"]["how"]}
            how["gpu"] = gpu.name if gpu else ""
            records += list(records_of(found, Bench(scratch, how, PACKAGES), report.said))
            click.echo(f"{case.name}: {found['verdict']} in {found['seconds']:.0f} s")
            if report.output:
                report.output.write_text(records_text(records))


@click.command()
@click.argument("trained", type=click.Path(exists=True, path_type=Path))
@click.argument("packed", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=64, show_default=True, help="Ids behind each prompt.")
@click.option("--text-tokens", default=4096, show_default=True, help="Tokens of the held-out text.")
@click.option("--device", default="auto", show_default=True, help="As in `lynnc gate`.")
@click.option("--only", type=click.Choice(["formats", "passes"]), help="Leave the others out.")
@click.option("--jobs", default=1, show_default=True, help="Gates at once; what they say of speed is of no use then.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON list of records.")
def main(trained: Path, packed: Path, only: str | None, jobs: int, output: Path | None, **effort: Any) -> None:
    """Judge every pass and format of the model in PACKED, which was made of TRAINED."""
    options = [(f"--{name.replace('_', '-')}", value) for name, value in effort.items()]
    common = ("--text", packed / "heldout.txt", *chain.from_iterable(options))
    said = f"python benchmarks/mini/gates.py trained {packed} --tokens {effort['tokens']} "
    said += f"--text-tokens {effort['text_tokens']}"
    spec = load_model(packed / "model.yaml")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        cases = [
            *(formats(trained, spec, scratch) if only != "passes" else ()),
            *(passes(packed, scratch, jobs) if only != "formats" else ()),
        ]
        judge_all(cases, scratch, common, jobs, Report(output, spec.name, said))


if __name__ == "__main__":
    main()
