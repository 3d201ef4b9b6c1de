"""Every program for every target, without a GPU: limits of the machine code, and width of the loads of weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ptx import load_widths

from lynnc.compiler import Compiled, Request, compile_model
from lynnc.modelfile import load_model
from lynnc.plan import KernelEntry
from lynnc.store import Store
from lynnc.target import TARGETS, find_target

FULL = (("lynn-27b-a3b", "sm_121"), ("lynn-27b-a3b", "sm_90"))
SMALL = (
    *(("tiny-moe", target) for target in TARGETS),
    *((model, target) for model in ("tiny-dense", "tiny-full") for target in ("sm_80", "sm_100", "sm_121")),
)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@cache
def compiled(model: str, target: str, store: Path) -> Compiled:
    return compile_model(load_model(model), Request(find_target(target), with_ptx=True), Store(store))


def decode_kernels(result: Compiled) -> list[KernelEntry]:
    plan = result.plan
    keys = {launch.kernel for name, p in plan.programs.items() if name != "prefill" for launch in p.launches}
    return [plan.kernels[key] for key in sorted(keys)]


@pytest.mark.parametrize(("model", "target"), SMALL + FULL)
def test_every_program_compiles_within_the_limits_of_the_target(model: str, target: str, store: Path) -> None:
    result = compiled(model, target, store)
    assert set(result.plan.programs) == {"decode/1", "decode/2", "decode/4", "decode/8", "prefill"}
    limit = find_target(target).shared_memory_limit
    for entry in result.plan.kernels.values():
        assert int(str(entry.artifact["shared_bytes"])) <= limit, entry.label
        assert entry.artifact["arch"] == find_target(target).arch
    spilling = [
        f"{e.name} {e.label}: {e.artifact['spill_bytes']}" for e in decode_kernels(result) if e.artifact["spill_bytes"]
    ]
    assert not spilling


@pytest.mark.parametrize(("model", "target"), FULL)
def test_decode_kernels_load_packed_weights_8_bytes_at_a_time_or_more(model: str, target: str, store: Path) -> None:
    result = compiled(model, target, store)
    checked = 0
    for entry in decode_kernels(result):
        ptx = result.files[f"kernels/{entry.name}-{entry.key[:16]}.ptx"].decode()
        for index, (parameter, kind) in enumerate(entry.signature.items()):
            if kind == "*i64" and "words" not in parameter and (widths := load_widths(ptx, index)):
                assert min(widths) >= 8, f"{entry.name} {entry.label}: {parameter} is loaded {widths} bytes at a time"
                checked += 1
    assert checked >= 5


def test_expert_counts_that_differ_share_their_kernels() -> None:
    from lynnc.compiler import lower_programs

    def keys(model: str) -> int:
        programs = lower_programs(load_model(model), Request(find_target("sm_90")))
        return len({key for _, low in programs.values() for key in low.kernels})

    assert keys("lynn-27b-a3b") == keys("qwen3.6-35b-a3b")


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    request = Request(find_target("sm_90"))
    first, second = (compile_model(load_model("tiny-moe"), request, Store(tmp_path / name)) for name in "ab")
    assert first.plan == second.plan
    assert first.files == second.files
