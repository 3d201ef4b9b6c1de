"""What base and candidate cost in the run that judged them: bytes and speed.

In: a pair after its work, and the bytes of each side's weights. Out: ``Costs`` of each. Steps of the two alternate, so
what else the machine did meets both alike.

Example::

    measure_costs(pair.candidate, weight_bytes).step_seconds        # median of all single tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from lynnc.build import build_graph
from lynnc.model import ModelSpec
from lynnc.quality.pair import HasMemory, Timed


@dataclass(frozen=True, slots=True)
class Costs:
    """``weight_bytes`` as stored in the model's formats; ``memory_bytes`` that the engine holds, None if it does not
    say; prompt tokens a second; median and count of the steps of one token."""

    weight_bytes: int
    memory_bytes: int | None
    prompt_rate: float
    step_seconds: float
    steps: int


def measure_costs(side: Timed) -> Costs:
    """The costs of one side."""
    engine = side.engine
    return Costs(
        weight_bytes=stored_bytes(engine.spec),
        memory_bytes=engine.memory_bytes if isinstance(engine, HasMemory) else None,
        prompt_rate=side.prompt_tokens / side.prompt_seconds if side.prompt_seconds else 0.0,
        step_seconds=median(side.steps) if side.steps else 0.0,
        steps=len(side.steps),
    )


def stored_bytes(spec: ModelSpec) -> int:
    """Bytes of all weights of a model in its formats."""
    return sum(weight.bytes for weight in build_graph(spec, 1).weights.values())
