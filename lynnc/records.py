"""Measured choices of a device: ``autotune/records/<device>.json``.

In: a device name. Out: ``Records``, empty where nothing was measured. A record names kernel and problem and holds the
knobs that were fastest; a damaged file or one of another schema counts as empty, as a cache entry would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

SCHEMA = 1

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Records:
    """Knobs by kernel and problem, measured on ``device``."""

    device: str = ""
    knobs: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)

    def find(self, kernel: str, problem: Mapping[str, int | str]) -> Mapping[str, int] | None:
        """Knobs recorded for exactly this problem."""
        return self.knobs.get(_key(kernel, problem))


def load_records(device: str) -> Records:
    """The records shipped for a device, such as ``h200``."""
    path = files("lynnc.autotune").joinpath("records", f"{device}.json")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return Records(device)
    return _from_json(device, data)


def _from_json(device: str, data: Any) -> Records:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("records"), list):
        return Records(device)
    found: dict[Key, Mapping[str, int]] = {}
    for entry in data["records"]:
        try:
            found[_key(entry["kernel"], entry["problem"])] = {str(k): int(v) for k, v in entry["knobs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return Records(device, found)


def _key(kernel: str, problem: Mapping[str, int | str]) -> Key:
    return kernel, tuple(sorted((name, str(value)) for name, value in problem.items()))
