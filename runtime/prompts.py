"""Prompts in steps: which programs run which rows, and one launch for a whole step where its size was seen before.

In: tokens of a prompt. Out: steps on the device. A short step takes a GPU less time than the host needs to start its
hundreds of launches, so it runs as a captured graph. Lengths of prompts differ all the time and a graph has one, so
short pieces are filled up with padding to one of few sizes (``SIZES``), of which each is captured once.

Example::

    pieces_of(2100, programs)        # 2,048 rows of prefill, then 52 rows and 12 of padding in prefill/64
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lynnc.plan import Plan, Program
from lynnc.programs import prefill_programs
from lynnc.runtime.budget import Room
from lynnc.runtime.device import Call, Device, StepGraph
from lynnc.runtime.memory import Memory
from lynnc.runtime.rows import prompt_columns

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that shorter steps are filled up to: at most a third of a step of more than 32 rows is padding.

Longer steps take the GPU longer than the host, which then starts each launch while earlier ones run.
"""
MOST_NODES = 8192
"""Launches in the graphs that are kept: each takes some KB of the GPU's memory, of those that a budget reserves."""


def prompt_programs(plan: Plan, room: Room) -> tuple[Program, ...]:
    """The loaded programs that run prompts, the one of fewest rows first."""
    loaded = [plan.programs[name] for name in prefill_programs(room.programs or plan.programs)]
    return tuple(sorted(loaded, key=lambda program: program.max_rows))


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``first`` to ``first + count`` of a prompt as a step of ``rows`` rows, the first of which are padding."""

    program: Program
    first: int
    count: int
    rows: int

    @property
    def padding(self) -> int:
        """Rows of padding in front."""
        return self.rows - self.count


def pieces_of(count: int, programs: Sequence[Program]) -> Iterator[Piece]:
    """The steps of a prompt of ``count`` tokens; ``programs`` are those for prompts, the one of fewest rows first.

    Each step is of the smallest program that runs what is left, else of the largest.
    """
    first = 0
    while first < count:
        left = count - first
        program = next((program for program in programs if program.max_rows >= left), programs[-1])
        taken = min(left, program.max_rows)
        yield Piece(program, first, taken, padded_rows(taken, program.max_rows))
        first += taken


def padded_rows(count: int, most: int) -> int:
    """Rows of a step of ``count`` tokens in a program of at most ``most``."""
    return min(next((size for size in SIZES if size >= count), count), most)


@dataclass(slots=True)
class Prompts:
    """Runs prompts through ``programs``; ``calls`` gives the launches of a program for a number of rows.

    A size runs launch by launch when it is first met and is captured at the second time: whoever asks once need not
    wait for a capture. Both have the same rows, padding included, so they give the same bits.
    """

    device: Device
    memory: Memory
    programs: tuple[Program, ...]
    calls: Callable[[Program, int], tuple[Call, ...]]
    _graphs: OrderedDict[tuple[str, int], StepGraph] = field(default_factory=OrderedDict)
    _met: set[tuple[str, int]] = field(default_factory=set)

    def run(self, tokens: Sequence[int], start: int, slot: int) -> None:
        """Starts all steps of tokens that go on at position ``start`` of a slot's sequence; waits for none."""
        for piece in pieces_of(len(tokens), self.programs):
            own = tokens[piece.first : piece.first + piece.count]
            self.memory.write_columns(prompt_columns(own, start + piece.first, slot, piece.padding))
            self._launch(piece)

    def clear(self) -> None:
        """Forgets the graphs."""
        self._graphs.clear()

    @property
    def nodes(self) -> int:
        """Launches in the graphs that are kept."""
        return sum(graph.nodes for graph in self._graphs.values())

    def _launch(self, piece: Piece) -> None:
        key = piece.program.name, piece.rows
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self._graphs[key].launch()
        elif key in self._met and piece.rows <= SIZES[-1]:
            self._capture(key, self.calls(piece.program, piece.rows)).launch()
        else:
            self.device.launch(self.calls(piece.program, piece.rows))
            self._met.add(key)

    def _capture(self, key: tuple[str, int], calls: Sequence[Call]) -> StepGraph:
        """A graph that is kept; the least recently used ones go where all together would have too many launches."""
        while self._graphs and self.nodes + len(calls) > MOST_NODES:
            self._graphs.popitem(last=False)[1].close()
        self._graphs[key] = self.device.capture(calls)
        return self._graphs[key]
