"""The command line as processes: Ctrl-C, two at once, folders that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lynnc.planfile import load_plan

COMPILE = (
    sys.executable,
    "-P",
    "-m",
    "lynnc.cli",
    "compile",
    "tiny-full",
    "--target",
    "sm_80",
    "--programs",
    "decode/1",
)


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [*COMPILE, *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory, kernels_of_this_run) -> Path:
    process = start(tmp_path_factory.mktemp("filled"), "--store", kernels_of_this_run, "-o", "p.plan")
    assert process.wait() == 0, process.stderr
    return kernels_of_this_run


def worker_pids(folder: Path) -> list[int]:
    """Processes whose current folder lies below ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_leaves_nothing_behind(tmp_path, number, code):
    process = start(tmp_path, "--store", "store", "-o", "p.plan")
    deadline = time.monotonic() + 60
    while not worker_pids(tmp_path / "tmp") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == "" and stderr.strip() in ("lynnc: interrupted.", "")
    deadline = time.monotonic() + 10  # a killed process is listed until the system has taken it away
    while worker_pids(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert worker_pids(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not [path for path in tmp_path.iterdir() if path.name not in ("tmp", "store")]


def test_two_at_once_with_force(tmp_path):
    processes = [start(tmp_path, "--store", "store", "-o", "p.plan", "--force", "--jobs", 1) for _ in range(2)]
    for process in processes:
        assert process.wait() == 0, process.stderr.read() if process.stderr else ""
    load_plan(tmp_path / "p.plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.plan", "store", "tmp"]


def test_two_at_once_without_force(tmp_path, store):
    processes = [start(tmp_path, "--store", store, "-o", "p.plan") for _ in range(3)]
    outputs = [(process.communicate(), process.returncode) for process in processes]
    for (stdout, stderr), code in outputs:  # one that began after another had ended finds the folder there
        assert code == 0 or (code == 2 and "exists already" in stderr and stdout == "")
    assert any(code == 0 for _, code in outputs)
    load_plan(tmp_path / "p.plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.plan", "tmp"]


def test_store_that_cannot_be_written_falls_back_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    process = start(tmp_path, "--store", "file/store", "-o", "p.plan")
    _, stderr = process.communicate()
    assert process.returncode == 0
    assert len(stderr.splitlines()) == 1 and stderr.startswith("lynnc: warning: The store file/store cannot be written")
    load_plan(tmp_path / "p.plan")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_without_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    process = start(tmp_path, "--store", "store", "-o", "locked/p.plan")
    _, stderr = process.communicate()
    assert process.returncode == 2 and "no permission" in stderr


def test_store_is_found_through_the_environment(tmp_path, store, monkeypatch):
    (tmp_path / "cache" / "lynnc").mkdir(parents=True)
    (tmp_path / "cache" / "lynnc" / "store").symlink_to(store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process = start(tmp_path, "-o", "p.plan")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "(0 compiled" in stdout
