"""A whole run: every task searched within the budget, raced, confirmed in whole steps, and summed up.

In: tasks, a run's studies, a bench, a budget. Out: a ``Sweep``. The search may be shared by any number of workers on
any number of hosts; racing and confirming is one worker's work, at the end.

Example::

    tuner = Tuner(tasks, Run(storage, "h200", Worker.here()), bench, Setting(device), identity)
    tuner.search(budget, records)
    sweep = tuner.conclude(budget, About("qwen3.6-35b-a3b", identity), records)
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from lynnc.artifact import digest
from lynnc.autotune.bounds import least_bound
from lynnc.autotune.budget import Budget
from lynnc.autotune.confirm import Confirmation, Untried, confirm
from lynnc.autotune.legalspace import legal_space
from lynnc.autotune.problems import Key, Task
from lynnc.autotune.race import Race, promise, run_race, unraced
from lynnc.autotune.search import Say, Search, Setting, candidate_of
from lynnc.autotune.studies import KnobStudy, Run
from lynnc.autotune.sweep import Finding, Sweep
from lynnc.autotune.trial import Bench, Outcome, Status
from lynnc.deviceidentity import Identity
from lynnc.kernels.kernel import Knob, Knobs
from lynnc.records import Records, best_record, legal_records
from lynnc.render import template_digest
from lynnc.tools import find_tools

NOT_REACHED = Outcome(Status.REFUSED, reason="the budget did not reach it")
NOT_RACED = "there was no time for the last race, so what was in use stays"
MOST_RECORDS = 3
"""Different knobs of records, of a problem or of near ones, that are in the race; outdated ones too."""
TASKS_AHEAD = 3
"""Tasks whose first candidates compile while one is searched: with little time each has little more than these."""
EVEN = 0.3
"""Part of the search that all tasks share alike: by their shares alone the last ones would get no more than records."""
RACING = 0.5
"""Part of the time after the search for races; the rest is for whole steps."""


@dataclass(frozen=True, slots=True)
class About:
    """What a sweep says of itself: the model, the device, whether it was simulated, and what was asked for."""

    model: str
    device: Identity
    is_simulated: bool = False
    settings: Mapping[str, str | int] = field(default_factory=dict)


class Tuner:
    """Tasks with their studies, on one bench."""

    def __init__(self, tasks: Sequence[Task], run: Run, bench: Bench, setting: Setting, identity: Identity) -> None:
        self.tasks = tuple(tasks)
        self._run, self._bench, self._setting = run, bench, setting
        self._spaces = {task.key: legal_space(task, setting.device.target) for task in self.tasks}
        self._studies = {task.key: self._open(task, identity) for task in self.tasks}

    def _open(self, task: Task, identity: Identity) -> KnobStudy:
        space = self._spaces[task.key].knobs
        return self._run.study(task, study_digest(task, space, identity), space)

    def study(self, task: Task) -> KnobStudy:
        """The study of a task."""
        return self._studies[task.key]

    def search(self, budget: Budget, records: Records, say: Say | None = None) -> None:
        """Each task for its share of what is left, so that what one does not need goes to those behind it.

        The first candidates of the next tasks compile while one is searched.
        """
        shares = {task.key: (1 - EVEN) * task.share + EVEN / len(self.tasks) for task in self.tasks}
        left = sum(shares.values())
        begun: deque[Search] = deque()
        try:
            for index, task in enumerate(self.tasks):
                allowance = budget.part(min(1.0, shares[task.key] / left))
                left -= shares[task.key]
                if not allowance.is_left():
                    return
                for following in self.tasks[index + len(begun) : index + 1 + TASKS_AHEAD]:
                    begun.append(self._begin(following, records))
                begun.popleft().run(allowance, budget, say)
        finally:
            for search in begun:
                search.release()

    def _begin(self, task: Task, records: Records) -> Search:
        search = Search(task, self.study(task), self._bench, self._setting, self._spaces[task.key])
        known = legal_records(records, task.kernel, task.problem, self._setting.device.target)
        different = {frozenset(match.record.knobs.items()): match.record.knobs for match in known}
        search.begin(list(islice(different.values(), MOST_RECORDS)))
        return search

    def conclude(self, budget: Budget, about: About, records: Records) -> Sweep:
        """Races what was tried, confirms the winners against what ``records`` make the compiler use, and sums up."""
        in_use = {task.key: self._in_use(task, records) for task in self.tasks}
        kept = [Untried(task, task.default(self._setting.device), in_use[task.key]) for task in self.tasks]
        self._bench.prepare([candidate_of(one.task, one.default) for one in kept if one.default != one.in_use])
        races = self._races(budget, in_use)
        raced = {race.task.key for race in races}
        untried = [one for one in kept if one.task.key not in raced]
        confirmation = confirm(races, self._bench, lambda: budget.seconds_left, untried)
        by_key = {race.task.key: race for race in races}
        findings = [self._finding(task, by_key.get(task.key), confirmation, in_use[task.key]) for task in self.tasks]
        return Sweep(
            run=self._run.name,
            model=about.model,
            device=about.device.name,
            is_simulated=about.is_simulated,
            seconds=budget.seconds_spent,
            settings=dict(about.settings),
            findings=tuple(found if not about.is_simulated else _predicted(found) for found in findings),
            steps=confirmation.steps,
        )

    def _races(self, budget: Budget, in_use: Mapping[Key, Knobs]) -> list[Race]:
        """Of the tasks of which something was timed, those that promise most first: time may be short."""
        promises: dict[Key, float] = {}
        for task in self.tasks:
            study = self.study(task)
            study.replace_lost()
            if any(tried.outcome.is_timed for tried in study.tried()):
                promises[task.key] = promise(task, study, in_use[task.key], self._setting.floor)
        end = 0.0 if math.isinf(budget.seconds_left) else (1 - RACING) * budget.seconds_left
        races: dict[Key, Race] = {}
        known = [task for task in self.tasks if task.key in promises]
        for task in sorted(known, key=lambda task: -promises[task.key]):
            study, holder = self.study(task), in_use[task.key]
            if not promises[task.key]:
                races[task.key] = unraced(task, study, self._setting, holder)
            elif budget.seconds_left > end or not races:
                races[task.key] = run_race(task, study, self._bench, self._setting, holder)
        return [races[task.key] for task in known if task.key in races]

    def _in_use(self, task: Task, records: Records) -> Knobs:
        match = best_record(records, task.kernel, task.problem, self._setting.device.target)
        return match.record.knobs if match else task.default(self._setting.device)

    def _finding(self, task: Task, race: Race | None, confirmation: Confirmation, in_use: Knobs) -> Finding:
        study, default = self.study(task), task.default(self._setting.device)
        chosen = confirmation.chosen[task.key] if race else None
        return Finding(
            kernel=task.kernel.name,
            program=task.program,
            programs=task.programs,
            problem=_plain(task.problem),
            launches=task.launches,
            share=task.share,
            bound_seconds=least_bound(task, self._setting.device, self._setting.context),
            default_knobs=default,
            in_use=in_use,
            knobs=chosen.knobs if chosen else in_use,
            default=race.default.outcome if race else NOT_REACHED,
            best=chosen.outcome if chosen else NOT_REACHED,
            verdict=confirmation.verdicts[task.key] if race else _why_not_raced(study),
            tried=study.tried(),
            importances=study.importances(),
        )


def _why_not_raced(study: KnobStudy) -> str:
    return NOT_RACED if any(tried.outcome.is_timed for tried in study.tried()) else NOT_REACHED.reason


def _predicted(found: Finding) -> Finding:
    """A finding whose verdict says that nothing was run."""
    return replace(found, verdict=f"{found.verdict}, by prediction alone") if found.is_raced else found


def study_digest(task: Task, space: Mapping[str, Knob], identity: Identity) -> str:
    """Stands for all that makes earlier times of a task invalid: device, template, compiler, the problem itself; and
    for the values that a sampler may draw, which must not change within a study."""
    tools = find_tools()
    ptxas = tools.ptxas_for(int("".join(filter(str.isdigit, identity.arch))))
    facts = {
        "problem": _plain(task.problem),
        "kernel": task.kernel.name,
        "space": {name: list(knob.values) for name, knob in space.items()},
        "program": task.program,
        "template": template_digest(task.kernel.template),
        "device": repr(identity),
        "triton": tools.triton_version,
        "ptxas": ptxas.version if ptxas else None,
    }
    return digest(json.dumps(facts, sort_keys=True).encode())


def _plain(problem: Mapping[str, int | str]) -> dict[str, int | str]:
    """A problem without the enumerations of formats."""
    return {name: value if isinstance(value, int) else str(value) for name, value in problem.items()}
