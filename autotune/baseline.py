"""What a tuner starts from: a compiled plan, its graphs and choices, and launches with other knobs.

In: a model, a request, what compiles kernels. Out: a ``Baseline``, of which a candidate changes the launches of one
kernel and problem. No knob changes the size of a tensor or the number of launches (runs of attention are split by a
pass, and are part of a problem), so whatever else a program has stays as it is.

Example::

    compiled, baseline = compile_baseline(spec, request, compiler.compile_all)
    baseline.bound("decode/8", [candidate]).launches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lynnc.autotune.problems import DECODE
from lynnc.autotune.trial import Candidate
from lynnc.choose import KernelChoice, choose_all
from lynnc.compiler import CompileAll, Compiled, Request, compile_model_by, settle
from lynnc.ir import Graph, Op
from lynnc.lower import BoundOps, bind_ops
from lynnc.model import ModelSpec
from lynnc.programs import MOST_DECODE_ROWS, is_prefill, program_rows
from lynnc.target import Target


@dataclass(frozen=True, slots=True)
class Baseline:
    """Graphs and choices of a plan's programs by name."""

    target: Target
    graphs: Mapping[str, Graph]
    choices: Mapping[str, tuple[KernelChoice, ...]]

    def refusal(self, candidate: Candidate) -> str:
        """Why a candidate cannot be measured here, or ``""``."""
        pairs = self._pairs(candidate.program, [candidate]) if candidate.program in self.graphs else []
        if not pairs:
            return f"{candidate.program} has no launch of {candidate.kernel} for this problem"
        return pairs[0][1].kernel.refusal(candidate.problem, candidate.knobs, self.target) or ""

    def bound(self, program: str, candidates: Sequence[Candidate]) -> BoundOps:
        """The launches that candidates have in a program, of whatever program they are themselves."""
        return bind_ops(self.graphs[program], self._pairs(program, candidates), self.target)

    def partner(self, program: str) -> str:
        """The decode program whose rows must have the bits of this one's, or ``""``: the largest to ``decode/1``, and
        ``decode/1`` to any other."""
        rows = {name: count for name in self.graphs if (count := program_rows(name))}
        others = [name for name in rows if program in rows and name != program and 1 in (rows[name], rows[program])]
        return max(others, key=lambda name: rows[name], default="")

    def unchecked(self, candidate: Candidate) -> str:
        """Why a decode candidate's rows cannot be compared with those of another program, or ``""``."""
        if is_prefill(candidate.program):
            return ""
        partner = self.partner(candidate.program)
        if not partner:
            return f"the plan has no decode program whose rows could be compared with those of {candidate.program}"
        why = self.refusal(replace(candidate, program=partner))
        return f"its rows cannot be compared: {why}" if why else ""

    def _pairs(self, program: str, candidates: Sequence[Candidate]) -> list[tuple[Op, KernelChoice]]:
        """Ops whose choice some candidate changes, with the new one."""
        found = []
        for op, choice in zip(self.graphs[program].ops, self.choices[program], strict=True):
            for candidate in candidates:
                if candidate.kernel == choice.kernel.name and dict(candidate.problem) == dict(choice.problem):
                    knobs = MappingProxyType(dict(candidate.knobs))
                    found.append((op, replace(choice, knobs=knobs, origin="tuning")))
        return found


def with_partners(programs: Iterable[str]) -> tuple[str, ...]:
    """The programs and, if any is one of decode, those of one row and of most rows: each has a partner then.

    A record of decode serves every number of rows, also where fewer were asked for.
    """
    names = tuple(programs)
    ends = (DECODE, f"decode/{MOST_DECODE_ROWS}") if any(not is_prefill(name) for name in names) else ()
    return tuple(dict.fromkeys((*names, *ends)))


def compile_baseline(spec: ModelSpec, request: Request, compile_all: CompileAll) -> tuple[Compiled, Baseline]:
    """The plan that ``lynnc compile`` makes of a request, and what it was made of."""
    compiled = compile_model_by(spec, request, compile_all)
    return compiled, baseline_of(spec, request, compiled.graphs)


def baseline_of(spec: ModelSpec, request: Request, graphs: Mapping[str, Graph]) -> Baseline:
    """Graphs with the choices of a request."""
    request, _ = settle(spec, request)
    records, knobs = request.known_records, request.options.knobs
    choices = {name: choose_all(graph, request.target, records, knobs) for name, graph in graphs.items()}
    return Baseline(request.target, graphs, choices)
