"""When two times differ, who wins a tie, and how a budget is shared."""

from __future__ import annotations

import math

import pytest
from tuning import FakeClock

from lynnc.autotune.budget import LEAST_TRIALS, Budget, parse_duration
from lynnc.autotune.noise import is_faster, joined, noise_of, winner
from lynnc.autotune.trial import Outcome, Status
from lynnc.errors import OptionError


def timed(microseconds: float, spread: float = 0.0, repeats: int = 16) -> Outcome:
    half = spread / 2
    low, high = ((microseconds + part) * 1e-6 for part in (-half, half))
    return Outcome(Status.TIMED, microseconds * 1e-6, low, high, repeats)


WRONG = Outcome(Status.WRONG, reason="no")


def test_noise_falls_with_the_runs():
    assert noise_of(timed(10, 1.0, 16)) == pytest.approx(1.2533 * 0.25e-6 / 4)
    assert noise_of(timed(10, 1.0, 64)) == pytest.approx(noise_of(timed(10, 1.0, 16)) / 2)


def test_less_than_a_hundredth_is_no_difference():
    assert not is_faster(timed(9.95), timed(10))
    assert is_faster(timed(9.8), timed(10))
    assert is_faster(timed(9.95), timed(10), floor=0.001)


def test_what_lies_within_the_spread_is_no_difference():
    assert not is_faster(timed(9.5, spread=5), timed(10, spread=5))
    assert is_faster(timed(9.5, spread=0.5), timed(10, spread=0.5))


def test_only_times_win():
    assert is_faster(timed(10), WRONG) and not is_faster(WRONG, timed(10)) and not is_faster(WRONG, WRONG)


def test_ties_go_to_the_one_in_front():
    assert winner([timed(10), timed(9.95), timed(9.93)]) == 0
    assert winner([timed(10), timed(9), timed(8.95)]) == 1
    assert winner([WRONG, timed(9), timed(8)]) == 2
    assert winner([WRONG, WRONG]) == 0


def test_rounds_join_to_their_median_or_first_fault():
    whole = joined([timed(10, 1), timed(12, 1), timed(11, 1)])
    assert (whole.seconds, whole.repeats) == (11e-6, 48)
    assert (whole.least, whole.greatest) == pytest.approx((9.5e-6, 12.5e-6))
    assert joined([timed(10), WRONG]) is WRONG


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "10 m", "-1m", "0s", "10d", ""])
def test_other_durations_are_refused(text):
    with pytest.raises(OptionError, match="--budget"):
        parse_duration(text)


def test_a_task_gets_its_part_of_the_time_and_leaves_the_rest():
    clock = FakeClock()
    budget = Budget(seconds=100, clock=clock)  # 80 for the search
    first = budget.part(0.5)
    for _ in range(LEAST_TRIALS):
        budget.spend()
    clock.wait(39)
    assert first.is_left()
    clock.wait(2)
    assert not first.is_left()
    second = budget.part(1.0)
    for _ in range(LEAST_TRIALS):
        budget.spend()
    clock.wait(38)
    assert second.is_left()
    clock.wait(2)
    assert not second.is_left() and budget.seconds_left == pytest.approx(19) and budget.seconds_spent == 81


def test_a_task_gets_its_part_of_the_candidates():
    budget = Budget(trials=40)
    allowance, spent = budget.part(0.25), 0
    while allowance.is_left():
        budget.spend()
        spent += 1
    assert spent == 10 and math.isinf(budget.seconds_left)
    last = budget.part(1.0)
    while last.is_left():
        budget.spend()
    assert budget.spent == 40


def test_a_task_that_is_begun_gets_a_few_candidates():
    budget = Budget(trials=40)
    allowance = budget.part(0.001)
    while allowance.is_left():
        budget.spend()
    assert budget.spent == LEAST_TRIALS
