"""Winners have to win whole steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tuning import DEVICE, Rig, finding, tasks

from lynnc.autotune.confirm import LAST_REPEATS, STEP_REPEATS, Untried, confirm
from lynnc.autotune.noise import SIMULATED_FLOOR
from lynnc.autotune.race import Contender, Race, promise, unraced
from lynnc.autotune.search import Setting
from lynnc.autotune.synthetic import SyntheticBench, Traits
from lynnc.autotune.trial import Candidate, Outcome, Status
from lynnc.records import Records

BOTH = ("decode/1", "prefill/16")


def timed(seconds: float) -> Outcome:
    return Outcome(Status.TIMED, seconds, seconds, seconds, 20)


class Steps:
    """A bench that times steps by a function of their candidates."""

    def __init__(self, seconds) -> None:
        self.seconds, self.asked = seconds, []

    def measure_steps(self, program: str, choices: Sequence[Sequence[Candidate]], repeats: int) -> list[Outcome]:
        self.asked.append((program, choices))
        return [timed(self.seconds(program, {one.kernel: dict(one.knobs) for one in chosen})) for chosen in choices]


@pytest.fixture(scope="module")
def races():
    """Two tasks whose second contender is twice and whose third is 1.5 times as fast as the default."""
    found = []
    for task in (*tasks("embed", "gdn_step", programs=BOTH),):
        knobs = task.default(DEVICE)
        others = [{**knobs, "num_warps": warps} for warps in (8, 16)]
        contenders = [Contender(knobs, "default", timed(3e-6)), Contender(others[0], "sampler", timed(1.5e-6))]
        found.append(Race(task, (*contenders, Contender(others[1], "sampler", timed(2e-6))), knobs))
    return found


def warps(chosen) -> list[int]:
    return [contender.knobs["num_warps"] for contender in chosen.chosen.values()]


def test_winners_that_speed_the_step_up_stay(races):
    found = confirm(
        races, Steps(lambda program, chosen: 1 - sum(knobs["num_warps"] == 8 for knobs in chosen.values()) / 10)
    )
    assert warps(found) == [8, 8] and all("confirmed" in verdict for verdict in found.verdicts.values())
    assert {step.program: round(step.gain, 3) for step in found.steps} == {"decode/1": 0.2, "prefill/16": 0.1}


def test_a_winner_that_slows_the_step_loses_to_the_next(races):
    def seconds(program, chosen):
        return 1 + sum({8: 0.05, 16: -0.02}.get(knobs["num_warps"], 0) for knobs in chosen.values())

    found = confirm(races, Steps(seconds))
    assert warps(found) == [16, 16]
    assert all("the fastest kernel is not the best for the step" in verdict for verdict in found.verdicts.values())


def test_the_default_stays_where_every_faster_kernel_slows_the_step(races):
    found = confirm(races, Steps(lambda program, chosen: 1 + sum(k["num_warps"] in (8, 16) for k in chosen.values())))
    assert [contender.origin for contender in found.chosen.values()] == ["default", "default"]
    assert all("slows the step" in verdict for verdict in found.verdicts.values())
    assert all(step.gain == 0 for step in found.steps)


def test_a_choice_that_slows_another_program_goes(races):
    def seconds(program, chosen):
        is_fast = chosen["embed"]["num_warps"] in (8, 16)
        return 1 + (-0.1 if program == "decode/1" else 0.2) * is_fast

    found = confirm(races, Steps(seconds))
    by_kernel = {race.task.kernel.name: found.chosen[race.task.key] for race in races}
    assert by_kernel["embed"].origin == "default" and by_kernel["gdn_step"].origin == "sampler"
    assert "prefill/16" in found.verdicts[next(race.task.key for race in races if race.task.kernel.name == "embed")]
    assert all(step.gain == 0 for step in found.steps)


def test_together_they_must_not_be_slower_either(races):
    class Late(Steps):
        """One by one each is a gain; all at once, measured longer, they are none."""

        def measure_steps(self, program, choices, repeats):
            self.seconds = (lambda program, chosen: 1 + 0.1 * fast(chosen)) if repeats == LAST_REPEATS else one_by_one
            return super().measure_steps(program, choices, repeats)

    def fast(chosen):
        return sum(knobs["num_warps"] in (8, 16) for knobs in chosen.values())

    def one_by_one(program, chosen):
        return 1 - 0.1 * fast(chosen)

    found = confirm(races, Late(one_by_one))
    assert [contender.origin for contender in found.chosen.values()] == ["default", "default"]
    first, last = sorted(found.verdicts.values(), reverse=True)
    assert "together with others it slows" in first and last.startswith("it slows"), "half, then what is left"


def test_the_default_wins_a_race_that_is_a_tie(races):
    contenders = (races[0].default, Contender({}, "sampler", timed(2.99e-6)))
    race = Race(races[0].task, contenders, races[0].in_use)
    assert race.best is race.default and race.challengers == () and race.step_gain == 0


def test_times_that_say_little_need_more_to_count(races):
    default, better = races[0].default, Contender({}, "sampler", timed(2.5e-6))
    sure, unsure = (Race(races[0].task, (default, better), races[0].in_use, floor) for floor in (0.01, SIMULATED_FLOOR))
    assert sure.best is better and unsure.best is default and unsure.challengers == ()
    much_better = Contender({}, "sampler", timed(2.3e-6))
    assert Race(races[0].task, (default, much_better), races[0].in_use, SIMULATED_FLOOR).best is much_better


def test_without_time_nothing_is_changed(races):
    found = confirm(races, Steps(lambda program, chosen: 1.0), seconds_left=lambda: 0.0)
    assert all(contender.origin == "default" for contender in found.chosen.values())
    assert all("no time" in verdict for verdict in found.verdicts.values())


def with_record(races, seconds: float) -> list[Race]:
    """The same races with the third contender in use, as a record of so many seconds."""
    found = []
    for race in races:
        default, fast, other = race.contenders
        record = Contender(other.knobs, "record", timed(seconds))
        found.append(Race(race.task, (default, record, fast), record.knobs))
    return found


def test_without_time_the_record_in_use_stays_and_not_the_default(races):
    found = confirm(with_record(races, 2e-6), Steps(lambda program, chosen: 1.0), seconds_left=lambda: 0.0)
    assert all(contender.origin == "record" for contender in found.chosen.values())
    assert all("the record in use stays" in verdict for verdict in found.verdicts.values())


def test_a_winner_has_to_beat_the_record_in_use(races):
    known = with_record(races, 1.5e-6)
    assert all(race.challengers == () and race.step_gain == 0 for race in known)
    found = confirm(known, Steps(lambda program, chosen: 1.0))
    assert all("no candidate beats the record in use" in verdict for verdict in found.verdicts.values())


def test_a_record_that_is_slower_than_the_default_gives_way(races):
    slow = with_record(races, 4e-6)
    found = confirm(slow, Steps(lambda program, chosen: 1 - sum(k["num_warps"] == 8 for k in chosen.values()) / 10))
    assert warps(found) == [8, 8]
    outdone = [Race(race.task, race.contenders[:2], race.in_use) for race in slow]
    found = confirm(outdone, Steps(lambda program, chosen: 1 + sum(k["num_warps"] == 16 for k in chosen.values()) / 10))
    assert [contender.origin for contender in found.chosen.values()] == ["default", "default"]
    assert {step.program: round(step.gain, 3) for step in found.steps} == {"decode/1": 0.167, "prefill/16": 0.091}


def test_choices_that_together_slow_the_step_give_way_to_what_was_in_use(races):
    class Late(Steps):
        def measure_steps(self, program, choices, repeats):
            sign = 1 if repeats == LAST_REPEATS else -1
            self.seconds = lambda program, chosen: 1 + sign * 0.1 * sum(k["num_warps"] == 8 for k in chosen.values())
            return super().measure_steps(program, choices, repeats)

    found = confirm(with_record(races, 2e-6), Late(None))
    assert all(contender.origin == "record" for contender in found.chosen.values())


def test_a_default_step_is_one_of_defaults_even_where_a_task_had_no_race(races):
    """What was in use there counts in both other steps, and equal knobs are not asked for."""
    knobs, task = races[1].default.knobs, races[1].task
    bench = Steps(lambda program, chosen: 1 - sum(k["num_warps"] == 16 for k in chosen.values()) / 10)
    found = confirm(races[:1], bench, untried=[Untried(task, knobs, {**knobs, "num_warps": 16})])
    step = next(step for step in found.steps if step.program == task.program)
    assert (step.default.seconds, step.before.seconds) == (1.0, 0.9)
    assert found.chosen.keys() == {races[0].task.key}, "it keeps what it has"
    same = Steps(lambda program, chosen: 1.0)
    confirm(races[:1], same, untried=[Untried(task, knobs, knobs)])
    assert all(one.kernel != task.kernel.name for _, choices in same.asked for chosen in choices for one in chosen)


@pytest.mark.parametrize(("left", "expected"), [(10.0, {STEP_REPEATS}), (100.0, {STEP_REPEATS, LAST_REPEATS})])
def test_steps_are_shorter_where_time_is_short(races, left, expected):
    bench = Steps(lambda program, chosen: 1.0)
    repeats: list[int] = []
    bench.measure_steps = lambda program, choices, count: repeats.append(count) or [timed(1.0)] * len(choices)
    confirm(races, bench, seconds_left=lambda: left)
    assert set(repeats) == expected


def test_a_race_is_held_only_where_the_search_saw_somebody_faster():
    task = tasks("embed")[0]
    rig = Rig([task], Traits(seed=2))
    rig.tuner().search(rig.budget(trials=12), Records())
    default, study = task.default(DEVICE), rig.tuner().study(task)
    by_time = sorted(study.tried(), key=lambda tried: tried.outcome.seconds or math.inf)
    best = dict(next(tried.knobs for tried in by_time if tried.outcome.is_timed))
    gain = rig.bench.seconds(task, default) - rig.bench.seconds(task, best)
    assert promise(task, study, default) == pytest.approx(task.launches * gain, rel=0.3) and gain > 0
    assert promise(task, study, best) == 0 and promise(task, study, {"num_warps": 1}) == math.inf
    race = unraced(task, study, Setting(DEVICE), best)
    assert [one.origin for one in race.contenders] == ["default", "record"] and race.incumbent.outcome.is_timed


def test_only_the_choice_that_slows_another_program_gives_way():
    """What others gain there stays."""
    shared = tasks("embed", "rms_norm", "top_k", programs=("prefill", "prefill/16"))
    shared = [task for task in shared if len(task.programs) > 1]
    assert len(shared) > 1
    found = []
    for task in shared:
        knobs = task.default(DEVICE)
        better = Contender({**knobs, "num_warps": 16}, "sampler", timed(1e-6))
        found.append(Race(task, (Contender(knobs, "default", timed(2e-6)), better), knobs))

    def seconds(program, chosen):
        fast = [kernel for kernel, knobs in chosen.items() if knobs["num_warps"] == 16]
        return 1 - 0.05 * len(fast) + (0.5 if program != shared[0].program and shared[0].kernel.name in fast else 0)

    confirmation = confirm(found, Steps(seconds))
    origins = {race.task.kernel.name: confirmation.chosen[race.task.key].origin for race in found}
    slow = shared[0].kernel.name
    assert origins == {**dict.fromkeys(origins, "sampler"), slow: "default"}
    assert confirmation.verdicts[shared[0].key].startswith("it slows the step of")
    assert all(step.gain > 0 for step in confirmation.steps)


def test_without_time_programs_in_which_nothing_changed_are_not_measured(races):
    times = iter([1.0, *[0.0] * 9])
    only_decode = [race for race in races if race.task.programs == ("decode/1",)]
    other = [race for race in races if race not in only_decode]
    assert only_decode and other
    kept = [Race(race.task, race.contenders[:1], race.in_use) for race in other]
    found = confirm([*only_decode, *kept], Steps(lambda *_: 1.0), seconds_left=lambda: next(times))
    measured, other = found.steps
    assert (measured.program, other.program) == ("decode/1", "prefill/16") and measured.is_timed
    assert not other.is_timed and "not confirmed: there was no time left" in other.why_not and other.gain == 0


def test_a_kernel_winner_that_disturbs_its_neighbours_loses_on_the_whole_device():
    found = tasks("experts_up", "experts_down")
    up, down = sorted(found, key=lambda task: task.kernel.name, reverse=True)
    calm = Rig(found, Traits(seed=3, noise=0.001)).sweep(trials=150)
    assert not finding(calm, up).is_default and not finding(calm, down).is_default
    traits = Traits(seed=3, noise=0.001, disturbing={"experts_up": 50e-6})
    rough = Rig(found, traits).sweep(trials=150)
    assert finding(rough, up).is_default and not finding(rough, down).is_default
    assert "slows the step of decode/1" in finding(rough, up).verdict
    assert rough.steps[0].gain > 0


def test_the_made_up_device_keeps_its_word():
    found = tasks("experts_up")
    bench = SyntheticBench(found, DEVICE, Traits(seed=8), lambda seconds: None)
    best = bench.seconds(found[0], bench.optimum(found[0]))
    assert bench.fault(found[0], bench.optimum(found[0])) is None
    assert bench.seconds(found[0], found[0].default(DEVICE)) > best
