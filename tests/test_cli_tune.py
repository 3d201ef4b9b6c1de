"""``lynnc tune`` from the command line, on devices that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from recorded import made, users
from tuning import tasks

from lynnc.autotune.conditions import Conditions
from lynnc.autotune.publish import records_of
from lynnc.autotune.sweep import StepFinding, Sweep
from lynnc.autotune.trial import Outcome, Status
from lynnc.cli import tunerun
from lynnc.cli.main import cli
from lynnc.cli.tunefleet import run_workers, worker_commands
from lynnc.cli.tunetables import print_sweep
from lynnc.cli.tunewish import wish_of
from lynnc.deviceidentity import identity_of
from lynnc.errors import DeviceError
from lynnc.record import Record, RecordOrigin
from lynnc.recordfiles import default_records_folder, load_records, write_user_record
from lynnc.render import template_digest
from lynnc.report.tuning import TuneSummary
from lynnc.target import find_device

REHEARSE = ("tune", "tiny-moe", "--rehearse", "--programs", "decode/1", "--kernels", "embed,gdn_step")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lynnc"


def lynnc(*arguments: object):
    return CliRunner().invoke(cli, [str(word) for word in arguments], prog_name="lynnc")


def test_a_rehearsal_prints_what_was_tried_and_records_nothing(cache):
    result = lynnc(*REHEARSE, "--trials", 12)
    assert result.exit_code == 0, result.output
    assert "a made-up device" in result.stdout and "whole steps, in turns" in result.stdout
    assert "gdn_step" in result.stdout and "12 candidates" in result.stdout
    assert not (cache / "records").exists() and list((cache / "tune").glob("tiny-moe.h200.journal"))


def test_the_summary_is_what_the_report_reads(tmp_path):
    file = tmp_path / "tune.json"
    result = lynnc(*REHEARSE, "--trials", 20, "--seed", 3, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    summary = TuneSummary.from_dict(json.loads(file.read_text()))
    assert summary == TuneSummary.from_dict(json.loads(result.stdout))
    assert (summary.model, summary.device, summary.seed, summary.is_simulated) == ("tiny-moe", "h200", 3, True)
    assert {study.kernel for study in summary.kernels} == {"embed", "gdn_step"}
    assert summary.counts["timed"] > 10 and summary.steps[0].program == "decode/1"


def test_a_step_of_the_summary_says_how_many_tokens_stood_before_it():
    """Prompts are measured near the start of a sequence, and with knobs of their own."""
    result = lynnc("tune", "tiny-moe", "--rehearse", "--programs", "decode/1,prefill/16", "--trials", 9, "--json")
    summary = TuneSummary.from_dict(json.loads(result.stdout))
    before = Conditions().before
    assert {step.program: step.context for step in summary.steps} == {
        "decode/1": before("decode/1"),
        "prefill/16": before("prefill/16"),
    }
    assert before("decode/1") != before("prefill/16") and summary.budget == "9 candidates"


def test_every_decode_program_that_was_asked_for_has_a_step(tmp_path):
    programs = ["decode/1", "decode/2", "decode/4", "decode/8"]
    wanted = ("tune", "tiny-moe", "--rehearse", "--kernels", "embed,gdn_step", "--programs", ",".join(programs))
    result = lynnc(*wanted, "--trials", 12, "--json", "-o", tmp_path / "tune.json")
    assert result.exit_code == 0, result.output
    for text in (result.stdout, (tmp_path / "tune.json").read_text()):
        summary = TuneSummary.from_dict(json.loads(text))
        assert [step.program for step in summary.steps] == programs and not summary.not_measured
        assert all(step.best_seconds <= 1.01 * step.before_seconds for step in summary.steps)
    table = lynnc(*wanted, "--trials", 12).stdout.split("whole steps, in turns")[1]
    assert [line.split()[0] for line in table.splitlines() if "decode/" in line] == programs


def test_steps_that_were_not_measured_are_in_the_table(capsys):
    late = Outcome(Status.REFUSED, reason="not confirmed: there was no time left")
    done = Outcome(Status.TIMED, 1e-3, 1e-3, 1e-3, 15)
    steps = (StepFinding("decode/1", done, done, done), StepFinding("decode/8", late, late, late))
    print_sweep(Sweep("run", "tiny-moe", "h200", False, 1.0, {}, (), steps))
    one, eight = (line for line in capsys.readouterr().out.splitlines() if "decode/" in line)
    assert "0.0 %" in one and "not confirmed" not in one
    assert eight.split() == ["decode/8", *late.reason.split()]


def test_a_run_goes_on_with_what_was_kept():
    first = lynnc(*REHEARSE, "--trials", 4, "--json")
    second = lynnc(*REHEARSE, "--trials", 4, "--json", "--resume")
    counts = [TuneSummary.from_dict(json.loads(result.stdout)).counts for result in (first, second)]
    assert sum(counts[1].values()) >= sum(counts[0].values()) + 4
    fresh = TuneSummary.from_dict(json.loads(lynnc(*REHEARSE, "--trials", 4, "--json", "--study", "new").stdout))
    assert sum(fresh.counts.values()) < sum(counts[1].values())
    assert lynnc(*REHEARSE, "--resume", "--study", "other").exit_code == 2


def test_an_interrupt_says_how_to_go_on(monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tunerun.Tuner, "search", interrupt)
    result = lynnc(*REHEARSE, "--trials", 4)
    assert result.exit_code == 130 and "go on with --resume" in result.stderr


def test_a_simulation_leaves_records_that_say_so(tmp_path):
    records = tmp_path / "records"
    result = lynnc("tune", "tiny-moe", "--simulate", "spark", "--kernels", "embed", "--programs", "decode/1",
                   "--trials", 3, "--records-folder", records, "--store", tmp_path / "store")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "simulated: ranked by what the compiler made, not measured" in result.stdout
    (known,) = (one for one in load_records(identity_of(find_device("spark")), records).known if one.is_user)
    assert known.record.origin is RecordOrigin.SIMULATED and known.record.kernel == "embed"
    assert known.record.seconds and known.record.triton


def test_a_records_folder_that_takes_none_is_known_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(tunerun, "open_bench", lambda *arguments: pytest.fail("too late"))
    (tmp_path / "file").write_text("")
    result = lynnc("tune", "tiny-moe", "--simulate", "spark", "--records-folder", tmp_path / "file" / "below")
    assert result.exit_code == 2 and "No record can be written" in result.stderr and "--records-folder" in result.stderr


@pytest.mark.parametrize(("choice", "counts"), [((), True), (("--records", "none"), False)])
def test_records_that_do_not_count_are_neither_raced_nor_in_use(choice, counts):
    (task,) = tasks("embed", model="tiny-moe")
    better, device = {**task.default(find_device("h200")), "num_warps": 1}, identity_of(find_device("h200"))
    record = Record("embed", dict(task.problem), better, device, template_digest(task.kernel.template))
    write_user_record(default_records_folder(os.environ), record)
    result = lynnc(*REHEARSE[:-1], "embed", "--trials", 3, "--json", *choice)
    assert result.exit_code == 0, result.output
    (study,) = json.loads(result.stdout)["kernels"]
    assert (study["trials"][1]["knobs"] == better) is counts


def test_workers_of_several_gpus_search_and_this_process_decides(tmp_path):
    storage = tmp_path / "fleet.journal"
    options = ("--devices", "cuda:0,cuda:1", "--trials", 12, "--storage", storage, "--json")
    result = lynnc(*REHEARSE[:-1], "experts_up", *options)  # of a small space one worker may hold all that is left
    assert result.exit_code == 0, result.output
    summary = TuneSummary.from_dict(json.loads(result.stdout))
    assert sum(summary.counts.values()) >= 12 and summary.kernels


def test_each_worker_gets_its_gpu_seed_and_part_of_the_candidates():
    from lynnc.cli.tunewish import Arguments

    empty = dict.fromkeys(Arguments.__slots__)
    given = {"model": "tiny-moe", "devices": "cuda:0,cuda:2", "trials": 9, "seed": 5, "programs": "decode/1"}
    arguments = Arguments(**{**empty, "without": (), "resume": False, "search_only": False, "rehearse": False, **given})
    commands = worker_commands(arguments, wish_of(arguments), "postgresql://host/db", "run")
    lines = [" ".join(command) for command in commands]
    assert len(lines) == 2 and all("--search-only" in line and "--trials 5" in line for line in lines)
    assert "--device cuda:0 --seed 5" in lines[0] and "--device cuda:2 --seed 7" in lines[1]
    assert all("--storage postgresql://host/db --study run" in line for line in lines)


def test_the_greatest_seed_serves_a_fleet(tmp_path):
    storage = tmp_path / "fleet.journal"
    result = lynnc(*REHEARSE, "--devices", "cuda:0,cuda:1", "--trials", 4, "--storage", storage, "--search-only",
                   "--study", "s", "--seed", 2**32 - 1)  # fmt: skip
    assert result.exit_code == 0 and "ended with code" not in result.stderr, result.output
    assert {line.get("user_attr", {}).get("worker") for line in map(json.loads, storage.open())} != {None}


def test_a_storage_that_is_lost_is_one_line_and_the_code_of_others(tmp_path, monkeypatch):
    storage, prepare = tmp_path / "journal", tunerun.SyntheticBench.prepare

    def delete(*arguments):
        storage.unlink(missing_ok=True)
        return prepare(*arguments)

    monkeypatch.setattr(tunerun.SyntheticBench, "prepare", delete)
    result = lynnc(*REHEARSE, "--trials", 4, "--storage", storage)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"The journal {storage} was lost while it was in use" in result.stderr


def test_some_workers_may_fail_but_not_all(capsys):
    good, bad = [sys.executable, "-c", "pass"], [sys.executable, "-c", "raise SystemExit(3)"]
    run_workers([good, bad])
    assert "worker 1 ended with code 3" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="Every worker failed"):
        run_workers([bad, bad])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a model"),
        (("tiny-moe", "--rehearse", "--simulate", "spark"), "leave one of them out"),
        (("tiny-moe", "--simulate", "spark", "--device", "cuda:0"), "needs no GPU"),
        (("tiny-moe", "--simulate", "sparc"), "did you mean spark?"),
        (("tiny-moe", "--device", "h200"), "write GPUs by their numbers"),
        (("tiny-moe", "--device", "cuda:0,cuda:1"), "write GPUs by their numbers"),
        (("tiny-moe", "--devices", "cuda:0,cuda:0"), "name each GPU once"),
        (("tiny-moe", "--device", "cuda:0", "--devices", "all"), "leave one of them out"),
        (("tiny-moe", "--budget", "10"), "--budget 10"),
        (("tiny-moe", "--study", "a/b"), "--study a/b"),
        (("tiny-moe", "--search-only"), "--search-only"),
        (("tiny-moe", "--rehearse", "--kernels", "lineal"), "no kernel lineal"),
        (("tiny-moe", "--rehearse", "--resume"), "--resume"),
        (("tiny-moe", "--rehearse", "--storage", "oracle://x"), "--storage oracle"),
        (("tiny-moe", "--programs", "decode/9"), "decode/9"),
        (("tiny-moe", "--rehearse", "--seed", 2**32), "--seed"),
        (("tiny-moe", "--rehearse", "--storage", "postgresql://u:p@localhost:abc/x"), "localhost:abc"),
        (("tiny-moe", "--rehearse", "--output", "n" * 300), "File name too long"),
        (("--simulate", "h200", "--export", "n" * 300), "File name too long"),
        (("--export", "new.json", "--import", "old.json"), "--export and --import"),
        *(
            (("tiny-moe", "--rehearse", option, ""), f"{option} is empty")
            for option in ("--device", "--devices", "--budget", "--kernels", "--storage", "--simulate")
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = lynnc("tune", *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_optuna_the_message_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lynnc.cli.tunerun")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in ("tuner", "race", "search", "studies", "storages"):
        monkeypatch.delitem(sys.modules, f"lynnc.autotune.{name}", raising=False)
    result = lynnc("tune", "tiny-moe", "--rehearse")
    assert result.exit_code == 2 and "pip install -e '.[tune]'" in result.stderr


def test_help_compile_and_completion_do_not_import_optuna(tmp_path):
    code = (
        "import sys\nfrom lynnc.cli.main import cli\n"
        "for arguments in (['tune', '--help'], ['--help'], ['compile', '--help'], ['completion', 'bash']):\n"
        "    try: cli.main(arguments)\n    except SystemExit as end: assert not end.code, end\n"
        "import lynnc.compiler\nprint([name for name in ('optuna', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "[]"


def test_only_three_files_import_optuna():
    root = Path(__file__).resolve().parent.parent
    users = [
        path.name
        for folder in ("lynnc", "autotune", "runtime")
        for path in (root / folder).rglob("*.py")
        if "import optuna" in path.read_text() or "from optuna" in path.read_text()
    ]
    assert sorted(users) == ["patientdatabase.py", "storages.py", "studies.py"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--kernels", "linear,exp"], "linear,experts_up"),
        (["--simulate", "sp"], "spark"),
        (["--programs", "decode/1,pre"], "decode/1,prefill"),
        (["tiny-m"], "tiny-moe"),
    ],
)
def test_completion(typed, expected):
    from click.shell_completion import ShellComplete

    completion = ShellComplete(cli, {}, "lynnc", "_LYNNC_COMPLETE")
    *before, last = typed
    assert expected in [item.value for item in completion.get_completions(["tune", *before], last)]


def test_exported_records_can_be_imported_elsewhere(tmp_path):
    records, file, other = tmp_path / "records", tmp_path / "h200.json", tmp_path / "other"
    write_user_record(records, made(seconds=1e-6, triton="3.9.0"))
    result = lynnc("tune", "--export", file, "--simulate", "h200", "--records-folder", records)
    assert result.exit_code == 0 and "records of h200" in result.stderr and file.exists()
    result = lynnc("tune", "--import", file, "--records-folder", other)
    assert result.exit_code == 0 and "1 records taken" in result.stderr
    assert users(other) == [made(seconds=1e-6, triton="3.9.0")], "what ships counts already"
    file.write_text(file.read_text().replace('"num_warps": ', '"num_wraps": '))
    result = lynnc("tune", "--import", file, "--records-folder", tmp_path / "third")
    assert result.exit_code == 0 and len(result.stderr.splitlines()) == 1 and users(tmp_path / "third") == []
    assert "0 records taken" in result.stderr and "whose knobs their kernel does not have" in result.stderr


def test_a_record_is_made_of_every_race(monkeypatch):
    kept = []
    monkeypatch.setattr(tunerun, "print_sweep", kept.append)
    assert lynnc(*REHEARSE, "--trials", 20).exit_code == 0
    (sweep,) = kept
    device = identity_of(find_device("h200"))
    records = tuple(records_of(sweep, device, SimpleNamespace(isoformat=lambda: "2026-11-30")))  # type: ignore[arg-type]
    assert len(records) == sum(found.is_raced for found in sweep.findings) == 2
    for record, found in zip(records, sweep.findings, strict=True):
        assert record.gain == found.gain and record.seconds == found.best.seconds and record.date == "2026-11-30"
        assert record.origin is RecordOrigin.SIMULATED and record.spread and record.spread > 0
