"""Where trials are kept: a journal file, or a database through Optuna.

In: what ``--storage`` says. Out: an Optuna storage, or an ``OptionError`` in one sentence. A worker that dies leaves
its trials running; ``replace_lost_trial`` puts a lost one's last measurement in its place, or has it tried again.

Example::

    storage = open_storage("sqlite:///tune.db")
    runs_in(storage)
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import re
import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from lynnc.autotune.trial import Status
from lynnc.autotune.worker import HEARTBEAT_SECONDS, LOST_AFTER_SECONDS
from lynnc.errors import OptionError, StorageError

OPENING_ATTEMPTS = 6
LONGEST_NAME = 200
"""Bytes of a journal's name: its lock is renamed to one that is 48 longer, and no name has more than 255."""
MOST_BEGUN = 2
"""Measurements of a candidate that begin and end with the worker: it may be what kills them."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What SQLAlchemy speaks to a server through: its module, and the package that brings it."""

    module: str
    package: str


DRIVERS = {"postgresql": Driver("psycopg", "'psycopg[binary]'"), "mysql": Driver("pymysql", "PyMySQL")}
DATABASES = ("sqlite", "postgresql", "mysql")


def open_storage(text: str) -> BaseStorage:
    """The storage that a journal file's path or a URL names; OptionError if it cannot be opened."""
    logging.getLogger("optuna").setLevel(logging.ERROR)
    if "://" not in text:
        return _open_journal(Path(text))
    kind = text.split("://")[0].split("+")[0]
    if kind not in DATABASES:
        raise OptionError(
            f"--storage {_without_password(text)}: give a file, or a URL of {', '.join(DATABASES)}, such as "
            "sqlite:///tune.db."
        )
    return _open_database(text, kind)


class QuickJournal(JournalFileBackend):
    """Optuna's journal file, without waiting for the disk at each of the dozen entries of a candidate.

    What was written survives the end of any process; only the machine's own failure could lose the last entries. A
    line that a killed process or a full disk left half-written is cut off before the next one: with text behind it
    nobody could read the file again.
    """

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path.name)) > LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        self._own_lock, self._path = JournalFileSymlinkLock(str(path)), path
        super().__init__(str(path), self._own_lock)
        with self._locked():  # a folder that takes no lock is known at once
            self._file, self._end = path.stat(), 0  # behind what this process wrote last
        _check_last_line(path)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends whole lines, alone."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._worded(), self._locked(), self._path.open("r+b") as file:
            self._check_file()
            _cut_half_line(file)
            file.seek(0, os.SEEK_END)
            file.write(text.encode())
            self._end = file.tell()

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Every entry from one on."""
        with self._worded():
            self._check_file()
            yield from super().read_logs(log_number_from)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._own_lock.acquire()
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # who is suspended for long is not waited for
                self._own_lock.release()

    @contextlib.contextmanager
    def _worded(self) -> Iterator[None]:
        """What goes wrong with a journal that is in use, as a StorageError."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise StorageError(
                f"The journal {self._path} was lost while it was in use ({_why(error)}): put it back or make "
                "room, then go on with --resume, or begin anew with another --storage."
            ) from error

    def _check_file(self) -> None:
        """FileNotFoundError if another file is there now: entries of this one mean nothing behind those of that."""
        found = self._path.stat()
        if not os.path.samestat(found, self._file) or found.st_size < self._end:
            raise FileNotFoundError(errno.ENOENT, "another file has its name")


def _why(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check_last_line(path: Path) -> None:
    """ValueError if the last whole line of a file is none of a journal: with text behind it nobody could read the file
    again. Optuna reads over it, as it may be half-written."""
    with path.open("rb") as file:
        lines = file.read().rpartition(b"\n")[0].rsplit(b"\n", 1)
    if lines[-1]:
        json.loads(lines[-1])


def _cut_half_line(file: BinaryIO) -> None:
    """Shortens a file to its last whole line."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _open_journal(path: Path) -> BaseStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(QuickJournal(path))
    except (OSError, ValueError, KeyError, TypeError, StorageError) as error:
        cause = error.__cause__ if isinstance(error, StorageError) and error.__cause__ else error
        why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else _why(cause)
        raise OptionError(f"--storage {path} cannot be used as a journal ({why}): give another file.") from error


def _with_driver(url: str) -> str:
    """The same URL with a driver that needs no compiler to install, unless it names one."""
    return re.sub(r"^(postgresql|mysql)://", lambda found: f"{found[1]}+{DRIVERS[found[1]].module}://", url)


def _open_database(typed: str, kind: str) -> BaseStorage:
    """Imports what needs SQLAlchemy only now: journals do without it."""
    shown = _without_password(typed)
    try:
        from sqlalchemy.exc import SQLAlchemyError

        from lynnc.autotune.patientdatabase import PatientDatabase, reason_of
    except ModuleNotFoundError as error:
        raise OptionError(f"--storage {shown} needs the package sqlalchemy: run `pip install sqlalchemy`.") from error
    for attempt in range(OPENING_ATTEMPTS):
        try:
            with no_warnings():
                return PatientDatabase(
                    _with_driver(typed),
                    shown,
                    heartbeat_interval=HEARTBEAT_SECONDS,
                    grace_period=LOST_AFTER_SECONDS,
                    heartbeat_stale_trial_callback=replace_lost_trial,
                )
        except ImportError as error:
            package = DRIVERS[kind].package if kind in DRIVERS else "a driver"
            raise OptionError(
                f"--storage {shown} needs a driver that is not installed ({error}): run `pip install {package}`."
            ) from error
        except ValueError as error:  # which may quote a part of the password
            raise OptionError(
                f"--storage {shown} is no URL that can be read: write the port as a number, and special characters of "
                "a password as %XX."
            ) from error
        except (SQLAlchemyError, StorageInternalError) as error:
            # Workers that begin together make the tables together, and all but one fail.
            whole = f"{error} {error.__cause__}"
            if ("already exists" in whole or "is locked" in whole) and attempt + 1 < OPENING_ATTEMPTS:
                time.sleep(random.uniform(0.2, 1.0))
                continue
            why = reason_of(error)
            raise OptionError(f"--storage {shown} cannot be opened ({why}): check the URL and the server.") from error
    raise AssertionError("the last attempt returns or raises")


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.rsplit(':', 1)[0]}:...@{tail}" if at and head.count(":") > 1 else url


def runs_in(storage: BaseStorage) -> tuple[str, ...]:
    """Names of the runs that a storage holds, the newest last."""
    names = (study.study_name.split("/")[0] for study in storage.get_all_studies() if "/" in study.study_name)
    return tuple(dict.fromkeys(names))


def replace_lost_trial(study: optuna.Study, trial: FrozenTrial) -> None:
    """A lost trial's last measurement counts; a candidate without one is tried again, unless it may be what kills
    workers."""
    attributes = {name: value for name, value in trial.user_attrs.items() if name != "worker"}
    if trial.intermediate_values:
        value = trial.intermediate_values[max(trial.intermediate_values)]
        outcome = attributes.get("outcome", {})
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE,
                value=value,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={**attributes, "status": outcome.get("status", Status.TIMED.value), "recovered": True},
            )
        )
    elif trial.params and not is_given_up(trial):
        study.enqueue_trial(trial.params, attributes)


def is_given_up(trial: FrozenTrial) -> bool:
    """Whether the measurement of a candidate that was lost had begun often enough."""
    return int(trial.user_attrs.get("begun", 0)) >= MOST_BEGUN


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Heartbeats are experimental to Optuna, and are meant for its own loop where we have ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
