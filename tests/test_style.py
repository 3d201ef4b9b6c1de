"""The budgets and rules of CONTRIBUTING.md that ruff does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lynnc", "runtime", "autotune")
IGNORED = {"build", "dist", "__pycache__"}
KEPT_HIDDEN = {".ci", ".gitignore", ".pre-commit-config.yaml"}

FILE_LINES, FUNCTION_LINES, SOFT_FILE_LINES, TEMPLATE_CONDITIONALS = 500, 60, 300, 3
MORE_CONDITIONALS: Mapping[str, int] = MappingProxyType({"prelude.py.jinja": 4})
"""One conditional for each macro that depends on the structure."""
BAD_NAMES = {"base", "common", "helpers", "misc", "utils"}
ENVIRONMENT_READERS = ("lynnc/cli/", "lynnc/compile_pool.py", "lynnc/compile_worker.py")
"""The command line; and a compiler process gets an environment of its own, which the other two make and read."""
MAPPED_FOLDERS = {"runtime", "autotune", "models", "templates"}
"""From the root these import by accident, as a second copy of ``lynnc.runtime`` and its like."""
FOREIGN = tuple("".join(parts) for parts in (("/wo", "rk/"), ("/ro", "ot/"), ("pypi", ".org"), ("pytorch", ".org")))
"""Paths of one machine and hosts of registries: neither belongs in a repository."""

Node = TypeVar("Node", bound=ast.AST)


def project_files(*suffixes: str) -> Iterator[Path]:
    """Files of the checkout that are not built, cached or installed, sorted."""
    for entry in sorted(ROOT.iterdir()):
        if is_project_part(entry.name):
            for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
                is_part = all(map(is_project_part, path.relative_to(ROOT).parts))
                if path.is_file() and is_part and path.name.endswith(suffixes or ("",)):
                    yield path


def is_project_part(name: str) -> bool:
    """Whether a file or folder of this name belongs to the project rather than to a tool."""
    is_hidden = name.startswith(".") and name not in KEPT_HIDDEN
    return not is_hidden and name not in IGNORED and not name.endswith((".egg-info", ".plan"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


SOURCES = tuple(project_files(".py"))
CODE = tuple(path for path in SOURCES if name_of(path).split("/")[0] in PACKAGES)
TEMPLATES = tuple(project_files(".py.jinja"))


def nodes(paths: Iterable[Path], *kinds: type[Node]) -> Iterator[tuple[str, Node]]:
    """Every syntax node of some kinds, with its place as ``file:line``."""
    for path in paths:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, kinds):
                yield f"{name_of(path)}:{getattr(node, 'lineno', 0)}", node


def test_there_is_something_to_check() -> None:
    assert len(CODE) > 50 and len(TEMPLATES) > 20


def test_files_are_not_too_long() -> None:
    lengths = {name_of(path): len(read(path).splitlines()) for path in (*SOURCES, *TEMPLATES)}
    for name, length in lengths.items():
        if length > SOFT_FILE_LINES:
            print(f"{name}: {length} lines, more than the {SOFT_FILE_LINES} that are aimed at")
    assert {name: n for name, n in lengths.items() if n > FILE_LINES} == {}


def test_functions_are_not_too_long() -> None:
    found = nodes(SOURCES, ast.FunctionDef)
    lengths = {
        f"{place} {function.name}": (function.end_lineno or 0) - function.lineno + 1 for place, function in found
    }
    assert {place: length for place, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_nothing_catches_every_exception() -> None:
    found = []
    for place, handler in nodes(SOURCES, ast.ExceptHandler):
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names = {kind.id for kind in caught if isinstance(kind, ast.Name)}
        if handler.type is None or names & {"Exception", "BaseException"}:
            found.append(place)
    assert found == []


def test_imports_are_absolute_and_of_the_package() -> None:
    found = []
    for place, node in nodes(SOURCES, ast.stmt):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        if is_relative or {module.split(".")[0] for module in modules} & MAPPED_FOLDERS:
            found.append(place)
    assert found == []


def test_only_the_command_line_reads_the_environment() -> None:
    paths = [path for path in CODE if not name_of(path).startswith(ENVIRONMENT_READERS)]
    assert [place for place, node in nodes(paths, ast.Attribute) if node.attr in ("environ", "getenv")] == []


def test_no_module_is_named_after_nothing() -> None:
    assert [name_of(path) for path in SOURCES if path.stem in BAD_NAMES] == []


def test_templates_are_python_before_rendering() -> None:
    found = []
    for path in TEMPLATES:
        try:
            ast.parse(read(path))
        except SyntaxError as error:
            found.append(f"{name_of(path)}:{error.lineno} {error.msg}")
        if "{%" in read(path):
            found.append(f"{name_of(path)}: control lines start with '# %'")
    assert found == []


def test_templates_decide_little() -> None:
    counts = {path.name: len(re.findall(r"^\s*# % *(?:if|elif)\b", read(path), re.MULTILINE)) for path in TEMPLATES}
    assert {name: n for name, n in counts.items() if n > MORE_CONDITIONALS.get(name, TEMPLATE_CONDITIONALS)} == {}


def test_architecture_page_has_a_line_for_every_file() -> None:
    page = read(ROOT / "docs" / "architecture.md")
    named = {name for name in re.findall(r"`([\w./-]+\.(?:py|jinja))`", page) if "/" in name}
    expected = {name_of(path) for path in (*CODE, *TEMPLATES)}
    missing, gone = sorted(expected - named), sorted(name for name in named if not (ROOT / name).is_file())
    assert not missing, f"docs/architecture.md says nothing of {', '.join(missing)}"
    assert not gone, f"docs/architecture.md names {', '.join(gone)}, which do not exist"


def links_of(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", read(page))
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


def test_links_lead_somewhere() -> None:
    pages = project_files(".md")
    assert [f"{name_of(p)}: {link}" for p in pages for link in links_of(p) if not (p.parent / link).exists()] == []


def test_nothing_names_a_machine_or_a_registry() -> None:
    found = [f"{name_of(path)}: {word}" for path in project_files() for word in FOREIGN if word in read(path)]
    assert found == []
