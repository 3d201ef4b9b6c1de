"""The precision in which a plan's activations meet 4-bit weights: what the model declares, as far as the target can.

In: a model, a target and passes left out by choice. Out: the passes to leave out, which the plan records, and a note
where a declaration is not followed. 4-bit activations only ever follow a declaration; without FP4 tensor cores, or with
a Triton too old for them, the plan has BF16 ones, which are more exact.

Example::

    settle_activations(spec, find_target("sm_90"), ())
    # Settled(without=("quantise_activations",), note="mine declares nvfp4 activations; its plan has bf16 ones: ...")
"""

from __future__ import annotations

from dataclasses import dataclass

from lynnc.errors import TargetError
from lynnc.model import ModelSpec
from lynnc.passes.quantise_activations import quantise_activations
from lynnc.target import Target, check_tools
from lynnc.tools import Tools, find_tools

PASS = quantise_activations.__name__


@dataclass(frozen=True, slots=True)
class Settled:
    """Passes left out, sorted, and a sentence where that keeps declared 4-bit activations out, or ``""``."""

    without: tuple[str, ...]
    note: str = ""


def settle_activations(
    spec: ModelSpec, target: Target, without: tuple[str, ...], tools: Tools | None = None
) -> Settled:
    """Leaves out the pass for 4-bit activations where the target or this Triton lacks FP4 MMA; ``tools`` are found."""
    if spec.precision.activations == "bf16" or PASS in without:
        return Settled(without)
    reason = _refusal(target, tools or find_tools())
    if not reason:
        return Settled(without)
    note = f"{spec.name} declares {spec.precision.activations} activations; its plan has bf16 ones: {reason}"
    return Settled(tuple(sorted((*without, PASS))), note)


def _refusal(target: Target, tools: Tools) -> str:
    """Why there is no FP4 MMA, or ``""``."""
    if not target.has_fp4_mma:
        return f"{target.name} has no FP4 tensor cores."
    try:
        check_tools(target, tools, fp4_mma=True)
    except TargetError as error:
        return str(error)
    return ""
