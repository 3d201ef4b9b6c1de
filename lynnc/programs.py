"""The names of programs: ``decode/1`` to ``decode/8`` and ``prefill``.

In: a name. Out: the rows of its step. Example: ``program_rows("decode/4")`` is 4, ``program_rows("prefill")`` None.
"""

from __future__ import annotations

import re

from lynnc.errors import OptionError

PREFILL = "prefill"
MOST_DECODE_ROWS = 8


def program_rows(name: str) -> int | None:
    """Rows of a decode program, None for ``prefill`` with its free number; OptionError for any other name."""
    if name == PREFILL:
        return None
    found = re.fullmatch(r"decode/([1-9])", name)
    if found is None or int(found.group(1)) > MOST_DECODE_ROWS:
        raise OptionError(f"{name!r} is no program: name prefill or decode/1 to decode/{MOST_DECODE_ROWS}.")
    return int(found.group(1))
