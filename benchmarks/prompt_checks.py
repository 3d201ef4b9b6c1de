"""Whether prompts are right at a plan's full size, with random weights: layer by layer, and as long as users have them.

In: a plan for the GPU that is there. Out: a line and a record for each check; exit code 1 if one fails. What each layer
makes of the hidden state that it gets agrees with torch, which computes the model as its graph is before any fusion, on
dequantised weights and with BF16 between its ops; a prompt of 131,072 tokens ends in the logits of the same prompt cut
elsewhere, and decoding goes on behind it.

Example::

    python benchmarks/prompt_checks.py qwen3.6-35b-a3b.h200.plan --output benchmarks/results/h200-prompt-checks.json
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from checks import DEVICE, Check, Ends, limit_of, logits_of_last, records_of, relative_rms

from lynnc.bench.records import Record, Setting, setting_of, write_records
from lynnc.build import build_graph
from lynnc.compiler import model_of
from lynnc.engines.optrace import ops_of_section, run_section
from lynnc.interpret import new_states, step_inputs
from lynnc.ir import Graph, primitive_ops
from lynnc.outputfile import check_file
from lynnc.programs import prefill_programs
from lynnc.readback import Readback, readback_of
from lynnc.runtime import Room, load
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.rows import rows_of

LONG, BEHIND = 131_072, 3_333
"""Tokens of the long prompt, and how many of them stand behind its cut."""
LAYER_LIMIT = 1e-2
"""RMS error of a layer's hidden state over its RMS."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked: rows of a step at most, whose layers are compared, and how many of these (of the program of
    most rows all); tokens of the long prompt, how many stand behind its cut, and how many are decoded behind it."""

    rows: int = 2048
    layers: int = 8
    long: int = LONG
    behind: int = BEHIND
    decoded: int = 8

    @property
    def room(self) -> Room:
        """Memory for all of it."""
        return Room(1, self.long + self.decoded + 2)


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File for the records.")
@click.option("--force", is_flag=True, help="Replace it.")
@click.option("--long", type=click.IntRange(min=1), default=LONG, show_default=True, help="Tokens of the prompt.")
def main(plan: Path, output: Path | None, force: bool, long: int) -> None:
    """Check prompts of a plan at its full size on this machine's GPU."""
    if output:
        check_file(output, force)
    extent = Extent(long=long, behind=min(BEHIND, long // 2))
    records: list[Record] = []
    failed: list[str] = []
    with load(plan, GeneratedWeights(0), extent.room) as executor:
        setting = _setting(executor, plan, long)
        try:
            for check, own in run_checks(executor, extent, setting):
                click.echo(str(check))
                records.extend([*records_of(check, setting), *own])
                if not check.is_passed:
                    failed.append(check.name)
        finally:
            if output and records:
                write_records(output, records, force)
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed.")


def run_checks(executor: Executor, extent: Extent, setting: Setting) -> Iterator[tuple[Check, Sequence[Record]]]:
    """All checks with records of their own, each as it is done."""
    *short, longest = prefill_programs(executor.plan.programs)
    for name in short:
        yield check_layers(executor, name, extent), ()
    yield check_layers(executor, longest, replace(extent, layers=len(model_of(executor.plan).layers))), ()
    check, seconds = check_long(executor, extent)
    yield check, [setting.count("long_prompt_s", seconds, "s", tokens=extent.long)]


def check_layers(executor: Executor, name: str, extent: Extent) -> Check:
    """Layers of a step of a prompt, evenly chosen: each from the hidden state that the plan's own layer began with."""
    rows = min(executor.program(name).max_rows, extent.rows)
    tokens = _tokens(executor, rows)
    step = readback_of(executor, name, rows)
    hidden = _hidden_states(step, tokens)
    spec = model_of(executor.plan)
    count = len(spec.layers)
    chosen = sorted({index * (count - 1) // max(extent.layers - 1, 1) for index in range(extent.layers)})
    graph, worst, passed = build_graph(spec, rows), {}, 0
    for layer in chosen:
        expected = _layer(step, graph, layer, tokens, hidden[layer])
        found = relative_rms(hidden[layer + 1].to(DEVICE).double(), expected.double())
        worst[f"layer {layer}"] = found
        passed += found <= LAYER_LIMIT
    executor.reset()
    return Check(
        "prompt_layers_agree", passed, len(chosen), {"limit": LAYER_LIMIT, "program": name, "rows": rows}, worst
    )


def _hidden_states(step: Readback, tokens: Sequence[int]) -> Mapping[int, torch.Tensor]:
    """The hidden state before each layer, and behind the last one, of a step that begins a sequence."""
    executor, found = step.executor, {}
    executor.reset()
    executor.write_rows(rows_of(tokens, 0))
    for op, call in zip(step.graph.ops, executor.calls(step.program, step.rows), strict=True):
        executor.device.launch([call])
        for name in op.writes:
            if match := re.fullmatch(r"h\.(\d+)", name):
                found[int(match[1])] = step.tensor(name)
    return found


def _layer(step: Readback, graph: Graph, layer: int, tokens: Sequence[int], entry: torch.Tensor) -> torch.Tensor:
    """What torch makes of one layer, which begins with empty states."""
    section = f"layers.{layer}"
    ops = [inner for op in ops_of_section(graph, section) for inner in primitive_ops(op)]
    names = {name for op in ops for name in op.names("weight")}
    with torch.inference_mode(), torch.device(DEVICE):
        weights = {name: step.weight(graph.weights[name], DEVICE) for name in names}
        states = new_states(graph, slots=1, context=len(tokens))
        outputs = run_section(graph, section, weights, states, step_inputs(tokens), entry.to(DEVICE))
        return next(item.values for item in reversed(list(outputs)) if item.tensor == f"h.{layer + 1}")


def check_long(executor: Executor, extent: Extent) -> tuple[Check, float]:
    """A long prompt, whole and in two pieces, and tokens decoded behind it: logits, and the seconds of the whole."""
    tokens = _tokens(executor, extent.long)
    executor.reset()
    started = time.perf_counter()
    executor.prefill(tokens)
    seconds = time.perf_counter() - started
    whole = logits_of_last(executor)
    ends = Ends(whole, limit_of(executor))
    executor.reset()
    executor.prefill(tokens[: -extent.behind])
    executor.prefill(tokens[-extent.behind :])
    ends.add(f"cut {extent.behind} before the end", logits_of_last(executor))
    executor.decode(extent.decoded)
    is_finite = bool(whole.isfinite().all() and logits_of_last(executor).isfinite().all())
    executor.reset()
    params = {**ends.params, "tokens": extent.long}
    return Check("long_prompt", int(is_finite) + ends.passed, 2, params, ends.worst), seconds


def _tokens(executor: Executor, count: int) -> list[int]:
    return random.Random(1).choices(range(executor.plan.vocabulary), k=count)


def _setting(executor: Executor, plan: Path, long: int) -> Setting:
    command = f"python benchmarks/prompt_checks.py {plan} --long {long}"
    return setting_of(
        executor.plan, executor.device.facts, {"weights": "random, seed 0", "torch": torch.__version__}, command
    )


if __name__ == "__main__":
    main()
