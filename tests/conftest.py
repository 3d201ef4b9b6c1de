"""Where kernels run: Triton's interpreter on the CPU, or, with ``--device cuda``, a real GPU.

Triton decides when it is imported, so the variable is set before any test module is. The user's cache folder is a fresh
one: records that somebody tuned here would change plans.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where generated kernels run")
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    cache = tempfile.TemporaryDirectory(prefix="lynnc-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = cache.name
    device = config.getoption("--device")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import harness
    import torch

    torch.set_num_threads(1)  # tensors are tiny and every core runs a test process of its own
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU here.")
    harness.use_device(device)


@pytest.fixture(scope="session", autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels in the interpreter are quick in every test."""
    if request.config.getoption("--device") != "cpu":
        yield
        return
    from quick import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(scope="session")
def kernels_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that the test processes of this run share. A test of compiling or of a store takes one of its own."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="machine code runs on a GPU only: pytest --device cuda"))
