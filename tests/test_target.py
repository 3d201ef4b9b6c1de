import stat
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from lynnc.errors import TargetError
from lynnc.target import DEVICES, TARGETS, check_tools, default_device, find_device, find_target
from lynnc.tools import Tool, Tools, detect_gpu, find_tools, tool_version

ALL_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def fake_tools(
    folder: Path, triton: str | None = "3.9.0", archs: str = "'sm_90a'", programs: tuple[str, ...] = ()
) -> Tools:
    made = []
    for name in programs or ("ptxas", "ptxas-blackwell", "cuobjdump"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release 12.8, V12.8.93 {archs}"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        made.append(Tool(name, path))
    return Tools(triton, folder, tuple(made))


def test_table_is_complete_and_frozen() -> None:
    assert tuple(TARGETS) == ALL_TARGETS
    for name, target in TARGETS.items():
        assert name == target.name == f"sm_{target.capability}"
        assert target.arch == name + ("a" if target.capability >= 90 else "")
        assert target.has_pdl == target.has_tma == (target.capability >= 90)
        assert target.has_fp8_type == (target.capability >= 89)
        assert target.has_fp4_mma == (target.capability >= 100) == (target.min_triton_fp4 is not None)
        assert target.shared_memory_limit + 1024 == target.shared_memory_per_sm
    with pytest.raises(FrozenInstanceError):
        TARGETS["sm_90"].capability = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90", "sm_90"),
        ("90", "sm_90"),
        ("sm_90a", "sm_90"),
        (" SM_121A ", "sm_121"),
        ("sm120", "sm_120"),
        ("80", "sm_80"),
    ],
)
def test_find_target(text: str, name: str) -> None:
    assert find_target(text).name == name


@pytest.mark.parametrize(
    ("text", "hint"), [("sm_87", "did you mean sm_86?"), ("sm_80a", "sm_80?"), ("sm_120f", "sm_120?"), ("", "choose")]
)
def test_unknown_target_names_the_nearest_and_the_list(text: str, hint: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_target(text)
    assert hint in str(caught.value)
    assert ", ".join(ALL_TARGETS) in str(caught.value)


def test_devices() -> None:
    assert find_device("H200") is find_device(" h200 ") is DEVICES["h200"]
    assert find_device("RTX 4090").target.name == "sm_89"
    for name, device in DEVICES.items():
        assert device.name == name and device.source
        assert device.launch_overhead_s == (0.93e-6 if device.target.has_pdl else 1.24e-6)
        assert 1e11 < device.bandwidth_bytes_per_s < 1e13 < device.flops_per_s < 1e16
        assert device.l2_bytes < 2**28 < device.memory_bytes < 2**39
    with pytest.raises(TargetError, match=r"Unknown device 'h20' \(did you mean h200\?\): choose one of a100, "):
        find_device("h20")


def test_every_target_has_a_default_device() -> None:
    assert default_device(TARGETS["sm_90"]).name == "h200"
    for target in TARGETS.values():
        assert default_device(target).target is target


def test_installed_tools_serve_every_target() -> None:
    for target in TARGETS.values():
        check_tools(target, find_tools())


def test_no_triton(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="Triton is not installed, which sm_90 needs: run pip"):
        check_tools(TARGETS["sm_90"], fake_tools(tmp_path, triton=None))


def test_old_triton(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"Triton 3\.5\.1 cannot serve sm_90, which needs 3\.6 or newer"):
        check_tools(TARGETS["sm_90"], fake_tools(tmp_path, triton="3.5.1"))


def test_fp4_needs_a_newer_triton_on_sm_121(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, triton="3.7.1", archs="'sm_121a' 'sm_120a'")
    check_tools(TARGETS["sm_121"], tools)
    check_tools(TARGETS["sm_120"], tools, fp4_mma=True)
    with pytest.raises(TargetError, match=r"cannot serve sm_121 with FP4 MMA, which needs 3\.8"):
        check_tools(TARGETS["sm_121"], tools, fp4_mma=True)
    check_tools(TARGETS["sm_121"], replace(tools, triton_version="3.10.0+git1"), fp4_mma=True)
    with pytest.raises(TargetError, match="sm_90 has no FP4 tensor cores"):
        check_tools(TARGETS["sm_90"], tools, fp4_mma=True)


def test_ptxas_too_old(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"ptxas-blackwell \(12\.8\.93\) does not know sm_121a, which sm_121 needs"):
        check_tools(TARGETS["sm_121"], fake_tools(tmp_path, archs="'sm_121' 'sm_90a'"))


def test_missing_programs(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No ptxas for sm_80"):
        check_tools(TARGETS["sm_80"], fake_tools(tmp_path, programs=("cuobjdump",)))
    with pytest.raises(TargetError, match="No cuobjdump"):
        check_tools(TARGETS["sm_90"], fake_tools(tmp_path, programs=("ptxas-blackwell",)))


@pytest.mark.parametrize(
    ("triton", "capability", "name"),
    [
        ("3.6.0", 90, "ptxas"),
        ("3.8.0", 100, "ptxas-blackwell"),
        ("3.9.0", 90, "ptxas-blackwell"),
        ("3.10.0", 89, "ptxas"),
    ],
)
def test_which_ptxas_a_triton_runs(tmp_path: Path, triton: str, capability: int, name: str) -> None:
    tool = fake_tools(tmp_path, triton).ptxas_for(capability)
    assert tool is not None and tool.name == name


def test_a_program_that_does_not_answer(tmp_path: Path) -> None:
    assert tool_version(tmp_path / "nothing") == ""
    assert Tool("ptxas", tmp_path).archs == frozenset()


def test_finding_tools_imports_no_triton_and_is_quick() -> None:
    code = (
        "import sys, time; from lynnc.tools import find_tools; start = time.perf_counter(); tools = find_tools()\n"
        "assert time.perf_counter() - start < 0.2 and tools.triton_version and tools.program('ptxas').version\n"
        "assert not {'triton', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_detect_gpu_says_none_or_a_whole_record() -> None:
    gpu = detect_gpu()
    assert gpu is None or (gpu.capability >= 50 and gpu.sm_count > 0 and gpu.memory_bytes > 0 and gpu.count > 0)
