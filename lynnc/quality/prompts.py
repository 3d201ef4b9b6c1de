"""The prompts of the gate: code, prose, structured JSON, tool calls, and long contexts cut from the held-out text.

In: ``prompts.json`` of this package or a file of the user's, and a function from text to token ids. Out: ``Encoded``
prompts that leave room in the context for what is generated.

Example::

    prompts = encode_prompts(read_prompts(), encode, heldout.ids, room=4096 - 128)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from lynnc.errors import ModelError
from lynnc.fields import Field, Place, Section, list_of, one_of, positive_number, text
from lynnc.modelfile import read_text

LONG = "long-context"
KINDS = ("code", "prose", "json", "tool-call", LONG)
UNNAMED = "prose"
PROMPTS_FILE, HELDOUT_FILE = "prompts.json", "heldout.txt"

Encode = Callable[[str], Sequence[int]]
"""From text to token ids."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on with; or, where ``share`` is above 0, that share of the context filled with the held-out text."""

    name: str
    kind: str
    text: str = ""
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids."""

    name: str
    kind: str
    ids: tuple[int, ...]


def read_prompts(path: Path | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file, a JSON list of texts or of objects with name, kind, and text or share; those of lynnc if
    no file is given. ModelError for a file that is not understood."""
    place = Place(str(path or PROMPTS_FILE))
    content = read_text(path) if path else _shipped(PROMPTS_FILE)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place.file}: the prompts are not JSON ({error}); correct the file") from None
    prompts: tuple[Prompt, ...] = list_of(_prompt)(found, place)
    names = [prompt.name for prompt in prompts]
    for index, name in enumerate(names):
        if name in names[:index]:
            place.item(index).field("name").fail(f"is {name!r} a second time", "give every prompt a name of its own")
    return prompts


def shipped_heldout() -> str:
    """The held-out text that comes with lynnc."""
    return _shipped(HELDOUT_FILE)


def _shipped(name: str) -> str:
    return files("lynnc.quality").joinpath(name).read_text("utf-8")


def _prompt(value: object, place: Place) -> Prompt:
    if isinstance(value, str):
        return Prompt(place.path, UNNAMED, _some_text(value, place))
    found: dict[str, Any] = _PROMPT.read(value, place)
    if (found["text"] is None) is (found["share"] is None):
        place.fail("has neither text nor share, or both", "give it a text, or the share of the context to fill")
    return Prompt(found["name"], found["kind"], found["text"] or "", found["share"] or 0.0)


def _some_text(value: object, place: Place) -> str:
    if not text(value, place).strip():
        place.fail("is empty", "write a prompt")
    return str(value)


def _share(value: object, place: Place) -> float:
    if positive_number(value, place) > 1:
        place.fail(f"is {value}", "write a share of the context of at most 1")
    return float(str(value))


_PROMPT = Section(
    {
        "name": Field(_some_text),
        "kind": Field(one_of(*KINDS), UNNAMED),
        "text": Field(_some_text, None),
        "share": Field(_share, None),
    }
)


def encode_prompts(prompts: Sequence[Prompt], encode: Encode, heldout: Sequence[int], room: int) -> tuple[Encoded, ...]:
    """Each prompt as ids; of one that is longer than ``room`` tokens the last ones count. ModelError for a prompt
    without tokens."""
    found = []
    for prompt in prompts:
        if prompt.share:
            ids = tuple(islice(cycle(heldout), max(1, int(prompt.share * room))))
        else:
            ids = tuple(encode(prompt.text))[-room:]
        if not ids:
            raise ModelError(f"The prompt {prompt.name} has no tokens: change its text, or use another --tokenizer.")
        found.append(Encoded(prompt.name, prompt.kind, ids))
    return tuple(found)
