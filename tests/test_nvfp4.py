"""Quantisation and packing against an exhaustive search and torch's own E4M3."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lynnc.runtime.weights.nvfp4 import E2M1, GROUP, dequantise, pack_codes, quantise, unpack_codes

SIGNED = torch.cat([E2M1, -E2M1])


def random_matrix(seed: int, scale: float, rows: int = 8, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("kind", ["e4m3", "fp16"])
@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e6])
def test_codes_are_the_nearest_of_all_sixteen(kind: str, scale: float) -> None:
    values = random_matrix(0, scale)
    codes, scales, global_scale = quantise(values, kind)
    found = dequantise(codes, scales, global_scale)
    assert found.isfinite().all()
    step = dequantise(torch.full_like(codes, 2), scales, global_scale)  # the value of code 2, which is 1
    every = step[..., None] * SIGNED
    nearest = (every - values[..., None]).abs().amin(-1)
    assert ((found - values).abs() - nearest).max() <= 1e-6 * values.abs().max()
    assert float((found - values).norm() / values.norm()) < 0.15


def test_ties_go_to_the_even_code() -> None:
    block = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -2.5, -5.0, 0, 0, 0, 0])[None]
    codes, scales, global_scale = quantise(block * 448)  # block scale 448 and global scale 1: exact
    assert dequantise(codes, scales, global_scale)[0, 0] == 6 * 448
    assert (codes[0, :12] & 7).tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, 2, 4, 6]


def test_zero_blocks_are_zero_and_no_scale_is_nan() -> None:
    values = random_matrix(1, 1.0)
    values[:, :GROUP] = 0
    for matrix in (values, torch.zeros(2, 32)):
        codes, scales, global_scale = quantise(matrix)
        assert not scales.view(torch.float8_e4m3fn).float().isnan().any()
        assert (dequantise(codes, scales, global_scale)[matrix == 0] == 0).all()


@given(st.lists(st.integers(0, 15), min_size=GROUP, max_size=4 * GROUP).filter(lambda codes: len(codes) % GROUP == 0))
@settings(max_examples=50, deadline=None)
def test_packing_loses_nothing(codes: list[int]) -> None:
    tensor = torch.tensor([codes], dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(tensor)), tensor)


def test_places_of_codes_in_a_word() -> None:
    """Computed by hand from the layout's description: sign and magnitude bits of elements 0, 1, 2, 5 and 15."""
    expected = {
        0: (15, 9),
        1: (16 + 15, 16 + 9),
        2: (12, 6),
        5: (16 + 14, 16 + 3),
        15: (48 + 13, 48 + 0),
    }
    for element, (sign, magnitude) in expected.items():
        codes = torch.zeros(1, GROUP, dtype=torch.uint8)
        codes[0, element] = 0b1101
        word = int(pack_codes(codes)[0, 0]) & (2**64 - 1)
        assert word == (1 << sign) | (0b101 << magnitude)


def test_every_scale_byte_decodes_as_torch_does() -> None:
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    found = dequantise(codes, scales, torch.ones(()))
    expected = scales.view(torch.float8_e4m3fn).float() * SIGNED
    assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))
