"""Which compiler programs and which GPU this machine has.

In: the installed ``triton`` package, found without importing it, and ``PATH``. Out: a frozen ``Tools``; a program is
asked for its version only when somebody reads it, so building the record costs a few milliseconds.

Example::

    tools = find_tools()
    tools.triton_version                    # "3.9.0"
    tools.ptxas_for(90).version             # "13.4.59"
    detect_gpu()                            # None where there is no driver or no GPU
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm")
BLACKWELL_PTXAS_FROM = (((3, 9), 90), ((0, 0), 100))
"""From which capability on a Triton release takes ``ptxas-blackwell``: the first row whose release is reached."""
PROGRAM_SECONDS = 20.0

# Numbers of CUdevice_attribute in cuda.h.
ATTRIBUTE_SM_COUNT = 16
ATTRIBUTE_L2_BYTES = 38
ATTRIBUTE_MAJOR = 75
ATTRIBUTE_MINOR = 76


@dataclass(frozen=True, slots=True)
class Tool:
    """One program. ``version`` and ``archs`` run it once in a process; both are empty if it does not answer."""

    name: str
    path: Path

    @property
    def version(self) -> str:
        """Full version such as ``13.4.59``."""
        return tool_version(self.path)

    @property
    def archs(self) -> frozenset[str]:
        """Values of ``--gpu-name`` that start with ``sm_``; ptxas only."""
        return tool_archs(self.path)


@dataclass(frozen=True, slots=True)
class Tools:
    """Triton and the NVIDIA programs beside it; absent ones are None or missing from ``programs``."""

    triton_version: str | None
    triton_folder: Path | None
    programs: tuple[Tool, ...]

    def program(self, name: str) -> Tool | None:
        """The program of that name, or None."""
        return next((tool for tool in self.programs if tool.name == name), None)

    @property
    def triton_release(self) -> tuple[int, int]:
        """Major and minor version of Triton, (0, 0) without it."""
        match = re.match(r"(\d+)\.(\d+)", self.triton_version or "")
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def ptxas_for(self, capability: int) -> Tool | None:
        """The assembler that this Triton runs for a compute capability such as 90."""
        first = next(start for version, start in BLACKWELL_PTXAS_FROM if self.triton_release >= version)
        return self.program("ptxas-blackwell" if capability >= first else "ptxas")


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that the driver shows. ``driver_cuda`` is the newest CUDA version it serves, such as ``13.0``."""

    name: str
    capability: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    driver_cuda: str
    count: int


@functools.cache
def find_tools() -> Tools:
    """Find Triton and its programs; those that the package lacks are looked for on ``PATH``."""
    folder = _triton_folder()
    found = ((name, _program_path(name, folder)) for name in PROGRAMS)
    programs = tuple(Tool(name, path) for name, path in found if path is not None)
    return Tools(_triton_version() if folder else None, folder, programs)


@functools.cache
def tool_version(path: Path) -> str:
    """Version that an NVIDIA program prints, such as ``12.9.86``."""
    match = re.search(r"release [\d.]+, V([\d.]+)", _output(path, "--version"))
    return match[1] if match else ""


@functools.cache
def tool_archs(path: Path) -> frozenset[str]:
    """Architectures that a ptxas lists, such as ``sm_90a``."""
    return frozenset(re.findall(r"'(sm_\d+[af]?)'", _output(path, "--help")))


def detect_gpu() -> Gpu | None:
    """Ask the CUDA driver for its first GPU; None without a driver or a GPU. Creates no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if cuda.cuInit(0) != 0:
        return None
    count = _integer(cuda.cuDeviceGetCount)
    if count < 1:
        return None
    device = ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver = _integer(cuda.cuDriverGetVersion)
    attribute = functools.partial(_attribute, cuda, device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        capability=10 * attribute(ATTRIBUTE_MAJOR) + attribute(ATTRIBUTE_MINOR),
        sm_count=attribute(ATTRIBUTE_SM_COUNT),
        memory_bytes=memory.value,
        l2_bytes=attribute(ATTRIBUTE_L2_BYTES),
        driver_cuda=f"{driver // 1000}.{driver % 1000 // 10}",
        count=count,
    )


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


def _integer(function: ctypes._NamedFuncPointer) -> int:
    value = ctypes.c_int()
    return value.value if function(ctypes.byref(value)) == 0 else 0


def _triton_folder() -> Path | None:
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent if spec and spec.origin else None


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _program_path(name: str, folder: Path | None) -> Path | None:
    if folder is not None:
        path = folder / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return path
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def _output(path: Path, option: str) -> str:
    try:
        result = subprocess.run(
            [str(path), option], capture_output=True, text=True, errors="replace", timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout
