"""Checkpoints of every format, packed, verified, and run through the generated kernels against ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import ALL_FLAVOURS, Flavour, Written, write_checkpoint
from reference import LIMIT, Case, Reference, judge, place_of
from runners import Kernels, check, follow
from safetensors.torch import load_file

from lynnc.runtime.weights.pack import PackReport, PackRequest, pack
from lynnc.runtime.weights.packedfile import Packed, open_packed
from lynnc.runtime.weights.verify import verify
from lynnc.tensors import Format, Weight

TOKENS = 2
"""Decode steps from an empty state: every weight counts in the second."""


@dataclass(frozen=True)
class Trip:
    """A model written in one flavour."""

    model: str
    flavour: Flavour

    def __str__(self) -> str:
        return f"{self.model}-{self.flavour}"


TRIPS = (
    *(Trip("tiny-moe", flavour) for flavour in ALL_FLAVOURS),
    *(Trip("tiny-dense", flavour) for flavour in ALL_FLAVOURS if str(flavour) in ("plain", "modelopt-mixed")),
    *(Trip("tiny-full", flavour) for flavour in ALL_FLAVOURS if str(flavour) in ("plain-f16-fused", "lynn-all-fp4")),
)
each_trip = pytest.mark.parametrize("trip", TRIPS, ids=str)


@dataclass(frozen=True)
class Done:
    written: Written
    report: PackReport
    packed: Packed


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """What was packed so far, by trip."""
    return {}


@pytest.fixture
def done(trip: Trip, trips: dict[str, Done], tmp_path_factory: pytest.TempPathFactory) -> Done:
    if str(trip) not in trips:
        folder = tmp_path_factory.mktemp(str(trip))
        written = write_checkpoint(folder / "checkpoint", Case(trip.model), trip.flavour)
        report = pack(PackRequest(written.folder, folder / "packed"))
        trips[str(trip)] = Done(written, report, open_packed(folder / "packed"))
    return trips[str(trip)]


def parts(weight: Weight) -> Iterator[tuple[int, int, str, slice]]:
    """Expert, part, name in the checkpoint, and rows of every part."""
    for expert in range(weight.experts):
        first = 0
        for index, part in enumerate(weight.parts):
            yield expert, index, part.source.format(expert=expert), slice(first, first + part.rows)
            first += part.rows


def canonical(name: str, packed: Packed, written: Written) -> str:
    """A part's name with the prefix of the model that was written."""
    rest = name.removeprefix(packed.spec.tensor_prefix)
    return name if rest == name else f"{written.spec.tensor_prefix}{rest}"


@each_trip
def test_packed_values_are_the_checkpoints(trip: Trip, done: Done) -> None:
    """Bit for bit where nothing was quantised while packing, by a decoder that shares no code with the package."""
    compared = 0
    for weight in done.packed.weights.values():
        values = done.packed.values(weight.name).reshape(weight.experts, weight.rows, weight.columns)
        for expert, _, source, rows in parts(weight):
            name = canonical(source, done.packed, done.written)
            expected = done.written.values[name].reshape(-1, weight.columns)
            found = values[expert, rows]
            if done.written.formats[name] is weight.format:
                wanted = expected.bfloat16().float() if weight.format is Format.BF16 else expected
                assert torch.equal(found, wanted), name
                compared += 1
            elif weight.format is Format.F32:
                assert torch.equal(found, expected), name
            else:
                assert float((found - expected).norm() / expected.norm()) < 0.13, name
    assert compared > 10


@each_trip
def test_formats_follow_the_checkpoint(trip: Trip, done: Done) -> None:
    """Every class that is stored quantised is packed so; in a quantised checkpoint, what is plain stays plain."""
    formats = done.packed.spec.precision.formats
    if trip.flavour.kind == "plain":
        assert set(formats.values()) == {Format.NVFP4, Format.BF16}
        return
    for weight in done.packed.weights.values():
        if weight.format is not Format.F32:
            names = {canonical(source, done.packed, done.written) for *_, source, _ in parts(weight)}
            assert {done.written.formats[name] for name in names} == {weight.format}, weight.name


@each_trip
def test_it_verifies(trip: Trip, done: Done) -> None:
    found = verify(done.written.folder, done.packed.folder)
    assert {row.tensor_class for row in found.classes} >= {"embed", "lm_head", "vector"}
    for row in found.classes:
        assert row.cosine > 0.99
        is_quantised_here = trip.flavour.kind == "plain" and row.format == "nvfp4"
        is_rounded = trip.flavour.dtype is not torch.bfloat16 and row.format == "bf16"
        assert (row.rounded_tensors > 0) == (is_quantised_here or is_rounded), row


@each_trip
def test_every_tensor_is_accounted_for(trip: Trip, done: Done) -> None:
    index = done.report.index
    assert set(index.skipped) == done.written.skipped
    held = {tensor for tensors in done.written.tensors.values() for tensor in tensors}
    tensors = set(load_all(done.written.folder))
    assert held | set(index.skipped) == tensors


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@each_trip
def test_generated_kernels_equal_transformers(trip: Trip, done: Done) -> None:
    """The judge holds the checkpoint's values as an independent decoder gives them, and ours only where the packer
    itself quantised; the kernels read the packed arrays."""
    packed, written = done.packed, done.written
    _put_back_quantised(packed, written)
    arrays = {(name, array): values for name in packed.weights for array, values in packed.arrays(name).items()}
    values = {name: packed.values(name) for name in packed.weights}
    run = judge(Reference(written.spec, written.model, arrays, values), prompt=TOKENS, steps=0)
    case = Case(trip.model, formats=tuple(sorted(packed.spec.precision.formats.items())))
    check(follow(Kernels(case, packed=arrays), run.tokens), run, LIMIT, str(trip))


def _put_back_quantised(packed: Packed, written: Written) -> None:
    for weight in packed.weights.values():
        values = packed.values(weight.name).reshape(weight.experts, weight.rows, weight.columns)
        for expert, _, source, rows in parts(weight):
            name = canonical(source, packed, written)
            if written.formats[name] is not weight.format and weight.format is not Format.F32:
                place = place_of(written.model, name)
                place.copy_(values[expert, rows].reshape(place.shape))
