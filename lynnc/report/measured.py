"""What ``lynnc bench -o`` measured of one plan, read back from its files.

In: files of records, and the plan. Out: ``Measurements``, of those records alone that carry the plan's digest; or a
``RecordError`` that names the file and what to do.

Example::

    measured = read_measurements([Path("result.json")], plan)
    [(step.rows, step.context, step.timing.median) for step in measured.steps]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from lynnc.bench.records import Record
from lynnc.bench.timing import Timing
from lynnc.errors import RecordError
from lynnc.jsonform import decode
from lynnc.plan import Plan
from lynnc.runtime.device import DeviceFacts


@dataclass(frozen=True, slots=True)
class StepFigure:
    """Seconds of a decode step of ``rows`` tokens behind ``context`` others."""

    rows: int
    context: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class PromptFigure:
    """Seconds of all steps of a prompt of so many tokens on the GPU."""

    tokens: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """Seconds of a launch in a chain of its kernel's launches, in a step of ``rows`` tokens at ``context``."""

    program: str
    rows: int
    context: int
    op: str
    kernel: str
    timing: Timing


@dataclass(frozen=True, slots=True)
class MemoryFigure:
    """Bytes that a class of memory took."""

    what: str
    bytes: int
    is_host: bool


@dataclass(frozen=True, slots=True)
class Measurements:
    """All figures of one plan, and where they are from."""

    files: tuple[str, ...]
    gpu: DeviceFacts
    weights: str
    date: str
    steps: tuple[StepFigure, ...] = ()
    prompts: tuple[PromptFigure, ...] = ()
    kernels: tuple[KernelFigure, ...] = ()
    memory: tuple[MemoryFigure, ...] = ()


Figure: TypeAlias = StepFigure | PromptFigure | KernelFigure | MemoryFigure


def read_measurements(paths: Sequence[Path], plan: Plan) -> Measurements:
    """The figures of the plan in the files; later ones of the same thing win. RecordError if a file holds none."""
    figures: list[Figure] = []
    records: list[Record] = []
    for path in paths:
        own = _read_file(path, plan)
        records += own
        figures += _figures(path, own)
    gpus = {_gpu(record) for record in records}
    if len(gpus) > 1:
        names = " and ".join(sorted(gpu.name for gpu in gpus))
        raise RecordError(f"{_names(paths)}: the plan was measured on {names}: give files of one GPU.")
    latest = max(records, key=lambda record: record.date)
    return Measurements(
        files=tuple(path.name for path in paths),
        gpu=_gpu(latest),
        weights=str(latest.params.get("weights", "")),
        date=latest.date,
        steps=_latest(figures, StepFigure, lambda step: (step.rows, step.context)),
        prompts=_latest(figures, PromptFigure, lambda prompt: prompt.tokens),
        kernels=_latest(figures, KernelFigure, lambda one: (one.program, one.rows, one.context, one.op, one.kernel)),
        memory=_latest(figures, MemoryFigure, lambda use: use.what),
    )


def _latest(figures: Iterable[Figure], kind: type[Any], name: Callable[[Any], object]) -> tuple[Any, ...]:
    return tuple({name(figure): figure for figure in figures if isinstance(figure, kind)}.values())


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def _read_file(path: Path, plan: Plan) -> list[Record]:
    """The records of the plan in a file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read ({error.strerror}): name a file that `lynnc bench -o` wrote."
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON ({error}): name a file that `lynnc bench -o` wrote.") from error
    if not isinstance(content, list):
        raise RecordError(f"{path} is not a list of records: name a file that `lynnc bench -o` wrote.")
    found = [item for item in content if _param(item, "plan_digest") == plan.digest]
    if not found:
        raise RecordError(_foreign(path, plan, content))
    try:
        return [_checked(cast(Record, decode(Record, item))) for item in found]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error}): write it again with `lynnc bench -o`.") from error


def _param(item: object, name: str) -> object:
    params = item.get("params") if isinstance(item, dict) else None
    return params.get(name) if isinstance(params, dict) else None


def _foreign(path: Path, plan: Plan, content: Sequence[object]) -> str:
    models = sorted({str(name) for item in content if (name := _param(item, "model"))})
    what = f"the plan {plan.name} with the digest {plan.digest[:12]}"
    if plan.model_name in models:
        why = f"was measured with other plans of {plan.model_name} than {what}"
    else:
        why = f"holds nothing of {what}" + (f" but of {', '.join(models)}" if models else "")
    return f"{path} {why}: measure this plan with `lynnc bench PLAN -o FILE`."


def _checked(record: Record) -> Record:
    _gpu(record)
    numbers = (record.value, *record.spread)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{record.metric} is {record.value} with a spread of {record.spread}")
    return record


def _gpu(record: Record) -> DeviceFacts:
    facts = {item.name: record.device.get(item.name) for item in fields(DeviceFacts)}
    return cast(DeviceFacts, decode(DeviceFacts, facts))


def _figures(path: Path, records: Sequence[Record]) -> list[Figure]:
    figures: list[Figure] = []
    try:
        for record in records:
            reader = _READERS.get(record.metric)
            if reader:
                figures.append(reader(record, records))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({record.metric}: {error}): write it again with `lynnc bench -o`.") from (
            error
        )
    return figures


def _number(record: Record, name: str) -> int:
    return cast(int, decode(int, record.params[name]))


def _text(record: Record, name: str) -> str:
    return cast(str, decode(str, record.params[name]))


def _timing(record: Record) -> Timing:
    """A record's microseconds as seconds."""
    if record.unit != "us" or record.value <= 0:
        raise ValueError(f"{record.value} {record.unit} is no time in us")
    return Timing(record.value * 1e-6, record.spread[0] * 1e-6, record.spread[1] * 1e-6, record.runs)


def _step(record: Record, _: Sequence[Record]) -> StepFigure:
    return StepFigure(_number(record, "rows"), _number(record, "context"), _timing(record))


def _prompt(record: Record, _: Sequence[Record]) -> PromptFigure:
    return PromptFigure(_number(record, "tokens"), _timing(record))


def _decode_kernel(record: Record, records: Sequence[Record]) -> KernelFigure:
    """Kernels of decode/1 are timed at the first context of their run, which its first step of one row tells."""
    steps = (each for each in records if each.metric == "decode_step_us" and each.params.get("rows") == 1)
    step = next((each for each in steps if (each.command, each.date) == (record.command, record.date)), None)
    if step is None:
        raise ValueError("no step of the same run says the context")
    timing = _timing(record)
    context = _number(step, "context")
    return KernelFigure("decode/1", 1, context, _text(record, "op"), _text(record, "kernel"), timing)


def _prompt_kernel(record: Record, _: Sequence[Record]) -> KernelFigure:
    rows, tokens = _number(record, "rows"), _number(record, "tokens")
    return KernelFigure(
        _text(record, "program"), rows, tokens, _text(record, "op"), _text(record, "kernel"), _timing(record)
    )


def _memory(record: Record, _: Sequence[Record]) -> MemoryFigure:
    if record.value < 0:
        raise ValueError(f"{record.value} bytes")
    return MemoryFigure(_text(record, "what"), round(record.value), record.params.get("host") is True)


_READERS: Mapping[str, Callable[[Record, Sequence[Record]], Figure]] = MappingProxyType(
    {
        "decode_step_us": _step,
        "prefill_gpu_us": _prompt,
        "kernel_us": _decode_kernel,
        "prefill_kernel_us": _prompt_kernel,
        "memory_bytes": _memory,
        "resident_bytes": _memory,
    }
)
"""What the page shows; records of other metrics are passed over."""
