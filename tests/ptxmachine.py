"""Runs hand-written PTX one thread at a time: the few instructions that ``runtime/random/fill.ptx`` is made of.

In: the text, an entry's name, its parameters and the size of the grid. Out: what was stored, as numbers by address.
What the assembler checks (types of registers) is not checked again; an unknown instruction is a KeyError.

Example::

    stored = run_entry(text, "fill_words", (4096, 0, 8, key), blocks=1, threads=8)      # {4096: ..., 4104: ...}
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Number = int | np.float32

_FUNCTION = re.compile(
    r"(?:\.visible \.entry|\.func \([^)]*?(?P<result>%?\w+)\)) (?P<name>\w+)\((?P<params>[^)]*)\)\s*\{"
)
_M64, _M32 = 2**64 - 1, 2**32 - 1


@dataclass(frozen=True)
class Function:
    """Parameters in order, the register that is the result (empty for an entry), and statements or labels."""

    parameters: tuple[str, ...]
    result: str
    statements: tuple[str, ...]


@dataclass
class Thread:
    """Registers that every thread has, and what this one stored."""

    special: Mapping[str, int]
    stored: dict[int, Number] = field(default_factory=dict)


def run_entry(text: str, entry: str, parameters: Sequence[Number], blocks: int, threads: int) -> dict[int, Number]:
    functions = parse(text)
    stored: dict[int, Number] = {}
    for block in range(blocks):
        for number in range(threads):
            special = {"%ctaid.x": block, "%ntid.x": threads, "%tid.x": number, "%nctaid.x": blocks}
            thread = Thread(special)
            call(functions, entry, parameters, thread)
            assert not stored.keys() & thread.stored.keys(), "two threads wrote one element"
            stored.update(thread.stored)
    return stored


def parse(text: str) -> dict[str, Function]:
    text = re.sub(r"//.*", "", text)
    found = {}
    for match in _FUNCTION.finditer(text):
        body = text[match.end() : text.index("\n}", match.end())]
        statements = re.findall(r"[^;:]+;|\w+:", body)
        code = tuple(" ".join(s.rstrip(";").split()) for s in statements if not s.strip().startswith(".reg"))
        parameters = tuple(part.split()[-1] for part in match["params"].split(","))
        found[match["name"]] = Function(parameters, match["result"] or "", code)
    return found


def call(functions: Mapping[str, Function], name: str, arguments: Sequence[Number], thread: Thread) -> Number:
    function = functions[name]
    registers: dict[str, Number] = dict(zip(function.parameters, arguments, strict=True))
    at = 0
    while function.statements[at] != "ret":
        statement = function.statements[at]
        at += 1
        if statement.endswith(":"):
            continue
        guard = re.match(r"@(!?)(%\w+) ", statement)
        if guard:
            statement = statement[guard.end() :]
            if bool(registers[guard[2]]) == bool(guard[1]):
                continue
        op, _, rest = statement.partition(" ")
        if op == "bra":
            at = function.statements.index(f"{rest}:")
        elif op == "call.uni":
            target, callee, given = re.fullmatch(r"\((%?\w+)\), (\w+), \((.*)\)", rest).groups()  # type: ignore[union-attr]
            values = [registers[register] for register in given.split(", ")]
            registers[target] = call(functions, callee, values, thread)
        else:
            step(op, rest, registers, thread)
    return registers.get(function.result, 0)


def step(op: str, rest: str, registers: dict[str, Number], thread: Thread) -> None:
    if op == "mov.b64":
        low, high, source = re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest).groups()  # type: ignore[union-attr]
        bits = int(registers[source])
        registers[low], registers[high] = bits & _M32, bits >> 32
        return
    target, *operands = rest.split(", ")
    values = [read(operand, registers, thread) for operand in operands]
    if op.startswith("st.global"):
        thread.stored[int(registers[target.strip("[]")])] = values[0]
    else:
        registers[target] = OPERATIONS[op](*values)


def read(operand: str, registers: Mapping[str, Number], thread: Thread) -> Number:
    name = operand.strip("[]")
    if name in thread.special:
        return thread.special[name]
    if name in registers:
        return registers[name]
    if name.startswith("0f"):
        return np.float32(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
    return int(name, 0)


def bf16(x: np.float32) -> int:
    """The nearest BF16 number, ties to even, by trying both neighbours."""
    bits = int(x.view(np.uint32))
    below = bits >> 16
    gap = [abs(float(np.uint32(n << 16).view(np.float32)) - float(x)) for n in (below, below + 1)]
    return below + (gap[1] < gap[0] or (gap[1] == gap[0] and below & 1 == 1))


OPERATIONS: Mapping[str, Callable[..., Number]] = {
    "ld.param.u64": lambda x: x,
    "ld.param.u32": lambda x: x,
    "ld.param.f32": np.float32,
    "cvta.to.global.u64": lambda x: x,
    "mov.u32": lambda x: x,
    "cvt.u64.u32": lambda x: x,
    "cvt.u16.u32": lambda x: x & 0xFFFF,
    "cvt.rn.f32.s32": lambda x: np.float32(x - 2**32 if x >= 2**31 else x),
    "cvt.rn.bf16.f32": bf16,
    "mul.wide.u32": lambda a, b: a * b,
    "mul.lo.u64": lambda a, b: a * b & _M64,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.rn.f32": lambda a, b: a * b,
    "add.rn.f32": lambda a, b: a + b,
    "add.u64": lambda a, b: a + b & _M64,
    "add.u32": lambda a, b: a + b & _M32,
    "xor.b64": lambda a, b: a ^ b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shl.b64": lambda a, b: a << b & _M64,
    "shr.u64": lambda a, b: a >> b,
    "setp.lt.u64": lambda a, b: a < b,
}
