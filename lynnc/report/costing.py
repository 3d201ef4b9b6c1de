"""A plan's programs with what each launch costs on a device.

In: a plan and a device. Out: ``CostedProgram`` values, which give the time of a launch or of a whole step by its bytes,
its launches and the rest.

Example::

    programs, left_out = cost_programs(plan, find_device("h200"))
    programs["decode/1"].parts(rows=1, context=4096).seconds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lynnc.compiler import graph_of
from lynnc.cost import Cost, Estimate, costs, estimate
from lynnc.errors import PlanError
from lynnc.ir import Graph
from lynnc.plan import Launch, Plan, Program
from lynnc.target import Device


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step: what its bytes take at the device's bandwidth, what launching takes, and what is left."""

    bytes_s: float
    launch_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.bytes_s + self.launch_s + self.other_s

    def over(self, count: int) -> Parts:
        """One of ``count`` equal parts."""
        return Parts(self.bytes_s / count, self.launch_s / count, self.other_s / count)

    def plus(self, other: Parts) -> Parts:
        """Both, one after the other."""
        return Parts(self.bytes_s + other.bytes_s, self.launch_s + other.launch_s, self.other_s + other.other_s)

    def measured(self, seconds: float) -> Parts:
        """The parts of a measured time: bytes as estimated, launches as far as time is left, and the rest.

        Launches that overlap take less than one after the other, so a fast step has less time for them than estimated.
        """
        bytes_s = min(self.bytes_s, seconds)
        launch_s = min(self.launch_s, seconds - bytes_s)
        return Parts(bytes_s, launch_s, seconds - bytes_s - launch_s)


@dataclass(frozen=True, slots=True)
class CostedProgram:
    """A program, the graph it was compiled from, and the cost of each launch by its op."""

    program: Program
    graph: Graph
    costs: Mapping[str, Cost]
    device: Device

    def estimate(self, launch: Launch, rows: int, context: int) -> Estimate:
        """The least time of a launch for T = ``rows`` and S = ``context``, or S = ``rows`` if that is more."""
        return estimate(self.costs[launch.op], rows, max(rows, context), self.device)

    def parts(self, rows: int, context: int) -> Parts:
        """The least time of a whole step; what computing takes beyond moving counts as other."""
        found = [self.estimate(launch, rows, context) for launch in self.program.launches]
        return Parts(
            bytes_s=sum(one.memory_s for one in found),
            launch_s=sum(one.launch_s for one in found),
            other_s=sum(max(one.compute_s - one.memory_s, 0.0) for one in found),
        )


def cost_programs(plan: Plan, device: Device) -> tuple[Mapping[str, CostedProgram], tuple[str, ...]]:
    """The plan's programs, and the names of those of which this lynnc would make other launches.

    PlanError if it would make other launches of all of them.
    """
    found: dict[str, CostedProgram] = {}
    for name, program in plan.programs.items():
        graph = graph_of(plan, name)
        if [(op.name, op.kind) for op in graph.ops] == [(launch.op, launch.kind) for launch in program.launches]:
            found[name] = CostedProgram(program, graph, costs(graph), device)
    if not found:
        raise PlanError(
            f"{plan.name} was compiled by another lynnc, which made other launches: "
            f"run `lynnc compile {plan.model_name} --target {plan.target}` again."
        )
    return found, tuple(name for name in plan.programs if name not in found)
