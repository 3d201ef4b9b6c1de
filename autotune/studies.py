"""The tuner's memory and its sampler, on Optuna.

In: a storage (``storages.py``), the name of a run, a task. Out: a ``KnobStudy``, one Optuna study for each task, which
proposes candidates and keeps what came of them. Everything a worker finishes is in the storage at once; other workers
of any host see it and draw from the same study. A worker that dies leaves its trials running; whoever notices first
puts its last measurement in their place, or has the candidate tried again.

Example::

    run = Run(open_storage("sqlite:///tune.db"), "h200", Worker.here(seed=1))
    study = run.study(task, digest, task.kernel.space)
    ticket = study.draw()
    study.finish(ticket, outcome)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lynnc.autotune.problems import Task
from lynnc.autotune.storages import is_given_up, no_warnings, replace_lost_trial
from lynnc.autotune.sweep import Tried, outcome_from
from lynnc.autotune.trial import Outcome, Status
from lynnc.autotune.worker import Heart, Worker
from lynnc.errors import StorageError
from lynnc.kernels.kernel import Knob, Knobs, PowerOfTwo

STARTUP_TRIALS = 16
"""Candidates drawn at random before the sampler learns from them."""
HALVING = 2
"""One of so many goes on to more repeats."""

PUT_BACK = "put back"
Params = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A candidate that this worker holds. ``is_guarded`` ones get every repeat, however slow: default and record.

    ``begun`` is how often its measurement began before and ended with the worker.
    """

    trial: optuna.Trial
    knobs: Knobs
    origin: str
    begun: int = 0

    @property
    def is_guarded(self) -> bool:
        """Whether it must not be dropped early."""
        return self.origin in ("default", "record")


class Run:
    """The studies of one run; all workers that open the same name in the same storage share them."""

    def __init__(self, storage: BaseStorage, name: str, worker: Worker) -> None:
        self.storage, self.name, self.worker = storage, name, worker
        beat = storage.record_heartbeat if isinstance(storage, RDBStorage) else None
        self.heart = Heart(beat)

    def study(self, task: Task, digest: str, space: Mapping[str, Knob]) -> KnobStudy:
        """The study of a task in its own space; ``digest`` stands for all that makes earlier times invalid."""
        name = f"{self.name}/{task.program}/{task.kernel.name}/{digest[:16]}"
        sampler = optuna.samplers.TPESampler(
            seed=self.worker.seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True
        )
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=HALVING)
        with no_warnings():
            study = optuna.create_study(
                storage=self.storage, study_name=name, sampler=sampler, pruner=pruner, load_if_exists=True
            )
        if "task" not in study.user_attrs:
            study.set_user_attr("task", task.name)
        return KnobStudy(study, space, self.worker, self.heart)

    def close(self) -> None:
        """Lets the storage go."""
        self.heart.stop()
        if isinstance(self.storage, RDBStorage):
            self.storage.engine.dispose()


class KnobStudy:
    """Candidates of one task: drawn, held, finished."""

    def __init__(self, study: optuna.Study, space: Mapping[str, Knob], worker: Worker, heart: Heart) -> None:
        self._study, self._space, self._worker, self._heart = study, space, worker, heart
        self._distributions = {name: _distribution(knob) for name, knob in space.items() if len(knob.values) > 1}

    def offer(self, knobs: Knobs, origin: str) -> None:
        """Has some knobs tried before anything is drawn, unless they were offered or tried before."""
        params = dict(self._to_params(knobs))
        if not any(_answers(trial, params) for trial in self._study.get_trials(deepcopy=False)):
            self._study.enqueue_trial(params, {"origin": origin})

    def draw(self) -> Ticket:
        """The next candidate: one that was offered, else the sampler's choice."""
        while True:
            with contextlib.suppress(UpdateFinishedTrialError), no_warnings():  # lost while it was drawn: another one
                trial = self._study.ask(self._distributions)
                # In a database whoever has put a name down has been heard, so that silence tells.
                self._heart.hold(trial._trial_id)
                with self._unless_lost(trial):
                    trial.set_user_attr("worker", self._worker.name)
                    origin = str(trial.user_attrs.get("origin", "sampler"))
                    begun = int(trial.user_attrs.get("begun", 0))
                    return Ticket(trial, self._to_knobs(trial.params), origin, begun)

    def begin(self, ticket: Ticket) -> None:
        """Notes that the measurement begins: should the worker die of it, the candidate is not tried for ever."""
        with self._unless_lost(ticket.trial):
            ticket.trial.set_user_attr("begun", ticket.begun + 1)

    def report(self, ticket: Ticket, outcome: Outcome, step: int) -> bool:
        """Keeps a time of some repeats; whether the candidate is among the better half that goes on."""
        with self._unless_lost(ticket.trial):
            ticket.trial.set_user_attr("outcome", asdict(outcome))
            ticket.trial.report(outcome.seconds, step)
            return ticket.is_guarded or not ticket.trial.should_prune()
        return False

    def finish(self, ticket: Ticket, outcome: Outcome, is_whole: bool = True) -> bool:
        """Keeps what became of a candidate, unless it was lost; one without a time, or with few repeats, is known to be
        no good."""
        trial = ticket.trial
        attributes = {"outcome": asdict(outcome), "status": outcome.status.value, "reason": outcome.reason}
        with self._unless_lost(trial):
            for name, value in attributes.items():
                if value and trial.user_attrs.get(name) != value:  # each write waits for a disk or a server
                    trial.set_user_attr(name, value)
            if outcome.is_timed and is_whole:
                self._tell(trial, outcome.seconds, TrialState.COMPLETE)
            else:
                self._tell(trial, None, TrialState.PRUNED)
            return True
        return False

    def drop(self, ticket: Ticket, reason: str) -> None:
        """Forgets a draw that taught nothing, such as one that was tried before."""
        with self._unless_lost(ticket.trial):
            ticket.trial.set_user_attr("dropped", reason)
            self._tell(ticket.trial, None, TrialState.FAIL)

    def put_back(self, *tickets: Ticket) -> None:
        """Gives up candidates that were not measured; the next worker gets them, where the storage is lost for being
        silent about them."""
        for ticket in tickets:
            self._heart.let_go(ticket.trial._trial_id)
        with contextlib.suppress(StorageError):
            for ticket in tickets:
                self._put_back(ticket)

    def _put_back(self, ticket: Ticket) -> None:
        with self._unless_lost(ticket.trial):
            ticket.trial.set_user_attr("dropped", PUT_BACK)
            # Who is killed between the two leaves it twice, which costs little, and not never.
            attributes = {"origin": ticket.origin, "begun": ticket.begun}
            self._study.enqueue_trial(dict(self._to_params(ticket.knobs)), attributes)
            self._tell(ticket.trial, None, TrialState.FAIL)

    def tried(self) -> tuple[Tried, ...]:
        """Every finished candidate, in the order in which they were begun."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return tuple(self._tried(trial) for trial in self._study.get_trials(deepcopy=False, states=states))

    def running(self) -> tuple[Knobs, ...]:
        """Knobs that some worker has in hand."""
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return tuple(self._to_knobs(trial.params) for trial in trials)

    def has_offers(self) -> bool:
        """Whether candidates wait that were offered."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def replace_lost(self) -> None:
        """Settles the trials of workers that are gone: by heartbeats where the storage has them, else by process."""
        with no_warnings():
            optuna.storages.fail_stale_trials(self._study)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            worker = str(trial.user_attrs.get("worker", ""))
            if worker and self._heart.is_heard:
                continue  # its silence would have been noticed above
            if self._worker.knows_to_be_lost(worker, trial.datetime_start):
                with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # somebody else was quicker
                    self._study.tell(trial.number, state=TrialState.FAIL)
                    replace_lost_trial(self._study, trial)

    def importances(self) -> Mapping[str, float]:
        """How much of the differences in time each knob explains; nothing where too few were timed."""
        try:
            with no_warnings():
                return dict(get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator()))
        except (ValueError, RuntimeError):
            return {}

    @contextlib.contextmanager
    def _unless_lost(self, trial: optuna.Trial) -> Iterator[None]:
        """Another worker may have taken this one for dead: then its word stands, and the candidate is let go."""
        try:
            yield
        except UpdateFinishedTrialError:
            self._heart.let_go(trial._trial_id)

    def _tell(self, trial: optuna.Trial, value: float | None, state: TrialState) -> None:
        self._study.tell(trial, value, state=state, skip_if_finished=True)
        self._heart.let_go(trial._trial_id)

    def _tried(self, trial: FrozenTrial) -> Tried:
        attributes = trial.user_attrs
        outcome = outcome_from(attributes["outcome"]) if "outcome" in attributes else Outcome(Status.REFUSED)
        return Tried(
            number=trial.number,
            knobs=self._to_knobs(trial.params),
            outcome=outcome,
            origin=str(attributes.get("origin", "sampler")),
            worker=str(attributes.get("worker", "")),
            is_whole=trial.state is TrialState.COMPLETE,
        )

    def _to_params(self, knobs: Knobs) -> Params:
        return {name: _to_param(self._space[name], knobs[name]) for name in self._distributions}

    def _to_knobs(self, params: Mapping[str, Any]) -> Knobs:
        fixed = {name: knob.values[0] for name, knob in self._space.items() if name not in params}
        return fixed | {name: _to_value(self._space[name], int(value)) for name, value in params.items()}


def _answers(trial: FrozenTrial, params: Params) -> bool:
    """Whether a trial is about some parameters, and waits, runs, is finished or was given up for good.

    What was put back or lost waits again as another trial, unless the worker that saw to it was killed meanwhile.
    """
    if dict(trial.system_attrs.get("fixed_params", trial.params)) != params:
        return False
    is_dropped = trial.user_attrs.get("dropped", PUT_BACK) != PUT_BACK
    return trial.state is not TrialState.FAIL or is_dropped or is_given_up(trial)


def _distribution(knob: Knob) -> BaseDistribution:
    """Powers of two are numbers to the sampler, by their exponents; other values are names."""
    if isinstance(knob, PowerOfTwo):
        return IntDistribution(knob.values[0].bit_length() - 1, knob.values[-1].bit_length() - 1)
    return CategoricalDistribution(_listed(knob.values))


def _listed(values: Sequence[int]) -> list[bool | int | float | str | None]:
    return list(values)


def _to_param(knob: Knob, value: int) -> int:
    return value.bit_length() - 1 if isinstance(knob, PowerOfTwo) else value


def _to_value(knob: Knob, param: int) -> int:
    return 1 << param if isinstance(knob, PowerOfTwo) else param
