"""The one command of the README: sets up an environment, then runs every check. Needs nothing but Python.

In: a checkout. Out: the last line of pytest, and 0 if every check passed. The environment is the active virtual one, or
else ``.venv`` in the checkout, which sees the packages of the Python it was made from only where that one has torch:
then the CUDA build of a GPU machine is kept, and with it the Triton that it asks for. Where there is no torch, a CPU
build is installed.

Example::

    python3 tests/run.py
    python3 tests/run.py --no-install -- --device cuda     # as installed; pytest's arguments stand behind --
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
TORCH = "2.13.0"
"""The release that is installed where there is none; any from pyproject's ``torch`` extra on will do."""
EXTRAS = "test,weights,runtime,bench,tune,postgresql"
MAPPED_FOLDERS = ("autotune", "models", "runtime", "templates")
DEBIAN_PACKAGES = {
    "chromium": "usr/bin/chromium",
    "chromium-driver": "usr/bin/chromedriver",
    "fonts-dejavu-core": "usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "postgresql": "usr/lib/postgresql/*/bin/initdb",
}
"""Programs that some tests start: Debian's package, and a file (or pattern) below / that is there with it."""
CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
PYTEST = ("pytest", "-n", "2", "--dist", "worksteal")
ASK_TORCH = "from importlib import metadata as m; print(*[d.version for d in m.distributions(name='torch')][:1])"


def main() -> int:
    """Set up, then check; the exit code."""
    options = _parser().parse_args()
    if sys.version_info < OLDEST_PYTHON:
        return _complain(f"Python {sys.version.split()[0]} is too old: run this with Python 3.11 or newer.")
    python = sys.executable if options.no_install else _environment()
    if not python:
        return _complain("no virtual environment could be made: on Debian and Ubuntu, install python3-venv first.")
    if not options.no_install:
        if not _install(python):
            return 1
        _install_debian_packages()
    link_types(ROOT)
    return 0 if options.setup_only else _check(python, options.pytest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Set up an environment and run every check.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--setup-only", action="store_true", help="check nothing")
    choice.add_argument("--no-install", action="store_true", help="use this Python as it is, without a registry")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    return parser


def _environment() -> str:
    """Python of the active virtual environment or of ``.venv``, which is made if need be; empty if it cannot be."""
    if sys.prefix != sys.base_prefix:
        return sys.executable
    folder = ROOT / ".venv"
    python = folder / "bin" / "python"
    if not python.exists():
        _say(f"makes {folder}")
        shared = ["--system-site-packages"] if find_spec("torch") else []
        if _run([sys.executable, "-m", "venv", *shared, str(folder)]) != 0:
            return ""
    return str(python)


def _install(python: str) -> bool:
    """The project with its test tools, and torch as it is or new."""
    torch = _torch_version(python) or _install_torch(python)
    if not torch:
        return False
    _say(f"installs the project and its test tools beside torch {torch}")
    # Naming the installed torch makes pip respect what it asks for, such as the one Triton of a CUDA build.
    project = f"{ROOT}[{EXTRAS}]"
    if _run([*_pip(python), "--editable", project, f"torch=={torch}"]) != 0:
        _complain(
            f"see pip's message above. If it is about triton, torch {torch} asks for one that lynnc cannot use: "
            "run this in a virtual environment with another torch, or with none."
        )
        return False
    return True


def _install_debian_packages() -> None:
    """What is missing of them, where this is Debian and its superuser; elsewhere tests that need them are skipped."""
    missing = [name for name, place in DEBIAN_PACKAGES.items() if not any(Path("/").glob(place))]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        _say(f"skips the tests that need Debian's packages {', '.join(missing)}: install them to run those, too")
        return
    _say(f"installs Debian's packages {', '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        if subprocess.run(["apt-get", "-qq", *command], stdin=subprocess.DEVNULL, env=quiet).returncode != 0:
            _complain(f"apt-get {command[0]} failed, see above: the tests that need {', '.join(missing)} are skipped.")
            return


def _install_torch(python: str) -> str:
    """The CPU build from the registries that pip is set up for; else from where uv knows that such builds are."""
    _say(f"installs torch {TORCH}, CPU build (about 200 MB)")
    first = _captured([*_pip(python), f"torch=={TORCH}+cpu"])
    if first.returncode != 0 and _run([*_pip(python), "uv"]) == 0:
        uv = [python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend", "cpu"]
        _run([*uv, f"torch=={TORCH}"])
    found = _torch_version(python)
    if not found:
        print(first.stdout, first.stderr, file=sys.stderr)
        _complain(f"torch could not be installed: install any build with `{python} -m pip install`, then run again.")
    return found


def _torch_version(python: str) -> str:
    return _captured([python, "-c", ASK_TORCH]).stdout.strip()


def _pip(python: str) -> list[str]:
    quiet = ["-qq", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [python, "-m", "pip", "install", *quiet]


def link_types(root: Path) -> None:
    """``build/types/lynnc``: mypy finds the folders that setuptools maps only through links in such a package."""
    package = root / "build" / "types" / "lynnc"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    for name in MAPPED_FOLDERS:
        if not (package / name).exists():
            (package / name).symlink_to(Path("../../..") / name)


def _check(python: str, pytest_arguments: list[str]) -> int:
    """Every check even after a failure; pytest last, so that its closing line stands at the end."""
    failed = []
    for command in (*CHECKS, (*PYTEST, *pytest_arguments)):
        _say(f"runs {' '.join(command)}")
        if _run([python, "-m", *command]) != 0:
            failed.append(command[0] if command[0] != "ruff" else f"ruff {command[1]}")
    return _complain(f"failed: {', '.join(failed)}") if failed else 0


def _run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode


def _captured(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def _say(message: str) -> None:
    print(f"tests/run.py {message}", flush=True)


def _complain(message: str) -> int:
    print(f"tests/run.py: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
