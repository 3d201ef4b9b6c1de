"""Random weights for a plan, such that the model is alive: finite activations of ordinary size, every expert in use.

In: a ``Plan`` (or the entries and the norm rule of one). Out: one ``Fill`` for each array of each weight. Rows of a
matrix have length about 1, so a normed input gives outputs of variance about 1; projections back to the residual stream
have half of that, as many layers add to it. Norm weights lie around the value that leaves their input as it is.

Example::

    fills = random_weights(load_plan("qwen3.6-35b-a3b.h200.plan"))
    sum(fill.count * fill.element_bytes for fill in fills)           # the packed bytes of the plan
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import prod, sqrt
from typing import Any

from lynnc.errors import PlanError
from lynnc.plan import Plan, WeightArray, WeightEntry
from lynnc.runtime.random.fill import Bits, Fill, Integers, Law, Uniform

CODE_MEAN_SQUARE = 8.5625
"""Of the 16 E2M1 codes, both zeros included."""
SCALES = Integers(1, low=0x38, high=0x3F)
"""Bits of E4M3 numbers: 1 to 1.875 in steps of an eighth."""
WIDE_SCALES = Integers(2, low=0x3C00, high=0x3FFF)
"""Bits of FP16 numbers: 1 to 2, without 2."""
FP8_DATA = Integers(1, low=0x20, high=0x3F, flip=0x80)
"""Bits of E4M3 numbers of either sign: magnitudes from 0.125 to 1.875."""
OUTPUT_SUFFIXES = ("out_weight", "down_weight")
"""Projections back to the residual stream, by the ends of their names."""
VECTORS: Mapping[str, tuple[float, float]] = {"a_log": (-1.0, 1.4), "dt_bias": (0.0, 0.9), "conv_weight": (0.0, 0.9)}
"""Centre and spread at which a GDN layer's decays, gates and convolution are neither shut nor saturated."""
NORM_SPREAD = 0.35
UNIFORM_RMS = 1 / sqrt(3)
"""Of numbers uniform between -1 and 1."""


def random_weights(plan: Plan) -> tuple[Fill, ...]:
    """A fill for each array of the plan's weights, in the order of names. PlanError for a model without a norm rule."""
    norm: Any = plan.model.get("norm")
    if not isinstance(norm, Mapping) or "weight" not in norm:
        raise PlanError(f"{plan.name} does not say how its model's norms are stored: compile it again.")
    return weight_fills(plan.weights.values(), is_shifted=norm["weight"] == "shifted")


def weight_fills(weights: Iterable[WeightEntry], is_shifted: bool) -> tuple[Fill, ...]:
    """A fill for each array; ``is_shifted`` where the model adds 1 to the norm weights it stores."""
    arrays = [(entry, array) for entry in sorted(weights, key=lambda entry: entry.name) for array in entry.arrays]
    return tuple(
        Fill(entry.name, array.array, element_count(array), stream, _law(entry, array, is_shifted))
        for stream, (entry, array) in enumerate(arrays)
    )


def element_count(array: WeightArray) -> int:
    """Elements of an array."""
    return prod(array.shape)


def _law(entry: WeightEntry, array: WeightArray, is_shifted: bool) -> Law:
    if entry.tensor_class == "vector":
        return _vector_law(entry, array, is_shifted)
    rms = _matrix_rms(entry)
    if array.array == "scale":
        return SCALES if array.dtype == "u8" else WIDE_SCALES
    if array.array == "global":
        return Uniform("f32", rms / _stored_rms(entry), 0.0)
    if array.dtype == "i64":
        return Bits()
    return FP8_DATA if array.dtype == "u8" else Uniform(array.dtype, 0.0, rms / UNIFORM_RMS)


def _vector_law(entry: WeightEntry, array: WeightArray, is_shifted: bool) -> Uniform:
    kind = entry.name.rpartition(".")[2]
    if kind in VECTORS:
        return Uniform(array.dtype, *VECTORS[kind])
    is_plain = kind == "gated_norm_weight" or not is_shifted
    return Uniform(array.dtype, 1.0 if is_plain else 0.0, NORM_SPREAD)


def _matrix_rms(entry: WeightEntry) -> float:
    if entry.tensor_class == "embed":
        return 1.0
    is_output = entry.name.endswith(OUTPUT_SUFFIXES)
    return (0.5 if is_output else 1.0) / sqrt(entry.shape[-1])


def _stored_rms(entry: WeightEntry) -> float:
    """RMS of what a quantised weight's ``data`` and ``scale`` stand for, without ``global``."""
    if entry.format == "fp8":
        return sqrt(_mean_square(FP8_DATA))
    return sqrt(CODE_MEAN_SQUARE * _mean_square(SCALES if entry.format == "nvfp4" else WIDE_SCALES))


def _mean_square(law: Integers) -> float:
    values = [_e4m3(bits) if law.width == 1 else _fp16(bits) for bits in range(law.low, law.high + 1)]
    return sum(value * value for value in values) / len(values)


def _e4m3(bits: int) -> float:
    """The value of a positive normal E4M3 number."""
    return float((1 + (bits & 7) / 8) * 2.0 ** ((bits >> 3) - 7))


def _fp16(bits: int) -> float:
    (value,) = struct.unpack("<e", bits.to_bytes(2, "little"))
    return float(value)
