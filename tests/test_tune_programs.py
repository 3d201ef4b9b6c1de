"""Winners are confirmed in the steps of every program that was asked for, and none may be slower than before."""

from __future__ import annotations

import json

import pytest
from tuning import DEVICE, IDENTITY, MODEL, Rig, finding, tasks

from lynnc.autotune.confirm import Stopwatch, confirm
from lynnc.autotune.publish import summary_of
from lynnc.autotune.race import Contender, Race
from lynnc.autotune.synthetic import Traits
from lynnc.autotune.trial import Outcome, Status
from lynnc.autotune.tuner import About
from lynnc.jsonform import encode
from lynnc.records import Records
from lynnc.report.tuning import TuneSummary

DECODE = ("decode/1", "decode/2", "decode/4", "decode/8")
KERNELS = ("embed", "gdn_step", "argmax", "combine_gate")


def timed(seconds: float) -> Outcome:
    return Outcome(Status.TIMED, seconds, seconds, seconds, 20)


def races(*kernels: str) -> list[Race]:
    """Tasks whose second contender, with 16 warps, is twice as fast as the default."""
    found = []
    for task in tasks(*kernels, programs=DECODE):
        knobs = task.default(DEVICE)
        faster = Contender({**knobs, "num_warps": 16}, "sampler", timed(1e-6))
        found.append(Race(task, (Contender(knobs, "default", timed(2e-6)), faster), knobs))
    return found


class Steps:
    """A bench that times steps by their program and the kernels that have 16 warps; each set takes a second."""

    def __init__(self, seconds) -> None:
        self.seconds, self.asked, self.now = seconds, [], 0.0

    def measure_steps(self, program, choices, repeats):
        self.asked.append(program)
        self.now += len(choices)
        changed = [{one.kernel for one in chosen if one.knobs["num_warps"] == 16} for chosen in choices]
        assert all(one.program == program for chosen in choices for one in chosen)
        return [timed(self.seconds(program, kernels)) for kernels in changed]


def changed(found, races) -> set[str]:
    return {race.task.kernel.name for race in races if found.chosen[race.task.key] is not race.incumbent}


def test_every_decode_program_is_measured_with_all_choices() -> None:
    known = races(*KERNELS)
    found = confirm(known, Steps(lambda program, kernels: 1 - 0.1 * len(kernels)))
    assert changed(found, known) == set(KERNELS)
    assert [step.program for step in found.steps] == list(DECODE)
    assert all(step.is_timed and step.gain == pytest.approx(0.4) for step in found.steps)


@pytest.mark.parametrize("slow", DECODE[1:])
def test_a_choice_that_gains_in_one_row_and_slows_more_rows_goes(slow: str) -> None:
    def seconds(program, kernels):
        return 1 - 0.1 * len(kernels) + (0.5 if program == slow and "embed" in kernels else 0)

    known = races(*KERNELS)
    found = confirm(known, Steps(seconds))
    assert changed(found, known) == set(KERNELS) - {"embed"}
    embed = next(race for race in known if race.task.kernel.name == "embed")
    assert found.verdicts[embed.task.key] == f"it slows the step of {slow}, so the default stays"
    assert all(step.gain == pytest.approx(0.3) for step in found.steps), "all of them after it was given back"


def test_what_others_gain_in_the_same_step_counts() -> None:
    """No step gets slower by it than with what was in use."""

    def seconds(program, kernels):
        return 1 - 0.1 * len(kernels) + (0.2 if program == "decode/8" and "embed" in kernels else 0)

    known = races(*KERNELS)
    found = confirm(known, Steps(seconds))
    assert changed(found, known) == set(KERNELS)
    assert [round(step.gain, 3) for step in found.steps] == [0.4, 0.4, 0.4, 0.2]


def test_where_none_stands_out_half_goes_at_a_time() -> None:
    """Each slows the step of 8 rows by less than counts, all four by more, and two of them again by less."""
    known = races(*KERNELS)
    costs = dict(zip(KERNELS, (0.0029, 0.0028, 0.0012, 0.0011), strict=True))
    bench = Steps(lambda program, kernels: 1 + (sum(costs[k] for k in kernels) if program == "decode/8" else 0))
    found = confirm(known, bench)
    assert changed(found, known) == {"argmax", "combine_gate"}
    gone = [found.verdicts[race.task.key] for race in known if race.task.kernel.name in ("embed", "gdn_step")]
    assert gone == ["together with others it slows the step of decode/8, so the default stays"] * 2
    assert all(step.gain > -0.003 for step in found.steps)


def test_without_time_to_find_out_who_it_is_all_go() -> None:
    known = races(*KERNELS)
    bench = Steps(lambda program, kernels: 1 + (0.1 * len(kernels) if program == "decode/8" else 0))
    found = confirm(known, bench, lambda: 21.0 - bench.now)
    assert changed(found, known) == set() and [step.gain for step in found.steps] == [0] * 4
    assert all(step.is_timed for step in found.steps)


def test_a_winner_joins_only_if_there_is_time_for_all_steps_that_it_changes() -> None:
    """Two sets for itself, three for each of four programs."""
    known = races(*KERNELS)
    bench = Steps(lambda program, kernels: 1 - 0.1 * len(kernels))
    found = confirm(known, bench, lambda: 18.5 - bench.now)
    assert len(changed(found, known)) == 3 and bench.now == 3 * 2 + 4 * 2
    assert sum("no time to confirm" in verdict for verdict in found.verdicts.values()) == 1
    assert all(step.is_timed for step in found.steps)


def test_programs_that_nobody_had_time_for_are_reported_and_unchanged() -> None:
    known = races(*KERNELS)
    bench = Steps(lambda program, kernels: 1.0)
    found = confirm(known, bench, lambda: 0.0)
    assert not bench.asked and changed(found, known) == set()
    assert [step.program for step in found.steps] == list(DECODE)
    assert all("not confirmed: there was no time" in step.why_not for step in found.steps)


def test_a_step_that_fails_with_more_rows_gives_back_what_made_it_fail() -> None:
    class Failing(Steps):
        def measure_steps(self, program, choices, repeats):
            found = super().measure_steps(program, choices, repeats)
            crashed = Outcome(Status.CRASHED, reason="illegal address")
            fails = [
                program == "decode/4" and any(one.kernel == "embed" and one.knobs["num_warps"] == 16 for one in chosen)
                for chosen in choices
            ]
            return [crashed if fail else outcome for fail, outcome in zip(fails, found, strict=True)]

    known = races(*KERNELS)
    found = confirm(known, Failing(lambda program, kernels: 1 - 0.1 * len(kernels)))
    assert changed(found, known) == set(KERNELS) - {"embed"} and all(step.is_timed for step in found.steps)


def test_the_stopwatch_learns_from_the_slowest_set() -> None:
    bench = Steps(lambda program, kernels: 1.0)
    watch = Stopwatch(bench, lambda: 10.0 - bench.now)  # type: ignore[arg-type]
    assert watch.is_time_for(10_000)
    watch.measure("decode/1", [[]])
    assert watch.seconds_a_set == 1.0 and watch.is_time_for(8) and not watch.is_time_for(9)


def test_a_winner_that_disturbs_eight_rows_alone_loses_on_the_whole_device() -> None:
    found = tasks("experts_up", "experts_down", programs=DECODE)
    up, down = sorted(found, key=lambda task: task.kernel.name, reverse=True)
    calm = Rig(found, Traits(seed=3, noise=0.001)).sweep(trials=150)
    assert not finding(calm, up).is_default and not finding(calm, down).is_default
    traits = Traits(seed=3, noise=0.001, disturbing={"experts_up": 50e-6}, disturbed=("decode/8",))
    rough = Rig(found, traits).sweep(trials=150)
    assert finding(rough, up).is_default and not finding(rough, down).is_default
    assert "slows the step of decode/8" in finding(rough, up).verdict
    assert [step.program for step in rough.steps] == list(DECODE) and all(step.gain > 0 for step in rough.steps)
    eight = rough.steps[-1]
    assert eight.tuned.seconds > 1.2 * rough.steps[0].tuned.seconds, "more rows take longer there"


@pytest.mark.parametrize(("seconds", "takes"), [(20, 0.05), (60, 0.4), (600, 0.5)])
def test_a_budget_holds_with_all_programs_to_confirm(seconds: float, takes: float) -> None:
    found = tasks(programs=(*DECODE, "prefill/16", "prefill"))
    rig = Rig(found, Traits(seed=4, measure_seconds=takes))
    tuner, budget = rig.tuner(), rig.budget(seconds=seconds)
    tuner.search(budget, Records())
    sweep = tuner.conclude(budget, About(MODEL, IDENTITY), Records())
    assert budget.seconds_spent <= seconds + 3 * takes, "one measurement may end after it"
    assert {step.program for step in sweep.steps} == {*DECODE, "prefill/16", "prefill"}
    better = [one for one in sweep.findings if one.is_changed]
    confirmed = {step.program for step in sweep.steps if step.is_timed}
    assert better and all(confirmed.issuperset(one.programs) for one in better)


def test_the_summary_has_every_step_or_why_it_has_not() -> None:
    found = tasks(*KERNELS, programs=DECODE)
    rig = Rig(found, Traits(seed=4, measure_seconds=0.1))
    tuner, budget = rig.tuner(), rig.budget(seconds=10)
    tuner.search(budget, Records())
    rig.clock.wait(100)
    summary = summary_of(tuner.conclude(budget, About(MODEL, IDENTITY), Records()), "h200", "none", lambda name: 7)
    assert not summary.steps and set(summary.not_measured) == set(DECODE)
    assert TuneSummary.from_dict(json.loads(encode(summary))) == summary
