"""What each GPU architecture and each GPU can do: two tables of frozen records.

In: a name that a user typed. Out: a ``Target`` (what code is made for) or a ``Device`` (what speed is estimated for).
Other files ask these records for a capability or a limit and never compare architectures.

Example::

    target = find_target("sm_90a")          # also "90", "sm_90"
    target.has_pdl, target.shared_memory_limit
    device = find_device("h200")
    check_tools(target, find_tools())       # TargetError if this Triton or ptxas cannot serve it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lynnc.errors import TargetError
from lynnc.tools import Tools

KIB, GIB = 1024, 1024**3
NEEDED_PROGRAMS = ("cuobjdump",)


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture. ``shared_memory_limit`` is bytes a block may opt in to; limits are from the CUDA C++ guide.

    ``arch`` is what ptxas gets and what the cubin says: from sm_90 on Triton always adds the ``a`` suffix, so code for
    sm_120 does not run on sm_121. ``min_triton_fp4`` is the first release whose ``tl.dot_scaled`` becomes an FP4 MMA
    there: older ones refuse groups of 16, and for groups of 32 fall back to BF16 in silence (tried with 3.6 to 3.9).
    """

    name: str
    capability: int
    arch: str
    shared_memory_limit: int
    shared_memory_per_sm: int
    threads_per_sm: int
    registers_per_sm: int = 65536
    has_fp8_type: bool = True
    has_pdl: bool = True
    has_tma: bool = True
    has_wgmma: bool = False
    has_tcgen05: bool = False
    has_fp4_mma: bool = False
    min_triton: tuple[int, int] = (3, 6)
    min_triton_fp4: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. FLOP/s are dense BF16 with FP32 sums; ``source`` says where the figures come from."""

    name: str
    target: Target
    sm_count: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    l2_bytes: int
    memory_bytes: int
    source: str
    launch_overhead_s: float = 0.93e-6
    """A launch in a chain, in a graph, with programmatic dependent launch; measured on an H200, assumed elsewhere."""


NO_PDL_LAUNCH_S = 1.24e-6
"""The same without programmatic dependent launch, which begins with sm_90; measured on an H200 too."""
AMPERE = Target("sm_80", 80, "sm_80", 166912, 167936, 2048, has_fp8_type=False, has_pdl=False, has_tma=False)
AMPERE_86 = Target("sm_86", 86, "sm_86", 101376, 102400, 1536, has_fp8_type=False, has_pdl=False, has_tma=False)
ADA = Target("sm_89", 89, "sm_89", 101376, 102400, 1536, has_pdl=False, has_tma=False)
HOPPER = Target("sm_90", 90, "sm_90a", 232448, 233472, 2048, has_wgmma=True)
BLACKWELL = Target(
    "sm_100", 100, "sm_100a", 232448, 233472, 2048, has_tcgen05=True, has_fp4_mma=True, min_triton_fp4=(3, 6)
)
BLACKWELL_103 = Target(
    "sm_103", 103, "sm_103a", 232448, 233472, 2048, has_tcgen05=True, has_fp4_mma=True, min_triton_fp4=(3, 6)
)
BLACKWELL_120 = Target("sm_120", 120, "sm_120a", 101376, 102400, 1536, has_fp4_mma=True, min_triton_fp4=(3, 6))
BLACKWELL_121 = Target("sm_121", 121, "sm_121a", 101376, 102400, 1536, has_fp4_mma=True, min_triton_fp4=(3, 8))

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (AMPERE, AMPERE_86, ADA, HOPPER, BLACKWELL, BLACKWELL_103, BLACKWELL_120, BLACKWELL_121)
    }
)

SHEET = "data sheet peak, not measured; launch overhead assumed as on H200"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                "a100", AMPERE, 108, 2.039e12, 312e12, 40960 * KIB, 80 * GIB, f"A100 80GB SXM: {SHEET}", NO_PDL_LAUNCH_S
            ),
            Device(
                "rtx3090",
                AMPERE_86,
                82,
                936e9,
                71e12,
                6144 * KIB,
                24 * GIB,
                f"GA102 white paper: {SHEET}",
                NO_PDL_LAUNCH_S,
            ),
            Device(
                "rtx4090",
                ADA,
                128,
                1.008e12,
                165.2e12,
                73728 * KIB,
                24 * GIB,
                f"Ada white paper: {SHEET}",
                NO_PDL_LAUNCH_S,
            ),
            Device("l40s", ADA, 142, 864e9, 362e12, 98304 * KIB, 48 * GIB, f"L40S: {SHEET}", NO_PDL_LAUNCH_S),
            Device(
                "h200",
                HOPPER,
                132,
                4.5e12,
                788e12,
                61440 * KIB,
                139 * GIB,
                "bandwidth, FLOP/s and launch overhead measured (Triton reduction over 4 GiB; torch product of 8192 x "
                "8192; graph of 200 kernels with PDL), L2 as the driver says, the rest H200 SXM data sheet",
            ),
            Device("h100", HOPPER, 132, 3.35e12, 989e12, 51200 * KIB, 80 * GIB, f"H100 SXM: {SHEET}"),
            Device("b200", BLACKWELL, 148, 8.0e12, 2.25e15, 129024 * KIB, 179 * GIB, f"HGX B200: {SHEET}"),
            Device("b300", BLACKWELL_103, 148, 8.0e12, 2.25e15, 129024 * KIB, 268 * GIB, f"HGX B300: {SHEET}"),
            Device(
                "r6000",
                BLACKWELL_120,
                188,
                1.792e12,
                503.8e12,
                131072 * KIB,
                96 * GIB,
                f"RTX PRO 6000 Blackwell: {SHEET}",
            ),
            Device("rtx5090", BLACKWELL_120, 170, 1.792e12, 209.5e12, 98304 * KIB, 32 * GIB, f"RTX 5090: {SHEET}"),
            Device("spark", BLACKWELL_121, 48, 273e9, 125e12, 24576 * KIB, 128 * GIB, f"DGX Spark, GB10: {SHEET}"),
        )
    }
)
"""The first device of a target is its default."""


def find_target(text: str) -> Target:
    """The target that ``sm_90``, ``90`` or ``sm_90a`` names; TargetError with the nearest name for others."""
    wanted = text.strip().lower()
    match = re.fullmatch(r"(?:sm_?)?(\d+)(a?)", wanted)
    if match:
        target = TARGETS.get(f"sm_{match[1]}")
        if target is not None and (not match[2] or target.arch.endswith("a")):
            return target
    if match:
        number = int(match[1])
        wanted = min(TARGETS.values(), key=lambda target: abs(target.capability - number)).name
    raise TargetError(f"Unknown target {text!r}{_nearest(wanted, TARGETS)}: choose one of {', '.join(TARGETS)}.")


def find_device(text: str) -> Device:
    """The device of that name, whatever its case; TargetError with the nearest name for others."""
    wanted = re.sub(r"[\s_-]", "", text.lower())
    device = DEVICES.get(wanted)
    if device is None:
        raise TargetError(f"Unknown device {text!r}{_nearest(wanted, DEVICES)}: choose one of {', '.join(DEVICES)}.")
    return device


def default_device(target: Target) -> Device:
    """The device that speed is estimated for when only the target is known."""
    return next(device for device in DEVICES.values() if device.target == target)


def check_tools(target: Target, tools: Tools, *, fp4_mma: bool = False) -> None:
    """Raise TargetError unless Triton and its ptxas can make code for ``target``; ``fp4_mma`` asks for FP4 MMA too."""
    needed = target.min_triton
    if fp4_mma:
        if target.min_triton_fp4 is None:
            raise TargetError(f"{target.name} has no FP4 tensor cores: choose a model without 4-bit activations.")
        needed = max(needed, target.min_triton_fp4)
    wish = f"{target.name}{' with FP4 MMA' if fp4_mma else ''}"
    version = f"{needed[0]}.{needed[1]}"
    if tools.triton_version is None:
        raise TargetError(f"Triton is not installed, which {wish} needs: run pip install 'triton>={version}'.")
    if tools.triton_release < needed:
        raise TargetError(
            f"Triton {tools.triton_version} cannot serve {wish}, which needs {version} or newer: "
            f"run pip install 'triton>={version}'."
        )
    _check_programs(target, tools)


def _check_programs(target: Target, tools: Tools) -> None:
    remedy = "install Triton again from its published wheel"
    ptxas = tools.ptxas_for(target.capability)
    if ptxas is None:
        raise TargetError(f"No ptxas for {target.name} beside Triton {tools.triton_version} nor on PATH: {remedy}.")
    if target.arch not in ptxas.archs:
        raise TargetError(
            f"{ptxas.path} ({ptxas.version or 'version unknown'}) does not know {target.arch}, "
            f"which {target.name} needs: {remedy}."
        )
    for name in NEEDED_PROGRAMS:
        if tools.program(name) is None:
            raise TargetError(f"No {name} beside Triton {tools.triton_version} nor on PATH: {remedy}.")


def _nearest(wanted: str, names: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(wanted, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
