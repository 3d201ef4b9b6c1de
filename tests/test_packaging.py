"""What is installed: every package and data file, and nothing imported that a user of the result does not have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("LICENSE", "README.md", "pyproject.toml")
NOT_SHIPPED = {"README.md"}
"""Names of files in package folders that only a reader of the repository needs."""
TRAINED = tuple(path.parent for path in (ROOT / "models").glob("*/lynnc-weights.json"))
"""Trained models lie in the repository alone: a wheel with their weights would be ten times as large."""


def settings() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return found


def folder_of(package: str) -> Path:
    """Where a package lies, by the longest entry of ``package-dir`` that holds it."""
    mapped = settings()["package-dir"]
    head = next(head for head in (package, *package_parents(package)) if head in mapped)
    return ROOT.joinpath(mapped[head], *package.removeprefix(head).split("."))


def package_parents(package: str) -> list[str]:
    names = package.split(".")
    return [".".join(names[:count]) for count in range(len(names) - 1, 0, -1)]


def packages_in_folders() -> set[str]:
    """Dotted names of all folders with an ``__init__.py`` below the mapped ones."""
    found = set()
    for name, folder in settings()["package-dir"].items():
        for marker in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *marker.parent.relative_to(ROOT / folder).parts]))
    return found


def data_files() -> set[str]:
    """Paths in the wheel that the data files of the package folders should have."""
    found = set()
    for name, mapped in settings()["package-dir"].items():
        folder = ROOT / mapped
        for path in folder.rglob("*"):
            if any(path.is_relative_to(trained) for trained in TRAINED):
                continue
            if path.is_file() and path.suffix not in (".py", ".pyc") and path.name not in NOT_SHIPPED:
                found.add(f"{name.replace('.', '/')}/{path.relative_to(folder)}")
    return found


def test_every_package_is_listed() -> None:
    assert sorted(settings()["packages"]) == sorted(packages_in_folders())


def test_every_mapped_package_lies_where_it_is_said_to() -> None:
    for package in settings()["packages"]:
        assert (folder_of(package) / "__init__.py").is_file(), package


def test_globs_match_the_data_files() -> None:
    found = set()
    for package, globs in settings()["package-data"].items():
        for pattern in globs:
            for path in folder_of(package).glob(pattern):
                found.add(f"{package.replace('.', '/')}/{path.relative_to(folder_of(package))}")
    assert found == data_files()
    assert settings()["include-package-data"] is False


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy, so that no earlier build leaves files in it. Needs no registry."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copy2(ROOT / name, copy / name)
    for folder in set(settings()["package-dir"].values()):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(out), str(copy)], check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_every_module(wheel_names: set[str]) -> None:
    for package in settings()["packages"]:
        for path in folder_of(package).glob("*.py"):
            assert f"{package.replace('.', '/')}/{path.name}" in wheel_names


def test_wheel_holds_exactly_the_data_files(wheel_names: set[str]) -> None:
    plain = {name for name in wheel_names if not name.endswith(".py") and ".dist-info/" not in name}
    assert plain == data_files()
    assert {"lynnc/py.typed", "lynnc/models/lynnc-model.schema.json", "lynnc/templates/prelude.py.jinja"} <= plain


@dataclass(frozen=True)
class Case:
    """What may be imported without what. ``forbidden`` are modules, with all below them."""

    name: str
    imports: str
    forbidden: tuple[str, ...]


def modules_of(package: str) -> str:
    """Every module of a package and its subpackages, as an import statement lists them."""
    folder = folder_of(package)
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return ", ".join(sorted(".".join([package, *path.parts]).removesuffix(".__init__") for path in paths))


COMPILER = ("jinja2", "lynnc.autotune", "lynnc.compile", "lynnc.kernels", "lynnc.passes", "lynnc.templates", "triton")
EXECUTOR = "lynnc.runtime.executor, lynnc.runtime.cudadevice, lynnc.runtime.loading.generated"
LOADER = f"lynnc.runtime.loader, {modules_of('lynnc.runtime.loading')}"
RANDOM = "lynnc.runtime.random.fillkernels, lynnc.runtime.random.randomweights"
CASES = (
    Case("plan", "lynnc.plan, lynnc.planfile, lynnc.dims", (*COMPILER, "numpy", "sympy", "torch", "yaml")),
    Case("runtime package", "lynnc.runtime", (*COMPILER, "sympy")),
    Case("runtime modules", modules_of("lynnc.runtime"), COMPILER),
    Case("executor", EXECUTOR, (*COMPILER, "cuda", "numpy", "safetensors", "sympy", "torch", "yaml")),
    Case("loader", LOADER, (*COMPILER, "cuda", "numpy", "safetensors", "torch", "yaml")),
    Case("random weights", RANDOM, (*COMPILER, "cuda", "numpy", "sympy", "torch", "yaml")),
    Case("random weights in numpy", modules_of("lynnc.runtime.random"), (*COMPILER, "cuda", "torch")),
    Case("benchmark", "lynnc.cli.bench", ("cuda", "gguf", "numpy", "torch", "triton")),
    Case("compiler", "lynnc.compiler, lynnc.planfile", ("numpy", "torch", "transformers", "triton")),
    Case("help", "lynnc.cli.main", ("jinja2", "numpy", "sympy", "torch", "triton")),
)


def test_the_runtime_package_gives_its_names_when_they_are_asked_for() -> None:
    code = (
        "import sys, lynnc.runtime as r; print(*sys.modules); print(*(getattr(r, name).__name__ for name in r.__all__))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, names = run.stdout.splitlines()
    assert "lynnc.runtime.loader" not in loaded.split()
    assert names.split() == ["BorrowedWeights", "Executor", "Room", "Row", "load"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_imports_no_more_than_it_may(case: Case) -> None:
    code = f"import sys, {case.imports}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    wrong = [name for name in loaded if any(f"{name}.".startswith(f"{other}.") for other in case.forbidden)]
    assert wrong == []


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch", "transformers"):
            raise ImportError(f"{name} must not be needed to compile")

sys.meta_path.insert(0, Refuse())
from lynnc.cli.main import main
try:
    main()
finally:
    assert "triton" not in sys.modules
"""


def test_compiles_without_torch(tmp_path: Path) -> None:
    """Nor is Triton imported here: only compiler processes do that. Then the example of docs/plan.md reads the plan."""
    plan, store = tmp_path / "tiny-moe.sm_90.plan", tmp_path / "store"
    arguments = ["compile", "tiny-moe", "--target", "sm_90", "--programs", "decode/1"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments, "--output", str(plan), "--store", str(store)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    example = (ROOT / "docs" / "plan.md").read_text().split("python -c '\n")[1].split("\n'\n")[0]
    said = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("decode/1: ") and "embed: embed, grid [1, 1, 1] of" in said


def test_layout_page_packs_as_the_code_does() -> None:
    torch = pytest.importorskip("torch")
    from lynnc.runtime.weights.nvfp4 import pack_codes

    names: dict[str, Any] = {}
    exec((ROOT / "docs" / "layout.md").read_text().split("```python\n")[1].split("```")[0], names)
    codes = torch.randint(0, 16, (50, 16), generator=torch.Generator().manual_seed(1))
    words = [names["pack_word"](row) for row in codes.tolist()]
    assert words == [word % 2**64 for word in pack_codes(codes).flatten().tolist()]
