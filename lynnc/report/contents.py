"""Everything that the page shows, computed before any of it is drawn.

In: a plan, a device, a context, and maybe measurements and a tuning summary. Out: a frozen ``Report``.

Example::

    report = make_report(plan, Sources(find_device("h200")))
    [program.name for program in report.programs]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lynnc.compiler import model_of
from lynnc.plan import Plan
from lynnc.report.charts import history_chart, layers_chart, slice_charts
from lynnc.report.costing import CostedProgram, Parts, cost_programs
from lynnc.report.flow import Block, flow_of
from lynnc.report.kernels import KernelUse, Setting, kernel_uses, setting_of
from lynnc.report.layers import LayerRow, layer_rows
from lynnc.report.measured import Measurements
from lynnc.report.memory import MemoryRow, memory_rows
from lynnc.report.roofline import roofline_chart
from lynnc.report.svg import Chart
from lynnc.report.tokentime import TimeRow, decode_rows, prompt_rows
from lynnc.report.tuning import KernelStudy, TuneSummary
from lynnc.summary import mixers
from lynnc.target import Device

USUAL_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Sources:
    """What a report is made from beside the plan; ``context`` is S where nothing was measured, ``USUAL_CONTEXT`` or
    what the model has if not given."""

    device: Device
    context: int | None = None
    measured: Measurements | None = None
    tuning: TuneSummary | None = None


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """One program: where its figures are taken, its launches, its kernels and their roofline."""

    name: str
    anchor: str
    setting: Setting
    launches: int
    parts: Parts
    blocks: tuple[Block, ...]
    uses: tuple[KernelUse, ...]
    roofline: Chart


@dataclass(frozen=True, slots=True)
class StudyPart:
    """One kernel of a tuning run with its plots."""

    study: KernelStudy
    history: Chart | None
    slices: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The page. ``left_out`` are programs that another lynnc compiled and this one does not understand."""

    plan: Plan
    sources: Sources
    context: int
    layers: tuple[LayerRow, ...]
    layers_chart: Chart | None
    programs: tuple[ProgramPart, ...]
    decode: tuple[TimeRow, ...]
    prompts: tuple[TimeRow, ...]
    memory: tuple[MemoryRow, ...]
    studies: tuple[StudyPart, ...]
    left_out: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Packed weights."""
        return sum(row.bytes for row in self.memory if row.is_weight)

    @property
    def gpu_bytes(self) -> int:
        """Memory of the GPU that the plan needs."""
        return sum(row.bytes for row in self.memory if not row.is_host)

    @property
    def is_representative(self) -> bool:
        """Whether the model's experts for each layer are a plausible map rather than a published one."""
        return model_of(self.plan).representative

    @property
    def candidates(self) -> Mapping[str, int]:
        """Candidates of the tuning run by what became of them."""
        return self.sources.tuning.counts if self.sources.tuning else {}

    @property
    def first_token(self) -> TimeRow | None:
        """The bar that stands for the plan's speed: the first of decode."""
        return self.decode[0] if self.decode else None


def make_report(plan: Plan, sources: Sources) -> Report:
    """All sections; PlanError for a plan of which this lynnc understands no program."""
    programs, left_out = cost_programs(plan, sources.device)
    layers = layer_rows(plan)
    measured = sources.measured
    context = sources.context or min(USUAL_CONTEXT, plan.longest_context)
    return Report(
        plan=plan,
        sources=sources,
        context=context,
        layers=layers,
        layers_chart=layers_chart(layers) if any(row.experts for row in layers) else None,
        programs=tuple(_program_part(plan, costed, context, measured) for costed in programs.values()),
        decode=decode_rows(programs, context, measured),
        prompts=prompt_rows(programs, measured),
        memory=memory_rows(plan, context),
        studies=_study_parts(sources.tuning.kernels if sources.tuning else ()),
        left_out=left_out,
    )


def _program_part(plan: Plan, costed: CostedProgram, context: int, measured: Measurements | None) -> ProgramPart:
    name = costed.program.name
    setting = setting_of(costed, context, measured)
    uses = kernel_uses(plan, costed, setting, measured)
    anchor = name.replace("/", "-")
    return ProgramPart(
        name=name,
        anchor=anchor,
        setting=setting,
        launches=len(costed.program.launches),
        parts=costed.parts(setting.rows, setting.context),
        blocks=flow_of(costed, uses, setting, mixers(plan)),
        uses=uses,
        roofline=roofline_chart(f"roofline-{anchor}", uses, costed.device),
    )


def _study_parts(studies: Sequence[KernelStudy]) -> tuple[StudyPart, ...]:
    """The kernels that save the most first."""
    ordered = sorted(studies, key=lambda study: -study.saved_s)
    return tuple(
        StudyPart(
            study=study,
            history=history_chart(f"study-{number}", study) if study.timed else None,
            slices=slice_charts(f"study-{number}", study),
        )
        for number, study in enumerate(ordered, start=1)
    )
