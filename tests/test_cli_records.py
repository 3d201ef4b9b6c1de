"""What commands say of records, and how a user's own change a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded import DEFAULT, HERE, made, records_of_tiny, served

from lynnc.cli.main import cli
from lynnc.deviceidentity import identify
from lynnc.planfile import load_plan
from lynnc.recordfiles import RecordChoice, load_records, write_user_record


@pytest.fixture(scope="module")
def store(kernels_of_this_run: Path) -> Path:
    return kernels_of_this_run


def compile_tiny(store: Path, folder: Path, *arguments: object) -> dict[str, object]:
    command = ["compile", "tiny-full", "--programs", "decode/1", "--store", store, "-o", folder, "--json", *arguments]
    result = CliRunner().invoke(cli, list(map(str, command)))
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document


def test_compile_says_where_knobs_come_from_and_can_ignore_the_users(store: Path, tmp_path: Path) -> None:
    mine = tmp_path / "records"
    for record in records_of_tiny():
        write_user_record(mine, record)
    by_hand = ("--device", "h200", "--records-folder", mine)
    found = compile_tiny(store, tmp_path / "mine.plan", *by_hand)
    rows = {row["origin"]: row for row in found["knobs"]}  # type: ignore[attr-defined]
    assert set(rows) == {"default", "user record h200"}
    assert rows["user record h200"]["file"] == str(mine / "h200") and rows["user record h200"]["is_users"]
    plan = load_plan(tmp_path / "mine.plan", "sm_90a")
    linears = [plan.kernels[launch.kernel] for launch in plan.programs["decode/1"].launches]
    assert rows["user record h200"]["launches"] == {"decode/1": sum(entry.name == "linear" for entry in linears)}
    assert {entry.origin for entry in linears if entry.name == "linear"} == {"user record h200"}
    assert {entry.knobs["num_warps"] for entry in linears if entry.name == "linear"} == {2}
    assert str(mine) not in (tmp_path / "mine.plan" / "plan.json").read_text(), "a plan names no folder"

    plain = compile_tiny(store, tmp_path / "plain.plan", "--device", "h200", "--records-folder", tmp_path / "empty")
    assert [row["origin"] for row in plain["knobs"]] == ["default"]  # type: ignore[attr-defined]
    for choice in ("shipped", "none"):
        compile_tiny(store, tmp_path / f"{choice}.plan", *by_hand, "--records", choice)
        assert (tmp_path / f"{choice}.plan" / "plan.json").read_bytes() == (
            tmp_path / "plain.plan" / "plan.json"
        ).read_bytes()
    compile_tiny(store, tmp_path / "again.plan", *by_hand, "--records", "user")
    assert (tmp_path / "again.plan" / "plan.json").read_bytes() == (tmp_path / "mine.plan" / "plan.json").read_bytes()
    unlike = load_plan(tmp_path / "plain.plan", "sm_90a").kernels.keys() ^ plan.kernels.keys()
    assert len(unlike) == 2 * len({entry.key for entry in linears if entry.name == "linear"}), "knobs are in the key"


def test_show_and_the_table_of_compile_say_the_same(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for record in records_of_tiny():
        write_user_record(tmp_path / "lynnc" / "records", record)
    run = CliRunner().invoke
    shown = run(cli, ["show", "tiny-full", "--stage", "choices", "--device", "h200"]).stdout
    kept = run(cli, ["show", "tiny-full", "--stage", "choices", "--device", "h200", "--records", "shipped"]).stdout
    assert shown.count("(user record h200)") == shown.count(": linear [") and "(user record" not in kept
    command = ["compile", "tiny-full", "--programs", "decode/1", "--device", "h200", "--store", str(store)]
    table = run(cli, [*command, "-o", str(tmp_path / "p.plan")]).stdout
    line = next(line for line in table.splitlines() if line.strip().endswith("records/h200"))
    assert line.split() == [
        "user",
        "record",
        "h200",
        str(shown.count("(user record h200)")),
        str(tmp_path / "lynnc/records/h200"),
    ]


def test_a_folder_that_was_named_must_be_readable_and_the_usual_one_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ["show", "tiny-full", "--stage", "choices", "--device", "h200"]
    run, long_name = CliRunner().invoke, str(tmp_path / ("r" * 300))
    expected = run(cli, [*show, "--records", "shipped"]).stdout
    refused = run(cli, [*show, "--records-folder", long_name])
    assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1
    assert f"The records in {long_name} cannot be read (File name too long): give a readable" in refused.stderr
    assert run(cli, [*show, "--records-folder", long_name, "--records", "shipped"]).stdout == expected
    assert run(cli, [*show, "--records-folder", str(tmp_path / "none")]).stdout == expected
    monkeypatch.setenv("XDG_CACHE_HOME", long_name)
    usual = run(cli, show)
    assert usual.exit_code == 0 and usual.stdout == expected != ""


def test_a_gpu_that_is_in_no_table_has_records_of_its_own(tmp_path: Path) -> None:
    laptop = identify("NVIDIA H200 Laptop", 90, 60, 30 << 20)
    write_user_record(tmp_path, made(laptop))
    assert served(*load_records(laptop, tmp_path).known, device=laptop) == (
        "user record h200-laptop",
        DEFAULT["BLOCK_N"],
    )
    assert served(*load_records(HERE, tmp_path, RecordChoice.USER).known) is None, "too few multiprocessors"
