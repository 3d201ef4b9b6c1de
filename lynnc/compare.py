"""Runs a step of a loaded plan and the interpreter side by side, launch by launch, and says where they part.

In: an executor and the tokens of a decode step. Out: an ``Agreement`` for each launch. Each launch starts from what the
GPU has in memory, so an error counts for the launch that makes it and for no later one. Needs torch; the graph is built
again from the plan's model and options, so the plan must have been compiled by this version of lynnc.

Example::

    found = compare_step(executor, [7, 8], until="layers.3.experts_up")
    first_difference(found)         # None, or Agreement(op="layers.1.gdn_step", tensor="layers.1.o", rms=0.4, ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lynnc.errors import OptionError
from lynnc.interpret import run_op
from lynnc.ir import Op, primitive_ops
from lynnc.programs import MOST_DECODE_ROWS
from lynnc.promptops import DeltaChunk
from lynnc.readback import Readback, readback_of
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import rows_of
from lynnc.stepvalues import Run

LIMIT = 2e-2
"""RMS error over the RMS of the interpreter's values; a launch with BF16 results stays well below."""
REST_LIMIT = LIMIT / 64
"""The same for what a BF16 tensor lost in rounding, over the RMS of that tensor: all of it is about 2 ** -9."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One tensor or state after a launch: largest and RMS difference, both over the RMS of the interpreter's values."""

    op: str
    tensor: str
    max: float
    rms: float
    limit: float

    @property
    def is_close(self) -> bool:
        """Whether the difference is within the limit; NaN is not."""
        return self.rms <= self.limit


def first_difference(found: Sequence[Agreement]) -> Agreement | None:
    """The first tensor that is not close."""
    return next((item for item in found if not item.is_close), None)


def compare_step(
    executor: Executor, tokens: Sequence[int], until: str | None = None, limit: float | None = None
) -> list[Agreement]:
    """One decode step of ``tokens``, which slot 0's sequence goes on with, up to the launch ``until``.

    A whole step counts as done: the sequence is longer by its tokens. After a part of one (``until``) the states are no
    sequence's, and the slot begins anew with a prompt. OptionError if the program has no such launch.
    """
    if not 1 <= len(tokens) <= MOST_DECODE_ROWS:
        raise OptionError(f"A decode step has 1 to {MOST_DECODE_ROWS} rows, not {len(tokens)}: give as many tokens.")
    step = readback_of(executor, f"decode/{len(tokens)}", len(tokens))
    comparison = Comparison(step, LIMIT if limit is None else limit)
    names = [op.name for op in comparison.graph.ops]
    if until is not None and until not in names:
        raise OptionError(f"{comparison.step.program.name} has no launch {until}: it has {', '.join(names)}.")
    return list(comparison.run(tokens, until))


class Comparison:
    """A program's step, and the values that both sides start each launch from. The interpreter runs on ``device`` of
    torch: the products of a long prompt take minutes on a CPU."""

    def __init__(self, step: Readback, limit: float = LIMIT, device: str = "cpu") -> None:
        self.executor, self.limit, self.rows = step.executor, limit, step.rows
        self.step, self.device = step, device
        self.graph = self.step.graph

    def run(self, tokens: Sequence[int], until: str | None) -> Iterator[Agreement]:
        """Launches in order, each followed by its comparison; who takes no more of them leaves a part of a step."""
        executor = self.executor
        length = executor.lengths[0]
        rows = rows_of(tokens, length)
        executor.check_rows(rows)
        executor.write_rows(rows)
        is_whole = until in (None, self.graph.ops[-1].name)
        with executor.advancing({0: length + len(rows) if is_whole else 0}):
            for op, call in zip(self.graph.ops, executor.calls(self.step.program, self.rows), strict=True):
                inside = self.before(op)
                executor.device.launch([call])
                with torch.device(self.device):
                    run_op(inside, op)
                yield from self.after(op, inside)
                if op.name == until:
                    return

    def before(self, op: Op) -> Run:
        """What the launch reads, and the memory that it writes to, of which it may leave a part as it is."""
        states = {name: self.step.state(name).to(self.device) for name in op.names("state")}
        weights = {name: self.step.weight(self.graph.weights[name], self.device) for name in op.names("weight")}
        run = Run(self.graph, weights, states, self.rows)
        with torch.device(self.device):
            for name in dict.fromkeys((*op.reads, *op.writes)):
                run.put(name, self.step.tensor(name).to(self.device))
        return run

    def after(self, op: Op, run: Run) -> Iterator[Agreement]:
        """What the launch left in each tensor and state that it writes, against what ``run`` holds of them."""
        rests = {part.inverse_rest: part.inverse for part in primitive_ops(op) if isinstance(part, DeltaChunk)}
        for name in dict.fromkeys(op.writes):
            found, expected = self.step.tensor(name), run.get(name)
            if name in rests:
                yield self._agreement(
                    (op.name, name), found, expected, run.get(rests[name]), min(self.limit, REST_LIMIT)
                )
            else:
                yield self._agreement((op.name, name), found, expected, expected, self.limit)
        for name in op.names("state"):
            expected = run.states[name]
            yield self._agreement((op.name, name), self.step.state(name), expected, expected, self.limit)

    def _agreement(
        self, where: tuple[str, str], found: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor, limit: float
    ) -> Agreement:
        """Differences in a tensor of an op, over the RMS of ``whole``."""
        found, expected = found.to(self.device).double(), expected.double()
        # Memory that neither side wrote may hold anything: the same bits there are no difference.
        difference = torch.where(found == expected, 0.0, found - expected)
        both = found.isnan() & expected.isnan()
        difference = torch.where(both, 0.0, difference)
        finite = whole[whole.isfinite()].double()
        scale = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
        scale = scale if scale > 0 else 1.0
        largest, rms = float(difference.abs().max()), float(difference.square().mean().sqrt())
        return Agreement(*where, largest / scale, rms / scale, limit)
