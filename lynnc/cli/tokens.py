"""Token ids that a command is given: a text with a tokenizer, or the ids themselves.

In: paths. Out: ids in a tuple, or a ``ModelError`` that names the file and the place in it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer

from lynnc.errors import ModelError
from lynnc.fields import Place, describe, list_of, whole
from lynnc.hfconfig import read_json
from lynnc.modelfile import read_text

TOKENIZER_FILE = "tokenizer.json"
_ID = re.compile(r"[0-9]{1,9}")


def tokenize(text: Path, tokenizer: Path) -> tuple[int, ...]:
    """The tokens of a UTF-8 text, without the special tokens that a tokenizer may put around one."""
    content = read_text(text)
    encoding: Any = load_tokenizer(tokenizer).encode(content, add_special_tokens=False)
    return tuple(encoding.ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``."""
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
