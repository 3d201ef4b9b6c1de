"""What the tests of records share: records of one projection on an H200, and of a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lynnc.choose import choose_all
from lynnc.compiler import fused_graph
from lynnc.deviceidentity import Identity, identity_of
from lynnc.kernels.kernel import Kernel, Problem
from lynnc.kernels.table import KERNELS
from lynnc.modelfile import load_model
from lynnc.record import Record
from lynnc.recordfiles import RecordChoice, load_records
from lynnc.records import Known, Records, best_record
from lynnc.render import template_digest
from lynnc.target import find_device

SHIPPED = Path(__file__).parent.parent / "autotune" / "records"
H200, H100, SPARK = (find_device(name) for name in ("h200", "h100", "spark"))
HERE = identity_of(H200)
LINEAR: Kernel = next(kernel for kernel in KERNELS if kernel.name == "linear")
PROBLEM: Problem = {"formats": "nvfp4", "k": 2048, "n": 8192, "norm": 1, "residual": 0}
DEFAULT = LINEAR.default(PROBLEM, H200.target)


def made(device: Identity = HERE, knobs: Mapping[str, int] | None = None, **values: object) -> Record:
    """A record of the default with one knob changed."""
    fixed = {"kernel": "linear", "problem": PROBLEM, "template": template_digest(LINEAR.template)}
    return Record(device=device, knobs={**DEFAULT, **(knobs or {})}, **{**fixed, **values})  # type: ignore[arg-type]


def at(n: int, **values: object) -> Record:
    """A record of another number of rows."""
    return made(problem={**PROBLEM, "n": n}, **values)  # type: ignore[arg-type]


def users(folder: Path, device: Identity = HERE) -> list[Record]:
    return [known.record for known in load_records(device, folder, RecordChoice.USER).known]


def records_of_tiny() -> list[Record]:
    """A record for each projection of a tiny model, with fewer warps than the default."""
    graph = fused_graph(load_model("tiny-full"), "decode/1")
    choices = {str(c): c for c in choose_all(graph, H200.target, Records()) if c.kernel.name == "linear"}
    return [made(problem=dict(choice.problem), knobs={**choice.knobs, "num_warps": 2}) for choice in choices.values()]


def served(*known: Record | Known, device: Identity = HERE, problem: Problem = PROBLEM) -> tuple[str, int] | None:
    """Where the knobs for the problem come from, and their BLOCK_N, which tells records apart."""
    items = tuple(item if isinstance(item, Known) else Known(item) for item in known)
    match = best_record(Records(device, items), LINEAR, problem, H200.target)
    return (match.text, match.record.knobs["BLOCK_N"]) if match else None
