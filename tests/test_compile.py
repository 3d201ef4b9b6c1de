import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import lynnc.compile
from lynnc.compile import Constant, KernelSource, compile_each, compile_kernels
from lynnc.compile_pool import run_requests
from lynnc.errors import CompileError, TargetError
from lynnc.store import Store
from lynnc.target import TARGETS, find_target
from lynnc.tools import Tools

DATA = Path(__file__).parent / "data"
AXPY = (DATA / "axpy_kernel.py").read_text()
DOT = (DATA / "dot_kernel.py").read_text()
HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


def axpy(target: str = "sm_90", block: int = 1024) -> KernelSource:
    chosen = find_target(target)
    return KernelSource(
        template="axpy",
        text=AXPY,
        signature=(("x", "*bf16"), ("w", "*bf16"), ("out", "*bf16"), ("rows", "i32:16")),
        constants=(("BLOCK", block), ("PDL", chosen.has_pdl)),
        target=chosen,
        pdl=True,
        label=f"axpy of {block}",
    )


def small(body: str, *constants: tuple[str, Constant]) -> KernelSource:
    names = "".join(f", {name}: tl.constexpr" for name, _ in constants)
    text = f"{HEAD}def kernel(x{names}):\n    {body}\n"
    return KernelSource("small", text, (("x", "*fp32"),), constants, TARGETS["sm_90"], label="small of 7")


SOURCES = [axpy("sm_80"), axpy("sm_90"), axpy("sm_121"), axpy("sm_90", 512)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    compile_kernels(SOURCES, store)
    yield store


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.target.name}-{source.label}")
def test_artifact(store: Store, source: KernelSource) -> None:
    artifact = store.load(source.key)
    assert artifact is not None
    assert artifact.arch == source.target.arch
    assert (artifact.symbol, artifact.num_warps, artifact.threads) == ("kernel", 4, 128)
    assert artifact.pdl == source.target.has_pdl
    assert 8 < artifact.registers < 128 and artifact.spill_bytes == artifact.shared_bytes == 0
    assert artifact.global_scratch_bytes == artifact.profile_scratch_bytes == 0
    assert [(p.name, p.type) for p in artifact.parameters if not p.hidden] == [
        ("x", "*bf16"),
        ("w", "*bf16"),
        ("out", "*bf16"),
        ("rows", "i32"),
    ]
    assert [p.type for p in artifact.parameters[4:]] == ["*i8", "*i8"]
    assert artifact.read_cubin().startswith(b"\x7fELF")


def test_alignment_is_stated_and_fusion_is_on(store: Store) -> None:
    for source in (SOURCES[0], SOURCES[3]):
        artifact = store.load(source.key)
        assert artifact is not None
        ptx = artifact.ptx_path.read_text()
        assert "fma.rn" in ptx
        assert "ld.global.v" in ptx and "ld.global.b16" not in ptx
        assert ("griddepcontrol" in ptx) == source.target.has_pdl


def test_same_bytes_whatever_the_folder_order_jobs_and_environment(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache = tmp_path / "user"
    for name, value in {
        "TRITON_INTERPRET": "1",
        "TRITON_FORCE_DISABLE_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(user_cache),
        "PTXAS_OPTIONS": "--opt-level 0",
        "MLIR_ENABLE_DUMP": "1",
        "PYTHONHASHSEED": "77",
    }.items():
        monkeypatch.setenv(name, value)
    deep = tmp_path / "a longer folder" / "for scratch"
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    again = compile_kernels([*SOURCES[::-1], small("pass")], Store(tmp_path / "store"), jobs=1)
    for source in SOURCES:
        first, second = store.load(source.key), again[source.key]
        assert first == second and first is not None
        assert first.read_cubin() == second.read_cubin()
        assert first.ptx_path.read_bytes() == second.ptx_path.read_bytes()
        for data in (second.read_cubin(), second.ptx_path.read_bytes()):
            assert b".py" not in data and b"/tmp" not in data
    assert not user_cache.exists()
    assert list(deep.iterdir()) == []


def test_key_counts_what_changes_code_and_nothing_else() -> None:
    source = axpy()
    assert source.key == replace(source, label="other").key
    assert source.key == replace(source, constants=source.constants[::-1], signature=source.signature[::-1]).key
    changed = [
        axpy("sm_100"),
        replace(source, text=AXPY + "#"),
        replace(source, template="b"),
        replace(source, num_warps=8),
        replace(source, num_stages=3),
        replace(source, pdl=False),
        replace(source, signature=(("x", "*fp16"), *source.signature[1:])),
        replace(source, constants=(("BLOCK", 1024.0), ("PDL", True))),
        replace(source, constants=(("BLOCK", 1024), ("PDL", 1))),
        replace(source, constants=(("BLOCK", 1024), ("PDL", None))),
    ]
    assert len({source.key, *(other.key for other in changed)}) == 1 + len(changed)
    assert axpy("sm_80").key == replace(axpy("sm_80"), pdl=False).key


def test_second_time_comes_from_the_store_in_a_process_without_triton(store: Store) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from lynnc.store import Store; import lynnc.compile\n"
        "import lynnc.target; from lynnc.compile import KernelSource, compile_kernels\n"
        f"text = {HEAD!r} + 'def kernel(x):\\n    tl.store(x, 1.0)\\n'\n"
        "source = KernelSource('small', text, (('x', '*fp32'),), (), lynnc.target.TARGETS['sm_90'])\n"
        "first = compile_kernels([source], Store(Path(sys.argv[1])))\n"
        "lynnc.compile.run_requests = None\n"
        "assert compile_kernels([source], Store(Path(sys.argv[1]))) == first\n"
        "assert not {'triton', 'torch'} & set(sys.modules)\n"
        "print(source.key)\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store.root)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] != ""


def test_progress_and_duplicates(store: Store, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    sources = [SOURCES[0], replace(SOURCES[0], label="again"), SOURCES[1]]
    artifacts = compile_kernels(sources, store, on_progress=lambda *step: seen.append(step))
    assert list(artifacts) == [SOURCES[0].key, SOURCES[1].key]
    assert seen == [(1, 2, "axpy of 1024"), (2, 2, "axpy of 1024")]
    assert compile_kernels([], store) == {}


def test_a_damaged_entry_is_compiled_again(store: Store, tmp_path: Path) -> None:
    own = Store(tmp_path)
    artifact = compile_kernels([small("pass")], own)[small("pass").key]
    artifact.cubin_path.write_bytes(b"broken")
    assert compile_kernels([small("pass")], own)[artifact.key].read_cubin().startswith(b"\x7fELF")


BAD_KERNELS = {
    "tl.store(x, zz + 1)": "does not compile: NameError('zz is not defined') at `tl.store(x, zz + 1)`; mend",
    "tl.static_assert(N == 8, 'N must be 8')": "N must be 8 at `tl.static_assert(N == 8, 'N must be 8')`",
    "tl.store(x, tl.inline_asm_elementwise('bogus.op $0;', '=f', [], tl.float32, True, 1))": (
        "does not compile: ptxas: Unknown modifier '.op'; mend"
    ),
    "tl.store(x, tl.sum(tl.arange(0, 100)))": "power of 2",
    "return (": "SyntaxError: '(' was never closed",
    "pass\nkernel = 1": "defines no function `kernel`",
    "pass\nimport nothing_like_this": "nothing_like_this",
    "pass\nimport os\nos.kill(os.getpid(), 9)": "the compiler process was killed by SIGKILL; mend",
    "pass\nprint('last words')\nraise SystemExit(3)": "compiler process ended with code 3, its last words: last words",
}


def test_every_bad_kernel_is_named_and_the_good_ones_go_on(tmp_path: Path) -> None:
    bad = {small(body, ("N", 7)).key: reason for body, reason in BAD_KERNELS.items()}
    sources = [small(body, ("N", 7)) for body in BAD_KERNELS]
    good = small("tl.store(x, 2.0)")
    outcomes = compile_each([*sources, good], Store(tmp_path))
    assert not isinstance(outcomes.pop(good.key), CompileError)
    assert list(outcomes) == list(bad)
    for key, outcome in outcomes.items():
        message = str(outcome)
        assert message.startswith("Kernel small of 7 (template small, target sm_90) does not compile: ")
        assert bad[key] in message
        assert "\n" not in message and "/tmp" not in message
    with pytest.raises(CompileError, match="NameError"):
        compile_kernels(sources[:1], Store(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"signature": (("x", "*fp32"), ("y", "i32"))}, "given but not taken: y"),
        ({"signature": ()}, "without a type or value: x"),
        ({"signature": (("x", "*nonsense"),)}, "nonsense"),
        ({"num_warps": 3}, "power of 2"),
    ],
)
def test_a_source_that_does_not_fit_its_kernel(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    source = replace(small("pass"), **change)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match=reason):
        compile_kernels([source], Store(tmp_path))


def test_too_much_shared_memory_names_the_numbers(tmp_path: Path) -> None:
    signature = (("a", "*bf16"), ("b", "*bf16"), ("out", "*fp32"), ("K", "i32:16"))
    small_card, large_card = (
        KernelSource("dot", DOT, signature, (("TILE", 128),), TARGETS[name], num_stages=3, label="dot of 128")
        for name in ("sm_121", "sm_90")
    )
    outcomes = compile_each([small_card, large_card], Store(tmp_path))
    message = str(outcomes[small_card.key])
    assert message.startswith("Kernel dot of 128 (template dot, target sm_121) needs ")
    assert "of shared memory where a block may have 101,376: choose smaller tiles or fewer stages." in message
    large = outcomes[large_card.key]
    assert not isinstance(large, CompileError) and 101_376 < large.shared_bytes <= 232_448


def test_unfit_tools_are_found_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lynnc.compile, "find_tools", lambda: Tools(None, None, ()))
    with pytest.raises(TargetError, match="Triton is not installed"):
        compile_kernels([axpy()], Store(tmp_path))


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_leaving_early_ends_every_process(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    before = children()
    slow = small("pass\nimport time\ntime.sleep(60)")
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_kernels([slow, small("pass")], Store(tmp_path), jobs=2, on_progress=interrupt)
    assert time.monotonic() - start < 20
    assert children() == before


def test_ctrl_c_ends_the_command_and_its_children(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_compile import *\n"
        'slow = small(f\'pass\\nimport os, time, pathlib\\npathlib.Path({sys.argv[1]!r}, "pid")'
        ".write_text(str(os.getpid()))\\ntime.sleep(60)')\n"
        "compile_kernels([slow], Store(Path(sys.argv[1])))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE)
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert b"KeyboardInterrupt" in error
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_pool_answers_each_request_once(tmp_path: Path) -> None:
    requests = [{"name": "x", "triton_folder": str(tmp_path)} for _ in range(5)]
    replies = list(run_requests(requests, 2, tmp_path))
    assert sorted(reply.index for reply in replies) == list(range(5))
    assert all("found another Triton in" in reply.error for reply in replies)
    assert all(a is not b for a, b in pairwise(replies))
