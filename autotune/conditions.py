"""Under what candidates are measured: tokens before a step, and how long measurements take.

In: what the caller wants, and a plan. Out: ``Conditions`` that fit the plan, and the room that they need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lynnc.plan import Plan
from lynnc.programs import MOST_DECODE_ROWS, is_prefill, prefill_programs
from lynnc.runtime.budget import Room


@dataclass(frozen=True, slots=True)
class Pace:
    """How long measurements are: seconds of GPU time that one run of a chain is to have, by at most ``most`` passes of
    it, and of steps as well; seconds of a chain that is timed whole; seconds after which no further run is begun."""

    run_seconds: float = 2e-3
    chain_seconds: float = 4e-3
    most: int = 8
    step_seconds: float = 20e-3
    most_steps: int = 16
    enough_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under what is measured: tokens before a decode step and before one of a prompt (at no round position), and how
    long."""

    behind: int = 1021
    behind_prompt: int = 37
    pace: Pace = field(default_factory=Pace)

    def before(self, program: str) -> int:
        """Tokens in the slot before a step of a program."""
        return self.behind_prompt if is_prefill(program) else self.behind

    def fitted(self, plan: Plan) -> Conditions:
        """The same with no more tokens than the model's context allows."""
        most = plan.longest_context - self._decode_positions
        return replace(self, behind=min(self.behind, most), behind_prompt=min(self.behind_prompt, most))

    def room(self, plan: Plan, programs: tuple[str, ...]) -> Room:
        """Memory for what is measured: one sequence, as long as the longest step needs."""
        rows = max((plan.programs[name].max_rows for name in prefill_programs(programs)), default=0)
        context = max(self.behind + self._decode_positions, self.behind_prompt + rows + 1)
        return Room(1, min(context, plan.longest_context), programs)

    @property
    def _decode_positions(self) -> int:
        """That decode steps behind the context may reach."""
        return MOST_DECODE_ROWS + self.pace.most_steps + 3
