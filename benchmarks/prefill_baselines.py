"""Kernels of prompts beside what would do their work otherwise, at the same shapes, in the same run.

In: a plan with programs for prompts. Out: for steps of 16 to 2,048 rows at position 0 the time of the plan's kernels as
``lynnc bench --prefill --kernels`` measures them, the time of each library's, and their ratio, above 1 where the plan's
are faster. A table and a JSON list of records. The libraries' weights are BF16:

- a projection beside torch's matrix product, whose weights no cache holds until they are read again;
- a layer's experts beside two grouped products and ``silu(gate) * up`` on rows that are sorted already
  (``grouped_mm``), and with top-k, sort, gather and weighted sum (``grouped_mm_whole``), where the plan's top-k counts
  too. The plan's kernels also compute the shared expert and add the residual;
- the delta rule by chunks beside flash-linear-attention's, with gates and norms inside, if that is installed;
- causal attention with its output gate beside torch's without one, heads of keys shared or repeated beforehand.

The plan's kernels go through the layers in turn; the inputs of the libraries' delta rule and attention may stay in L2.

Example::

    python benchmarks/prefill_baselines.py qwen3.6-35b-a3b.h200.plan --output benchmarks/results/h200-prefill.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import click
from prefill_libraries import BACKENDS, time_attention, time_experts, time_fla, time_matmul
from triton.errors import TritonError

from lynnc.bench.kernels import KernelTime
from lynnc.bench.prompts import PromptKernels, time_prompt_kernels
from lynnc.bench.records import Record, Setting, Value, setting_of, write_records
from lynnc.bench.timing import Effort, Timing
from lynnc.outputfile import check_file
from lynnc.plan import KernelEntry
from lynnc.planfile import load_plan
from lynnc.programs import prefill_programs
from lynnc.runtime import Room, load
from lynnc.runtime.executor import Executor
from lynnc.runtime.loading.generated import GeneratedWeights

ROWS = (16, 64, 256, 512, 2048)
REPEATS = 15
LIBRARIES = ("torch", "flash-linear-attention")
EXPERTS = ("group", "grouped_up", "grouped_down", "combine", "combine_add")
"""Kernels of a layer's experts behind the top-k."""
DELTA = ("delta_prepare", "delta_scan")
FAILURES = (
    *(ImportError, AttributeError, TypeError, ValueError, LookupError),
    *(AssertionError, OSError, RuntimeError, TritonError),
)
"""What libraries raise that are missing, have other parameters, or do not run at a shape."""
Kernels = Mapping[str, Sequence[tuple[KernelEntry, KernelTime]]]
"""Kernels of a step by name."""


@dataclass(frozen=True, slots=True)
class Part:
    """Kernels of a step of ``rows`` rows, their time together in one layer, and what times each of the others."""

    name: str
    what: str
    rows: int
    ours: Timing
    others: Mapping[str, Callable[[], Timing]]


@click.command()
@click.argument("plan", type=click.Path(exists=True, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File for the records.")
@click.option("--force", is_flag=True, help="Replace it.")
@click.option("--without-fla", is_flag=True, help="Leave flash-linear-attention out: it compiles for a minute or more.")
def main(plan: Path, output: Path | None, force: bool, without_fla: bool) -> None:
    """Measure a plan's kernels of prompts beside those of libraries."""
    if output:
        check_file(output, force)
    records: list[Record] = []
    room = Room(1, max(ROWS) + 2, prefill_programs(load_plan(plan).programs))
    with load(plan, GeneratedWeights(0), room) as executor:
        command = f"python benchmarks/prefill_baselines.py {plan}{' --without-fla' if without_fla else ''}"
        params = {"weights": "random, seed 0", **_versions()}
        setting = setting_of(executor.plan, executor.device.facts, params, command)
        click.echo(f"{'rows':>5} {'kernels':32} {'us':>9}   {'beside':18} {'us':>9} {'ratio':>6}")
        for part in parts_of(executor, without_fla):
            records += measured(part, setting)
            if output:
                write_records(output, records, force=True)


def parts_of(executor: Executor, without_fla: bool = False) -> Iterator[Part]:
    """All parts, kind by kind; that of flash-linear-attention last, whose first call takes longest."""
    found = list(time_prompt_kernels(executor, ROWS, Effort(REPEATS), lambda _: None))
    steps = [(step.rows, _kernels(executor, step)) for step in found]
    for rows, kernels in steps:
        yield from projections(rows, kernels, executor.device.facts.l2_bytes)
    for rows, kernels in steps:
        yield from experts(rows, kernels)
    for rows, kernels in steps:
        yield from attentions(rows, kernels)
    for rows, kernels in steps:
        yield from delta_rules(rows, kernels, without_fla)


def measured(part: Part, setting: Setting) -> Iterator[Record]:
    """Records of a part and of what did its work; a library that fails is reported and left out."""
    where: dict[str, Value] = {"op": part.what, "rows": part.rows}
    yield setting.time(f"{part.name}_us", part.ours, **where)
    click.echo(f"{part.rows:5} {part.what:32} {part.ours.median * 1e6:9.2f}")
    for name, run in part.others.items():
        try:
            theirs = run()
        except FAILURES as error:
            click.echo(f"warning: {name} at {part.rows} rows left out: {type(error).__name__}: {error}", err=True)
            continue
        ratio = theirs.median / part.ours.median
        yield setting.time(f"{name}_us", theirs, **where)
        yield setting.count(f"{name}_over_{part.name}", ratio, "x", **where)
        click.echo(f"{'':48}   {name:18} {theirs.median * 1e6:9.2f} {ratio:6.2f}")


def projections(rows: int, kernels: Kernels, l2_bytes: int) -> Iterator[Part]:
    """Packed projections of a layer; a router's has rows that are named otherwise, and is none of them."""
    for name in ("gemm", "gemm_fp4"):
        for entry, kernel in kernels.get(name, ()):
            if not str(entry.problem["n"]).isdigit():
                continue
            height, width = int(entry.problem["n"]), int(entry.problem["k"])
            what = f"{kernel.label.removeprefix('layers.*.')} {height} x {width}"
            others = {"torch_matmul": partial(time_matmul, rows, height, width, l2_bytes)}
            yield Part("projection", what, rows, kernel.alone, others)


def experts(rows: int, kernels: Kernels) -> Iterator[Part]:
    """A layer's experts, without the choice of experts and with it."""
    if "grouped_up" not in kernels:
        return
    choice, up, down = (kernels[name][0][0].problem for name in ("top_k", "grouped_up", "grouped_down"))
    sizes = rows, int(choice["experts"]), int(choice["k"]), int(up["k"]), int(down["k"])
    others = {"grouped_mm": partial(time_experts, sizes)}
    yield Part("moe_layer", "experts behind top-k", rows, _together(kernels, EXPERTS), others)
    others = {"grouped_mm_whole": partial(time_experts, sizes, with_choice=True)}
    yield Part("moe_layer_whole", "experts and top-k", rows, _together(kernels, ("top_k", *EXPERTS)), others)


def attentions(rows: int, kernels: Kernels) -> Iterator[Part]:
    """Attention of a prompt that begins here."""
    for entry, kernel in kernels.get("attention", ()):
        heads, shared, width = (int(entry.problem[name]) for name in ("heads", "kv_heads", "head_dim"))
        sizes = rows, heads, shared, width
        others = {
            f"torch_{backend}{'_gqa' if gqa else ''}": partial(time_attention, sizes, backend, gqa)
            for backend in BACKENDS
            for gqa in (False, True)
        }
        yield Part("attention", f"attention, {heads} heads of {width}", rows, kernel.alone, others)


def delta_rules(rows: int, kernels: Kernels, without_fla: bool) -> Iterator[Part]:
    """The delta rule by chunks, without the convolution before and the norm behind it."""
    if any(name not in kernels for name in DELTA):
        return
    problem = kernels[DELTA[1]][0][0].problem
    keys, heads, width, value_width = (
        int(problem[name]) for name in ("key_heads", "value_heads", "key_dim", "value_dim")
    )
    others = {} if without_fla else {"fla": partial(time_fla, rows, (keys, heads), (width, value_width))}
    yield Part("delta_rule", f"delta rule, {heads} heads of {width}", rows, _together(kernels, DELTA), others)


def _versions() -> Mapping[str, str]:
    """Of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _kernels(executor: Executor, step: PromptKernels) -> Kernels:
    keys = dict.fromkeys(launch.kernel for launch in executor.program(step.program).launches)
    found: dict[str, list[tuple[KernelEntry, KernelTime]]] = {}
    for key, kernel in zip(keys, step.kernels, strict=True):
        entry = executor.plan.kernels[key]
        found.setdefault(entry.name, []).append((entry, kernel))
    return found


def _together(kernels: Kernels, names: Sequence[str]) -> Timing:
    """Time of all these kernels in one layer; each has the first."""
    layers = sum(kernel.count for _, kernel in kernels[names[0]])
    own = [kernel.alone.over(layers / kernel.count) for name in names for _, kernel in kernels.get(name, ())]
    least, greatest = sum(timing.least for timing in own), sum(timing.greatest for timing in own)
    return Timing(sum(timing.median for timing in own), least, greatest, own[0].runs)


if __name__ == "__main__":
    main()
