"""Every program for every target, without a GPU: limits of the machine code, and width of the loads of weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path

import pytest
from ptx import load_widths

from lynnc.compile import KernelSource, compile_kernels
from lynnc.compiler import Compiled, Request, compile_model, lower_programs, public_facts
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


WIDE_GDN = "chunk=64 key_dim=128 key_heads=16"
SPILLING = {
    "sm_80": {
        "attention Attention (head_dim=64 heads=4 kv_heads=2)": 32,
        "delta_prepare DeltaPrepare (chunk=64 key_dim=64 key_heads=2 value_heads=4)": 48,
        f"delta_prepare DeltaPrepare ({WIDE_GDN} value_heads=32)": 216,
        f"delta_scan DeltaScan ({WIDE_GDN} value_dim=128 value_heads=32)": 192,
        "delta_scan DeltaScan (chunk=16 key_dim=128 key_heads=16 value_dim=128 value_heads=32)": 8,
        "linear Linear (formats=nvfp4 k=2048 n=151936 norm=0 residual=0)": 8,
        "linear Linear (formats=nvfp4 k=2048 n=248320 norm=0 residual=0)": 8,
    },
    "sm_89": {
        "attention Attention (head_dim=64 heads=4 kv_heads=2)": 48,
        "delta_prepare DeltaPrepare (chunk=64 key_dim=64 key_heads=2 value_heads=4)": 32,
        f"delta_prepare DeltaPrepare ({WIDE_GDN} value_heads=32)": 288,
        f"delta_scan DeltaScan ({WIDE_GDN} value_dim=128 value_heads=32)": 96,
    },
    "sm_90": {
        "attention Attention (head_dim=128 heads=32 kv_heads=4)": 80,
        "attention AttentionGate (head_dim=256 heads=16 kv_heads=2)": 248,
        "attention AttentionGate (head_dim=256 heads=16 kv_heads=4)": 248,
    },
    "sm_100": {
        "attention AttentionGate (head_dim=256 heads=16 kv_heads=2)": 160,
        "attention AttentionGate (head_dim=256 heads=16 kv_heads=4)": 136,
    },
    "sm_121": {
        "delta_prepare DeltaPrepare (chunk=64 key_dim=64 key_heads=2 value_heads=4)": 56,
        f"delta_prepare DeltaPrepare ({WIDE_GDN} value_heads=32)": 312,
        f"delta_scan DeltaScan ({WIDE_GDN} value_dim=128 value_heads=32)": 200,
        "delta_scan DeltaScan (chunk=16 key_dim=128 key_heads=16 value_dim=128 value_heads=32)": 24,
        "gemm Linear (formats=bf16 k=2048 n=router-128 norm=0 order=natural residual=0 rows=64)": 8,
        "gemm Linear (formats=bf16 k=2048 n=router-257 norm=0 order=natural residual=0 rows=64)": 8,
    },
}
"""Kernels of prompts that spill with their default knobs, of all shipped models, and bytes a thread; by Triton 3.9. For
the attention of 16 heads the tuner found nothing faster on an H200, and on sm_100 no other tile of as many rows spills
less."""
ALONE = (
    *(("qwen3.6-35b-a3b", target) for target in ("sm_80", "sm_89", "sm_100")),
    *(("qwen3.5-9b", target) for target in ("sm_90", "sm_100")),
    ("qwen3-30b-a3b", "sm_90"),
)
"""Models and targets of which only what spills is compiled, if it is ``MUCH``: all of it would take minutes."""
MUCH = 32


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


def kernels_of(result: Compiled, *, prompts: bool) -> list[KernelEntry]:
    """Those of decode programs, or of programs for prompts."""
    plan = result.plan
    keys = {launch.kernel for name, p in plan.programs.items() if is_prefill(name) is prompts for launch in p.launches}
    return [plan.kernels[key] for key in sorted(keys)]


@pytest.mark.parametrize(("model", "target"), SMALL + FULL)
def test_every_program_compiles_within_the_limits_of_the_target(model: str, target: str, store: Path) -> None:
    result = compiled(model, target, store)
    assert set(result.plan.programs) == set(options_of(target).programs)
    limit = find_target(target).shared_memory_limit
    for entry in result.plan.kernels.values():
        assert int(str(entry.artifact["shared_bytes"])) <= limit, entry.label
        assert entry.artifact["arch"] == find_target(target).arch
    assert not spills(kernels_of(result, prompts=False))
    check_spills(target, kernels_of(result, prompts=True))


def spills(entries: Iterable[KernelEntry]) -> dict[str, int]:
    """Bytes that a thread spills, by kernel and problem, of those that do."""
    found = {f"{entry.name} {entry.label}": int(str(entry.artifact["spill_bytes"])) for entry in entries}
    return {name: spilled for name, spilled in found.items() if spilled}


def check_spills(target: str, entries: Iterable[KernelEntry]) -> None:
    """Nothing spills but what is known to, and that no more than it did."""
    known = SPILLING[LIKE.get(target, target)]
    for name, spilled in spills(entries).items():
        assert spilled <= known.get(name, 0), f"{name} spills {spilled} bytes a thread on {target}"


@pytest.mark.parametrize(("model", "target"), ALONE)
def test_kernels_of_prompts_that_spill_do_so_no_more_than_they_did(model: str, target: str, store: Path) -> None:
    request = Request(find_target(target), options=Options(programs=("prefill",)))
    lowered = lower_programs(load_model(model), request).values()
    calls = {f"{c.entry.name} {c.entry.label}": c for _, low in lowered for c in low.kernels.values()}
    chosen = [call for name, call in calls.items() if SPILLING[target].get(name, 0) >= MUCH]
    assert chosen
    artifacts = compile_kernels([call.source for call in chosen], Store(store))
    facts = [replace(call.entry, artifact=public_facts(artifacts[call.source.key])) for call in chosen]
    check_spills(target, facts)


MATRIX_PRODUCTS = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
PROJECTIONS = {"gemm", "grouped_up", "grouped_down"}


@pytest.mark.parametrize(("target", "product"), MATRIX_PRODUCTS.items())
def test_projections_of_prompts_are_matrix_products_of_the_target_and_nothing_else(
    target: str, product: str, store: Path
) -> None:
    result = compiled("tiny-moe", target, store)
    chosen = [entry for entry in kernels_of(result, prompts=True) if entry.name in PROJECTIONS]
    assert {entry.name for entry in chosen} == PROJECTIONS
    for entry in chosen:
        ptx = result.files[f"kernels/{entry.name}-{entry.key[:16]}.ptx"].decode()
        products = set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx))
        assert products == {product}, f"{entry.name} {entry.label} has {products}"


@pytest.mark.parametrize(("model", "target"), FULL)
def test_decode_kernels_load_packed_weights_8_bytes_at_a_time_or_more(model: str, target: str, store: Path) -> None:
    result = compiled(model, target, store)
    checked = 0
    for entry in kernels_of(result, prompts=False):
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
