"""What the tests of the report share: plans without machine code, records of them, a tuning run, and a page's elements.

Example::

    page = read_page(render_page(make_report(large_plan(), Sources(find_device("h200")))))
    page.table("layers-table")[0]                  # ["0", "gdn", "256", "474.83 MB"]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from lynnc.bench.records import Record, Setting
from lynnc.bench.timing import Timing
from lynnc.compiler import Request, assemble_plan, lower_programs
from lynnc.modelfile import load_model
from lynnc.plan import Options, Plan
from lynnc.planfile import sealed
from lynnc.report.kernels import layerless
from lynnc.report.tuning import SCHEMA, KernelStudy, StepStudy, TrialRow, TuneSummary
from lynnc.target import find_device

VOID = {"br", "hr", "img", "input", "link", "meta"}
PROGRAMS = ("decode/1", "decode/4", "prefill")
CONTEXT = 128
GPU = {
    "name": "NVIDIA H200",
    "capability": 90,
    "sm_count": 132,
    "memory_bytes": 150109880320,
    "l2_bytes": 62914560,
    "driver": "13.0",
}


@cache
def plan_without_code(model: str, programs: tuple[str, ...] = PROGRAMS) -> Plan:
    """A plan for an H200, of which nothing was compiled."""
    device = find_device("h200")
    spec, request = load_model(model), Request(device.target, device, Options(programs=programs))
    lowered = lower_programs(spec, request)
    kernels = {key: call.entry for _, low in lowered.values() for key, call in low.kernels.items()}
    return sealed(assemble_plan(spec, request, lowered, kernels, {}))


def large_plan() -> Plan:
    """The pruned model, whose layers differ in their number of experts."""
    return plan_without_code("lynn-27b-a3b")


def timing(microseconds: float) -> Timing:
    return Timing(microseconds * 1e-6, microseconds * 0.99e-6, microseconds * 1.01e-6, 20)


def records_for(plan: Plan, step_us: float = 979.25, kernel_us: float = 5.5) -> list[Record]:
    """What ``lynnc bench`` would write of a plan: steps, prompts, every kernel of decode/1, memory."""
    shared = {"model": plan.model_name, "plan": plan.name, "plan_digest": plan.digest, "weights": "random, seed 0"}
    setting = Setting(shared, GPU, {"lynnc": plan.lynnc}, "abc1234", "2026-11-30T01:40:04+00:00", "lynnc bench")
    found = [
        setting.time("decode_step_us", timing(step_us), rows=1, context=CONTEXT),
        setting.rate("decode_tokens_per_s", timing(step_us), 1, "tokens/s", rows=1, context=CONTEXT),
        setting.time("prefill_gpu_us", timing(30_000), tokens=2048, steps="1 x prefill of 2048 rows"),
        setting.count("memory_bytes", 18_468_500_000, "B", what="weights", host=False),
    ]
    by_kernel: dict[str, list[str]] = {}
    for launch in plan.programs["decode/1"].launches:
        by_kernel.setdefault(launch.kernel, []).append(launch.op)
    for key, ops in by_kernel.items():
        label = ", ".join(dict.fromkeys(map(layerless, ops)))
        where = {"op": label, "kernel": plan.kernels[key].label, "launches": len(ops), "bytes": 1}
        found.append(setting.time("kernel_us", timing(kernel_us), **where))
    return found


def write_records(path: Path, records: Sequence[Record]) -> Path:
    path.write_text(json.dumps([asdict(record) for record in records]))
    return path


def summary_for(plan: Plan, reason: str = "row 3 differs") -> TuneSummary:
    """A tuning run with candidates of every kind; times are made up."""
    outcomes = (
        ("timed", 5.8e-6, ""),
        ("timed", 5.2e-6, ""),
        ("wrong", 0.0, reason),
        ("timed", 5.5e-6, ""),
        ("hung", 0.0, "no answer within 5 s"),
        ("timed", 5.0e-6, ""),
    )
    trials = tuple(
        TrialRow(number, status, seconds, {"BLOCK_N": (8, 16)[number % 2], "num_warps": (2, 4, 8)[number % 3]}, why)
        for number, (status, seconds, why) in enumerate(outcomes)
    )
    linear = KernelStudy(
        program="decode/1",
        kernel="linear",
        problem={"k": 2048, "n": 12352},
        launches=30,
        default_seconds=5.8e-6,
        best_seconds=5.0e-6,
        default_knobs={"BLOCK_N": 8, "num_warps": 2},
        best_knobs={"BLOCK_N": 16, "num_warps": 4},
        refused={"shared memory 300000 > 232448": 2, "shared memory 400000 > 232448": 1},
        trials=trials,
        importance={"BLOCK_N": 0.75, "num_warps": 0.25},
        verdict="confirmed in the step of decode/1",
    )
    embed = KernelStudy("decode/1", "embed", {}, 1, 1e-6, 1e-6, {}, {}, {}, (), {}, "no candidate beats the default")
    return TuneSummary(
        schema=SCHEMA,
        lynnc=plan.lynnc,
        model=plan.model_name,
        device="h200",
        gpu="NVIDIA H200",
        seed=7,
        budget="10m",
        seconds=583.0,
        is_simulated=False,
        steps=(
            StepStudy("decode/1", CONTEXT, 979e-6, 960e-6, 950e-6, 4e-6),
            StepStudy("decode/8", CONTEXT, 6.2e-3, 6.1e-3, 6.1e-3, 9e-6),
        ),
        not_measured={"prefill": "not confirmed: there was no time left"},
        kernels=(embed, linear),
    )


@dataclass
class Element:
    """One element with its attributes and what stands in it."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None = field(default=None, repr=False)
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        """Itself and every element inside, in the order of the text."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """Elements inside with a tag, a word among their classes (``cls``), and other attributes."""
        wanted = dict(attributes)
        cls = wanted.pop("cls", None)
        return [
            one
            for one in self.walk()
            if one.tag == tag
            and (cls is None or cls in one.attributes.get("class", "").split())
            and all(one.attributes.get(name) == value for name, value in wanted.items())
        ]

    @property
    def text(self) -> str:
        """All text inside, in one line."""
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join("".join(parts).split())

    def is_within(self, **attributes: str) -> bool:
        """Whether it or one around it has the attributes."""
        found = all(self.attributes.get(name) == value for name, value in attributes.items())
        return found or (self.parent is not None and self.parent.is_within(**attributes))


class Page(HTMLParser):
    """A page's elements; a closing tag that closes nothing, or the wrong element, is an error."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self._open = Element("#root", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        element = Element(tag, {name: value or "" for name, value in attrs}, self._open)
        self._open.children.append(element)
        if tag not in VOID:
            self._open = element

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.tag and self._open.parent is not None, (tag, self._open, self.getpos())
        self._open = self._open.parent

    def handle_data(self, data: str) -> None:
        self._open.children.append(data)

    def by_id(self, name: str) -> Element:
        """The one element of that id."""
        (found,) = (one for one in self.root.walk() if one.attributes.get("id") == name)
        return found

    def table(self, name: str) -> list[list[str]]:
        """The text of every cell of a table's body."""
        (body,) = self.by_id(name).find("tbody")
        return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in body.find("tr")]

    def headings(self, name: str) -> list[str]:
        """The text of a table's column headings."""
        (head,) = self.by_id(name).find("thead")
        return [cell.text for cell in head.find("th")]


def read_page(text: str) -> Page:
    """The elements of a page; every one of them is closed."""
    page = Page()
    page.feed(text)
    page.close()
    assert page._open is page.root
    return page
