"""``benchmarks/random_folder.py`` on a simulated device: a packed folder like any other, with the seed's bits."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from executing import executor_on, meaning_device, plan_for
from reference import Case

from lynnc.runtime.budget import Room
from lynnc.runtime.loading.generated import GeneratedWeights
from lynnc.runtime.loading.packedfolder import checked_index
from lynnc.runtime.weights.packedfile import open_packed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from random_folder import write_folder

ROOM = Room(1, 64)


def test_folder_holds_the_weights_of_the_seed(tmp_path: Path) -> None:
    plan = plan_for(Case("tiny-moe"))
    executor = executor_on(plan, GeneratedWeights(5), ROOM, meaning_device(plan, ROOM))
    size = write_folder(executor, tmp_path / "packed", seed=5)
    packed = open_packed(tmp_path / "packed")
    assert checked_index(tmp_path / "packed", plan) == packed.index
    assert size > sum(array.bytes for weight in plan.weights.values() for array in weight.arrays)
    for name, weight in plan.weights.items():
        packed.check(name)
        for array in weight.arrays:
            data = bytearray(array.bytes)
            executor.memory.read_into(data, executor.memory.addresses.weights[name, array.array])
            stored = packed.arrays(name)[array.array].contiguous().flatten().view(torch.uint8)
            assert stored.numpy().tobytes() == bytes(data), (name, array.array)
