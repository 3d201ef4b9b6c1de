"""Machine code of projections with 4-bit activations where there is FP4 MMA: block-scaled products, nothing else."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lynnc.compile import compile_kernels
from lynnc.compiler import Request, lower_programs
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.store import Store
from lynnc.target import find_target
from lynnc.tools import find_tools

WARP_PTX = (
    r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.f32\.e2m1\.e2m1\.f32\.ue4m3"
)
TCGEN05_PTX = r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.(?:block16|scale_vec::4X)"
INSTRUCTIONS = {
    "sm_100": (TCGEN05_PTX, r"UTCOMMA\.\S+"),
    "sm_103": (TCGEN05_PTX, r"UTCOMMA\.\S+"),
    "sm_120": (WARP_PTX, r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X"),
    "sm_121": (WARP_PTX, r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X"),
}
"""What PTX and machine code call a block-scaled product of E2M1 codes with an E4M3 scale for each 16."""
EXPERTS = {"grouped_up_fp4", "grouped_down_fp4"}
CASES = (*(("tiny-moe", target) for target in INSTRUCTIONS), ("lynn-27b-a3b", "sm_121"), ("lynn-27b-a3b", "sm_100"))


def machine_code(cubin: Path) -> str:
    nvdisasm = find_tools().program("nvdisasm")
    if nvdisasm is None:
        pytest.skip("no nvdisasm beside Triton nor on PATH")
    return subprocess.run([nvdisasm.path, "-c", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("model", "target"), CASES)
def test_products_are_block_scaled_fp4_ones(model: str, target: str, tmp_path: Path) -> None:
    if find_tools().triton_release < (find_target(target).min_triton_fp4 or (0, 0)):
        pytest.skip("this Triton is too old for FP4 MMA there")
    spec = load_model(model)
    declared = replace(spec, precision=replace(spec.precision, activations="nvfp4"))
    options = Options(programs=("prefill/16", "prefill/512", "prefill"))
    lowered = lower_programs(declared, Request(find_target(target), options=options))
    calls = {
        key: call
        for program, (_, low) in lowered.items()
        for key, call in low.kernels.items()
        if call.entry.name in EXPERTS or (call.entry.name == "gemm_fp4" and program != "prefill/512")
    }
    sources = {key: call.source for key, call in calls.items()}
    artifacts = compile_kernels(list(sources.values()), Store(tmp_path))
    names = Counter(calls[key].entry.name for key in sources)
    tiles = 3 if model == "lynn-27b-a3b" else 2  # of 16, 32 and 64 rows
    assert names["gemm_fp4"] >= 4 and names["grouped_up_fp4"] == names["grouped_down_fp4"] == tiles
    in_ptx, in_code = INSTRUCTIONS[target]
    for key, source in sources.items():
        artifact, label = artifacts[source.key], calls[key].entry.label
        products = set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S+", artifact.ptx_path.read_text()))
        assert products and all(re.fullmatch(in_ptx, product.rstrip(";")) for product in products), (label, products)
        assert artifact.spill_bytes == 0, label
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(artifact.read_cubin())
        code = machine_code(cubin)
        assert re.search(in_code, code) and not re.search(r"\b(?:HMMA|UTCHMMA|QMMA|UTCQMMA)\b", code), label
