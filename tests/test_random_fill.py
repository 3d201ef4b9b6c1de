"""Random elements: their laws, the independence of arrays and pieces, and the PTX against its numpy twin."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ptxmachine import run_entry

from lynnc.runtime.random.fill import Bits, Fill, Integers, Law, Uniform, array_key, mix
from lynnc.runtime.random.fillbits import fill_array, random_bits, round_to_bf16
from lynnc.runtime.random.fillkernels import ENTRIES, fill_launch, read_ptx
from lynnc.target import TARGETS, Target
from lynnc.tools import find_tools

COUNT = 1 << 16


@dataclass(frozen=True)
class Case:
    """A law, and the smallest, the largest and the mean of what it draws, as floats."""

    name: str
    law: Law
    least: float
    most: float
    mean: float

    @property
    def fill(self) -> Fill:
        return Fill("weight", "data", COUNT, stream=3, law=self.law)


CASES = (
    Case("words", Bits(), 0.0, 2.0**64, 2.0**63),
    Case("bytes", Integers(1, 0x38, 0x3F), 0x38, 0x3F, 59.5),
    Case("bytes of no power of two", Integers(1, 5, 14), 5, 14, 9.5),
    Case("signed bytes", Integers(1, 0x20, 0x3F, 0x80), 0x20, 0xBF, 47.5 + 64),
    Case("halves", Integers(2, 0x3C00, 0x3FFF), 0x3C00, 0x3FFF, 0x3DFF + 0.5),
    Case("bf16", Uniform("bf16", 1.0, 0.5), 0.5, 1.5, 1.0),
    Case("f32", Uniform("f32", -1.0, 1.4), -2.4, 0.4, -1.0),
    Case("constant", Uniform("f32", 0.0078125, 0.0), 0.0078125, 0.0078125, 0.0078125),
)


def numbers(case: Case, seed: int = 1) -> np.ndarray:
    """The elements as float64."""
    array = fill_array(case.fill, seed)
    if isinstance(case.law, Uniform) and case.law.dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_elements_keep_their_law(case: Case) -> None:
    found = numbers(case)
    spread = case.most - case.least
    assert found.min() == pytest.approx(case.least, abs=1e-4 * spread + 1e-7)
    assert found.max() == pytest.approx(case.most, abs=1e-4 * spread + 1e-7)
    assert found.mean() == pytest.approx(case.mean, abs=0.01 * spread + 1e-9)


@pytest.mark.parametrize("law", [Integers(1, 0, 15), Integers(1, 5, 14), Integers(2, 7, 23)], ids=str)
def test_every_whole_number_is_as_likely(law: Integers) -> None:
    found = np.bincount(fill_array(Fill("w", "scale", COUNT, 0, law), seed=5), minlength=law.high + 1)
    expected = COUNT / (law.high - law.low + 1)
    assert found[: law.low].sum() == 0 and len(found) == law.high + 1
    assert np.abs(found[law.low :] - expected).max() < 5 * expected**0.5


def test_every_bit_of_words_is_fair_and_so_are_codes() -> None:
    words = fill_array(CASES[0].fill, seed=1)
    ones = [int((words >> np.uint64(bit) & np.uint64(1)).sum()) for bit in range(64)]
    assert max(abs(count - COUNT / 2) for count in ones) < 5 * (COUNT / 4) ** 0.5
    codes = np.stack([words >> np.uint64(shift) & np.uint64(15) for shift in range(0, 64, 4)])
    found = np.bincount(codes.flatten().astype(np.int64), minlength=16)
    assert np.abs(found - found.mean()).max() < 5 * found.mean() ** 0.5


def test_neighbours_arrays_and_seeds_have_nothing_in_common() -> None:
    words = [random_bits(array_key(seed, stream), 0, 4096) for seed in range(4) for stream in range(16)]
    found = np.concatenate(words)
    assert len(np.unique(found)) == len(found)
    bits = np.unpackbits(found.view(np.uint8)).reshape(len(words), -1) * 2.0 - 1.0
    likeness = bits @ bits.T / bits.shape[1]
    assert np.abs(likeness - np.eye(len(words))).max() < 0.01
    shifted = (bits[:, 64:] * bits[:, :-64]).mean(axis=1)
    assert np.abs(shifted).max() < 0.01


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pieces_are_the_whole(case: Case) -> None:
    whole = fill_array(case.fill, seed=2)
    pieces = [fill_array(case.fill, 2, first, count) for first, count in ((0, 1), (1, 6), (7, 1000), (1007, None))]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_the_mixer_loses_nothing() -> None:
    """A bijection can be undone: xor of a shift and the product with an odd number."""
    assert mix(0) == 0
    assert len({mix(x) for x in range(100_000)}) == 100_000
    changed = [bin(mix(x) ^ mix(x ^ 1 << bit)).count("1") for x in range(1, 200) for bit in range(64)]
    assert min(changed) > 8 and 31 < sum(changed) / len(changed) < 33


def test_bf16_is_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    values[:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF], np.uint32).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bf16(values), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ptx_gives_the_same_bits(case: Case) -> None:
    """Instruction by instruction, with more elements than threads, from the middle of an array."""
    first, count, blocks, threads = 40_000, 45, 3, 5
    launch = fill_launch(case.fill, seed=9, address=1 << 40, first=first, count=count)
    stored = run_entry(read_ptx().decode().rstrip("\0"), launch.entry, launch.values, blocks, threads)
    size = case.fill.element_bytes
    assert sorted(stored) == [(1 << 40) + size * index for index in range(count)]
    mask = (1 << 8 * size) - 1
    found = [value if isinstance(value, np.float32) else value & mask for _, value in sorted(stored.items())]
    assert found == fill_array(case.fill, 9, first, count).tolist()


def test_launches_fill_the_gpu_and_no_more() -> None:
    small = fill_launch(Fill("w", "data", 3, 0, Bits()), 0, 256)
    large = fill_launch(Fill("w", "data", 1 << 33, 0, Bits()), 0, 256)
    assert (small.blocks, large.blocks, small.threads) == (1, 4096, 256)
    assert large.values[2] == 1 << 33 and len(large.values) == len(large.types)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_target_assembles_it(target: Target, tmp_path: Path) -> None:
    ptxas = find_tools().ptxas_for(target.capability)
    if ptxas is None:
        pytest.skip("no ptxas beside Triton")
    (tmp_path / "fill.ptx").write_bytes(read_ptx().rstrip(b"\0"))
    command = [str(ptxas.path), "-v", f"--gpu-name={target.arch}", "-o", "fill.cubin", "fill.ptx"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(f"'{entry}'" in run.stderr for entry in ENTRIES)
    assert "spill stores" not in run.stderr.replace("0 bytes spill stores", "")
