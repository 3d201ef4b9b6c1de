"""Storages, workers that die, and runs that go on."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import TrialState
from postgres import find_program, server
from sqlalchemy import text
from tuning import DEVICE, IDENTITY, MODEL, finding
from tuning_worker import rig

from lynnc.autotune import storages
from lynnc.autotune.legalspace import legal_space
from lynnc.autotune.search import Search, Setting
from lynnc.autotune.storages import open_storage, replace_lost_trial, runs_in
from lynnc.autotune.studies import Run
from lynnc.autotune.trial import Outcome, Status
from lynnc.autotune.tuner import About, Tuner, study_digest
from lynnc.autotune.worker import LONGEST_HOLD_SECONDS, Worker
from lynnc.errors import OptionError
from lynnc.kernels.kernel import Choice
from lynnc.records import Records

HERE = Path(__file__).parent
TIMED = Outcome(Status.TIMED, 2e-6, 1.9e-6, 2.1e-6, 5)


def start_worker(storage: str, study: str, seed: int, trials: int, seconds: float = 0.02) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "tuning_worker.py"), storage, study, str(seed), str(trials), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def begin(*workers: subprocess.Popen[str]) -> None:
    """Lets workers go once all of them are ready."""
    for worker in workers:
        assert worker.stdout and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("\n")
        worker.stdin.flush()


def kill_after(worker: subprocess.Popen[str], lines: int) -> list[int]:
    """Kills a worker once it has finished some candidates; their numbers."""
    assert worker.stdout
    numbers = [int(worker.stdout.readline()) for _ in range(lines)]
    worker.send_signal(signal.SIGKILL)
    rest = worker.stdout.read().split()
    worker.wait()
    return numbers + [int(word) for word in rest if word.isdigit()]


def gone_worker() -> Worker:
    """One whose process is known to be dead."""
    host, _, _, space = Worker.here().name.split(":")
    return Worker(f"{host}:999999:1:{space}")


def fall_silent(storage: str) -> None:
    """Makes every heart of a database stop, a while ago; a journal has none."""
    if "://" in storage:
        opened = open_storage(storage)
        with opened.engine.begin() as connection:
            connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'"))
        opened.engine.dispose()


def studies_of(tuner: Tuner):
    return [tuner.study(task) for task in tuner.tasks]


@pytest.fixture(params=["journal", "sqlite"])
def storage(request, tmp_path) -> str:
    return str(tmp_path / "journal") if request.param == "journal" else f"sqlite:///{tmp_path}/tune.db"


def test_a_candidate_outlives_its_storage_being_closed(storage):
    made = rig(storage, "a")
    study = made.tuner().study(made.tasks[0])
    study.offer(made.tasks[0].default(made.bench._device), "default")
    ticket = study.draw()
    assert ticket.origin == "default" and ticket.is_guarded
    assert study.report(ticket, TIMED, 1)
    study.finish(ticket, TIMED)
    (tried,) = rig(storage, "a").tuner().study(made.tasks[0]).tried()
    assert tried.outcome == TIMED and tried.knobs == ticket.knobs and tried.is_whole
    assert runs_in(open_storage(storage)) == ("a",)


@pytest.mark.parametrize("status", [Status.WRONG, Status.CRASHED, Status.HUNG, Status.NOT_COMPILED, Status.REFUSED])
def test_why_a_candidate_has_no_time_is_kept(status, tmp_path):
    made = rig(str(tmp_path / "journal"), "a")
    study = made.tuner().study(made.tasks[0])
    study.finish(study.draw(), Outcome(status, reason="because"))
    (tried,) = study.tried()
    assert (tried.outcome.status, tried.outcome.reason) == (status, "because")
    (trial,) = study._study.get_trials()
    assert trial.user_attrs["status"] == status.value and trial.user_attrs["reason"] == "because"


def test_a_put_back_candidate_is_the_next_to_be_drawn(storage):
    made = rig(storage, "a")
    study = made.tuner().study(made.tasks[0])
    ticket = study.draw()
    study.put_back(ticket)
    assert study.has_offers() and study.draw().knobs == ticket.knobs and not study.tried()


def test_what_a_dead_process_held_is_tried_again_and_what_it_measured_counts(storage):
    made = rig(storage, "a")
    gone = gone_worker()
    task = made.tasks[0]
    lost = made.tuner(worker=gone).study(task)
    measured, held = lost.draw(), lost.draw()
    lost.report(measured, TIMED, 1)
    fall_silent(storage)
    study = made.tuner().study(task)
    study.replace_lost()
    (tried,) = study.tried()
    assert tried.outcome == TIMED and tried.knobs == measured.knobs
    again = study.draw()
    assert again.knobs == held.knobs
    study.replace_lost()  # this process lives
    assert not study.has_offers()


def test_only_a_candidate_whose_measurement_killed_two_workers_is_given_up(storage):
    made = rig(storage, "a")
    task = made.tasks[0]
    default, knobs = task.default(DEVICE), made.bench.optimum(task)
    dying, study = made.tuner(worker=gone_worker()).study(task), made.tuner().study(task)
    for deaths in range(4):
        for proposal in (default, knobs):
            study.offer(proposal, "default")
        drawn = [dying.draw() for _ in range(3)]
        held, begun, _ = sorted(drawn, key=lambda one: [default, knobs, one.knobs].index(one.knobs))
        assert held.knobs == default and held.begun == 0
        assert (begun.knobs == knobs and begun.begun == deaths) or deaths >= 2
        if begun.knobs == knobs:
            dying.begin(begun)
        fall_silent(storage)
        study.replace_lost()
    states = [trial.state for trial in study._study.get_trials() if study._to_knobs(trial.params) == knobs]
    assert Counter(states)[TrialState.FAIL] == 2
    assert default in [study.draw().knobs for _ in range(2)]


def test_a_candidate_put_back_has_killed_no_worker(storage):
    made = rig(storage, "a")
    study = made.tuner().study(made.tasks[0])
    ticket = study.draw()
    for _ in range(3):  # interrupted, as by Ctrl-C
        study.begin(ticket)
        study.put_back(ticket)
        ticket = study.draw()
    assert ticket.begun == 0


def test_what_a_worker_lost_while_it_gave_it_back_is_offered_again(storage, monkeypatch):
    """It was killed after the trial was failed and before the candidate waited again."""
    made = rig(storage, "a")
    study = made.tuner().study(made.tasks[0])
    default = made.tasks[0].default(DEVICE)
    study.offer(default, "default")
    study._study.tell(study.draw().trial, state=TrialState.FAIL)
    study.offer(default, "default")
    ticket = study.draw()
    assert ticket.knobs == default and ticket.origin == "default"
    study.drop(ticket, "the same kernel was tried before")
    study.offer(default, "default")
    assert not study.has_offers()


def test_the_search_says_when_a_measurement_begins(tmp_path, monkeypatch):
    made = rig(str(tmp_path / "journal"), "a")

    def die(candidate, repeats):
        raise SystemExit

    monkeypatch.setattr(made.bench, "measure", die)
    monkeypatch.setattr(Search, "release", lambda search: None)  # a killed process puts nothing back
    tuner = made.tuner()
    with pytest.raises(SystemExit):
        tuner.search(made.budget(trials=5), Records())
    trials = [trial for study in studies_of(tuner) for trial in study._study.get_trials()]
    assert len([trial for trial in trials if trial.state is TrialState.RUNNING]) > 1
    assert [trial.user_attrs["begun"] for trial in trials if "begun" in trial.user_attrs] == [1]


def test_a_worker_of_another_host_or_container_is_lost_after_a_while():
    here = Worker.here()
    now = datetime.datetime.now()
    long_ago = now - datetime.timedelta(seconds=LONGEST_HOLD_SECONDS + 1)
    host, pid, start, space = here.name.split(":")
    boot, namespace = space.split(".")
    assert not here.knows_to_be_lost(here.name, long_ago)
    others = ("otherhost:1:1", f"{host}:{pid}:1:{boot}.{int(namespace) + 1}", f"{host}:{pid}:1:other.{namespace}",
              f"{host}:{pid}:1:", f"{host}:{pid}:1")  # fmt: skip
    for other in others:
        assert not here.knows_to_be_lost(other, now)
        assert here.knows_to_be_lost(other, long_ago)
    assert here.knows_to_be_lost(f"{host}:{pid}:1:{space}", now)  # the number was given to another process since
    assert here.knows_to_be_lost(f"{host}:999999:1:{space}", now)
    assert not here.knows_to_be_lost(f"{host}:{pid}:{start}:{space}", long_ago)


def test_a_worker_that_proc_belies_has_no_space(monkeypatch):
    """Such as one in a namespace of its own that sees the processes of another."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert Worker.here().name.endswith(":")


def test_a_beating_heart_is_no_dead_worker_whatever_its_process_or_age(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/tune.db"
    made = rig(url, "a")
    for name in (gone_worker().name, "otherhost:1:1:"):
        made.tuner(worker=Worker(name)).study(made.tasks[0]).draw()
    monkeypatch.setattr("lynnc.autotune.worker.LONGEST_HOLD_SECONDS", -1)
    study = made.tuner().study(made.tasks[0])
    study.replace_lost()
    assert len(study.running()) == 2 and not study.has_offers()


def test_a_trial_of_a_database_that_nobody_put_a_name_to_is_lost_after_a_while(tmp_path, monkeypatch):
    """Its worker was killed before its first beat."""
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    study = made.tuner().study(made.tasks[0])
    with storages.no_warnings():
        study._study.ask(study._distributions)
    study.replace_lost()
    assert study.running()
    monkeypatch.setattr("lynnc.autotune.worker.LONGEST_HOLD_SECONDS", -1)
    study.replace_lost()
    assert not study.running() and study.has_offers()


def test_who_was_taken_for_dead_loses_its_candidates_and_goes_on(storage):
    made = rig(storage, "a")
    late, other = made.tuner(worker=gone_worker()), made.tuner()
    late_study, study = late.study(made.tasks[0]), other.study(made.tasks[0])
    tickets = [late_study.draw() for _ in range(5)]
    fall_silent(storage)
    study.replace_lost()
    assert not study.running()
    assert not late_study.report(tickets[0], TIMED, 1)
    assert not late_study.finish(tickets[1], TIMED)
    assert not late_study.finish(tickets[2], Outcome(Status.WRONG, reason="because"))
    late_study.drop(tickets[3], "because")
    late_study.put_back(tickets[4])
    assert not late._run.heart._held
    drawn = [late_study.draw().knobs for _ in tickets]
    assert drawn == [ticket.knobs for ticket in tickets], "each of them is offered again, once"
    assert not study.has_offers() and not study.tried()


def test_a_candidate_that_is_lost_while_it_is_drawn_is_another_workers(storage, monkeypatch):
    made = rig(storage, "a")
    study, other = (made.tuner().study(made.tasks[0]) for _ in range(2))
    hold, lost = study._heart.hold, []

    def hold_late(number):
        hold(number)
        if not lost:
            lost.append(number)
            other._study.tell(len(other._study.get_trials()) - 1, state=TrialState.FAIL)

    monkeypatch.setattr(study._heart, "hold", hold_late)
    ticket = study.draw()
    assert lost and ticket.trial._trial_id not in lost and study._heart._held == {ticket.trial._trial_id}
    assert study.finish(ticket, TIMED)


@pytest.mark.parametrize("how", ["put back", "lost"])
def test_what_another_worker_gave_up_is_not_taken_for_its_twin(how, storage):
    made = rig(storage, "a")
    task = made.tasks[1]
    other = made.tuner().study(task)
    ticket = other.draw()
    tuner = made.tuner()
    search = Search(task, tuner.study(task), made.bench, Setting(DEVICE, ahead=1), legal_space(task, DEVICE.target))
    search._whole_space = ()  # so that begin offers the default alone
    search.begin([])  # it sees the other's candidate in hand
    if how == "put back":
        other.put_back(ticket)
    else:
        other._study.tell(ticket.trial.number, state=TrialState.FAIL)
        replace_lost_trial(other._study, other._study.get_trials()[ticket.trial.number])
    again = search._accept(search.study.draw())
    assert again and again.knobs == ticket.knobs
    search.release()


def test_a_database_notices_silence(tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "LOST_AFTER_SECONDS", 1)
    monkeypatch.setattr(storages, "HEARTBEAT_SECONDS", 1)
    url = f"sqlite:///{tmp_path}/tune.db"
    made = rig(url, "a")
    silent = made.tuner(worker=Worker("otherhost:1:1:"))
    ticket = silent.study(made.tasks[0]).draw()
    silent._run.heart.let_go(ticket.trial._trial_id)
    study = made.tuner().study(made.tasks[0])
    study.replace_lost()
    assert not study.has_offers()
    time.sleep(2.5)
    study.replace_lost()
    assert study.has_offers() and study.draw().knobs == ticket.knobs


def test_a_killed_run_goes_on_and_has_lost_nothing_finished(storage):
    worker = start_worker(storage, "killed", seed=1, trials=500)
    begin(worker)
    numbers = kill_after(worker, lines=12)
    fall_silent(storage)
    made = rig(storage, "killed", seed=2)
    tuner = made.tuner()
    before = {(index, tried.number) for index, study in enumerate(studies_of(tuner)) for tried in study.tried()}
    assert set(numbers) <= {number for _, number in before}
    budget = made.budget(trials=30)
    tuner.search(budget, Records())
    after = [study.tried() for study in studies_of(tuner)]
    assert before <= {(index, tried.number) for index, found in enumerate(after) for tried in found}
    running = [study.running() for study in studies_of(tuner)]
    assert running == [(), ()]
    measured = Counter(str(one.knobs) for found in after for one in found if one.outcome.status is not Status.REFUSED)
    assert max(measured.values()) == 1, "nothing is measured twice"
    sweep = tuner.conclude(budget, About(MODEL, IDENTITY), Records())
    assert all(found.is_raced for found in sweep.findings)


def test_a_half_written_line_costs_a_journal_nothing_else(tmp_path):
    path = tmp_path / "journal"
    made = rig(str(path), "a")
    study = made.tuner().study(made.tasks[0])
    study.finish(study.draw(), TIMED)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-20])
    study.finish(study.draw(), TIMED)
    found = rig(str(path), "a").tuner().study(made.tasks[0]).tried()
    assert [tried.outcome for tried in found] == [TIMED, TIMED] and path.read_bytes().startswith(whole)


@pytest.mark.parametrize("line", [b'{"a":1}\n', b"[1]\n", b"garbage\n", b"no JSON\n{}\n", b"\xfa\n{}\n"])
def test_a_file_that_is_no_journal_is_refused(line, tmp_path):
    (tmp_path / "journal").write_bytes(line)
    with pytest.raises(OptionError, match="cannot be used as a journal"):
        open_storage(str(tmp_path / "journal"))


def test_an_interrupted_search_puts_back_what_it_holds(tmp_path):
    made = rig(str(tmp_path / "journal"), "a")
    tuner = made.tuner(ahead=5)

    def interrupt(task, tried):
        if len(made.bench.measured) > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuner.search(made.budget(trials=100), Records(), interrupt)
    assert all(study.running() == () for study in studies_of(tuner))
    assert any(study.has_offers() for study in studies_of(tuner))


def test_another_template_or_device_begins_a_study_of_its_own(monkeypatch):
    task = rig("", "a").tasks[0]
    space = task.kernel.space
    first = study_digest(task, space, IDENTITY)
    assert first == study_digest(task, space, IDENTITY)
    assert first != study_digest(task, {**space, "num_warps": Choice((4,))}, IDENTITY)
    monkeypatch.setattr("lynnc.autotune.tuner.template_digest", lambda template: "changed")
    assert first != study_digest(task, space, IDENTITY)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("redis://host", "give a file, or a URL of sqlite, postgresql, mysql"),
        ("mysql://u:secret@127.0.0.1/x", "pip install PyMySQL"),
        ("postgresql://u:secret@127.0.0.1:1/x", "cannot be opened|pip install 'psycopg"),
        (
            "postgresql://u:secret@localhost:abc/x",
            "u:...@localhost:abc/x is no URL that can be read|pip install 'psycopg",
        ),
        ("postgresql://u:{secret}@127.0.0.1:1/x", "cannot be opened|pip install 'psycopg"),
        ("/proc/no/such/folder/journal", "cannot be used as a journal"),
        (f"/tmp/{'n' * 300}", r"\(File name too long\)"),
        (f"/tmp/{'n' * 230}", r"\(File name too long\)"),  # that of its lock
    ],
)
def test_storages_that_cannot_be_opened_say_why(typed, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(OptionError, match=message) as error:
        open_storage(typed)
    assert "secret" not in str(error.value)
    assert "+psycopg" not in str(error.value) and "+pymysql" not in str(error.value), "what was typed is shown"


@pytest.mark.skipif(not find_program("initdb"), reason="Debian's package postgresql is not installed")
def test_workers_share_a_postgresql_server_and_one_that_is_killed_loses_one_trial():
    pytest.importorskip("psycopg", reason="the driver of the extra postgresql is not installed")
    with server() as url:
        workers = [start_worker(url, "fleet", seed, trials=25, seconds=0.03) for seed in (1, 2, 3)]
        victim = start_worker(url, "fleet", seed=4, trials=400, seconds=0.03)
        begin(*workers, victim)
        numbers = kill_after(victim, lines=5)
        spoken = [worker.communicate()[0].split() for worker in workers]
        fall_silent(url)
        assert [worker.returncode for worker in workers] == [0, 0, 0]
        made = rig(url, "fleet", seed=5)
        tuner = made.tuner()
        for study in studies_of(tuner):
            study.replace_lost()
        tried = [one for study in studies_of(tuner) for one in study.tried()]
        by_worker = Counter(one.worker for one in tried if one.outcome.status is not Status.REFUSED)
        assert len(by_worker) == 4, "each of them measured something"
        assert len(numbers) <= sum(by_worker[name] for name in by_worker if name.split(":")[1] == str(victim.pid))
        assert all(study.running() == () for study in studies_of(tuner))
        finished = sum(int(words[-1]) for words in spoken)
        assert sum(by_worker.values()) >= finished + len(numbers)
        sweep = tuner.conclude(made.budget(), About(MODEL, IDENTITY), Records())
        for task in made.tasks:
            assert finding(sweep, task).best.seconds < 1.1 * made.optimum_seconds(task)
        tuner._run.close()


def test_a_run_closes_its_storage(tmp_path):
    run = Run(open_storage(f"sqlite:///{tmp_path}/tune.db"), "a", Worker.here())
    run.close()
    assert (tmp_path / "tune.db").exists()
