"""``lynnc report`` from the command line: the file that it writes, and one sentence for what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from reporting import plan_without_code, read_page, records_for, summary_for, write_records

from lynnc.cli.main import cli
from lynnc.plan import Plan
from lynnc.planfile import load_plan, save_plan

Json = Any


def report(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def complaint(result: Result) -> str:
    """The one line on standard error of a command that was refused."""
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("lynnc: ") and result.stdout == ""
    return line


@dataclass(frozen=True)
class Files:
    """A plan folder, and what was measured and tuned of it."""

    plan: Path
    bench: Path
    tune: Path
    page: Path

    @property
    def loaded(self) -> Plan:
        return load_plan(self.plan)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path / "tiny.plan", tmp_path / "bench.json", tmp_path / "tune.json", tmp_path / "report.html")
    save_plan(plan_without_code("tiny-moe"), {}, found.plan)
    write_records(found.bench, records_for(found.loaded))
    found.tune.write_text(json.dumps(asdict(summary_for(found.loaded))))
    return found


def test_page_of_a_plan_with_measurements_and_tuning(files: Files) -> None:
    result = report(files.plan, "--bench", files.bench, "--tune", files.tune, "-o", files.page)
    assert result.exit_code == 0 and result.stdout == "", result.output
    page = read_page(files.page.read_text("utf-8"))
    assert page.root.find("h1")[0].text == "tiny-moe.h200" and page.by_id("tuning-gains")
    assert page.table("decode-time")[0][1] == "measured"
    assert sorted(path.name for path in files.page.parent.iterdir()) == [
        "bench.json",
        "report.html",
        "tiny.plan",
        "tune.json",
    ]


def test_several_files_of_one_plan_are_one_measurement(files: Files) -> None:
    records = records_for(files.loaded)
    first, second = (
        write_records(files.bench, records[:2]),
        write_records(files.page.with_suffix(".json"), records[2:3]),
    )
    assert report(files.plan, "--bench", first, "--bench", second, "-o", files.page).exit_code == 0
    page = read_page(files.page.read_text("utf-8"))
    assert page.table("decode-time")[0][1] == page.table("prompt-time")[0][1] == "measured"


def test_a_file_that_exists_is_replaced_only_if_told(files: Files) -> None:
    files.page.write_text("mine")
    line = complaint(report(files.plan, "-o", files.page))
    assert "report.html exists already" in line and "--force" in line and files.page.read_text() == "mine"
    assert report(files.plan, "-o", files.page, "--force").exit_code == 0
    assert "File name too long" in complaint(report(files.plan, "-o", "n" * 300))
    assert files.page.read_text().startswith("<!DOCTYPE html>")


def test_figures_of_another_device_of_the_target(files: Files) -> None:
    assert report(files.plan, "-o", files.page, "--device", "h100", "--context", "100").exit_code == 0
    page = read_page(files.page.read_text("utf-8"))
    assert "seen on h100: 3.35 TB/s" in page.root.text
    assert page.table("decode-time")[0][0] == "decode/1 at 100"


@dataclass(frozen=True)
class Bad:
    """Input that is refused: a change of the JSON of records or summary, and words of the sentence."""

    name: str
    change: Callable[[Json], Json]
    words: tuple[str, ...]


def of_each(change: Callable[[dict[str, Json]], None]) -> Callable[[Json], Json]:
    """A change of every record."""

    def changed(records: Json) -> Json:
        for record in records:
            change(record)
        return records

    return changed


def of(path: str, value: Json) -> Callable[[Json], Json]:
    """A change of one field, by its names and numbers."""

    def changed(data: Json) -> Json:
        *way, last = (int(name) if name.isdigit() else name for name in path.split("."))
        place = data
        for name in way:
            place = place[name]
        place[last] = value
        return data

    return changed


MEASURE = "lynnc bench"
BAD_RECORDS = (
    Bad("model", of_each(lambda r: r["params"].update(model="x", plan_digest="1")), ("nothing of", "of x", MEASURE)),
    Bad("plan", of_each(lambda r: r["params"].update(plan_digest="1")), ("other plans of tiny-moe", MEASURE)),
    Bad("no list", lambda records: records[0], ("not a list of records", MEASURE)),
    Bad("empty", lambda records: [], ("holds nothing of the plan tiny-moe.h200", MEASURE)),
    Bad("words", lambda records: ["a", None, 3], ("holds nothing of", MEASURE)),
    Bad("no value", of_each(lambda r: r.pop("value")), ("damaged", "value", MEASURE)),
    Bad("text", of("0.value", "fast"), ("damaged", "'fast'", MEASURE)),
    Bad("nan", of("0.value", float("nan")), ("damaged", "nan", MEASURE)),
    Bad("negative", of("0.value", -3.0), ("damaged", "decode_step_us", "-3.0", MEASURE)),
    Bad("unit", of("0.unit", "s"), ("damaged", "no time in us", MEASURE)),
    Bad("no rows", lambda records: [records[0]["params"].pop("rows") and records[0]], ("damaged", "rows", MEASURE)),
    Bad("no context", lambda records: records[4:], ("damaged", "kernel_us", "context", MEASURE)),
    Bad("gpu", of("0.device.name", "NVIDIA H100"), ("NVIDIA H100 and NVIDIA H200", "one GPU")),
    Bad("no gpu", of("0.device", {}), ("damaged", MEASURE)),
    Bad("other target", of_each(lambda r: r["device"].update(capability=120)), ("is no sm_90", MEASURE)),
)
TUNED = "lynnc tune"
BAD_SUMMARIES = (
    Bad("schema", of("schema", 99), ("its schema is 99", TUNED)),
    Bad("list", lambda summary: [summary], ("its schema is None", TUNED)),
    Bad("model", of("model", "qwen3.5-9b"), ("is of qwen3.5-9b on h200", "tiny-moe for sm_90")),
    Bad("device", of("device", "spark"), ("on spark (sm_121)", "tiny-moe for sm_90")),
    Bad("unknown device", of("device", "h20"), ("Unknown device", TUNED)),
    Bad("field", of("kernels.0.extra", 1), ("KernelStudy has other fields: extra", TUNED)),
    Bad("text", of("kernels.1.launches", "30"), ("int was expected, not '30'", TUNED)),
    Bad("status", of("kernels.1.trials.0.status", "lost"), ("trial 0 of linear", "unknown status 'lost'", TUNED)),
    Bad("time", of("kernels.1.best_seconds", 0.0), ("linear of decode/1 has a time", TUNED)),
    Bad("trial", of("kernels.1.trials.0.seconds", float("inf")), ("trial 0 of linear", "inf is no time", TUNED)),
    Bad("century", of("kernels.1.trials.0.seconds", 1e308), ("trial 0 of linear", "1e+308 is no time", TUNED)),
    Bad("long trial", of("kernels.1.trials.0.seconds", 10**400), ("too large for a number", TUNED)),
    Bad("long step", of("steps.0.best_seconds", 10**400), ("too large for a number", TUNED)),
    Bad("long run", of("seconds", 10**400), ("too large for a number", TUNED)),
    Bad("run backwards", of("seconds", -5.0), ("the run took -5.0 s", TUNED)),
    Bad("number", of("kernels.1.trials.0.number", -5), ("a trial of linear", "a number that cannot be", TUNED)),
    Bad("long number", of("kernels.1.trials.0.number", 10**400), ("a number that cannot be", TUNED)),
    Bad("many launches", of("kernels.1.launches", 10**400), ("a number of launches that cannot be", TUNED)),
    Bad("context", of("steps.0.context", -1), ("the context of the step decode/1 cannot be", TUNED)),
    Bad("spread", of("steps.0.best_spread", float("nan")), ("spread of the step decode/1 is nan s", TUNED)),
    Bad("launches", of("kernels.1.launches", 0), ("a number of launches that cannot be", TUNED)),
    Bad("refused", of("kernels.1.refused.x", -1), ("negative number of refusals", TUNED)),
    Bad("step", of("steps.0.best_seconds", float("nan")), ("the step decode/1", TUNED)),
    Bad("importance", of("kernels.1.importance.BLOCK_N", float("nan")), ("no number", TUNED)),
    Bad("run", of("seconds", float("inf")), ("the run took inf s", TUNED)),
)


@pytest.mark.parametrize("case", BAD_RECORDS, ids=lambda case: case.name)
def test_records_that_do_not_fit(case: Bad, files: Files) -> None:
    files.bench.write_text(json.dumps(case.change(json.loads(files.bench.read_text()))))
    line = complaint(report(files.plan, "--bench", files.bench, "-o", files.page))
    assert "bench.json" in line and all(words in line for words in case.words), line
    assert not files.page.exists()


@pytest.mark.parametrize("case", BAD_SUMMARIES, ids=lambda case: case.name)
def test_summaries_that_do_not_fit(case: Bad, files: Files) -> None:
    files.tune.write_text(json.dumps(case.change(json.loads(files.tune.read_text()))))
    line = complaint(report(files.plan, "--tune", files.tune, "-o", files.page))
    assert "tune.json" in line and all(words in line for words in case.words), line
    assert not files.page.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2", b"\xff\xfe", b"[" * 100_000], ids=range(5))
@pytest.mark.parametrize("option", ["--bench", "--tune"])
def test_files_that_are_no_json(option: str, content: bytes, files: Files) -> None:
    path = files.page.with_suffix(".json")
    path.write_bytes(content)
    line = complaint(report(files.plan, option, path, "-o", files.page))
    assert "report.json" in line and f"lynnc {option[2:]}" in line, line


@pytest.mark.parametrize("option", ["--bench", "--tune"])
def test_files_that_are_not_there(option: str, files: Files) -> None:
    line = complaint(report(files.plan, option, files.page.with_suffix(".gone"), "-o", files.page))
    assert "report.gone cannot be read (No such file or directory)" in line


def test_records_of_another_file_are_no_summary_and_the_other_way(files: Files) -> None:
    assert "no tuning summary" in complaint(report(files.plan, "--tune", files.bench, "-o", files.page))
    assert "not a list of records" in complaint(report(files.plan, "--bench", files.tune, "-o", files.page))


def test_what_is_no_plan(files: Files) -> None:
    line = complaint(report("tiny-moe", "-o", files.page))
    assert "tiny-moe is a model: run `lynnc compile tiny-moe" in line
    assert "nothing.plan" in complaint(report("nothing.plan", "-o", files.page))
    assert "--output" in complaint(report(files.plan))


def test_device_and_context_that_the_plan_does_not_have(files: Files) -> None:
    assert "does not run on spark" in complaint(report(files.plan, "-o", files.page, "--device", "spark"))
    assert "context of 1 to 512" in complaint(report(files.plan, "-o", files.page, "--context", "513"))
    assert not files.page.exists()


def test_a_plan_whose_launches_this_lynnc_would_not_make(files: Files) -> None:
    plan = files.loaded
    programs = {name: replace(program, launches=program.launches[:-1]) for name, program in plan.programs.items()}
    some = {**programs, "decode/1": plan.programs["decode/1"]}
    save_plan(replace(plan, programs=some), {}, files.plan, force=True)
    result = report(files.plan, "-o", files.page)
    assert result.exit_code == 0 and "warning: decode/4, prefill of" in result.stderr
    save_plan(replace(plan, programs=programs), {}, files.plan, force=True)
    line = complaint(report(files.plan, "-o", files.page, "--force"))
    assert "another lynnc" in line and "lynnc compile tiny-moe --target sm_90" in line
