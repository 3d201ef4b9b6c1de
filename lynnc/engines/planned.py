"""A plan without a GPU: its fused graphs in torch, with the plan's passes and programs.

In: a plan folder and the packed folder of its weights. Out: an ``Engine``. What a pass did to the graph shows here, and
what the machine code makes of a launch does not: that needs the GPU.

Example::

    engine = open_planned(Path("tiny-moe.sm_90.plan"), Path("packed"))
    engine.append([1, 2, 3])[-1].argmax()
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lynnc.build import build_graph
from lynnc.compiler import model_of
from lynnc.engines.interpreted import CHUNK, Interpreted
from lynnc.errors import PlanError
from lynnc.ir import Graph
from lynnc.passes import run_passes
from lynnc.plan import Options, Plan
from lynnc.planfile import load_plan
from lynnc.programs import PREFILL, prefill_programs, program_rows
from lynnc.runtime.weights.packedfile import Packed, open_packed

USUAL = Options()


@dataclass(slots=True)
class Planned(Interpreted):
    """An engine that runs the graphs that a plan's programs were compiled from: prompts by ``prefill`` if the plan has
    it, single tokens by ``decode/1``. Every row has logits here, also in ``prefill``, which keeps only the last."""

    options: Options = USUAL

    def _rows(self, left: int) -> int:
        if left > 1 and prefill_programs(self.options.programs):
            return min(left, CHUNK, self.options.prefill_rows)
        rows = [program_rows(name) or 1 for name in self.options.programs]
        return max((count for count in rows if count <= left), default=min(left, CHUNK))

    def _graph(self, rows: int) -> Graph:
        if rows not in self._graphs:
            graph = build_graph(self.spec, rows)
            of_prompts = bool(prefill_programs(self.options.programs))
            if f"decode/{rows}" not in self.options.programs or (rows > 1 and of_prompts):
                graph = replace(graph, program=PREFILL)
            self._graphs[rows] = run_passes(graph, self.options.without)
        return self._graphs[rows]


def open_planned(folder: Path, weights: Path, context: int | None = None, device: str = "cpu") -> Planned:
    """The plan's graphs on its weights. PlanError for a damaged plan or one of another model than the weights."""
    plan, packed = load_plan(folder), open_packed(weights)
    check_weights(plan, packed)
    spec = model_of(plan, folder)
    values = {name: packed.values(name, device) for name in packed.weights}
    label = f"{plan.name}, its graph interpreted"
    return Planned(spec, values, label, context or spec.max_context, device=device, options=plan.options)


def check_weights(plan: Plan, packed: Packed) -> None:
    """PlanError unless the plan was compiled for the model of these weights."""
    if plan.model_digest != packed.index.model_digest:
        raise PlanError(
            f"{plan.name} was compiled for another model than {packed.folder} holds: run `lynnc compile "
            f"{packed.folder / 'model.yaml'} --target {plan.target}`."
        )
