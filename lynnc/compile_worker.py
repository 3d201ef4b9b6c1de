"""A compiler process: the only file of ``lynnc`` that imports triton.

In: one JSON request a line on standard input. Out: one JSON reply a line on the file descriptor in ``argv[1]``; its own
standard output and error go to a log, since Triton prints there. Runs as a plain script in a folder of its own, with
the environment that ``lynnc.compile_pool`` gives it; imports nothing of ``lynnc``, so that starting costs little.

Files and modules get names that say nothing about the folder, and line information is off: same request, same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompilationError
from triton.errors import TritonError

MODULE = "lynnc_kernel"
ALIGNED = "tt.divisibility"
HIDDEN = (("global_scratch", "*i8"), ("profile_scratch", "*i8"))

REASONS = (
    r"(?<=; )error\s*: .*$",  # ptxas, after its name, the file and the line of PTX
    r"\w+\.cpp:\d+: .*: Assertion .*$",
    r"^(?!PTXAS error|.*Failures have been detected).*\b(?:error|fatal|LLVM ERROR)\b\s*:.*$",
    r"Pipeline failed while executing \[`\w+`",
)
"""Where in what Triton, MLIR and ptxas print the reason stands; the first pattern that is found counts."""

# What Triton raises for a kernel that it refuses; anything else ends the process, and the parent says so.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TritonError,
    TypeError,
    ValueError,
)


def main() -> None:
    """Answer requests until standard input closes."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # Triton's ptxas would hold it open after our death
    with os.fdopen(descriptor, "w", encoding="utf-8") as replies:
        for line in sys.stdin:
            log_start = _log_size()
            try:
                reply = compile_request(json.loads(line))
            except REFUSALS as error:
                reply = {"error": first_reason(error, _log_since(log_start))}
            shutil.rmtree(os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def compile_request(request: Mapping[str, Any]) -> dict[str, object]:
    """Compile one kernel and leave ``NAME.cubin`` and ``NAME.ptx`` in the current folder; returns the launch facts."""
    name = request["name"]
    found = Path(triton.__file__).parent
    if not found.samefile(request["triton_folder"]):
        raise ImportError(f"the compiler process found another Triton in {found}")
    function = load_kernel(name, request["text"])
    runtime = dict(request["signature"])
    constants = dict(request["constants"])
    check_names(function.arg_names, runtime, constants)
    # "i32:16" says that an integer is always a multiple of 16; every pointer is aligned to 16 bytes.
    kinds = {key: runtime.get(key, "constexpr").partition(":") for key in function.arg_names}
    attributes = {
        (index,): [[ALIGNED, int(kinds[key][2] or 16)]]
        for index, key in enumerate(function.arg_names)
        if kinds[key][0].startswith("*") or kinds[key][2]
    }
    source = ASTSource(function, {key: kind[0] for key, kind in kinds.items()}, constants, attributes)
    capability = request["capability"]
    options = {
        "num_warps": request["num_warps"],
        "num_stages": request["num_stages"],
        "maxnreg": request["max_registers"] or None,
        "launch_pdl": request["pdl"],
        "enable_fp_fusion": True,  # Triton 3.10 changes the default, and it changes bits
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    Path(f"{name}.cubin").write_bytes(cubin)
    Path(f"{name}.ptx").write_text(ptx, encoding="utf-8")
    declared = [(key, kinds[key][0]) for key in function.arg_names if key in runtime]
    return {
        **launch_facts(compiled.metadata, ptx),
        **resource_usage(request["cuobjdump"], f"{name}.cubin", compiled.metadata.name),
        "parameters": parameters(declared, ptx),
        "triton": triton.__version__,
        "ptxas": get_ptxas(capability).path,
    }


def load_kernel(name: str, text: str) -> Any:
    """Write the text to a file, which ``triton.jit`` wants, run it and return its ``kernel``."""
    path = Path(f"kernel_{name[:8]}.py")  # one name for two texts would confuse linecache
    path.write_text(text, encoding="utf-8")
    module = types.ModuleType(MODULE)
    exec(compile(text, path.name, "exec"), module.__dict__)
    function = module.__dict__.get("kernel")
    if not isinstance(function, triton.runtime.JITFunction):
        raise ValueError("the source defines no function `kernel` under @triton.jit")
    return function


def check_names(names: list[str], runtime: Mapping[str, str], constants: Mapping[str, object]) -> None:
    """Every parameter of the kernel is either passed at run time or a constant, and nothing else is given."""
    given = [*runtime, *constants]
    missing = [name for name in names if name not in given]
    extra = [name for name in given if name not in names]
    both = [name for name in runtime if name in constants]
    if missing or extra or both:
        faults = (("without a type or value", missing), ("given but not taken", extra), ("given twice", both))
        raise ValueError(
            "kernel parameters " + ", ".join(f"{what}: {' '.join(which)}" for what, which in faults if which)
        )


def launch_facts(metadata: Any, ptx: str) -> dict[str, object]:
    """What Triton and the PTX say; warp specialisation adds threads to those of ``num_warps``."""
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    return {
        "symbol": metadata.name,
        "arch": arch[1] if arch else "",
        "num_warps": metadata.num_warps,
        "threads": int(threads[1]) if threads else 32 * metadata.num_warps,
        "shared_bytes": metadata.shared,
        "global_scratch_bytes": metadata.global_scratch_size or 0,
        "global_scratch_align": metadata.global_scratch_align or 1,
        "profile_scratch_bytes": getattr(metadata, "profile_scratch_size", 0) or 0,
        "profile_scratch_align": getattr(metadata, "profile_scratch_align", 1) or 1,
        "pdl": bool(metadata.launch_pdl),
    }


def parameters(declared: list[tuple[str, str]], ptx: str) -> list[dict[str, object]]:
    """Declared parameters and the hidden ones that Triton appends, counted in the PTX rather than assumed."""
    entry = re.search(r"\.entry \w+\((.*?)\)\s", ptx, re.DOTALL)
    count = len(re.findall(r"\.param ", entry[1])) if entry else 0
    hidden = count - len(declared)
    if not 0 <= hidden <= len(HIDDEN):
        raise ValueError(f"the machine code takes {count} parameters where {len(declared)} are declared")
    rows = [(name, kind, False) for name, kind in declared] + [(name, kind, True) for name, kind in HIDDEN[:hidden]]
    return [{"name": name, "type": kind, "hidden": is_hidden} for name, kind, is_hidden in rows]


def resource_usage(cuobjdump: str, cubin: str, symbol: str) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory, which are spills in our kernels."""
    result = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=False)
    match = re.search(rf"Function {symbol}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", result.stdout)
    if not match:
        raise ValueError(f"{cuobjdump} does not say how many registers the kernel takes: {result.stderr.strip()}")
    return {"registers": int(match[1]), "spill_bytes": int(match[2]) + int(match[3])}


def first_reason(error: BaseException, log: str) -> str:
    """The first line that helps: where in the kernel, else what ptxas or MLIR said, else the exception itself."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, CompilationError):
            error = inner
        inner = inner.__cause__
    text = str(error).strip()
    if isinstance(error, CompilationError):
        line = getattr(error.node, "lineno", 0)
        source = (error.src or "").split("\n")[line - 1].strip() if line else ""
        cause = (error.error_message or type(error).__name__).strip().split("\n")[0]
        return f"{cause} at `{source}`" if source else cause
    said = f"{text}\n{log}"
    for pattern in REASONS:
        match = re.search(pattern, said, re.MULTILINE)
        if match:
            without_folders = re.sub(r"\S*/(?=[\w.]+)", "", match[0])
            return re.sub(r"^error\s*:", "ptxas:", without_folders).strip().rstrip(".")
    name = type(error).__name__
    return f"{name}: {text.split(chr(10))[0]}" if text else name


def _log_size() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fstat(2).st_size


def _log_since(start: int) -> str:
    _log_size()
    with Path("log").open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


if __name__ == "__main__":
    main()
