"""Token ids that a command is given: a text with a tokenizer, or the ids themselves.

In: paths. Out: ids in a tuple, or a ``ModelError`` that names the file and the place in it. Of a packed folder also its
tokenizer, and the tokens that end a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer

from lynnc.errors import ModelError, WeightError
from lynnc.fields import Place, describe, list_of, whole
from lynnc.hfconfig import read_json
from lynnc.modelfile import read_text

TOKENIZER_FILE = "tokenizer.json"
EOS = "eos_token_id"
_ID = re.compile(r"[0-9]{1,9}")


def tokenize(text: Path, tokenizer: Path) -> tuple[int, ...]:
    """The tokens of a UTF-8 text, without the special tokens that a tokenizer may put around one."""
    return encode(load_tokenizer(tokenizer), read_text(text))


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a text; special tokens are those that are written in it."""
    encoding: Any = tokenizer.encode(text, add_special_tokens=False)
    return tuple(encoding.ids)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a packed folder; WeightError if it holds none."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise WeightError(f"{folder} holds no {TOKENIZER_FILE}: copy the one of the checkpoint into it.")
    return load_tokenizer(folder / TOKENIZER_FILE)


def stop_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end a text, by `generation_config.json` of a folder, or else by its `config.json`."""
    for name in ("generation_config.json", "config.json"):
        content = read_json(folder / name) if (folder / name).is_file() else {}
        for section, path in ((content, ""), (content.get("text_config"), "text_config.")):
            given = section.get(EOS) if isinstance(section, Mapping) else None
            if given is not None:
                place = Place(str(folder / name), f"{path}{EOS}")
                return frozenset(list_of(whole(0))(given if isinstance(given, list) else [given], place))
    return frozenset()


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer file; ModelError if the tokenizers library cannot use it."""
    model = read_json(path).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        Place(str(path), "model").fail(
            "has no vocabulary", f"name a {TOKENIZER_FILE} as the tokenizers library writes it"
        )
    with _Loading(path):
        return Tokenizer.from_file(str(path))


class _Loading:
    """Makes a ``ModelError`` of what the tokenizers library raises for a file that it cannot use: ``Exception`` itself,
    which cannot be caught without catching every other exception too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            raise ModelError(
                f"{self._path}: the tokenizers library cannot use the file ({error}); name a {TOKENIZER_FILE} that it "
                "wrote"
            ) from None


def read_token_ids(path: Path) -> tuple[int, ...]:
    """The ids in a file: a JSON list, or one on each line."""
    content = read_text(path)
    if not content.lstrip().startswith("["):
        return tuple(_read_line(path, number, line) for number, line in enumerate(content.splitlines(), 1) if line)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the list of token ids is not JSON ({error}); correct it") from None
    ids: tuple[int, ...] = list_of(whole(0))(found, Place(str(path)))
    return ids


def _read_line(path: Path, number: int, line: str) -> int:
    if not _ID.fullmatch(line.strip()):
        raise ModelError(f"{path}: line {number} is {describe(line)}; write one token id on each line")
    return int(line)
