"""Tokens to text while they come: no character is shown before all of its bytes are there.

In: a tokenizer of the ``tokenizers`` library, token ids one by one. Out: pieces of text that put together are what the
tokenizer makes of all ids at once, however the bytes of an emoji or of a Chinese character are spread over tokens.
(``DecodeStream`` of that library loses what is held back when the ids end.)

Example::

    stream = TextStream(tokenizer, prompt_ids)
    for token in tokens:
        print(stream.push(token), end="", flush=True)
    print(stream.flush())
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer shows in the place of bytes that are no character, or not yet."""
CONTEXT = 8
"""Tokens of the prompt that come before: some tokenizers drop the space in front of the first token."""


class TextStream:
    """Text of ids that follow ``before``, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._settled = list(before[-CONTEXT:])
        self._open: list[int] = []
        self._shown = len(self._decoded())

    def push(self, token: int) -> str:
        """What can be shown now; what is no whole character yet is held back."""
        self._open.append(token)
        text = self._decoded()
        whole = text.rstrip(UNFINISHED)
        piece = whole[self._shown :]
        if piece and len(whole) == len(text):
            self._settled, self._open = self._open, []
            self._shown = len(self._decoded())
        else:
            self._shown += len(piece)
        return piece

    def flush(self) -> str:
        """What is left when no token follows."""
        piece = self._decoded()[self._shown :]
        self._shown += len(piece)
        return piece

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode([*self._settled, *self._open], skip_special_tokens=True)
        return text
