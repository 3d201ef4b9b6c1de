"""Frozen records to JSON text and back, for files that lynnc writes and reads itself.

In: dataclasses of plain values, tuples and mappings. Out: JSON with sorted keys, so that equal records are equal text;
or, from parsed JSON, a record whose every field is there and of its type (KeyError, TypeError or ValueError if not).

Example::

    decode(Shard, json.loads(encode(Shard("weights-00001-of-00001.safetensors", 1024))))
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any


def encode(value: Any) -> str:
    """A record, or whatever JSON can hold, as one line."""
    return _ENCODER.encode(value)


def shallow(value: Any) -> dict[str, Any]:
    """A record or mapping as a dictionary, its values as they are."""
    if isinstance(value, Mapping):
        return dict(value)
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _names_of(kind)}


_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False, default=shallow)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def decode(kind: Any, data: Any) -> Any:
    """JSON values as a value of ``kind``: a dataclass, a tuple or mapping of such, or a plain value of that type."""
    if type(data) is kind:
        return data
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _decode_record(kind, data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"a list was expected, not {data!r}")
        kinds = [parameters[0]] * len(data) if parameters[-1] is Ellipsis else parameters
        return tuple(decode(item, value) for item, value in zip(kinds, data, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise TypeError(f"an object was expected, not {data!r}")
        return {key: decode(parameters[1], value) for key, value in data.items()}
    if origin in (typing.Union, types.UnionType):
        return _decode_union(parameters, data)
    return _decode_plain(kind, data)


def _decode_plain(kind: Any, data: Any) -> Any:
    if kind is object:
        return data
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(data)
    if kind is float and type(data) is int:
        return _as_float(data)
    raise TypeError(f"{kind.__name__} was expected, not {data!r}")


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"an integer of {value.bit_length()} bits is too large for a number") from None


def _decode_record(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not {data!r}")
    hints = _hints(kind)
    if data.keys() != hints.keys():
        raise KeyError(f"{kind.__name__} has other fields: {', '.join(sorted(data.keys() ^ hints.keys()))}")
    return kind(**{name: decode(hints[name], value) for name, value in data.items()})


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in _names_of(kind)}


def _decode_union(parameters: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in parameters:
        return None
    for member in parameters:
        if isinstance(member, type) and type(data) is member:
            return data
    raise TypeError(f"one of {', '.join(str(member) for member in parameters)} was expected, not {data!r}")
