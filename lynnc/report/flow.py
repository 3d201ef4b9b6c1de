"""The launches of a program as a reader follows them: before the layers, each kind of layer once, after the layers.

In: a ``CostedProgram`` with its kernels. Out: ``Block`` values; layers with the same launches share one, so forty
layers of two kinds are two blocks.

Example::

    [(block.title, len(block.layers), [box.op for box in block.boxes]) for block in flow_of(costed, uses, setting)]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lynnc.cost import Estimate
from lynnc.dims import evaluate
from lynnc.ir import Op, primitive_ops
from lynnc.plan import Launch
from lynnc.report.costing import CostedProgram
from lynnc.report.kernels import KernelUse, Setting, mean_estimate


@dataclass(frozen=True, slots=True)
class Box:
    """One launch, or the like ones of several layers: ``body`` are the steps it fuses, ``reads`` the launches whose
    results it takes, ``mean`` its cost, ``share`` the part of the step's least time that all of them take."""

    op: str
    kind: str
    use: KernelUse
    body: tuple[str, ...]
    reads: tuple[str, ...]
    grid: str
    mean: Estimate
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Block:
    """Boxes in the order of launch; ``layers`` that have them, none for what stands outside of layers."""

    title: str
    layers: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def layers_text(self) -> str:
        """Runs of layers: ``0-2, 4-6``."""
        return runs_text(self.layers)


def runs_text(numbers: Sequence[int]) -> str:
    """Numbers in rising order, with runs cut short: ``0–2, 4``."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(runs)


def flow_of(
    costed: CostedProgram, uses: Sequence[KernelUse], setting: Setting, mixers: Sequence[str]
) -> tuple[Block, ...]:
    """The blocks of a program in the order of their first launch; ``mixers`` are those of the layers."""
    parts: dict[tuple[object, ...], list[tuple[int, list[Launch]]]] = {}
    place = -1
    for layer, group in groupby(costed.program.launches, key=lambda launch: layer_of(launch.op)):
        launches = list(group)
        place = layer if layer is not None else place
        signature = tuple((_short(launch.op), launch.kernel) for launch in launches)
        key = (layer is None, place if layer is None else 0, *signature)
        parts.setdefault(key, []).append((-1 if layer is None else layer, launches))
    writers = {name: op.name for op in costed.graph.ops for name in op.writes}
    ops = {op.name: op for op in costed.graph.ops}
    least = sum(costed.estimate(launch, setting.rows, setting.context).seconds for launch in costed.program.launches)
    reader = _Reader(costed, {use.entry.key: use for use in uses}, setting, writers, ops, least)
    return tuple(_block(reader, same, mixers) for same in parts.values())


def layer_of(op: str) -> int | None:
    """The layer that an op belongs to."""
    found = re.match(r"layers\.(\d+)\.", op)
    return int(found.group(1)) if found else None


def _short(op: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", op)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What boxes are made of: ``writers`` has the op that writes each tensor, ``least`` is the step's least time."""

    costed: CostedProgram
    uses: Mapping[str, KernelUse]
    setting: Setting
    writers: Mapping[str, str]
    ops: Mapping[str, Op]
    least: float

    def box(self, launches: Sequence[Launch]) -> Box:
        """The box of like launches of several layers."""
        first, rows, context = launches[0], self.setting.rows, self.setting.context
        ops = [self.ops[launch.op] for launch in launches]
        grids = [[evaluate(size, rows, context) for size in launch.grid] for launch in launches]
        estimates = [self.costed.estimate(launch, rows, context) for launch in launches]
        return Box(
            op=_short(first.op),
            kind=first.kind,
            use=self.uses[first.kernel],
            body=tuple(type(inner).__name__ for inner in primitive_ops(ops[0])),
            reads=tuple(dict.fromkeys(name for op in ops for name in self._reads(op))),
            grid=" × ".join(_range_text(axis) for axis in zip(*grids, strict=True)),
            mean=mean_estimate(estimates),
            count=len(launches),
            share=sum(one.seconds for one in estimates) / self.least,
        )

    def _reads(self, op: Op) -> Iterator[str]:
        """The launches before, by name; an input of the step by its tensor's name."""
        tensors, own = self.costed.graph.tensors, layer_of(op.name)
        for name in op.reads:
            writer = self.writers.get(tensors[name].base or name)
            layer = layer_of(writer) if writer else None
            is_near = writer is None or layer is None or layer == own
            yield _short(writer or name) + ("" if is_near else " of the layer before")


def _range_text(sizes: tuple[int, ...]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _block(reader: _Reader, same: Sequence[tuple[int, list[Launch]]], mixers: Sequence[str]) -> Block:
    layers = tuple(layer for layer, _ in same if layer >= 0)
    boxes = tuple(reader.box(launches) for launches in zip(*(launches for _, launches in same), strict=True))
    if layers:
        names = " or ".join(dict.fromkeys(mixers[layer] for layer in layers))
        return Block(f"{names} layer", layers, boxes)
    is_first = same[0][1][0].op == reader.costed.program.launches[0].op
    return Block("before the layers" if is_first else "after the layers", (), boxes)
