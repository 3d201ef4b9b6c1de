"""Decoding of NVFP4 and FP8 against values that compressed-tensors and ModelOpt computed with their own code.

``data/make_nvfp4_decoding.py`` made the values and says how. They cover every E4M3 byte as a block scale with every
E2M1 code, under global scales most of which are not powers of two, so that each product is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lynnc.runtime.weights.matrix import Fp4Matrix, Fp8Matrix, decode
from lynnc.runtime.weights.nvfp4 import words_from_bytes

VECTORS = Path(__file__).parent / "data" / "nvfp4_decoding.safetensors"
NAN_BYTES = (0x7F, 0xFF)
POWER_OF_TWO = 5
"""Place of the divisor and the multiplier that are reciprocals of each other."""


@dataclass(frozen=True)
class Tool:
    name: str
    numbers: str
    divides: bool
    has_negative_zero: bool
    """Whether code 8 keeps its sign. Ours does; it makes no other difference."""


TOOLS = (
    Tool("compressed_tensors", "divisors", divides=True, has_negative_zero=True),
    Tool("modelopt", "multipliers", divides=False, has_negative_zero=False),
)
each_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
each_number = pytest.mark.parametrize("place", range(POWER_OF_TWO + 1))


@pytest.fixture(scope="module")
def vectors() -> dict[str, torch.Tensor]:
    return load_file(VECTORS)


def matrix_of(vectors: dict[str, torch.Tensor], tool: Tool, place: int) -> Fp4Matrix:
    words = words_from_bytes(vectors["nvfp4.packed"])
    return Fp4Matrix(words, vectors["nvfp4.scales"], vectors[tool.numbers][place], tool.divides)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal in dtype, shape and every bit, but a NaN's sign and payload."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(ours.isnan(), theirs.isnan())
    integer = torch.int32 if ours.dtype is torch.float32 else torch.int16
    differ = (ours.view(integer) != theirs.view(integer)) & ~ours.isnan()
    assert not differ.any(), f"{int(differ.sum())} differ, first at {differ.nonzero()[0].tolist()}"


def without_negative_zero(values: torch.Tensor) -> torch.Tensor:
    return values + torch.zeros_like(values)


def test_vectors_hold_every_scale_and_code(vectors: dict[str, torch.Tensor]) -> None:
    pairs = vectors["nvfp4.packed"].reshape(256, 8)
    codes = torch.cat([pairs & 15, pairs >> 4], -1).sort(-1).values
    assert torch.equal(codes, torch.arange(16, dtype=torch.uint8).expand(256, 16))
    assert vectors["nvfp4.scales"].flatten().tolist() == vectors["fp8.data"].flatten().tolist() == list(range(256))
    for tool in TOOLS:
        mantissas = vectors[tool.numbers].frexp().mantissa
        assert (mantissas == 0.5).tolist() == [False] * POWER_OF_TWO + [True]
    with safe_open(VECTORS, "pt") as file:
        assert "compressed-tensors==0.20.1 nvidia-modelopt==0.47.0" in file.metadata()["made_with"]


@each_tool
@each_number
def test_decodes_as_the_tool_in_fp32(vectors: dict[str, torch.Tensor], tool: Tool, place: int) -> None:
    ours, theirs = decode(matrix_of(vectors, tool, place)), vectors[f"{tool.name}.f32"][place]
    if not tool.has_negative_zero:
        ours, theirs = without_negative_zero(ours), without_negative_zero(theirs)
    assert_same_bits(ours, theirs)


@each_tool
@each_number
def test_decodes_as_the_tool_in_bf16(vectors: dict[str, torch.Tensor], tool: Tool, place: int) -> None:
    """What the tool writes for a BF16 model is our FP32 value rounded once."""
    ours, theirs = decode(matrix_of(vectors, tool, place)).bfloat16(), vectors[f"{tool.name}.bf16"][place]
    if not tool.has_negative_zero:
        ours, theirs = without_negative_zero(ours), without_negative_zero(theirs)
    assert_same_bits(ours, theirs)


@each_tool
def test_only_nan_scales_decode_to_nan(vectors: dict[str, torch.Tensor], tool: Tool) -> None:
    values = decode(matrix_of(vectors, tool, 0)).reshape(256, 16)
    assert values.isnan().all(-1).nonzero().flatten().tolist() == list(NAN_BYTES)
    assert values.isfinite().all(-1).sum() == 256 - len(NAN_BYTES)


def test_both_conventions_decode_alike_where_the_reciprocal_is_exact(vectors: dict[str, torch.Tensor]) -> None:
    """A divisor of 2048 and a multiplier of 1 / 2048 say the same: by the tools' own values, and by ours."""
    divides, multiplies = (matrix_of(vectors, tool, POWER_OF_TWO) for tool in TOOLS)
    assert divides.global_scale != multiplies.global_scale
    assert torch.equal(divides.multiplier, multiplies.multiplier)
    assert_same_bits(decode(divides), decode(multiplies))
    theirs = [without_negative_zero(vectors[f"{tool.name}.f32"][POWER_OF_TWO]) for tool in TOOLS]
    assert_same_bits(*theirs)
    assert_same_bits(without_negative_zero(decode(multiplies)), theirs[0])


def test_a_rounded_reciprocal_is_close_but_not_the_same(vectors: dict[str, torch.Tensor]) -> None:
    """Why a packed folder keeps the divisor: what kernels multiply with is off by some units in the last place."""
    differs = []
    for place in range(POWER_OF_TWO):
        divides = matrix_of(vectors, TOOLS[0], place)
        exact = decode(divides).nan_to_num()
        rounded = decode(Fp4Matrix(divides.words, divides.scales, divides.multiplier)).nan_to_num()
        assert ((exact - rounded).abs() <= 2**-22 * exact.abs()).all()
        differs.append(not torch.equal(exact, rounded))
    assert any(differs)


@each_number
def test_decodes_fp8_as_modelopt(vectors: dict[str, torch.Tensor], place: int) -> None:
    ours = decode(Fp8Matrix(vectors["fp8.data"], vectors["multipliers"][place]))
    assert_same_bits(ours, vectors["modelopt.fp8.f32"][place])


def test_fp8_in_bf16_differs_from_modelopt_by_its_rounding_of_the_scale(vectors: dict[str, torch.Tensor]) -> None:
    """For a BF16 model ModelOpt rounds the scale to BF16 before it multiplies; ours rounds the product alone."""
    differs = []
    for scale, theirs in zip(vectors["multipliers"], vectors["modelopt.fp8.bf16"], strict=True):
        ours = decode(Fp8Matrix(vectors["fp8.data"], scale)).bfloat16()
        error = (ours.float() - theirs.float()).abs().nan_to_num()
        assert (error <= 3 * 2**-8 * theirs.float().abs().nan_to_num()).all()
        differs.append(bool(error.any()))
    assert any(differs)
    assert not differs[POWER_OF_TWO]


@each_tool
@pytest.mark.parametrize("name", ["normal", "zeros", "wide", "ties"])
def test_decodes_what_the_tool_quantised(vectors: dict[str, torch.Tensor], tool: Tool, name: str) -> None:
    """Its codes and scales give the matrix back: off by half the widest step, or by what the smallest scale clips."""
    of = {part: vectors[f"{tool.name}.{name}.{part}"] for part in ("packed", "scales", "global")}
    fp4 = Fp4Matrix(words_from_bytes(of["packed"]), of["scales"], of["global"], tool.divides)
    matrix = vectors[f"matrix.{name}"].unflatten(-1, [-1, 16])
    error = (decode(fp4).unflatten(-1, [-1, 16]) - matrix).abs()
    clipped = 3 * 2**-9 * float(fp4.multiplier)
    assert (error <= (matrix.abs().amax(-1, keepdim=True) / 5).clamp(min=clipped)).all()
