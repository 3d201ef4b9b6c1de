"""The checks of a plan at its full size, with random weights: bits that must be the same, launches that must agree.

In: a plan for the GPU that is there. Out: a line and a record for each check, passed of how many; exit code 1 if one
fails. A decode step gives the same bits every time; a graph those of its launches one by one, also with ``debug``; rows
of a step those of single rows; each launch agrees with the interpreter, of prompts too; a prompt in pieces ends in the
logits of one piece.

Example::

    python benchmarks/checks.py qwen3.6-35b-a3b.h200.plan --output benchmarks/results/h200-full-size.json
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import torch

from lynnc.bench.records import Record, Setting, Value, setting_of, write_records
from lynnc.compare import LIMIT, Comparison
from lynnc.compiler import model_of
from lynnc.outputfile import check_file
from lynnc.programs import prefill_programs
from lynnc.readback import readback_of
from lynnc.runtime import Room, load
from lynnc.runtime.executor import DECODE, Executor
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.rows import rows_of

ROOM = Room(1, 4096)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where torch computes what prompts are compared with."""
PROMPT_LAYERS = 4
"""Layers of a prompt that are compared with the interpreter: one of each kind, and a second expert layer of each."""
PIECES_LIMIT, ROUTED_LIMIT = 0.1, 0.2
"""Difference of logits over their RMS, without experts and with them: where weights are random routers are often
nearly tied, and one expert moves all behind it. Another token may come next where both are within twice that."""
ROWS = (2, 4, 8)
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked: tokens of the prompt, repeats of a step, tokens that are decoded and that are given to steps
    of several rows (a multiple of them all), and after how many seconds no further launch of a step is compared.
    Of prompts: rows of the longest step that is compared, tokens that stand before it (so that states and cache hold
    something, at no round position), and where a prompt is cut in two, with its length at the end."""

    prompt: int = 32
    repeats: int = 200
    decoded: int = 200
    given: int = 64
    compare_seconds: float = 600.0
    longest: int = 2048
    before: int = 37
    pieces: tuple[int, ...] = (1, 16, 17, 64, 65, 255, 300)


@dataclass(frozen=True, slots=True)
class Check:
    """How many of its parts a check passed. ``worst`` are the largest RMS errors by kind of op, where it has such."""

    name: str
    passed: int
    of: int
    params: Mapping[str, Value] = field(default_factory=dict)
    worst: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_passed(self) -> bool:
        """Whether all parts were."""
        return self.passed == self.of > 0

    def __str__(self) -> str:
        where = "".join(f", {name} {value}" for name, value in self.params.items())
        return f"{'passed' if self.is_passed else 'FAILED'}  {self.name}: {self.passed} of {self.of}{where}"


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File for the records.")
@click.option("--force", is_flag=True, help="Replace it.")
@click.option(
    "--compare-seconds",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="After which no further launch is compared with the interpreter.",
)
def main(plan: Path, output: Path | None, force: bool, compare_seconds: float) -> None:
    """Check a plan at its full size on this machine's GPU."""
    if output:
        check_file(output, force)
    extent, weights = Extent(compare_seconds=compare_seconds), GeneratedWeights(0)
    records: list[Record] = []
    failed: list[str] = []

    def note(check: Check, setting: Setting) -> None:
        click.echo(str(check))
        records.extend(records_of(check, setting))
        if not check.is_passed:
            failed.append(check.name)

    try:
        with load(plan, weights, ROOM) as executor:
            setting = _setting(executor, plan, compare_seconds)
            decoded = decode_graph(executor, extent)
            for check in run_checks(executor, extent):
                note(check, setting)
        with load(plan, weights, ROOM, debug=True) as executor:
            note(check_debug(executor, decoded, extent), setting)
    finally:
        if output and records:
            write_records(output, records, force)
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed.")


def run_checks(executor: Executor, extent: Extent) -> Iterator[Check]:
    """All checks of one executor, each as it is done."""
    yield check_repeats(executor, extent)
    yield from check_graph(executor, extent)
    yield from check_rows(executor, extent)
    yield check_launches(executor, extent)
    yield from check_prompt_launches(executor, extent)
    yield check_pieces(executor, extent)


def check_repeats(executor: Executor, extent: Extent) -> Check:
    """A decode step from one state, again and again: token and logits have the bits of the first time."""
    prompt, given = tokens_of(executor, extent)
    _begin(executor, prompt)
    states = executor.memory.save_states()
    found = []
    for _ in range(extent.repeats):
        executor.memory.restore_states(states)
        found.append((executor.step(rows_of(given[:1], len(prompt))), logits_of(executor, 1)))
    return Check("repeats_equal", sum(item == found[0] for item in found), len(found))


def check_graph(executor: Executor, extent: Extent) -> Iterator[Check]:
    """Greedy tokens of the graph are those of its launches one by one, and so are the last logits."""
    prompt, _ = tokens_of(executor, extent)
    expected = decode_graph(executor, extent)
    logits = logits_of(executor, 1)
    token, found = _begin(executor, prompt), []
    for length in range(len(prompt), len(prompt) + extent.decoded):
        executor.launch(executor.program(DECODE), rows_of([token], length))
        token = executor.memory.read("token", 1)[0]
        executor.assume(length + 1, token)
        found.append(token)
    yield _equal("graph_equals_launches", found, expected)
    yield _equal("graph_equals_launches_last_logits", logits_of(executor, 1), logits)


def check_rows(executor: Executor, extent: Extent) -> Iterator[Check]:
    """Steps of several rows, as the plan has them: token and logits of each row have the bits of a step of its own."""
    prompt, given = tokens_of(executor, extent)
    singly = _steps(executor, prompt, given, 1)
    for rows in ROWS:
        if f"decode/{rows}" in executor.plan.programs:
            yield _equal("rows_equal_single_rows", _steps(executor, prompt, given, rows), singly, rows=rows)


def check_launches(executor: Executor, extent: Extent) -> Check:
    """Each launch of a decode step against the interpreter, as many as the time allows."""
    prompt, given = tokens_of(executor, extent)
    _begin(executor, prompt)
    return _compare(Comparison(readback_of(executor, DECODE, 1), LIMIT), given[:1], extent)


def check_prompt_launches(executor: Executor, extent: Extent) -> Iterator[Check]:
    """Each launch of a prompt behind another one, by each program for prompts, in its first layers."""
    last = f"layers.{PROMPT_LAYERS}."
    for name in prefill_programs(executor.plan.programs):
        program = executor.program(name)
        rows = min(program.max_rows, extent.longest) - 1
        _begin(executor, tokens_of(executor, replace(extent, prompt=extent.before))[0])
        prompt, _ = tokens_of(executor, replace(extent, prompt=rows))
        yield _compare(Comparison(readback_of(executor, name, rows), LIMIT, DEVICE), prompt, extent, last)


def _compare(comparison: Comparison, tokens: Sequence[int], extent: Extent, last: str = "") -> Check:
    """Launches before the first of ``last`` against the interpreter; their largest errors by op."""
    worst: dict[str, float] = {}
    launches: dict[str, bool] = {}
    ends = time.monotonic() + extent.compare_seconds
    for item in comparison.run(tokens, None):
        if last and item.op.startswith(last):
            break
        launches[item.op] = launches.get(item.op, True) and item.is_close
        kind = item.op.rpartition(".")[2]
        if math.isfinite(item.rms):
            worst[kind] = max(worst.get(kind, 0.0), item.rms)
        if time.monotonic() > ends:
            break
    executor = comparison.executor
    executor.reset()
    program = comparison.step.program.name
    name = "prompt_launches_agree" if last else "launches_agree"
    params: dict[str, Value] = {
        "limit": LIMIT,
        "launches": len(comparison.graph.ops),
        "program": program,
        "rows": len(tokens),
    }
    return Check(name, sum(launches.values()), len(launches), params, worst)


def check_pieces(executor: Executor, extent: Extent) -> Check:
    """A prompt in two pieces, cut anywhere, and token by token: it ends as one piece does, but for rounding."""
    prompt, _ = tokens_of(executor, replace(extent, prompt=extent.pieces[-1]))
    _begin(executor, prompt)
    ends = Ends(logits_of_last(executor), limit_of(executor))
    for cut in extent.pieces[:-1]:
        _begin(executor, prompt[:cut])
        executor.prefill(prompt[cut:])
        ends.add(f"cut at {cut}", logits_of_last(executor))
    _begin(executor, prompt[:1])
    for position in range(1, len(prompt)):
        executor.step(rows_of(prompt[position : position + 1], position))
    ends.add("token by token", logits_of_last(executor))
    return Check("pieces_agree", ends.passed, len(ends.worst), {**ends.params, "rows": len(prompt)}, ends.worst)


def limit_of(executor: Executor) -> float:
    """How far logits may be apart whose prompts ran in other pieces."""
    return ROUTED_LIMIT if model_of(executor.plan).moe else PIECES_LIMIT


class Ends:
    """Logits of one prompt in other pieces, beside ``whole``: how far they differ, and which tokens come next."""

    def __init__(self, whole: torch.Tensor, limit: float) -> None:
        self.worst: dict[str, float] = {}
        self._whole, self._limit, self._margins = whole, limit, list[float]()

    def add(self, name: str, logits: torch.Tensor) -> None:
        """One more way to cut. A margin is by how much ``whole`` prefers its own next token, over the RMS."""
        self.worst[name] = relative_rms(logits, self._whole)
        behind = self._whole.max() - self._whole[logits.argmax()]
        self._margins.append(float(behind / self._whole.square().mean().sqrt()))

    @property
    def passed(self) -> int:
        """How many are close, and choose the same token or one that was nearly chosen."""
        both = zip(self.worst.values(), self._margins, strict=True)
        return sum(rms < self._limit and margin < 2 * self._limit for rms, margin in both)

    @property
    def params(self) -> dict[str, Value]:
        """What a record says beside the differences."""
        same = sum(margin == 0 for margin in self._margins)
        return {"limit": self._limit, "same_token": same, "largest_margin": round(max(self._margins), 4)}


def logits_of_last(executor: Executor) -> torch.Tensor:
    """FP64 logits of the last row of the last step."""
    data = bytearray(executor.tensor("logits").read().tobytes())
    return torch.frombuffer(data, dtype=torch.float32)[: executor.plan.vocabulary].double()


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over that of the expected."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def check_debug(executor: Executor, expected: Sequence[int], extent: Extent) -> Check:
    """An executor that was loaded with ``debug`` decodes the tokens of the graph."""
    return _equal("debug_equals_graph", decode_graph(executor, extent), expected)


def decode_graph(executor: Executor, extent: Extent) -> list[int]:
    """Greedy tokens behind the prompt."""
    _begin(executor, tokens_of(executor, extent)[0])
    return executor.decode(extent.decoded)


def tokens_of(executor: Executor, extent: Extent) -> tuple[list[int], list[int]]:
    """The prompt, and the tokens given to steps: the same in every run."""
    vocabulary, chance = executor.plan.vocabulary, random.Random(0)
    tokens = [chance.randrange(vocabulary) for _ in range(extent.prompt + extent.given)]
    return tokens[: extent.prompt], tokens[extent.prompt :]


def logits_of(executor: Executor, rows: int) -> list[bytes]:
    """Bits of the logits of each row of the last step."""
    data, size = executor.tensor("logits").read().tobytes(), executor.plan.vocabulary * F32_BYTES
    return [data[row * size : (row + 1) * size] for row in range(rows)]


def records_of(check: Check, setting: Setting) -> Iterator[Record]:
    """How many parts passed, and the largest error of each kind of op."""
    yield setting.count(check.name, check.passed, "passed", of=check.of, **check.params)
    for kind, rms in check.worst.items():
        yield setting.count(f"{check.name}_worst_rms", rms, "of the interpreter's RMS", op=kind, **check.params)


def _begin(executor: Executor, prompt: Sequence[int]) -> int:
    executor.reset()
    return executor.prefill(prompt)


def _steps(executor: Executor, prompt: Sequence[int], given: Sequence[int], rows: int) -> list[tuple[int, bytes]]:
    """Token and logits of every given token behind the prompt, in steps of some rows."""
    _begin(executor, prompt)
    found: list[tuple[int, bytes]] = []
    for first in range(0, len(given), rows):
        chosen = executor.step(rows_of(given[first : first + rows], len(prompt) + first))
        found += zip(chosen, logits_of(executor, rows), strict=True)
    return found


def _equal(name: str, found: Sequence[object], expected: Sequence[object], **params: Value) -> Check:
    alike = sum(one == other for one, other in zip(found, expected, strict=True))
    return Check(name, alike, len(expected), params)


def _setting(executor: Executor, plan: Path, compare_seconds: float) -> Setting:
    command = f"python benchmarks/checks.py {plan} --compare-seconds {compare_seconds:g}"
    setting = setting_of(executor.plan, executor.device.facts, {"weights": "random, seed 0"}, command)
    return replace(setting, versions={**setting.versions, "torch": torch.__version__})


if __name__ == "__main__":
    main()
