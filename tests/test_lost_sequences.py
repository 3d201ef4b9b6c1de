"""Steps that fail or are stopped half-way: their sequence counts as lost, and no call goes on from half a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from executing import executor_for
from reference import PROMPT, Case, judged
from runners import PREFILL_ROWS
from simulated import SimulatedDevice

from lynnc.compare import Comparison
from lynnc.engines.compiled import compiled_engine
from lynnc.errors import DeviceError, OptionError
from lynnc.readback import readback_of
from lynnc.runtime.device import Call
from lynnc.runtime.executor import Executor
from lynnc.runtime.rows import Row, rows_of

TINY = Case("tiny-moe")
CONTEXT = 160
LONG = [index % 300 for index in range(PREFILL_ROWS + 5)]
"""A prompt of two pieces."""
LOST = "sequence of slot 0 was lost when a step failed or was stopped: begin anew with a prompt"


@pytest.fixture(scope="module")
def executor() -> Executor:
    return executor_for(TINY, slots=2, context=CONTEXT)


@contextmanager
def failing(executor: Executor, good: int, error: type[BaseException]) -> Iterator[None]:
    """A device that refuses every step but the first ``good`` ones."""
    device, done = executor.device, 0
    assert isinstance(device, SimulatedDevice)
    runs = device.runs

    def run(calls: Sequence[Call]) -> None:
        nonlocal done
        done += 1
        if done > good:
            raise error("Launching the step's graph failed: launch failed.")
        runs(calls)

    device.runs = run
    try:
        yield
    finally:
        device.runs = runs


@dataclass(frozen=True)
class Stopped:
    """A call behind a prompt, and how many of its steps are done before one fails."""

    label: str
    call: Callable[[Executor], object]
    good: int

    def __str__(self) -> str:
        return self.label


STOPPED = (
    Stopped("decode", lambda executor: executor.decode(5), 2),
    Stopped("stream", lambda executor: list(executor.stream(5)), 2),
    Stopped("prefill", lambda executor: executor.prefill(LONG), 1),
    Stopped("prompt of a size met before", lambda executor: executor.prefill([5] * PROMPT), 0),
    Stopped("step", lambda executor: executor.step(rows_of([5, 6], PROMPT)), 0),
    Stopped("launch", lambda executor: executor.launch(executor.program("decode/1"), [Row(5, PROMPT)]), 0),
    Stopped("trace", lambda executor: compiled_engine(executor).trace([5]), 1),
    Stopped("compare", lambda executor: executor.compare([5]), 3),
)


@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
@pytest.mark.parametrize("case", STOPPED, ids=str)
def test_a_step_that_ends_half_way_loses_its_sequence_alone(
    executor: Executor, case: Stopped, error: type[BaseException]
) -> None:
    prompt, other = judged(TINY).tokens[:PROMPT], judged(TINY).tokens[3:8]
    executor.reset(0)
    executor.reset(1)
    expected = [executor.prefill(prompt), *executor.decode(3)]
    executor.reset(0)
    beside = [executor.prefill(other, 1), *executor.decode(3, 1)]
    executor.reset(1)
    executor.prefill(prompt)
    assert executor.prefill(other, 1) == beside[0]
    with pytest.raises(error) as caught, failing(executor, case.good, error):
        case.call(executor)
    if error is DeviceError:
        assert str(caught.value) == (
            "Launching the step's graph failed: launch failed; the sequence of slot 0 was lost: begin anew with a "
            "prompt."
        )
    assert executor.lengths == [0, len(other)]
    for retry in (lambda: executor.decode(3), lambda: executor.step([Row(5, PROMPT)])):
        with pytest.raises(OptionError, match=LOST):
            retry()
    executor.device.runs.__self__.waiting.clear()  # type: ignore[attr-defined]
    assert executor.decode(3, 1) == beside[1:]
    assert [executor.prefill(prompt), *executor.decode(3)] == expected
    assert executor.lengths[0] == PROMPT + 3


@pytest.mark.parametrize("anew", [lambda executor: executor.reset(0), lambda executor: executor.assume(4, 1)])
def test_a_lost_sequence_is_forgotten_where_another_begins(
    executor: Executor, anew: Callable[[Executor], None]
) -> None:
    executor.reset(0)
    executor.prefill([1, 2, 3])
    with pytest.raises(DeviceError), failing(executor, 0, DeviceError):
        executor.decode(1)
    anew(executor)
    if executor.lengths[0]:
        assert len(executor.decode(1)) == 1
    else:
        with pytest.raises(OptionError, match="holds no sequence: give it a prompt first"):
            executor.decode(1)


def test_a_part_of_a_compared_step_is_no_sequence(executor: Executor) -> None:
    executor.reset(0)
    executor.prefill([1, 2, 3])
    executor.compare([4], until="layers.0.delta")
    assert executor.lengths[0] == 0
    executor.device.runs.__self__.waiting.clear()  # type: ignore[attr-defined]
    executor.prefill([1, 2, 3])
    launches = Comparison(readback_of(executor, "decode/1", 1), 1.0).run([4], None)
    next(launches)
    launches.close()
    with pytest.raises(OptionError, match=LOST):
        executor.decode(1)
    executor.device.runs.__self__.waiting.clear()  # type: ignore[attr-defined]
