"""Work spread over processes: every result once, errors raised here, lost processes noticed."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from reference import Case

from lynnc.errors import WeightError
from lynnc.runtime.weights import pack as packing
from lynnc.runtime.weights import verify as verifying
from lynnc.runtime.weights.pack import PackRequest, pack
from lynnc.runtime.weights.parallel import spread, spread_threads, worker_count
from lynnc.runtime.weights.verify import verify


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fail_at_seven(number: int) -> int:
    if number == 7:
        raise WeightError("seven is wrong: leave it out.")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_item_once(workers: int) -> None:
    found = dict(spread(square, range(40), workers))
    assert {index: result for index, (result, _) in found.items()} == {index: index**2 for index in range(40)}
    assert ({pid for _, pid in found.values()} == {os.getpid()}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_here(workers: int) -> None:
    with pytest.raises(WeightError, match="seven is wrong"):
        list(spread(fail_at_seven, range(40), workers))


def test_a_killed_process_is_noticed() -> None:
    with pytest.raises(WeightError, match="worker process ended with code -9"):
        list(spread(die_at_three, range(40), 2))


def test_no_process_stays_when_the_results_are_left() -> None:
    with closing(spread(square, range(1000), 2)) as results:
        pids = {next(results)[1][1] for _ in range(20)}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_and_one_process_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small checkpoints are packed by one process: here, by several all the same."""
    made = write_checkpoint(tmp_path / "checkpoint", Case("tiny-moe"))
    one = pack(PackRequest(made.folder, tmp_path / "one"))
    for module in (packing, verifying):
        monkeypatch.setattr(module, "FEW_BYTES", 0)
        monkeypatch.setattr(module, "worker_count", lambda *_: 3)
    several = pack(PackRequest(made.folder, tmp_path / "several"))
    assert one.index == several.index
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "several" / path.name).read_bytes(), path.name
    assert verify(made.folder, tmp_path / "several") == verify(made.folder, tmp_path / "one")


def test_there_is_a_worker_for_each_core() -> None:
    assert worker_count() == len(os.sched_getaffinity(0))


def test_threads_give_the_same(tmp_path: Path) -> None:
    """What a GPU's work is spread over."""
    found = dict(spread_threads(square, range(40), 3))
    assert {index: result for index, (result, _) in found.items()} == {index: index**2 for index in range(40)}
    with pytest.raises(WeightError, match="seven is wrong"):
        list(spread_threads(fail_at_seven, range(40), 3))
