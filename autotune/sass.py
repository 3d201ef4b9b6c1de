"""What the hot loop of machine code consists of: instructions, loads, matrix products.

In: a cubin. Out: a ``LoopMix`` of its innermost loop that loads or multiplies most, or of the whole kernel where no
loop does. The listing comes from ``cuobjdump``, which Triton brings along.

Example::

    mix = loop_mix(artifact.cubin_path, cuobjdump)
    mix.instructions, mix.load_bytes, mix.products      # of one thread, or warp, in one pass of the loop
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lynnc.errors import CompileError

SECONDS = 30.0
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
LOADS = ("LDG", "LDGSTS")
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "OMMA", "QMMA", "UTCOMMA", "UTCQMMA")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes by the part of an instruction's name that says its width; without one it is 4."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a listing."""

    address: int
    name: str
    operands: str

    @property
    def kind(self) -> str:
        """The name without its options."""
        return self.name.split(".")[0]

    @property
    def target(self) -> int:
        """Where a branch goes, or -1."""
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if self.kind == "BRA" else None
        return int(found[1], 16) if found else -1

    @property
    def load_bytes(self) -> int:
        """Bytes that a thread loads from global memory."""
        if self.kind not in LOADS:
            return 0
        return next((size for part, size in WIDTHS.items() if part in self.name.split(".")), 4)


@dataclass(frozen=True, slots=True)
class LoopMix:
    """One pass of a loop: instructions of a warp, bytes that a thread loads, matrix products; ``is_loop`` is false
    where the figures are of the whole kernel."""

    instructions: int
    load_bytes: int
    products: int
    is_loop: bool


def loop_mix(cubin: Path, cuobjdump: Path) -> LoopMix:
    """The mix of a cubin; CompileError if it cannot be listed."""
    try:
        listed = subprocess.run(
            [str(cuobjdump), "-sass", str(cubin)], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{cuobjdump} cannot list {cubin} ({error}): install Triton again.") from error
    return mix_of(parse(listed.stdout))


def parse(listing: str) -> tuple[Instruction, ...]:
    """The instructions of a listing."""
    return tuple(
        Instruction(int(address, 16), name, operands) for address, name, operands in INSTRUCTION.findall(listing)
    )


def mix_of(code: Sequence[Instruction]) -> LoopMix:
    """The innermost loop that loads most, of equal ones the one that multiplies most."""
    spans = [(line.target, line.address) for line in code if 0 <= line.target < line.address]
    inner = [span for span in spans if not any(_is_inside(other, span) for other in spans)]
    bodies = [tuple(line for line in code if first <= line.address <= last) for first, last in inner]
    mixes = [_count(body, is_loop=True) for body in bodies]
    best = max(mixes, key=lambda mix: (mix.load_bytes, mix.products), default=None)
    if best is not None and (best.load_bytes or best.products):
        return best
    return _count(code, is_loop=False)


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _count(code: Sequence[Instruction], is_loop: bool) -> LoopMix:
    return LoopMix(
        instructions=sum(line.kind != "NOP" for line in code),
        load_bytes=sum(line.load_bytes for line in code),
        products=sum(line.kind in PRODUCTS for line in code),
        is_loop=is_loop,
    )
