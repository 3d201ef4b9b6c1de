"""The search on a device whose optimum is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tuning import DEVICE, IDENTITY, MODEL, Rig, finding, tasks

from lynnc.autotune.bounds import identity
from lynnc.autotune.legalspace import legal_space
from lynnc.autotune.noise import is_faster
from lynnc.autotune.search import REPEATS, WHOLE_SPACE
from lynnc.autotune.synthetic import Traits
from lynnc.autotune.trial import Outcome, Status
from lynnc.autotune.tuner import About
from lynnc.deviceidentity import identity_of
from lynnc.record import Record
from lynnc.records import Known, Records
from lynnc.render import template_digest


@pytest.fixture(scope="module")
def all_tasks():
    return tasks()


def test_a_small_space_is_tried_whole_and_its_optimum_wins(all_tasks):
    small = [task for task in all_tasks if task.kernel.name in ("gdn_step", "embed", "argmax")]
    rig = Rig(small, Traits(seed=5, noise=0.001))
    sweep = rig.sweep(trials=200)
    for task in small:
        found = finding(sweep, task)
        kernels = {identity(task, tried.knobs) for tried in found.tried}
        assert len(found.tried) == len(kernels) <= WHOLE_SPACE
        assert found.best.seconds == pytest.approx(rig.optimum_seconds(task), rel=0.02)
        assert found.tried[0].origin == "default" and dict(found.tried[0].knobs) == task.default(DEVICE)


def test_the_sampler_finds_the_optimum_of_a_large_space_and_another_seed_the_same(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    best = []
    for seed in (1, 2):
        rig = Rig([task], Traits(seed=11, noise=0.001), seed=seed)
        found = finding(rig.sweep(trials=300), task)
        assert found.best.seconds == pytest.approx(rig.optimum_seconds(task), rel=0.02)
        best.append(found.best)
    assert not is_faster(best[0], best[1]) and not is_faster(best[1], best[0])


def test_the_search_stops_where_no_gain_is_to_be_expected(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    rig = Rig([task], Traits(seed=11, noise=0.001), seed=1)
    budget = rig.budget(trials=5000)
    rig.tuner().search(budget, Records())
    assert 40 < budget.spent < 600


def test_faults_are_outcomes_with_reasons(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_down")
    found = finding(Rig([task], Traits(seed=2)).sweep(trials=120), task)
    statuses = Counter(tried.outcome.status for tried in found.tried)
    assert set(statuses) == set(Status)
    for tried in found.tried:
        assert tried.outcome.is_timed == (tried.outcome.reason == "")
    assert found.refusals and sum(found.refusals.values()) == statuses[Status.REFUSED]


def test_what_is_refused_is_never_compiled_or_measured(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    rig = Rig([task])
    found = finding(rig.sweep(trials=60), task)
    asked = [*rig.bench.prepared, *rig.bench.measured]
    assert all(task.kernel.refusal(task.problem, one.knobs, DEVICE.target) is None for one in asked)
    refused = [tried.knobs for tried in found.tried if tried.outcome.status is Status.REFUSED]
    assert refused and all(one.knobs not in refused for one in asked)


def test_the_roofline_refuses_before_compiling():
    found = tasks("gemm", model="qwen3.6-35b-a3b", programs=("prefill/16",))
    task = next(task for task in found if str(task.problem["n"]).startswith("router"))
    found = finding(Rig([task], Traits(seed=4)).sweep(trials=80), task)
    hopeless = [tried for tried in found.tried if "the roofline allows no less" in tried.outcome.reason]
    assert hopeless and all(tried.outcome.status is Status.REFUSED for tried in hopeless)


def test_candidates_are_compiled_ahead_and_each_kernel_is_measured_by_rounds(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    rig = Rig([task])
    rig.tuner(ahead=6).search(rig.budget(trials=1), Records())
    assert len(rig.bench.prepared) >= 6 and len(rig.bench.measured) == len(REPEATS)
    tuner = Rig([task]).tuner()
    budget = rig.budget(trials=60)
    tuner.search(budget, Records())
    tried = tuner.study(task).tried()
    whole = [one for one in tried if one.is_whole]
    early = [one for one in tried if one.outcome.is_timed and not one.is_whole]
    assert len(early) > len(whole) / 2  # half of each round goes no further
    assert all(one.outcome.repeats == REPEATS[-1] for one in whole)
    assert all(one.outcome.repeats < REPEATS[-1] for one in early)


def test_a_tie_goes_to_the_default(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "gdn_step")
    rig = Rig([task], Traits(seed=5, noise=0.2))
    found = finding(rig.sweep(trials=50), task)
    assert found.is_default and found.gain == 0 and found.is_raced


def test_records_of_the_same_knobs_take_one_place():
    """Several Triton releases may have found the same."""
    task = tasks("embed")[0]
    rig = Rig([task])
    default, template = task.default(DEVICE), template_digest(task.kernel.template)
    known = [
        Known(Record("embed", dict(task.problem), {**default, "num_warps": warps}, IDENTITY, template, triton=version))
        for version, warps in (("3.4.0", 2), ("3.5.0", 2), ("3.6.0", 2), ("3.7.0", 4), ("3.8.0", 8))
    ]
    rig.tuner().search(rig.budget(trials=4), Records(IDENTITY, tuple(known)))
    tried = [one for one in rig.tuner().study(task).tried() if one.origin == "record"]
    assert {one.knobs["num_warps"] for one in tried} == {2, 4, 8} - {default["num_warps"]}


def test_the_record_is_in_the_race_and_wins_over_the_default(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    rig = Rig([task], Traits(noise=0.001))
    record = Record(
        task.kernel.name,
        dict(task.problem),
        rig.bench.optimum(task),
        identity_of(DEVICE),
        template_digest(task.kernel.template),
    )
    sweep = rig.sweep(trials=4, records=Records(IDENTITY, (Known(record, True),)))
    found = finding(sweep, task)
    assert [tried.origin for tried in found.tried[:2]] == ["default", "record"]
    assert dict(found.knobs) == dict(rig.bench.optimum(task)) and "the record in use" in found.verdict
    assert not found.is_changed and not found.is_default and found.gain > 0
    assert sweep.steps[0].before.seconds < sweep.steps[0].default.seconds


def test_a_default_that_is_wrong_does_not_stop_the_search(all_tasks):
    class Faulty(type(Rig(all_tasks).bench)):  # type: ignore[misc]
        def measure(self, candidate, repeats):
            if dict(candidate.knobs) == task.default(DEVICE):
                return Outcome(Status.WRONG, reason="rows differ")
            return super().measure(candidate, repeats)

    task = next(task for task in all_tasks if task.kernel.name == "embed")
    rig = Rig([task])
    tuner, budget = rig.tuner(Faulty([task], DEVICE, Traits(), rig.clock.wait)), rig.budget(trials=40)
    tuner.search(budget, Records())
    found = finding(tuner.conclude(budget, About(MODEL, IDENTITY), Records()), task)
    assert found.default.status is Status.WRONG and found.best.is_timed and not found.is_raced


def test_time_goes_where_the_step_spends_it():
    found = tasks(model="qwen3.6-35b-a3b")
    rig = Rig(found, Traits(seed=3, measure_seconds=0.1))
    budget = rig.budget(seconds=60)
    rig.tuner().search(budget, Records())
    assert budget.seconds_left >= 0.2 * 60 - 1
    counts = Counter((one.kernel, str(one.problem)) for one in rig.bench.measured)
    by_share = [counts[task.kernel.name, str(task.problem)] for task in found]
    assert by_share[0] > 1.3 * by_share[3] > 0


def test_a_second_run_of_the_same_seed_tries_the_same(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    runs = []
    for _ in ("a", "b"):
        rig = Rig([task], Traits(seed=1), seed=9)
        rig.tuner().search(rig.budget(trials=30), Records())
        runs.append([one.knobs for one in rig.bench.measured])
    assert runs[0] == runs[1]
    other = Rig([task], Traits(seed=1), seed=10)
    other.tuner().search(other.budget(trials=30), Records())
    assert [one.knobs for one in other.bench.measured] != runs[0]


def test_a_task_that_was_not_reached_keeps_its_default_and_says_so(all_tasks):
    sweep = Rig(all_tasks).sweep(trials=4)
    last = finding(sweep, all_tasks[-1])
    assert last.is_default and last.verdict == "the budget did not reach it" and not last.tried
    assert replace(last, verdict="").counts == {}


def test_a_sampler_draws_only_values_that_some_legal_combination_has():
    found = tasks("grouped_up", "gemm", model="qwen3.6-35b-a3b", programs=("prefill/16",))
    by_kernel = {
        task.kernel.name: legal_space(task, DEVICE.target) for task in found if task.problem["order"] == "lanes"
    }
    assert all(min(space.knobs["BLOCK_K"].values) == 128 for space in by_kernel.values()), "a block of lanes"
    assert by_kernel["grouped_up"].knobs["SWAP"].values == (1,)
    for task in found:
        space = legal_space(task, DEVICE.target)
        default = task.default(DEVICE)
        assert default in space.combinations and all(default[name] in knob.values for name, knob in space.knobs.items())
        for name, knob in space.knobs.items():
            assert {knobs[name] for knobs in space.combinations} == set(knob.values)


def test_few_candidates_are_refused_where_the_space_is_listed():
    found = tasks("grouped_up", model="qwen3.6-35b-a3b", programs=("prefill/64",))
    one = finding(Rig(found, Traits(seed=2)).sweep(trials=30), found[0])
    assert len(one.tried) >= 25 and sum(one.refusals.values()) <= len(one.tried) // 4


def test_a_candidate_that_is_long_in_the_compiler_holds_up_no_other(all_tasks):
    task = next(task for task in all_tasks if task.kernel.name == "experts_up")
    rig, slow = Rig([task]), []

    class Slow(type(rig.bench)):  # type: ignore[misc]
        def is_ready(self, candidate):
            is_slow = candidate.knobs["num_warps"] == 2 and len(self.measured) < 20
            slow.extend([len(self.measured)] if is_slow else [])
            return not is_slow

    bench = Slow(rig.tasks, DEVICE, rig.traits, rig.clock.wait)
    tuner, budget = rig.tuner(bench), rig.budget(trials=40)
    tuner.search(budget, Records())
    warps = [candidate.knobs["num_warps"] for candidate in bench.measured]
    assert slow and 2 not in warps[:20] and 2 in warps[20:] and budget.spent == 40
