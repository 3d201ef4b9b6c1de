"""Winners of kernels have to win whole steps: who slows the step loses, and the next or the default takes its place.

In: the races of all tasks, a bench. Out: a ``Confirmation``, the knobs that each task ends with and why, and the step
of every program with all defaults, with what was in use, and with all choices, measured in turns. Tasks without a race
count in these, too: a default step is one of defaults alone.

A winner joins by the step of the program in which its kernel was measured; at the end no program's step may be slower
than with what was in use. So a choice that gains in ``decode/1`` and slows ``decode/8`` goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lynnc.autotune.noise import STEP_FLOOR, is_faster, winner
from lynnc.autotune.problems import Key, Task
from lynnc.autotune.race import Contender, Race
from lynnc.autotune.sweep import StepFinding
from lynnc.autotune.trial import Bench, Candidate, Outcome, Status
from lynnc.kernels.kernel import Knobs

STEP_REPEATS = 15
LAST_REPEATS = 40
"""Of the steps of the table; as few as before where less time is left than ``LEISURE_SECONDS``."""
LEISURE_SECONDS = 30.0
MOST_CHALLENGERS = 3
SETS = 3
"""Of knobs, with which every step of the table is measured."""
MARGIN = 3
"""How many times as long as those before a step may take in which nothing changed: those of long prompts do."""
NO_TIME = Outcome(Status.REFUSED, reason="not confirmed: there was no time left, and none of its knobs have changed")


@dataclass(slots=True)
class Confirmation:
    """Who was chosen for each task by its key, a sentence that says why, and the steps of the programs."""

    chosen: dict[Key, Contender] = field(default_factory=dict)
    verdicts: dict[Key, str] = field(default_factory=dict)
    steps: tuple[StepFinding, ...] = ()

    def choose(self, race: Race, contender: Contender, verdict: str) -> None:
        """Settles a task."""
        self.chosen[race.task.key] = contender
        self.verdicts[race.task.key] = verdict


@dataclass(frozen=True, slots=True)
class Untried:
    """A task that had no race: it keeps the knobs in use."""

    task: Task
    default: Knobs
    in_use: Knobs


@dataclass(slots=True)
class Stopwatch:
    """Measures steps on a bench, and knows from those before how many more there is time for."""

    bench: Bench
    seconds_left: Callable[[], float]
    seconds_a_set: float = 0.0

    def measure(self, program: str, sets: Sequence[list[Candidate]], repeats: int = STEP_REPEATS) -> list[Outcome]:
        """The step with each set of choices; equal sets are measured once."""
        different = [one for index, one in enumerate(sets) if one not in sets[:index]]
        before = self.seconds_left()
        outcomes = self.bench.measure_steps(program, different, repeats)
        if repeats == STEP_REPEATS and math.isfinite(before):
            self.seconds_a_set = max(self.seconds_a_set, (before - self.seconds_left()) / len(different))
        return [outcomes[different.index(one)] for one in sets]

    def is_time_for(self, sets: int) -> bool:
        """Whether steps with so many sets of choices can still be measured."""
        return self.seconds_left() > sets * self.seconds_a_set


def confirm(
    races: Sequence[Race],
    bench: Bench,
    seconds_left: Callable[[], float] = lambda: math.inf,
    untried: Sequence[Untried] = (),
) -> Confirmation:
    """Adds the winners one by one, the greatest gain first, each beside those that are in; then all of them at once.

    None is added where the time would not do for the steps of all programs that it changes.
    """
    found, watch = Confirmation(), Stopwatch(bench, seconds_left)
    for race in races:
        found.choose(race, race.incumbent, _verdict_of_race(race))
    for race in sorted(races, key=lambda race: -race.step_gain):
        if race.challengers and watch.is_time_for(_sets_to_confirm(race, races, found)):
            _confirm_one(race, races, watch, found)
        elif race.challengers:
            found.verdicts[race.task.key] = (
                f"there was no time to confirm {_name_of(race, race.best)} in whole steps: {_stays(race)}"
            )
    found.steps = _confirm_all(races, watch, found, untried)
    return found


def _sets_to_confirm(race: Race, races: Sequence[Race], found: Confirmation) -> int:
    """Sets of choices whose steps are to be measured if a race's winner joins: its own, and those of the table."""
    programs = {name for one in races if one is race or _is_changed(one, found) for name in one.task.programs}
    return 1 + len(race.challengers[:MOST_CHALLENGERS]) + SETS * len(programs)


def _verdict_of_race(race: Race) -> str:
    if not any(contender.outcome.is_timed for contender in race.contenders):
        return f"nothing could be timed: the default {race.default.outcome.status.value}"
    return f"no candidate beats {_name_of(race, race.incumbent)} beyond the noise"


def _name_of(race: Race, contender: Contender) -> str:
    if contender is race.default:
        return "the default"
    return "the record in use" if contender is race.incumbent else "a faster one"


def _stays(race: Race) -> str:
    return f"{_name_of(race, race.incumbent)} stays"


def _confirm_one(race: Race, races: Sequence[Race], watch: Stopwatch, found: Confirmation) -> None:
    program, key = race.task.program, race.task.key
    challengers = race.challengers[:MOST_CHALLENGERS]
    sets = [_choices(program, races, found.chosen)]
    sets += [_choices(program, races, {**found.chosen, key: challenger}) for challenger in challengers]
    base, *outcomes = watch.measure(program, sets)
    able = [index for index, one in enumerate(outcomes) if one.is_timed and not is_faster(base, one, STEP_FLOOR)]
    if not able:
        found.verdicts[key] = f"the fastest kernel slows the step of {program}, so {_stays(race)}"
        return
    first = able[winner([outcomes[index] for index in able], STEP_FLOOR)]
    verdict = f"confirmed in the step of {program}"
    if first != 0:
        verdict = f"the fastest kernel is not the best for the step of {program}; this one is"
    found.choose(race, challengers[first], verdict)


def _confirm_all(
    races: Sequence[Race], watch: Stopwatch, found: Confirmation, untried: Sequence[Untried]
) -> tuple[StepFinding, ...]:
    """Every program with all of its choices, those first whose choices changed; where that is slower, some go.

    Without time, programs in which nothing changed are not measured; those in which something did always are.
    """
    tasks = [*(race.task for race in races), *(one.task for one in untried)]
    programs = tuple(dict.fromkeys(name for task in tasks for name in task.programs))
    steps: dict[str, StepFinding] = {}
    while waiting := sorted(
        (name for name in programs if name not in steps), key=lambda name: not _changed(name, races, found)
    ):
        program = waiting[0]
        if not _changed(program, races, found) and not watch.is_time_for(MARGIN * SETS):
            steps |= {name: StepFinding(name, NO_TIME, NO_TIME, NO_TIME) for name in waiting}
            break
        step = steps[program] = _step_of(program, races, watch, found, untried)
        if step.tuned.is_timed and not is_faster(step.before, step.tuned, STEP_FLOOR):
            continue
        touched = {name for race in _drop(program, races, watch, found) for name in race.task.programs}
        for name in touched & steps.keys():
            if _changed(name, races, found):
                del steps[name]
            else:
                steps[name] = replace(steps[name], tuned=steps[name].before)
    return tuple(steps[name] for name in programs)


def _step_of(
    program: str, races: Sequence[Race], watch: Stopwatch, found: Confirmation, untried: Sequence[Untried]
) -> StepFinding:
    defaults = {race.task.key: race.default for race in races}
    in_use = {race.task.key: race.incumbent for race in races}
    rest = [one for one in untried if program in one.task.programs and dict(one.default) != dict(one.in_use)]
    kept = [_candidate(program, one.task, one.in_use) for one in rest]
    sets = [_choices(program, races, defaults) + [_candidate(program, one.task, one.default) for one in rest]]
    sets += [_choices(program, races, who) + kept for who in (in_use, found.chosen)]
    repeats = LAST_REPEATS if watch.seconds_left() > LEISURE_SECONDS else STEP_REPEATS
    return StepFinding(program, *watch.measure(program, sets, repeats))


def _drop(program: str, races: Sequence[Race], watch: Stopwatch, found: Confirmation) -> list[Race]:
    """Gives back what was in use to what slows a program: to the choices without which it is faster; if none stands
    out, to the half without which it takes least; without time for that, to all. First to problems chosen in other
    programs."""
    changed = _changed(program, races, found)
    suspects = [race for race in changed if race.task.program != program] or changed
    how, guilty = "it" if len(changed) == 1 else "together with others it", suspects
    steps = {name for race in suspects for name in race.task.programs}
    if len(suspects) > 1 and watch.is_time_for(1 + len(suspects) + SETS * len(steps)):
        how, guilty = _guilty(program, suspects, races, watch, found)
    for race in guilty:
        found.choose(race, race.incumbent, f"{how} slows the step of {program}, so {_stays(race)}")
    return guilty


def _guilty(
    program: str, suspects: Sequence[Race], races: Sequence[Race], watch: Stopwatch, found: Confirmation
) -> tuple[str, list[Race]]:
    """Those without whose choice, all others in place, the program is faster, or half of all; and how they slow it."""
    sets = [_choices(program, races, found.chosen)]
    sets += [_choices(program, races, {**found.chosen, race.task.key: race.incumbent}) for race in suspects]
    tuned, *without = watch.measure(program, sets)
    alone = [race for race, one in zip(suspects, without, strict=True) if is_faster(one, tuned, STEP_FLOOR)]
    if alone:
        return "it", alone
    seconds = [one.seconds if one.is_timed else math.inf for one in without]
    ranked = sorted(zip(seconds, suspects, strict=True), key=lambda pair: pair[0])
    return "together with others it", [race for _, race in ranked[: -(-len(ranked) // 2)]]


def _is_changed(race: Race, found: Confirmation) -> bool:
    """Whether the choice of a race is another than what was in use."""
    return found.chosen[race.task.key] is not race.incumbent


def _changed(program: str, races: Iterable[Race], found: Confirmation) -> list[Race]:
    """Races of a program whose choice is another than what was in use."""
    return [race for race in races if program in race.task.programs and _is_changed(race, found)]


def _choices(program: str, races: Sequence[Race], chosen: Mapping[Key, Contender]) -> list[Candidate]:
    """The candidates of every task that a program uses, as parts of that program."""
    return [
        _candidate(program, race.task, chosen[race.task.key].knobs) for race in races if program in race.task.programs
    ]


def _candidate(program: str, task: Task, knobs: Knobs) -> Candidate:
    return Candidate(program, task.kernel.name, task.problem, dict(knobs))
