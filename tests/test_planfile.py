"""A plan folder says when it was changed, and equal plans written at once are no conflict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lynnc.compiler import Compiled, Request, compile_model
from lynnc.errors import OutputError, PlanError
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.planfile import PLAN_FILE, check_output, load_plan, save_plan
from lynnc.store import Store
from lynnc.target import find_target


@pytest.fixture(scope="module")
def compiled(kernels_of_this_run: Path) -> Compiled:
    request = Request(find_target("sm_90"), options=Options(programs=("decode/1",)))
    return compile_model(load_model("tiny-dense"), request, Store(kernels_of_this_run))


def edit(folder: Path, path: tuple[str | int, ...], value: object) -> None:
    data = json.loads((folder / PLAN_FILE).read_text())
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (folder / PLAN_FILE).write_text(json.dumps(data))


EDITS = (
    (("programs", "decode/1", "launches", 0, "grid"), [9, 1, 1]),
    (("programs", "decode/1", "launches", 0, "kernel"), "nope"),
    (("weights", "lm_head", "shape"), [1, 16]),
    (("programs",), {}),
    (("files",), {}),
    (("digest",), "0" * 64),
)


@pytest.mark.parametrize(("path", "value"), EDITS, ids=lambda part: str(part)[:40])
def test_an_edited_plan_is_refused(
    compiled: Compiled, tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    save_plan(compiled.plan, compiled.files, tmp_path / "p.plan")
    edit(tmp_path / "p.plan", path, value)
    with pytest.raises(PlanError, match=r"plan.json was changed since it was compiled: run `lynnc compile"):
        load_plan(tmp_path / "p.plan")


def test_nested_beyond_reason_is_damage(compiled: Compiled, tmp_path: Path) -> None:
    save_plan(compiled.plan, compiled.files, tmp_path / "p.plan")
    (tmp_path / "p.plan" / PLAN_FILE).write_text("[" * 100_000)
    with pytest.raises(PlanError, match=r"cannot be read"):
        load_plan(tmp_path / "p.plan")


def test_the_same_plan_placed_meanwhile_is_success(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p.plan"
    save_plan(compiled.plan, compiled.files, folder)
    with pytest.raises(OutputError, match="exists already"):
        check_output(folder)
    monkeypatch.setattr("lynnc.planfile.check_output", lambda folder, force: None)  # as if we had looked before
    save_plan(compiled.plan, compiled.files, folder)
    edit(folder, ("lynnc",), "other")
    with pytest.raises(OutputError, match="exists already"):
        save_plan(compiled.plan, compiled.files, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["p.plan"]
