"""Ways in which a candidate can be broken, each for one side of a gate alone.

In: a candidate engine. Out: an engine whose weights or ops are wrong in one place, and what the gate must name. Faults
of weights replace values; faults of the runtime change what one op means while it runs on the candidate's weights.

Example::

    broken = break_weights(engine, "layers.1.out_weight", swap_nibbles)
    break_op(monkeypatch, engine, "layers.3.q_rope", rope_off_by_one)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gating import engine_of
from reference import Reference

import lynnc.interpret as meaning
from lynnc.build import build_graph
from lynnc.engines.interpreted import Interpreted
from lynnc.ir import Op
from lynnc.runtime.weights.arrays import PackedWeight, unpack_weight
from lynnc.runtime.weights.nvfp4 import pack_codes, unpack_codes
from lynnc.stepvalues import Run

Arrays = dict[str, torch.Tensor]
Meaning = Callable[[Run, Any], None]
Wrong = Callable[[Meaning], Meaning]


def break_weight(reference: Reference, weight: str, change: Callable[[Arrays], None]) -> Interpreted:
    """A candidate one of whose packed weights was changed before it was decoded."""
    described = build_graph(reference.spec, 1).weights[weight]
    arrays = {array: values.clone() for (name, array), values in reference.packed.items() if name == weight}
    change(arrays)
    values = {**reference.values, weight: unpack_weight(PackedWeight(described, arrays))}
    return engine_of(reference, values)


def swap_nibbles(arrays: Arrays) -> None:
    """Element 0 in the high nibble."""
    codes = unpack_codes(arrays["data"]).unflatten(-1, [-1, 2]).flip(-1).flatten(-2)
    arrays["data"] = pack_codes(codes)


def take_next_expert(arrays: Arrays) -> None:
    """Expert 1 is a copy of expert 2."""
    for array in arrays.values():
        array[1] = array[2]


def invert_global_scale(arrays: Arrays) -> None:
    """A divisor taken for a multiplier."""
    arrays["global"] = arrays["global"].reciprocal()


def spoil_one_scale(arrays: Arrays) -> None:
    """E4M3's NaN, as 0/0 leaves it."""
    arrays["scale"][..., 3, 2] = 0x7F


def share_largest_global_scale(arrays: Arrays) -> None:
    """Fused parts with the maximum of their global scales."""
    arrays["global"][:] = arrays["global"].max()


def break_op(patch: pytest.MonkeyPatch, engine: Interpreted, name: str, wrong: Wrong, rows: int = 0) -> None:
    """The op called ``name`` means something else while it runs on the engine's weights, in steps of so many rows (0:
    of any number)."""
    kinds = {type(op) for op in build_graph(engine.spec, 1).ops if op.name == name}
    assert len(kinds) == 1, f"there is no op {name}"
    kind: type[Op] = kinds.pop()
    right = meaning._MEANING[kind]

    def either(run: Run, op: Op) -> None:
        is_broken = run.weights is engine.weights and op.name == name and rows in (0, run.rows)
        (wrong(right) if is_broken else right)(run, op)

    patch.setitem(meaning._MEANING, kind, either)  # type: ignore[arg-type]


def one_position_late(right: Meaning) -> Meaning:
    """The op believes that its rows stand one position later. So queries are rotated too far, keys and values land in
    the next place, and a recurrent state is not begun anew at position 0 but goes on from the sequence before."""

    def run_late(run: Run, op: Any) -> None:
        position = run.get("position")
        position += 1
        right(run, op)
        position -= 1

    return run_late


def forget_steps(right: Meaning) -> Meaning:
    """The recurrent state is not written back."""

    def forget(run: Run, op: Any) -> None:
        before = run.states[op.state].clone()
        right(run, op)
        run.states[op.state].copy_(before)

    return forget


def drop_shared_expert(right: Meaning) -> Meaning:
    """Routed experts alone."""

    def add(run: Run, op: Any) -> None:
        run.put(op.out, run.f32(op.experts))

    return add


def take_ranks_from_one(right: Meaning) -> Meaning:
    """Top-k without the best expert."""

    def choose(run: Run, op: Any) -> None:
        logits = run.f32(op.logits)
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, 1 : op.k + 1]
        scores = logits.softmax(-1).gather(1, order)
        run.put(op.ids, order.to(torch.int32))
        run.put(op.scores, scores / scores.sum(-1, keepdim=True))

    return choose


def forget_to_normalize(right: Meaning) -> Meaning:
    """Scores that do not add up to 1."""
    return lambda run, op: right(run, replace(op, normalize=False))


def norm_plainly(right: Meaning) -> Meaning:
    """``w`` where the model has ``1 + w``."""
    return lambda run, op: right(run, replace(op, shifted=False))


def spill_nan(right: Meaning) -> Meaning:
    """One value of the result is NaN."""

    def spill(run: Run, op: Any) -> None:
        right(run, op)
        run.get(op.out)[-1, 3] = torch.nan

    return spill
