"""Inline PTX of packed products and its plain twins, bit for bit. Needs a GPU: ``pytest --device cuda``."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch

from lynnc.render import environment
from lynnc.runtime.weights.nvfp4 import E2M1, unpack_codes
from lynnc.simulate import import_source

KERNEL = """
# % include "project.py.jinja"


@triton.jit
def kernel(q, x, out, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    pairs = x + index * 8
    dot = word_dot(
        tl.load(q + index), tl.load(pairs), tl.load(pairs + 1), tl.load(pairs + 2), tl.load(pairs + 3),
        tl.load(pairs + 4), tl.load(pairs + 5), tl.load(pairs + 6), tl.load(pairs + 7),
    )
    tl.store(out + index, dot)
"""

PAIRS_KERNEL = """
# % include "project.py.jinja"
# % include "experts.py.jinja"


@triton.jit
def kernel(x, up, out, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    pair = tl.load(x + index)
    tl.store(out + index * 3, larger_magnitudes(tl.load(x + index // 2 * 2) & 0x7FFF7FFF, pair))
    tl.store(out + index * 3 + 1, scaled_halves(pair, tl.load(up + index)))
    tl.store(out + index * 3 + 2, widened(pair.to(tl.uint16)))
"""

HELD_KERNEL = """
# % include "project.py.jinja"


@triton.jit
def kernel(q, x, values, up, scales, dots, halves, decoded, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    words = x + index * 4
    dot = packed_dot(tl.load(q + index), tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))
    tl.store(dots + index, dot)
    four = values + index * 4
    packed = packed_halves(
        tl.load(four), tl.load(four + 1), tl.load(four + 2), tl.load(four + 3), tl.load(up + index)
    )
    tl.store(halves + index, packed)
    first, second, third, fourth = four_scales(tl.load(scales + index))
    tl.store(decoded + index * 4, first)
    tl.store(decoded + index * 4 + 1, second)
    tl.store(decoded + index * 4 + 2, third)
    tl.store(decoded + index * 4 + 3, fourth)
"""

WORDS_KERNEL = """
# % include "products.py.jinja"


@triton.jit
def kernel(words, scales, bytes_, unpacked_, decoded, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    word = tl.load(words + index)[:, None]
    one, two = scale_factors(tl.load(scales + index)[:, None])
    place = (index * 32)[:, None] + tl.arange(0, 16)[None, :]
    tl.store(unpacked_ + place, unpacked(word, one))
    tl.store(unpacked_ + place + 16, unpacked(word, two))
    four = (index * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(decoded + four, e4m3_operand(tl.load(bytes_ + four)))
"""


def words_times_pairs(folder: Path, interpret: bool, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    text = environment().from_string(KERNEL).render(interpret=interpret, pdl=False)
    out = torch.full(q.shape, torch.nan, device=q.device)
    import_source(text, folder).kernel[(q.numel() // 128,)](q, x, out, N=128, enable_fp_fusion=True)
    return out


def test_packed_dot_product_equals_its_twin(tmp_path: Path) -> None:
    if harness.device() == "cpu":
        pytest.skip("inline PTX runs on a GPU only: pytest --device cuda")
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-(2**63), 2**63 - 1, (65536,), generator=generator)
    # BF16 activations as the kernels scale them: the largest of a row just below 2**15.
    x = torch.randn(65536, 16, generator=generator).bfloat16().float()
    x = (x * 2.0 ** (14 - x.abs().amax(1, keepdim=True).log2().floor())).half().view(torch.int32)
    found = [words_times_pairs(tmp_path, twin, q.cuda(), x.cuda()) for twin in (False, True)]
    assert found[0].isfinite().all() and torch.equal(*found)


def scaled_pairs(folder: Path, interpret: bool, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    text = environment().from_string(PAIRS_KERNEL).render(interpret=interpret, pdl=False)
    out = torch.zeros(x.numel() * 3, dtype=torch.int32, device=x.device)
    import_source(text, folder).kernel[(x.numel() // 128,)](x, up, out, N=128, enable_fp_fusion=True)
    return out


def test_magnitudes_and_scaled_pairs_equal_their_twins(tmp_path: Path) -> None:
    if harness.device() == "cpu":
        pytest.skip("inline PTX runs on a GPU only: pytest --device cuda")
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-20, 20, (65536, 1), generator=generator).float()
    x = torch.randn(65536, 2, generator=generator) * 2.0**exponents
    x[::7, 0], x[::5, 1] = 0.0, -0.0
    up = 2.0 ** (14 - x.abs().amax(1).clamp_min(2.0**-40).log2().floor())
    pairs = x.bfloat16().view(torch.int32).flatten()
    found = [scaled_pairs(tmp_path, twin, pairs.cuda(), up.cuda()) for twin in (False, True)]
    assert torch.equal(*found)


def held(folder: Path, interpret: bool, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Products of words with 64-bit activations, values as FP16 in 64 bits, and decoded scales."""
    text = environment().from_string(HELD_KERNEL).render(interpret=interpret, pdl=False)
    count, device = inputs[0].numel(), inputs[0].device
    outputs = (
        torch.full((count,), torch.nan, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.full((count * 4,), torch.nan, device=device),
    )
    import_source(text, folder).kernel[(count // 128,)](*inputs, *outputs, N=128, enable_fp_fusion=True)
    return outputs


def held_inputs(count: int) -> tuple[torch.Tensor, ...]:
    """Words, activations, values with the power of two that brings them below 2**15, and every E4M3 byte but NaN."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    x = torch.randn(count, 16, generator=generator)
    x = (x * 2.0 ** (14 - x.abs().amax(1, keepdim=True).log2().floor())).half().view(torch.int64)
    exponents = torch.randint(-20, 20, (count, 1), generator=generator).float()
    values = torch.randn(count, 4, generator=generator) * 2.0**exponents
    up = 2.0 ** (14 - values.abs().amax(1).log2().floor())
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    scales = numbers[torch.randint(len(numbers), (count * 4,), generator=generator)].view(torch.int32)
    return q, x, values, up, scales


def test_a_held_row_and_its_scales_equal_their_twins(tmp_path: Path) -> None:
    inputs = held_inputs(65536 if harness.device() == "cuda" else 256)
    if harness.device() == "cpu":  # the twins alone, against torch
        _, halves, decoded = held(tmp_path, True, inputs)
        values, up = inputs[2], inputs[3]
        assert torch.equal(halves.view(torch.float16).view(-1, 4), (values.bfloat16().float() * up[:, None]).half())
        expected = inputs[4].view(torch.uint8).view(torch.float8_e4m3fn).float() * 2.0**-8
        assert torch.equal(decoded, expected)
        return
    placed = tuple(value.cuda() for value in inputs)
    for real, twin in zip(*(held(tmp_path, interpret, placed) for interpret in (False, True)), strict=True):
        assert torch.equal(real, twin)


def unpacked_words(folder: Path, interpret: bool, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Words times either of the two low bytes of other words as scales [n, 2, 16], and bytes as BF16."""
    text = environment().from_string(WORDS_KERNEL).render(interpret=interpret, pdl=False)
    count, device = inputs[0].numel(), inputs[0].device
    outputs = (
        torch.full((count, 2, 16), torch.nan, dtype=torch.bfloat16, device=device),
        torch.full((count * 4,), torch.nan, dtype=torch.bfloat16, device=device),
    )
    import_source(text, folder).kernel[(count // 128,)](*inputs, *outputs, N=128, enable_fp_fusion=True)
    return outputs


def test_words_and_their_scales_equal_their_twins(tmp_path: Path) -> None:
    words, *_, scales = held_inputs(65536 if harness.device() == "cuda" else 512)
    inputs = (words, scales, scales.view(torch.uint8))
    twin = unpacked_words(tmp_path, True, tuple(value.to(harness.device()) for value in inputs))
    numbers = scales.view(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = unpack_codes(words[:, None]).long()
    values = torch.where(codes >= 8, -E2M1[codes % 8], E2M1[codes % 8])
    products = values[:, None, :] * numbers.view(-1, 4)[:, :2, None] * 2.0**-7
    assert torch.equal(twin[0].cpu().float(), products) and torch.equal(twin[1].cpu().float(), numbers)
    if harness.device() == "cuda":
        real = unpacked_words(tmp_path, False, tuple(value.cuda() for value in inputs))
        assert all(torch.equal(found, expected) for found, expected in zip(real, twin, strict=True))
