"""The names of programs: ``decode/1`` to ``decode/8``; for prompts ``prefill/N``, up to N rows, and ``prefill``.

In: a name. Out: the rows of its step. Example: ``program_rows("decode/4")`` is 4, ``program_rows("prefill")`` None.
A prompt's piece runs by the smallest of the plan's prefill programs that holds it: tiles that are right for 2,048 rows
leave most of a GPU idle at 16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lynnc.errors import OptionError

PREFILL = "prefill"
MOST_DECODE_ROWS = 8
MOST_PREFILL_ROWS = 1 << 16
LONG_ROWS = 2048


def program_rows(name: str) -> int | None:
    """Rows of a decode program, None for those of prompts with their free number; OptionError for any other name."""
    if is_prefill(name):
        return None
    found = re.fullmatch(r"decode/([1-9])", name)
    if found is None or int(found.group(1)) > MOST_DECODE_ROWS:
        raise OptionError(f"{name!r} is no program: name prefill, prefill/16 (any number) or decode/1 to decode/8.")
    return int(found.group(1))


def is_prefill(name: str) -> bool:
    """Whether a program runs prompts: steps of a free number of rows that give logits for the last one alone."""
    return name == PREFILL or most_rows(name) is not None


def most_rows(name: str) -> int | None:
    """Most rows of a step of ``prefill/N``; None for any other program."""
    found = re.fullmatch(r"prefill/([1-9][0-9]{0,4})", name)
    return int(found.group(1)) if found and int(found.group(1)) <= MOST_PREFILL_ROWS else None


def expected_rows(name: str) -> int:
    """Rows that a step of a program for prompts is expected to have: its most, or ``LONG_ROWS`` without a limit."""
    return most_rows(name) or LONG_ROWS


def prefill_programs(names: Iterable[str]) -> tuple[str, ...]:
    """Those that run prompts, the one of fewest rows first."""
    found = [name for name in names if is_prefill(name)]
    return tuple(sorted(found, key=lambda name: (name == PREFILL, most_rows(name) or 0)))
