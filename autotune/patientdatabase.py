"""A database of Optuna's that rides out short outages.

In: a URL, and how to name it. Out: an Optuna storage whose operations are tried again while the database is away, for a
minute at most; then a ``StorageError``. What was done twice as the answer to the first time was lost does no harm: most
operations set a value; a trial that is finished as it was to be counts as done; a second new trial is another candidate
that is found to be known, or, if it runs without anybody's name, one that is taken over after a while.

Example::

    storage = PatientDatabase(url, "postgresql://tuner:...@host/tuning", heartbeat_interval=5)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from lynnc.errors import StorageError

PATIENCE_SECONDS = 60.0
"""For which a database may be away, counted from the first operation that failed."""
PAUSE_SECONDS = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def _patient(operation: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The operation, tried again while the database is away."""

    @functools.wraps(operation)
    def patient(storage: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        while True:
            try:
                result = operation(storage, *arguments, **options)
            except (StorageInternalError, SQLAlchemyError) as error:
                storage.wait_after(error)
            else:
                storage.away_since = None
                return result

    return patient


class PatientDatabase(RDBStorage):
    """Optuna's storage in a database; ``shown`` is its URL as it may be printed."""

    def __init__(self, url: str, shown: str, **options: Any) -> None:
        self.shown = shown
        self.away_since: float | None = None
        self.failures = 0
        super().__init__(url.replace("{", "{{").replace("}", "}}"), **options)  # Optuna takes it for a template

    def wait_after(self, error: StorageInternalError | SQLAlchemyError) -> None:
        """Waits a moment; StorageError where that does not help, or did not for a minute."""
        cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
        now = time.monotonic()
        self.failures += 1
        if self.away_since is None:
            self.away_since = now
        if not _may_pass(cause) or now - self.away_since >= PATIENCE_SECONDS:
            raise StorageError(
                f"The storage {self.shown} was lost ({reason_of(cause or error)}): what was finished is kept; see to "
                "the database, then go on with --resume."
            ) from error
        time.sleep(PAUSE_SECONDS)

    create_new_study = _patient(RDBStorage.create_new_study)
    get_study_id_from_name = _patient(RDBStorage.get_study_id_from_name)
    get_study_name_from_id = _patient(RDBStorage.get_study_name_from_id)
    get_study_directions = _patient(RDBStorage.get_study_directions)
    get_study_user_attrs = _patient(RDBStorage.get_study_user_attrs)
    get_study_system_attrs = _patient(RDBStorage.get_study_system_attrs)
    get_all_studies = _patient(RDBStorage.get_all_studies)
    set_study_user_attr = _patient(RDBStorage.set_study_user_attr)
    set_study_system_attr = _patient(RDBStorage.set_study_system_attr)
    _create_new_trial = _patient(RDBStorage._create_new_trial)
    _set_trial_param = _patient(RDBStorage._set_trial_param)
    set_trial_user_attr = _patient(RDBStorage.set_trial_user_attr)
    set_trial_system_attr = _patient(RDBStorage.set_trial_system_attr)
    set_trial_intermediate_value = _patient(RDBStorage.set_trial_intermediate_value)
    get_trial = _patient(RDBStorage.get_trial)
    _get_trials = _patient(RDBStorage._get_trials)
    get_trial_id_from_study_id_trial_number = _patient(RDBStorage.get_trial_id_from_study_id_trial_number)
    record_heartbeat = _patient(RDBStorage.record_heartbeat)
    _get_stale_trial_ids = _patient(RDBStorage._get_stale_trial_ids)
    _set_trial_state = _patient(RDBStorage.set_trial_state_values)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Done, too, is a trial that is found finished in just this state when it is tried again."""
        failures = self.failures
        try:
            return self._set_trial_state(trial_id, state, values)
        except UpdateFinishedTrialError:
            found = self.get_trial(trial_id)
            if self.failures == failures or (found.state, found.values) != (state, values):
                raise
            return True


def reason_of(error: BaseException) -> str:
    """The first line of what a driver says."""
    text = str(getattr(error, "orig", None) or error.__cause__ or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _may_pass(error: BaseException | None) -> bool:
    """Whether trying again may help: a connection or a lock, not a table that is not there."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | InterfaceError | PoolTimeoutError)
