"""Seconds of a launch by a model of the GPU: for devices that are not at hand, and to rank before measuring.

In: a task, how its candidate came out of the compiler, a device. Out: seconds that are good for ranking and nothing
else. The model: multiprocessors that stay idle, blocks that fit on one at once (registers, shared memory, threads),
bytes in flight against what the memory's latency asks for, instructions of the hot loop against what can be issued,
passes of a loop that follow each other, and matrix products against the peak; spilled registers pass through memory
twice. Latency and clock are assumed.

Example::

    predict(task, knobs, Build(artifact, mix, programs=396), find_device("spark")).seconds
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation

from lynnc.artifact import Artifact
from lynnc.autotune.problems import Task
from lynnc.autotune.sass import LoopMix
from lynnc.autotune.trial import Outcome
from lynnc.kernels.kernel import Knobs
from lynnc.target import Device

WARP = 32
LATENCY_SECONDS = 0.7e-6
"""From a load to its data, under load."""
PASS_SECONDS = 1.2e-6
"""A pass of a loop that waits for its own loads; several stages wait for several passes at once. Chosen with the
candidates of a run on an H200, see ``benchmarks/results/h200-ranking.json``."""
CLOCK_HZ = 1.7e9
SCHEDULERS = 4
"""Of a multiprocessor, each of which issues one instruction of a warp in a cycle."""
WARPS_TO_ISSUE = 16
"""Warps of a multiprocessor that keep its schedulers busy."""
RESERVED_SHARED_BYTES = 1024
"""Of each block, which the system takes."""
REGISTER_GRANULE = 8
MOST_BLOCKS = 24
"""Resident on one multiprocessor, whatever they need; some have 32."""


@dataclass(frozen=True, slots=True)
class Build:
    """A compiled candidate and the programs it is launched with."""

    artifact: Artifact
    mix: LoopMix
    programs: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What each resource, and waiting, would take by itself, in seconds; the blocks that a multiprocessor holds."""

    memory_s: float
    issue_s: float
    compute_s: float
    wait_s: float
    launch_s: float
    blocks: int

    @property
    def seconds(self) -> float:
        """The longest of them, and the launch."""
        return max(self.memory_s, self.issue_s, self.compute_s, self.wait_s) + self.launch_s


def resident_blocks(artifact: Artifact, device: Device) -> int:
    """Blocks of a kernel that one multiprocessor holds at once; 0 if it cannot hold any."""
    target = device.target
    registers = -(-max(artifact.registers, 1) // REGISTER_GRANULE) * REGISTER_GRANULE
    return min(
        MOST_BLOCKS,
        target.registers_per_sm // (registers * artifact.threads),
        target.threads_per_sm // artifact.threads,
        target.shared_memory_per_sm // (artifact.shared_bytes + RESERVED_SHARED_BYTES),
    )


def predict(task: Task, knobs: Knobs, build: Build, device: Device) -> Prediction:
    """The model's figures for one launch."""
    artifact, mix = build.artifact, build.mix
    blocks = max(1, resident_blocks(artifact, device))
    on_each = -(-build.programs // device.sm_count)
    busy = build.programs / (device.sm_count * on_each)
    warps = artifact.threads // WARP * min(blocks, on_each)
    in_flight = warps * WARP * max(mix.load_bytes, 1)
    wanted = device.bandwidth_bytes_per_s * LATENCY_SECONDS / device.sm_count
    spilled = 2 * artifact.spill_bytes * artifact.threads * build.programs / device.bandwidth_bytes_per_s
    passes = _warp_passes(task, knobs, build)
    in_turn = passes / (build.programs * (artifact.threads // WARP)) * -(-on_each // min(blocks, on_each))
    stages = knobs.get("num_stages", 1) if mix.is_loop else 1
    a_second = device.sm_count * SCHEDULERS * CLOCK_HZ * min(1.0, warps / WARPS_TO_ISSUE)
    return Prediction(
        memory_s=task.estimate.memory_s / (busy * min(1.0, in_flight / wanted)) + spilled,
        issue_s=passes * mix.instructions / (a_second * busy),
        compute_s=task.estimate.compute_s / busy,
        wait_s=in_turn * PASS_SECONDS / stages,
        launch_s=device.launch_overhead_s,
        blocks=blocks,
    )


def _warp_passes(task: Task, knobs: Knobs, build: Build) -> float:
    """Passes of all warps through the hot loop."""
    warps = build.programs * (build.artifact.threads // WARP)
    if not build.mix.is_loop:
        return warps
    if build.mix.products and "BLOCK_K" in knobs and "k" in task.problem:
        return warps * -(-int(task.problem["k"]) // knobs["BLOCK_K"])
    return max(warps, task.estimate.bytes / (WARP * max(build.mix.load_bytes, 1)))


def paired(predicted: Mapping[str, Outcome], measured: Mapping[str, Outcome]) -> tuple[tuple[float, float], ...]:
    """Predicted and measured seconds of the candidates that have both, by whatever names them."""
    both = (name for name in predicted if name in measured)
    return tuple(
        (predicted[name].seconds, measured[name].seconds)
        for name in both
        if predicted[name].is_timed and measured[name].is_timed
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's coefficient: 1 where both sort alike, 0 where one says nothing of the other; None for too few."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(first, second)


def _ranks(values: Iterable[float]) -> list[float]:
    """Places in rising order; equal values share the mean of theirs."""
    listed = list(values)
    ordered = sorted(listed)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in listed]
