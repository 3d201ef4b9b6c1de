"""Winners of kernels have to win whole steps: who slows the step loses, and the next or the default takes its place.

In: the races of all tasks, a bench. Out: a ``Confirmation``, the knobs that each task ends with and why, and the step
of every program with all defaults, with what was in use, and with all choices, measured in turns. Tasks without a race
count in these, too: a default step is one of defaults alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lynnc.autotune.noise import STEP_FLOOR, is_faster, winner
from lynnc.autotune.problems import Key, Task
from lynnc.autotune.race import Contender, Race
from lynnc.autotune.sweep import StepFinding
from lynnc.autotune.trial import Bench, Candidate, Outcome
from lynnc.kernels.kernel import Knobs

STEP_REPEATS = 15
LAST_REPEATS = 40
"""Of the steps of the table; as few as before where less time is left than ``LEISURE_SECONDS``."""
LEISURE_SECONDS = 30.0
MOST_CHALLENGERS = 3


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


def confirm(
    races: Sequence[Race],
    bench: Bench,
    seconds_left: Callable[[], float] = lambda: math.inf,
    untried: Sequence[Untried] = (),
) -> Confirmation:
    """Adds the winners one by one, the greatest gain first, each beside those that are in; then all of them at once."""
    found = Confirmation()
    for race in races:
        found.choose(race, race.incumbent, _verdict_of_race(race))
    for race in sorted(races, key=lambda race: -race.step_gain):
        if race.challengers and seconds_left() > 0:
            _confirm_one(race, races, bench, found)
        elif race.challengers:
            found.verdicts[race.task.key] = (
                f"there was no time to confirm {_name_of(race, race.best)} in whole steps: {_stays(race)}"
            )
    found.steps = _confirm_all(races, bench, found, seconds_left, untried)
    return found


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


def _confirm_one(race: Race, races: Sequence[Race], bench: Bench, found: Confirmation) -> None:
    program, key = race.task.program, race.task.key
    challengers = race.challengers[:MOST_CHALLENGERS]
    sets = [_choices(program, races, found.chosen)]
    sets += [_choices(program, races, {**found.chosen, key: challenger}) for challenger in challengers]
    base, *outcomes = bench.measure_steps(program, sets, STEP_REPEATS)
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
    races: Sequence[Race],
    bench: Bench,
    found: Confirmation,
    seconds_left: Callable[[], float],
    untried: Sequence[Untried],
) -> tuple[StepFinding, ...]:
    """Every program with all of its choices, those first whose choices changed; where that is slower, some go.

    Without time, further programs in which nothing changed are not measured.
    """
    programs = tuple(dict.fromkeys(name for race in races for name in race.task.programs))
    defaults = {race.task.key: race.default for race in races}
    in_use = {race.task.key: race.incumbent for race in races}
    steps: dict[str, StepFinding] = {}
    while len(steps) < len(programs):
        program = next(
            (name for name in programs if name not in steps and _changed(name, races, found)),
            next(name for name in programs if name not in steps),
        )
        if steps and seconds_left() <= 0 and not _changed(program, races, found):
            break
        rest = [one for one in untried if program in one.task.programs and dict(one.default) != dict(one.in_use)]
        kept = [_candidate(program, one.task, one.in_use) for one in rest]
        sets = [_choices(program, races, defaults) + [_candidate(program, one.task, one.default) for one in rest]]
        sets += [_choices(program, races, who) + kept for who in (in_use, found.chosen)]
        repeats = LAST_REPEATS if seconds_left() > LEISURE_SECONDS else STEP_REPEATS
        default, before, tuned = _measure(bench, program, sets, repeats)
        steps[program] = StepFinding(program, default, before, tuned)
        if not tuned.is_timed or is_faster(before, tuned, STEP_FLOOR):
            for task in _drop(program, races, bench, found):
                for name in task.programs:
                    steps.pop(name, None)
    return tuple(steps[name] for name in programs if name in steps)


def _measure(bench: Bench, program: str, sets: Sequence[list[Candidate]], repeats: int) -> list[Outcome]:
    """The step with each set of choices; equal sets are measured once."""
    different = [one for index, one in enumerate(sets) if one not in sets[:index]]
    outcomes = bench.measure_steps(program, different, repeats)
    return [outcomes[different.index(one)] for one in sets]


def _drop(program: str, races: Sequence[Race], bench: Bench, found: Confirmation) -> list[Task]:
    """Gives back what was in use to what slows a program: to the choices without which it is faster, or else to all;
    first to problems chosen in other programs."""
    changed = _changed(program, races, found)
    suspects = [race for race in changed if race.task.program != program] or changed
    guilty = _guilty(program, suspects, races, bench, found)
    for race in guilty or suspects:
        how = "it" if guilty else "together with others it"
        found.choose(race, race.incumbent, f"{how} slows the step of {program}, so {_stays(race)}")
    return [race.task for race in guilty or suspects]


def _guilty(
    program: str, suspects: Sequence[Race], races: Sequence[Race], bench: Bench, found: Confirmation
) -> list[Race]:
    """Those without whose choice, all others in place, the program is faster."""
    sets = [_choices(program, races, found.chosen)]
    sets += [_choices(program, races, {**found.chosen, race.task.key: race.incumbent}) for race in suspects]
    tuned, *without = bench.measure_steps(program, sets, STEP_REPEATS)
    return [race for race, one in zip(suspects, without, strict=True) if is_faster(one, tuned, STEP_FLOOR)]


def _changed(program: str, races: Iterable[Race], found: Confirmation) -> list[Race]:
    """Races of a program whose choice is another than what was in use."""
    return [
        race for race in races if program in race.task.programs and found.chosen[race.task.key] is not race.incumbent
    ]


def _choices(program: str, races: Sequence[Race], chosen: Mapping[Key, Contender]) -> list[Candidate]:
    """The candidates of every task that a program uses, as parts of that program."""
    return [
        _candidate(program, race.task, chosen[race.task.key].knobs) for race in races if program in race.task.programs
    ]


def _candidate(program: str, task: Task, knobs: Knobs) -> Candidate:
    return Candidate(program, task.kernel.name, task.problem, dict(knobs))
