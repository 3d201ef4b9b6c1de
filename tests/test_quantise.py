"""The quantiser against the layout page's rules in exact fractions, against torch's own casts, and its properties."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.errors import WeightError
from lynnc.runtime.weights import smallfloat
from lynnc.runtime.weights.blockscales import SEARCH_RATIOS
from lynnc.runtime.weights.matrix import Fp4Matrix, decode
from lynnc.runtime.weights.nvfp4 import unpack_codes
from lynnc.runtime.weights.quantise import find_not_finite, quantise_fp8, quantise_nvfp4
from lynnc.runtime.weights.smallfloat import E2M1, E4M3, FP16, Rounder, SmallFloat
from lynnc.tensors import GROUP, Format

BOTH = (Format.NVFP4, Format.NVFP4_FP16)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
SMALLEST = {Format.NVFP4: Fraction(1, 2**9), Format.NVFP4_FP16: Fraction(1, 2**24)}
LARGEST = {Format.NVFP4: 448, Format.NVFP4_FP16: 65504}

each_format = pytest.mark.parametrize("scale_format", BOTH)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def normal(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(value: Fraction, bits: int, smallest_exponent: int) -> Fraction:
    """The nearest number with so many bits, ties to even; numbers below 2^smallest_exponent are evenly spaced."""
    if value == 0:
        return value
    exponent = smallest_exponent
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    last_place = Fraction(2) ** (exponent + 1 - bits)
    return round(value / last_place) * last_place


def to_fp32(value: Fraction) -> Fraction:
    return rounded(value, 24, -126)


def nearest_scale(wanted: Fraction, scale_format: Format) -> Fraction:
    bits, smallest_exponent = (4, -6) if scale_format is Format.NVFP4 else (11, -14)
    return rounded(min(max(wanted, SMALLEST[scale_format]), Fraction(LARGEST[scale_format])), bits, smallest_exponent)


def nearest_code(quotient: Fraction) -> int:
    magnitude = min(abs(quotient), MAGNITUDES[-1])
    code = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - magnitude), code % 2))
    return code + 8 if quotient < 0 and code else code


def global_scale_by_the_page(largest: Fraction, scale_format: Format) -> Fraction:
    if largest == 0:
        return Fraction(1)
    if scale_format is Format.NVFP4:
        return max(to_fp32(largest / 2688), Fraction(1, 2**117))
    scale = largest / 6
    if Fraction(1, 2**8) <= scale <= 2**15:
        return Fraction(1)
    power = Fraction(1, 2**102)
    while power * 2 <= scale:
        power *= 2
    return power


@dataclass(frozen=True)
class Exact:
    codes: list[list[int]]
    scales: list[list[Fraction]]
    global_scale: Fraction


def quantise_by_the_page(values: torch.Tensor, scale_format: Format) -> Exact:
    rows = [[Fraction(value) for value in row] for row in values.double().tolist()]
    global_scale = global_scale_by_the_page(max(abs(value) for row in rows for value in row), scale_format)
    codes: list[list[int]] = []
    scales: list[list[Fraction]] = []
    for row in rows:
        blocks = [row[start : start + GROUP] for start in range(0, len(row), GROUP)]
        wanted = [to_fp32(to_fp32(max(map(abs, block)) / 6) / global_scale) for block in blocks]
        scales.append([nearest_scale(scale, scale_format) for scale in wanted])
        steps = [to_fp32(scale * global_scale) for scale in scales[-1]]
        pairs = zip(blocks, steps, strict=True)
        codes.append([nearest_code(to_fp32(value / step)) for block, step in pairs for value in block])
    return Exact(codes, scales, global_scale)


def scales_of(matrix: Fp4Matrix) -> torch.Tensor:
    scales = matrix.scales
    return scales.view(torch.float8_e4m3fn).float() if scales.dtype is torch.uint8 else scales.float()


def assert_follows_the_page(values: torch.Tensor, scale_format: Format) -> None:
    found, exact = quantise_nvfp4(values, scale_format), quantise_by_the_page(values, scale_format)
    assert Fraction(float(found.global_scale)) == exact.global_scale
    assert [[Fraction(scale) for scale in row] for row in scales_of(found).tolist()] == exact.scales
    assert unpack_codes(found.words).tolist() == exact.codes


def assert_same(one: Fp4Matrix, other: Fp4Matrix) -> None:
    assert torch.equal(one.words, other.words)
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(one.global_scale, other.global_scale)


def ties() -> torch.Tensor:
    """Steps of 1 in the first rows, and of 1.25, 2^-9 and 3 * 2^-9; values at halfway points and beside them."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0])
    up, down = halfway.nextafter(halfway * 2), halfway.nextafter(torch.zeros(()))
    rows = torch.stack([halfway, up, down, halfway * 1.25, up * 1.25, halfway / 512, halfway * 3 / 512])
    steps = torch.tensor([1, 1, 1, 1.25, 1.25, 2**-9, 3 * 2**-9])[:, None]
    rows = torch.cat([rows, steps * 6, steps * 0], dim=1)
    first = torch.zeros(1, GROUP)
    first[0, 0] = 448 * 6  # the global scale is 1
    return torch.cat([first, rows])


def beside_one(*blocks: list[float]) -> torch.Tensor:
    """Rows of one block each, below a row that makes the global scale 1."""
    rows = [[448 * 6.0], *blocks]
    return torch.tensor([row + [0.0] * (GROUP - len(row)) for row in rows])


CASES = {
    "normal": normal(4, 64),
    "one row": normal(1, 16, seed=1),
    "48 columns": normal(3, 48, seed=2),
    "large": normal(2, 64, seed=3, scale=1e6),
    "small": normal(2, 64, seed=4, scale=1e-7),
    "heavy tail": normal(4, 64, seed=5) ** 5,
    "blocks of all sizes": normal(2, 512, seed=6) * 2.0 ** torch.arange(0, -32, -1).repeat_interleave(GROUP),
    "zero blocks": normal(4, 64, seed=7) * (torch.arange(64) % 32 < GROUP),
    "all zero": torch.zeros(2, 32),
    "negative zero": torch.full((1, 16), -0.0),
    "ties": ties(),
    "around 1e-38": normal(2, 64, seed=8, scale=1e-38),
    "subnormal": normal(2, 64, seed=9, scale=1e-42),
    "smallest": torch.full((1, 16), 2.0**-149),
    "largest": torch.tensor([[torch.finfo(torch.float32).max, *[-1e38, 3.0, 0.0, 2.0**100, 1e37] * 3]]),
    "largest BF16": torch.tensor([[-torch.finfo(torch.bfloat16).max, *[1e38, -1e30, 0.0] * 5]]),
    "beyond the largest code": beside_one([8.4 / 512, -8.9 / 512, 7 / 512], [14.4 / 512, -14.9 / 512], [6.9 / 512]),
    "beyond it with the second scale": beside_one([14.9 / 512, -14.4 / 512, 1 / 512]),
    "about 2^118": normal(2, 32, seed=10, scale=2.0**118),
    "FP16 scales below 2^-8": normal(2, 32, seed=10, scale=0.006),
    "FP16 scales from 2^-8": torch.tensor([[6 * 2.0**-8, -0.01, *[0.001] * 14]]),
    "FP16 scales to 2^15": torch.tensor([[6 * 2.0**15, -1e5, *[7e4] * 14]]),
    "FP16 scales above 2^15": torch.tensor([[6.1 * 2.0**15, -1e5, *[7e4] * 14]]),
    "one large among small": torch.tensor([[1e38, *[1e-30] * 15, *[1e33] * 16, *[1e28] * 16]]),
}


@each_format
@pytest.mark.parametrize("name", CASES)
def test_follows_the_page_bit_by_bit(name: str, scale_format: Format) -> None:
    assert_follows_the_page(CASES[name], scale_format)


@each_format
@pytest.mark.parametrize("name", CASES)
def test_any_type_with_the_same_values_gives_the_same_bits(name: str, scale_format: Format) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        values = CASES[name].to(dtype).nan_to_num(posinf=1.0, neginf=1.0)
        assert_same(quantise_nvfp4(values, scale_format), quantise_nvfp4(values.float(), scale_format))
        assert_same(quantise_nvfp4(values, scale_format, True), quantise_nvfp4(values.float(), scale_format, True))


numbers = st.one_of(
    st.floats(-(2.0**127), 2.0**127, width=32),
    st.floats(-8, 8, width=16),
    st.integers(-24, 24).map(lambda quarters: quarters / 4),
    st.just(0.0),
)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 3)), GROUP * draw(st.integers(1, 3))
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).view(rows, columns)


@given(matrices(), st.sampled_from(BOTH))
@settings(max_examples=60, deadline=None)
def test_any_matrix_follows_the_page(values: torch.Tensor, scale_format: Format) -> None:
    assert_follows_the_page(values, scale_format)


@given(matrices(), st.sampled_from(BOTH), st.booleans())
@settings(max_examples=60, deadline=None)
def test_nothing_stored_is_odd(values: torch.Tensor, scale_format: Format, search: bool) -> None:
    """Scales are positive, finite and not 0; steps are normal numbers; zeros stay zeros; no code is -0.0."""
    matrix = quantise_nvfp4(values, scale_format, search)
    scales, codes = scales_of(matrix), unpack_codes(matrix.words)
    assert scales.isfinite().all() and (scales > 0).all()
    assert (scales * matrix.global_scale >= 2.0**-126).all()
    assert not (codes == 8).any() and not codes[values == 0].any()
    assert decode(matrix).isfinite().all() or values.abs().max() > 2.0**127


def patterns(dtype: torch.dtype, limit: float) -> torch.Tensor:
    """All numbers of a 16-bit type up to a limit, but -0.0, as FP32."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[(values.abs() <= limit) & ~((values == 0) & values.signbit())]


def around(values: torch.Tensor) -> torch.Tensor:
    """FP32 numbers up to three places beside each."""
    bits = values.view(torch.int32)
    return torch.cat([bits + place for place in range(-3, 4)]).view(torch.float32)


def round_all(values: torch.Tensor, kind: SmallFloat) -> torch.Tensor:
    rounder = Rounder.of(torch.empty(2 * len(values)))
    rounder.values.copy_(values).mul_(kind.unit)
    return rounder.round(kind) / kind.unit


@cache
def tie_neighbours() -> torch.Tensor:
    halves = torch.arange(1, 28) / 4.0  # every value and every midpoint of E2M1, and more
    near = around(halves)
    return torch.cat([near, -near, torch.rand(50_000, generator=torch.Generator().manual_seed(1)) * 13.5 - 6.75])


def test_codes_are_the_nearest_of_all_ties_to_even() -> None:
    values = torch.cat([patterns(torch.bfloat16, 6.75), patterns(torch.float16, 6.75), tie_neighbours()])
    exact = torch.tensor([*map(float, MAGNITUDES), 8.0], dtype=torch.float64)
    distance = (values.double().abs()[:, None] - exact).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    code = torch.where(is_nearest & (torch.arange(9) % 2 == 0), 9, is_nearest.long()).argmax(-1)
    expected = exact[code] * values.double().sign()
    assert is_nearest.sum(-1).max() == 2
    assert torch.equal(round_all(values, E2M1).double(), expected)


def test_codes_lie_at_bits_11_to_9_of_fp16() -> None:
    exact = torch.tensor([float(magnitude) for magnitude in MAGNITUDES])
    bits = (torch.cat([exact, -exact[1:]]) * E2M1.unit).half().view(torch.int16).tolist()
    assert [bit % 2**16 for bit in bits] == [code << 9 for code in range(8)] + [
        1 << 15 | code << 9 for code in range(1, 8)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_e4m3_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.cat([patterns(dtype, 448.0), around(patterns(torch.bfloat16, 447.0)[::7])])
    values = values[values.abs() <= 448]
    expected = values.to(torch.float8_e4m3fn).float()
    assert torch.equal(round_all(values, E4M3), expected)


def test_fp16_is_rounded_as_torch_does() -> None:
    values = torch.cat([patterns(torch.bfloat16, 65000.0), around(patterns(torch.float16, 65000.0)[::11])])
    assert torch.equal(round_all(values, FP16), values.half().float())


@pytest.mark.filterwarnings("error")  # torch warns if memory has not the size of what is written to it
@pytest.mark.parametrize("search", [False, True])
@each_format
def test_parts_do_not_show(monkeypatch: pytest.MonkeyPatch, scale_format: Format, search: bool) -> None:
    values = normal(5, 208, seed=11) ** 3
    whole, fp8 = quantise_nvfp4(values, scale_format, search), quantise_fp8(values)
    for part in (GROUP, 3 * GROUP, 32 * GROUP):
        monkeypatch.setattr(smallfloat, "PART", part)
        assert_same(quantise_nvfp4(values, scale_format, search), whole)
        assert torch.equal(quantise_fp8(values).data, fp8.data)


def test_rows_may_lie_apart() -> None:
    values = normal(32, 64, seed=12)
    assert_same(quantise_nvfp4(values.t()[::2]), quantise_nvfp4(values.t()[::2].contiguous()))
    assert_same(quantise_nvfp4(values[1::2]), quantise_nvfp4(values[1::2].clone()))
    assert torch.equal(quantise_fp8(values.t()).data, quantise_fp8(values.t().contiguous()).data)


@each_format
@each_type
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_error_is_small(dtype: torch.dtype, scale_format: Format, scale: float) -> None:
    values = normal(16, 256, seed=13, scale=scale).to(dtype)
    error = decode(quantise_nvfp4(values, scale_format)) - values.float()
    assert 0.08 < float(error.norm() / values.float().norm()) < 0.11


def test_tiny_weights_keep_their_size() -> None:
    for scale, bound in ((1e-7, 0.11), (1e-30, 0.11), (1e-34, 0.12), (1e-36, 0.4)):
        values = normal(8, 64, seed=14, scale=scale)
        error = decode(quantise_nvfp4(values)).double() - values.double()
        assert float(error.norm() / values.double().norm()) < bound


def block_errors(matrix: Fp4Matrix, values: torch.Tensor) -> torch.Tensor:
    return (decode(matrix).double() - values.double()).unflatten(-1, [-1, GROUP]).square().sum(-1)


@given(matrices(), st.sampled_from(BOTH))
@settings(max_examples=60, deadline=None)
def test_search_is_never_worse(values: torch.Tensor, scale_format: Format) -> None:
    plain, searched = (quantise_nvfp4(values, scale_format, search) for search in (False, True))
    before, after = block_errors(plain, values), block_errors(searched, values)
    assert (after <= before * (1 + 1e-6)).all()
    chosen, default = scales_of(searched), scales_of(plain)
    assert torch.equal(chosen[before == 0], default[before == 0])


@each_format
def test_search_keeps_the_default_where_another_is_as_good(scale_format: Format) -> None:
    """6 is a code at the default scale, 1, and at 1.5, to which 23 / 16 rounds."""
    values = beside_one([6.0])
    assert scales_of(quantise_nvfp4(values, scale_format, True))[1].tolist() == [1.0]


@pytest.mark.parametrize(("scale_format", "bound"), [(Format.NVFP4, 0.78), (Format.NVFP4_FP16, 0.76)])
@pytest.mark.parametrize("size", [1e-25, 1e-3, 1e25])
def test_search_finds_better_scales(scale_format: Format, bound: float, size: float) -> None:
    values = normal(64, 256, seed=15, scale=size)
    plain, searched = (quantise_nvfp4(values, scale_format, search) for search in (False, True))
    assert torch.equal(plain.global_scale, searched.global_scale)
    assert block_errors(searched, values).sum() < bound * block_errors(plain, values).sum()


@each_format
def test_search_chooses_the_best_candidate(scale_format: Format) -> None:
    """Each candidate by the page's rules in exact fractions: none is better, but for rounding of the errors."""
    values = normal(2, 64, seed=16)
    searched, plain = quantise_nvfp4(values, scale_format, True), quantise_by_the_page(values, scale_format)
    rows = [[Fraction(value) for value in row] for row in values.tolist()]
    for row, found in zip(rows, scales_of(searched).tolist(), strict=True):
        for start, chosen in zip(range(0, len(row), GROUP), found, strict=True):
            block = row[start : start + GROUP]
            wanted = to_fp32(to_fp32(max(map(abs, block)) / 6) / plain.global_scale)
            errors = {}
            for ratio in (1.0, *SEARCH_RATIOS):
                scale = nearest_scale(to_fp32(wanted * Fraction(ratio)), scale_format)
                step = to_fp32(scale * plain.global_scale)
                decoded = [MAGNITUDES[nearest_code(abs(value) / step)] * step for value in block]
                errors[scale] = float(sum((abs(v) - d) ** 2 for v, d in zip(block, decoded, strict=True)))
            assert errors[Fraction(chosen)] <= min(errors.values()) * (1 + 1e-6)


@each_type
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (3, 7), (4, 64)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_fp8_is_torchs_cast_of_the_quotient(dtype: torch.dtype, shape: tuple[int, int], scale: float) -> None:
    values = normal(*shape, seed=17, scale=1.0).mul(scale if dtype is not torch.float16 else 1.0).to(dtype)
    found = quantise_fp8(values)
    assert float(found.scale) == float(values.float().abs().max() / 448.0)
    expected = (values.float() / found.scale).to(torch.float8_e4m3fn).float()
    assert found.data.shape == values.shape and found.data.dtype is torch.uint8
    assert torch.equal(found.data.view(torch.float8_e4m3fn).float(), expected)
    assert not (found.data & 0x7F == 0x7F).any() and not (found.data == 0x80).any()


@pytest.mark.parametrize(("largest", "scale"), [(0.0, 1.0), (1e-45, 2.0**-117), (3e38, None)])
def test_fp8_of_extremes(largest: float, scale: float | None) -> None:
    values = torch.tensor([[largest, -largest, 0.0]])
    found = quantise_fp8(values)
    assert float(found.scale) == (scale or float(values.max() / 448.0))
    assert (decode(found) - values).abs().max() <= max(2.0**-117, largest * 2.0**-4)


@each_type
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (2, 31), (4, 47)])
def test_what_is_not_finite_is_found_and_refused(dtype: torch.dtype, wrong: float, place: tuple[int, int]) -> None:
    values = normal(5, 48, seed=18).to(dtype)
    assert find_not_finite(values) is None
    values[place] = wrong
    values[4, 47] = wrong  # the first one counts
    assert find_not_finite(values) == place
    for quantise in (quantise_nvfp4, quantise_fp8):
        with pytest.raises(WeightError, match="NaN or an infinity"):
            quantise(values)


def test_nothing_is_found_without_values_or_in_large_ones() -> None:
    assert find_not_finite(torch.zeros(0, 16)) is None
    assert find_not_finite(torch.full((2, 16), torch.finfo(torch.float32).max)) is None


@pytest.mark.parametrize("columns", [8, 20, 2049])
def test_columns_that_do_not_fill_blocks_are_refused(columns: int) -> None:
    with pytest.raises(WeightError, match=f"{columns} columns"):
        quantise_nvfp4(torch.ones(16, columns))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_same_bits(name: str, search: bool) -> None:
    for scale_format in BOTH:
        found = quantise_nvfp4(CASES[name].cuda(), scale_format, search)
        on_cpu = Fp4Matrix(found.words.cpu(), found.scales.cpu(), found.global_scale.cpu())
        assert_same(on_cpu, quantise_nvfp4(CASES[name], scale_format, search))
    assert torch.equal(quantise_fp8(CASES[name].cuda()).data.cpu(), quantise_fp8(CASES[name]).data)
