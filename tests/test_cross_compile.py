"""Every program for every target, without a GPU: limits of the machine code, and width of the loads of weights."""

from __future__ import annotations

from dataclasses import replace
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path

import pytest
from ptx import load_widths

from lynnc.compile import KernelSource
from lynnc.compiler import Compiled, Request, compile_model, lower_programs
from lynnc.modelfile import load_model
from lynnc.plan import KernelEntry, Options
from lynnc.programs import is_prefill
from lynnc.store import Store
from lynnc.target import TARGETS, find_target
from lynnc.tensors import Format

FULL = (("lynn-27b-a3b", "sm_121"), ("lynn-27b-a3b", "sm_90"))
SMALL = (
    *(("tiny-moe", target) for target in TARGETS),
    *((model, target) for model in ("tiny-dense", "tiny-full") for target in ("sm_80", "sm_100", "sm_121")),
)
LIKE = {"sm_86": "sm_89", "sm_103": "sm_100", "sm_120": "sm_121"}
"""Targets whose every kernel has the source, knobs included, of another one's: two programs of them are compiled."""


@cache
def compiled(model: str, target: str, store: Path) -> Compiled:
    """Two test processes that want the same kernels do not both compile them."""
    store.mkdir(exist_ok=True)
    with (store.parent / f"{model}.{target}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        request = Request(find_target(target), options=options_of(target), with_ptx=True)
        return compile_model(load_model(model), request, Store(store))


def options_of(target: str) -> Options:
    return Options(programs=("decode/1", "prefill")) if target in LIKE else Options()


@pytest.fixture(scope="session")
def store(kernels_of_this_run: Path) -> Path:
    return kernels_of_this_run


def decode_kernels(result: Compiled) -> list[KernelEntry]:
    plan = result.plan
    keys = {launch.kernel for name, p in plan.programs.items() if not is_prefill(name) for launch in p.launches}
    return [plan.kernels[key] for key in sorted(keys)]


@pytest.mark.parametrize(("model", "target"), SMALL + FULL)
def test_every_program_compiles_within_the_limits_of_the_target(model: str, target: str, store: Path) -> None:
    result = compiled(model, target, store)
    assert set(result.plan.programs) == set(options_of(target).programs)
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
            is_absent = parameter == "data2" and entry.constants.get("FORMAT2") == -1
            if kind == "*i64" and "words" not in parameter and not is_absent:
                widths = load_widths(ptx, index)
                least = LEAST_BYTES.get(entry.name, 8)
                assert widths and min(widths) >= least, f"{entry.name} {entry.label}: {parameter} in loads of {widths}"
                checked += 1
    assert checked >= 5


LEAST_BYTES = {"linear": 16, "gate_up": 16}
"""Bytes that each load of packed weights brings; the expert kernels take one 64-bit word at a time by choice."""


STARTS_NOTHING = {
    *("attention", "causal_conv", "combine_add", "delta_prepare", "delta_scan", "gated_norm", "gemm", "gemm_fp4"),
    *("group", "grouped_down", "grouped_down_fp4", "grouped_up", "grouped_up_fp4", "quantise_activations", "rms_norm"),
    *("rotate_append", "silu_mul", "sum_parts"),
}
"""Kernels of prompts: programs of the next launch would crowd where there is room."""
EARLY_READS = {
    "attention_step": {"position", "slot", "k_cache", "v_cache"},
    "attention_partial": {"position", "slot"},
    "attention_combine": {"position"},
    "combine_gate": {"position"},
    "gdn_step": {"position", "slot", "start", "state", "conv_state"},
    "causal_conv": {"position", "slot", "start"},
    "delta_prepare": {"position", "slot"},
    "delta_scan": {"position", "slot"},
    "experts_down": {"ids"},
}
"""Reads before the wait of what no launch of the same step wrote: inputs of the step and what earlier steps left. Ids
are stored before ``experts_up`` lets the launch that reads them start."""


@pytest.mark.parametrize("model", ["tiny-moe", "lynn-27b-a3b"])
def test_kernels_touch_what_this_step_wrote_only_after_the_wait(model: str, store: Path) -> None:
    result = compiled(model, "sm_90", store)
    kinds = {
        (launch.kernel, arg.parameter): arg.kind
        for program in result.plan.programs.values()
        for launch in program.launches
        for arg in launch.args
    }
    for entry in result.plan.kernels.values():
        ptx = result.files[f"kernels/{entry.name}-{entry.key[:16]}.ptx"].decode()
        before, wait, _ = ptx.partition("griddepcontrol.wait")
        start = "griddepcontrol.launch_dependents"
        assert wait and (start not in ptx if entry.name in STARTS_NOTHING else start in before), entry.name
        assert "st.global" not in before, f"{entry.name} stores before it waits"
        pointers = [(index, p) for index, (p, kind) in enumerate(entry.signature.items()) if kind.startswith("*")]
        early = {p for index, p in pointers if load_widths(before, index)}
        early -= {p for p in early if kinds[entry.key, p] == "weight"}
        assert early <= EARLY_READS.get(entry.name, set()), f"{entry.name} reads {early} before it waits"


MIXES = (
    {"shared_expert": "bf16", "gdn_gates": "bf16", "attention_in": "fp8", "lm_head": "bf16", "embed": "nvfp4"},
    {"experts": "nvfp4-fp16", "gdn_in": "nvfp4-fp16", "attention_out": "bf16", "gdn_out": "fp8", "embed": "fp8"},
    {"experts": "fp8", "shared_expert": "nvfp4-fp16", "router": "nvfp4", "attention_in": "nvfp4-fp16"},
    {"experts": "bf16", "shared_expert": "fp8", "gdn_in": "fp8", "gdn_gates": "nvfp4-fp16", "lm_head": "fp8"},
)


@pytest.mark.parametrize(("mix", "target"), tuple(zip(MIXES, ("sm_121", "sm_80", "sm_90", "sm_89"), strict=True)))
def test_mixed_precision_compiles(mix: dict[str, str], target: str, store: Path) -> None:
    spec = load_model("tiny-moe")
    formats = {**spec.precision.formats, **{name: Format(fmt) for name, fmt in mix.items()}}
    mixed = replace(spec, precision=replace(spec.precision, formats=formats))
    options = Options(programs=("decode/1", "prefill"))
    result = compile_model(mixed, Request(find_target(target), options=options), Store(store))
    per_layer = result.plan.programs["decode/1"].launches
    assert sum(launch.op.startswith("layers.0.") for launch in per_layer) == 6
    assert sum(launch.op.startswith("layers.3.") for launch in per_layer) == 7


def test_expert_counts_that_differ_share_their_kernels() -> None:
    def keys(model: str) -> int:
        programs = lower_programs(load_model(model), Request(find_target("sm_90")))
        return len({key for _, low in programs.values() for key in low.kernels})

    assert keys("lynn-27b-a3b") == keys("qwen3.6-35b-a3b")


@pytest.mark.parametrize(("target", "other"), LIKE.items())
def test_targets_that_are_alike_have_the_same_sources(target: str, other: str) -> None:
    def sources(name: str) -> set[KernelSource]:
        lowered = lower_programs(load_model("tiny-moe"), Request(find_target(name)))
        calls = {key: call for _, low in lowered.values() for key, call in low.kernels.items()}
        return {replace(call.source, text=code_of(call.source), target=find_target(other)) for call in calls.values()}

    def code_of(source: KernelSource) -> str:
        return "\n".join(line for line in source.text.splitlines() if not line.startswith("#"))

    assert sources(target) == sources(other)


def test_equal_inputs_give_equal_bytes(store: Path, tmp_path: Path) -> None:
    """Compiled here and now, and maybe earlier by another process."""
    request = Request(find_target("sm_90"), options=Options(programs=("decode/1", "prefill")))
    first, second = (compile_model(load_model("tiny-moe"), request, Store(place)) for place in (store, tmp_path))
    assert first.plan == second.plan
    assert first.files == second.files
