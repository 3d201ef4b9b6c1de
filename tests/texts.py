"""Tiny tokenizers: one whose tokens are bytes, and one of words that falls back to bytes."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@cache
def _byte_tokenizer() -> str:
    own = [byte for byte in range(256) if chr(byte) in pre_tokenizers.ByteLevel.alphabet()]
    others = (byte for byte in range(256) if byte not in own)
    letters = {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def byte_tokenizer() -> Tokenizer:
    """256 tokens: token N is the byte N, written as byte-level tokenizers of the family write it."""
    return Tokenizer.from_str(_byte_tokenizer())


def fallback_tokenizer() -> Tokenizer:
    """Words with the space before them, and bytes for the rest."""
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    names = ["<unk>", f"{space}one", f"{space}two", space, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer
