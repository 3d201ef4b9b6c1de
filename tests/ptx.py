"""Reads PTX: how wide the loads from one pointer parameter are."""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?(?P<op>[a-z][\w.:]*)\s+(?P<args>[^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"%\w+")
_LOAD = re.compile(r"ld\.global(?:\.[a-z0-9_:]+)*?(?:\.v(?P<count>\d))?\.b(?P<bits>\d+)$")


def load_widths(ptx: str, parameter: int) -> list[int]:
    """Bytes of each global load whose address comes from the kernel's parameter of that index, in order.

    Follows the pointer through moves and integer arithmetic, one pass: a register that was ever derived from it counts.
    """
    derived: set[str] = set()
    widths: list[int] = []
    for match in _INSTRUCTION.finditer(ptx):
        op, args = match["op"], match["args"]
        if op.startswith("ld.param"):
            if re.search(rf"_param_{parameter}\b", args):
                derived.update(_REGISTER.findall(args.split("[")[0]))
            continue
        if op.startswith("ld.global"):
            address = args.rpartition("[")[2]
            if derived & set(_REGISTER.findall(address)):
                widths.append(_width(op))
            continue
        registers = _REGISTER.findall(args)
        if registers and derived & set(registers[1:]) and op.split(".")[0] in _MOVES:
            derived.add(registers[0])
    return widths


_MOVES = {"mov", "add", "mad", "cvta", "selp", "or", "sub", "shl", "lea"}


def _width(op: str) -> int:
    found = _LOAD.match(op)
    assert found, op
    return int(found["count"] or 1) * int(found["bits"]) // 8
