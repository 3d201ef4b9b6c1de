"""Databases and journals that go away while they are used."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing, contextmanager

import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from postgres import find_program, server
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DataError, OperationalError
from tuning_worker import rig

from lynnc.autotune import patientdatabase, storages, worker
from lynnc.autotune.storages import open_storage
from lynnc.autotune.trial import Outcome, Status
from lynnc.autotune.worker import Heart
from lynnc.errors import StorageError
from lynnc.records import Records

TIMED = Outcome(Status.TIMED, 2e-6, 1.9e-6, 2.1e-6, 5)


@contextmanager
def locked(path):
    """Nobody else can read or write a SQLite file."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield connection
        connection.execute("ROLLBACK") if connection.in_transaction else None


@pytest.fixture
def hurried(monkeypatch):
    """SQLite waits for a lock for 5 s; here for a moment."""
    monkeypatch.setattr(patientdatabase, "PAUSE_SECONDS", 0.05)

    def engine_options(url, options):
        options["connect_args"] = {"timeout": 0.05}

    monkeypatch.setattr(RDBStorage, "_set_default_engine_kwargs_for_mysql", staticmethod(engine_options))


def test_a_short_lock_is_ridden_out(tmp_path, hurried):
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    study = made.tuner().study(made.tasks[0])
    ticket = study.draw()
    with locked(tmp_path / "tune.db") as lock:
        release = threading.Timer(0.5, lambda: lock.execute("ROLLBACK"))
        release.start()
        begun = time.monotonic()
        assert study.report(ticket, TIMED, 1) and time.monotonic() - begun > 0.3
        release.join()
    assert study.finish(ticket, TIMED) and len(study.tried()) == 1
    assert study._study._storage._backend.away_since is None


@pytest.mark.parametrize(
    "reason",
    [
        'duplicate key value violates unique constraint "pg_type"\nDETAIL: Key (typname) already exists.',
        "database is locked",
    ],
)
def test_who_opens_a_database_beside_others_tries_again(reason, tmp_path, monkeypatch):
    monkeypatch.setattr(storages.time, "sleep", lambda seconds: None)
    opened = RDBStorage.__init__
    failures = [OperationalError("CREATE", {}, Exception(reason)), StorageInternalError("see the cause")]
    failures[1].__cause__ = failures[0]

    def fail_twice(self, *arguments, **options):
        if failures:
            raise failures.pop()
        opened(self, *arguments, **options)

    monkeypatch.setattr(RDBStorage, "__init__", fail_twice)
    assert open_storage(f"sqlite:///{tmp_path}/tune.db").get_all_studies() == [] and not failures


def test_a_long_one_is_a_sentence_and_the_run_goes_on_later(tmp_path, hurried, monkeypatch):
    monkeypatch.setattr(patientdatabase, "PATIENCE_SECONDS", 0.3)
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    tuner = made.tuner()
    with locked(tmp_path / "tune.db"):
        with pytest.raises(StorageError, match=r"sqlite:///.*was lost \(database is locked\).*--resume") as error:
            tuner.study(made.tasks[0]).draw()
        assert error.value.exit_code == 2
        begun = time.monotonic()
        with pytest.raises(StorageError):
            tuner.study(made.tasks[0]).tried()
        assert time.monotonic() - begun < 0.3, "it is known to be away for long"
    budget = made.budget(trials=8)
    tuner.search(budget, Records())
    assert budget.spent == 8


def test_who_loses_the_storage_while_it_gives_back_is_not_kept_up(tmp_path, hurried, monkeypatch):
    monkeypatch.setattr(patientdatabase, "PATIENCE_SECONDS", 0.2)
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    tuner = made.tuner()

    def interrupt(task, tried):
        lock.execute("BEGIN EXCLUSIVE")
        raise KeyboardInterrupt

    with locked(tmp_path / "tune.db") as lock:
        lock.execute("ROLLBACK")
        with pytest.raises(KeyboardInterrupt):
            tuner.search(made.budget(trials=9), Records(), interrupt)
    assert not tuner._run.heart._held, "else nobody would take over what it held"


def test_what_trying_again_cannot_help_is_said_at_once(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/tune.db")
    begun = time.monotonic()
    with pytest.raises(StorageError, match="value too long"):
        storage.wait_after(DataError("INSERT", {}, Exception("value too long\nand more")))
    assert time.monotonic() - begun < patientdatabase.PAUSE_SECONDS


@pytest.mark.parametrize("state", [TrialState.FAIL, TrialState.COMPLETE, TrialState.PRUNED])
def test_a_tell_whose_answer_was_lost_counts_once(state, tmp_path, hurried, monkeypatch):
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    study = made.tuner().study(made.tasks[0])
    storage, ticket, answers = study._study._storage._backend, study.draw(), []

    def forget(self, *arguments):
        answers.append(tell(self, *arguments))
        if len(answers) == 1:
            raise OperationalError("UPDATE", {}, Exception("server closed the connection unexpectedly"))
        return answers[-1]

    tell = RDBStorage.set_trial_state_values
    monkeypatch.setattr(type(storage), "_set_trial_state", patientdatabase._patient(forget))
    monkeypatch.setattr(patientdatabase, "PAUSE_SECONDS", 0)
    values = [2e-6] if state is TrialState.COMPLETE else None
    assert storage.set_trial_state_values(ticket.trial._trial_id, state, values)
    (trial,) = study._study.get_trials()
    assert trial.state is state and trial.values == values and answers == [True]


def test_who_is_late_with_the_same_word_is_told_so(tmp_path):
    """Of two that take over a lost trial only one puts it back."""
    made = rig(f"sqlite:///{tmp_path}/tune.db", "a")
    study = made.tuner().study(made.tasks[0])
    number = study.draw().trial._trial_id
    assert study._study._storage.set_trial_state_values(number, TrialState.FAIL)
    with pytest.raises(Exception, match="has already finished"):
        study._study._storage.set_trial_state_values(number, TrialState.FAIL)


def test_a_heart_beats_on_after_a_beat_that_failed(monkeypatch):
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.02)
    beats = []

    def beat(trial):
        beats.append(trial)
        if 1 < len(beats) < 4:
            raise StorageError("away")

    heart = Heart(beat)
    heart.hold(7)
    end = time.monotonic() + 10
    while len(beats) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    heart.stop()
    assert len(beats) >= 6


def test_a_journal_that_is_gone_is_a_sentence(tmp_path):
    path = tmp_path / "journal"
    made = rig(str(path), "a")
    study = made.tuner().study(made.tasks[0])
    ticket = study.draw()
    held = path.read_bytes()
    (tmp_path / "copy").write_bytes(held)
    path.unlink()
    for operation in (study.tried, study.draw, lambda: study.finish(ticket, TIMED)):
        with pytest.raises(StorageError, match=r"journal .*journal was lost .*No such file.*--resume"):
            operation()
    assert not path.exists(), "nothing is written where nothing was"
    (tmp_path / "copy").rename(path)
    with pytest.raises(StorageError, match="another file has its name"):
        study.finish(ticket, TIMED)
    assert path.read_bytes() == held
    assert rig(str(path), "a").tuner().study(made.tasks[0]).running() == (ticket.knobs,)


def test_a_journal_that_was_begun_anew_meanwhile_is_left_alone(tmp_path):
    path = tmp_path / "journal"
    made = rig(str(path), "a")
    study = made.tuner().study(made.tasks[0])
    path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StorageError, match="another file has its name"):
            study.draw()
    assert path.read_bytes() == b""


def test_a_journal_that_somebody_damages_is_a_sentence(tmp_path):
    path = tmp_path / "journal"
    made = rig(str(path), "a")
    study = made.tuner().study(made.tasks[0])
    with path.open("a") as file:
        file.write("garbage\n")
    with pytest.raises(StorageError, match="was lost"):
        for _ in range(2):
            study.draw()


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    made = rig(str(tmp_path / "journal"), "a")
    study = made.tuner().study(made.tasks[0])

    def fill(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storages, "_cut_half_line", fill)
    with pytest.raises(StorageError, match="No space left on device"):
        study.draw()
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.skipif(not find_program("initdb"), reason="Debian's package postgresql is not installed")
def test_sessions_that_a_server_ends_are_opened_again(monkeypatch):
    pytest.importorskip("psycopg", reason="the driver of the extra postgresql is not installed")
    monkeypatch.setattr(patientdatabase, "PAUSE_SECONDS", 0.05)
    with server() as url:
        made = rig(url, "a")
        tuner, ends = made.tuner(), []
        engine = create_engine(url.replace("://", "+psycopg://"), isolation_level="AUTOCOMMIT")
        others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"

        def terminate(task, tried):
            with engine.connect() as connection:
                ends.append(connection.execute(text(f"{others} AND usename = 'tuner'")).scalar())

        budget = made.budget(trials=5)
        tuner.search(budget, Records(), terminate)
        assert budget.spent == 5 and sum(ends) > 0
        tried = [one for task in made.tasks for one in tuner.study(task).tried()]
        assert len({(one.origin, str(one.knobs)) for one in tried}) == len(tried) >= 5
        engine.dispose()
        tuner._run.close()
