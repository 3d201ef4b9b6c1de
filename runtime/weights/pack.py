"""From a checkpoint to a packed folder: read, quantise where the model asks, write, part by part.

In: a ``PackRequest``. Out: the packed folder and a ``PackReport``. A part is a matrix of one expert, or one that is no
expert's; a few of them are in memory at any time. What was finished before a kill is kept.

Example::

    report = pack(PackRequest(Path("Qwen3.6-35B-A3B"), Path("packed"), load_model("qwen3.6-35b-a3b")))
    report.bytes_written, report.seconds
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from lynnc.model import ModelSpec
from lynnc.modelfile import dump_model
from lynnc.outputfolder import check_folder, check_room, settled
from lynnc.runtime.checkpoints.source import Source
from lynnc.runtime.experts.expertspec import ExpertSpec
from lynnc.runtime.weights.arrays import convert, format_of, part_arrays
from lynnc.runtime.weights.assign import (
    AssignedPart,
    AssignedWeight,
    Assignment,
    PartReader,
    assign,
    largest_first,
    quantised_notes,
)
from lynnc.runtime.weights.comparison import compare
from lynnc.runtime.weights.digests import matrix_digest, weight_digest
from lynnc.runtime.weights.draft import Draft, draft
from lynnc.runtime.weights.matrix import Fp4Matrix, Matrix, PlainMatrix
from lynnc.runtime.weights.packedindex import DIVISOR, INDEX_FILE, MODEL_FILE, PackedIndex, array_name
from lynnc.runtime.weights.packedwriter import Finished, PackedWriter
from lynnc.runtime.weights.parallel import THREADS_ON_GPU, spread, spread_threads, worker_count
from lynnc.runtime.weights.quantise import quantise_nvfp4
from lynnc.runtime.weights.resolve import resolve
from lynnc.runtime.weights.unfinished import partial_folder

SHARD_BYTES = 4_000_000_000
FEW_BYTES = 1 << 28
"""What one process packs before others would have started."""

Progress = Callable[[int, int, str], None]
"""Called with the bytes read so far, the bytes in all, and the weight that is next."""


@dataclass(frozen=True, slots=True)
class PackRequest:
    """What to pack. Without a model, it is read from the checkpoint's configuration and the formats found there.

    ``experts`` prunes; ``keep_first`` lets a spec of bare counts keep the lowest numbers. ``search`` picks each block
    scale by squared error. ``device`` is where quantising runs; the bits do not depend on it.
    """

    checkpoint: Path
    output: Path
    model: ModelSpec | None = None
    experts: ExpertSpec | None = None
    keep_first: bool = False
    search: bool = False
    device: str = "cpu"
    shard_bytes: int = SHARD_BYTES
    force: bool = False


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was done: bytes that this run read, bytes of all shards, seconds of this run, weights that an earlier run
    had finished, what is worth saying, tensors of pruned experts, and the share of the squared error that the search
    for scales saved over everything quantised."""

    index: PackedIndex
    spec: ModelSpec
    bytes_read: int
    bytes_written: int
    seconds: float
    kept_weights: int
    notes: tuple[str, ...]
    pruned_tensors: int
    search_gain: float | None


@dataclass(frozen=True, slots=True)
class _Written:
    """What became of a part: bytes written of each array by name, the digest of what was read for it, and, where
    scales were searched for, the squared errors without and with that."""

    sizes: Mapping[str, int]
    digest: bytes
    errors: tuple[float, float]


def pack(request: PackRequest, on_progress: Progress | None = None) -> PackReport:
    """Packs the checkpoint. WeightError, ModelError or OutputError say what is wrong before anything is written, but
    for values that are no numbers, which show when they are read."""
    request = replace(request, output=settled(request.output))
    check_folder(request.output, INDEX_FILE, "packed", request.force, [request.checkpoint])
    started = time.perf_counter()
    with closing(resolve(request.checkpoint, request.model, request.experts, request.keep_first)) as resolved:
        assignment = assign(resolved.source, resolved.spec, resolved.kept)
        plan = draft(resolved, assignment, request.shard_bytes, request.search)
        _check_room(request.output, plan)
        with PackedWriter.open(request.output, plan.layouts, plan.index, plan.identity, request.force) as writer:
            kept = set(writer.finished)
            _write_weights(request, resolved.source, assignment, writer, on_progress)
            index = plan.completed(writer.finished)
            files = {name: request.checkpoint / name for name in index.files if name != MODEL_FILE}
            writer.publish(index, files, {MODEL_FILE: dump_model(resolved.spec)})
    return PackReport(
        index=index,
        spec=resolved.spec,
        bytes_read=sum(item.source_bytes for item in assignment.weights if item.weight.name not in kept),
        bytes_written=sum(shard.bytes for shard in index.shards),
        seconds=time.perf_counter() - started,
        kept_weights=len(kept),
        notes=(*resolved.notes, *(quantised_notes(assignment) if resolved.source.is_quantised else ())),
        pruned_tensors=len(assignment.pruned),
        search_gain=_search_gain(writer.finished) if request.search else None,
    )


def _write_weights(
    request: PackRequest,
    source: Source,
    assignment: Assignment,
    writer: PackedWriter,
    on_progress: Progress | None,
) -> None:
    """Converts and writes the parts of all weights that are not there yet."""
    missing = largest_first(item for item in assignment.weights if item.weight.name not in writer.finished)
    parts = [part for item in missing for part in item.each_part()]
    left = {item.weight.name: item for item in missing}
    written: dict[str, dict[int, _Written]] = {name: {} for name in left}
    to_read = sum(item.source_bytes for item in missing)
    done = assignment.source_bytes - to_read
    work = _PartWriter(request, source, writer)
    if request.device == "cpu":
        started = spread(work, parts, worker_count() if to_read > FEW_BYTES else 1)
    else:
        started = spread_threads(work, parts, THREADS_ON_GPU)
    with closing(started) as results:
        for index, result in results:
            part = parts[index]
            name = part.weight.name
            written[name][index] = result
            done += part.located.bytes
            if on_progress:
                on_progress(done, assignment.source_bytes, name)
            if len(written[name]) == len(left[name].parts) * len(part.weight.parts):
                _finish(writer, left[name], written.pop(name))


def _finish(writer: PackedWriter, item: AssignedWeight, written: Mapping[int, _Written]) -> None:
    """Notes a weight whose parts are all there, by their places in its order."""
    totals: Counter[str] = Counter()
    for result in written.values():
        totals.update(result.sizes)
    digest = weight_digest(written[index].digest for index in sorted(written))
    plain, searched = (sum(result.errors[index] for result in written.values()) for index in range(2))
    writer.finish(Finished(item.weight.name, {}, digest, plain, searched), totals)


class _PartWriter:
    """Reads a part, converts it and writes it into the shards; runs in worker processes."""

    def __init__(self, request: PackRequest, source: Source, writer: PackedWriter) -> None:
        self._request, self._reader, self._writer = request, PartReader(source), writer

    def __call__(self, part: AssignedPart) -> _Written:
        weight = part.weight
        matrix = self._reader.read(part)
        placed = _to(matrix, self._request.device)
        packed = convert(placed, weight.format, part.located.tensors[0], self._request.search)
        written = {}
        for array, values in part_arrays(weight, packed).items():
            if array != DIVISOR or part.has_divisor:
                name = array_name(weight.name, array)
                written[name] = self._writer.array(name).write(part.start(array, values), values)
        errors = _search_errors(placed, packed) if self._request.search else (0.0, 0.0)
        return _Written(written, matrix_digest(matrix), errors)


def _search_errors(matrix: Matrix, packed: Matrix) -> tuple[float, float]:
    """Squared errors without and with the search for scales, of what was quantised."""
    if not (isinstance(matrix, PlainMatrix) and isinstance(packed, Fp4Matrix)):
        return 0.0, 0.0
    plain = quantise_nvfp4(matrix.values, format_of(packed))
    return compare(matrix, plain)[1].error, compare(matrix, packed)[1].error


def _to(matrix: Matrix, device: str) -> Matrix:
    """Values to be quantised go to the device; what is only copied stays on the CPU."""
    if device == "cpu" or not isinstance(matrix, PlainMatrix):
        return matrix
    return PlainMatrix(matrix.values.to(device))


def _check_room(output: Path, plan: Draft) -> None:
    """OutputError if what an earlier run left and what is free are too little."""
    partial = partial_folder(output)
    held = sum(path.stat().st_blocks * 512 for path in partial.iterdir()) if partial.is_dir() else 0
    check_room(output, sum(shard.bytes for shard in plan.index.shards) - held, "MB")


def _search_gain(finished: Mapping[str, Finished]) -> float:
    plain = sum(entry.plain_error for entry in finished.values())
    return 1.0 - sum(entry.error for entry in finished.values()) / plain if plain else 0.0
