"""Tokens chosen from logits, and tokens that become text while they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from texts import byte_tokenizer, fallback_tokenizer
from tokenizers import AddedToken, Tokenizer

from lynnc.engines.engine import Trace
from lynnc.generation import Wish, generate
from lynnc.sampling import GREEDY, Sampler, Sampling, candidates
from lynnc.textstream import TextStream

# Choosing


LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0, 1.0, -3.0])


def drawn(sampling: Sampling, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert drawn(GREEDY, 2) == [1, 1]
    assert drawn(GREEDY, 1, torch.tensor([1.0, torch.nan, 3.0])) == [2]


def test_one_candidate_is_the_greedy_choice_at_any_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        logits = torch.randn(300, generator=generator)
        expected = int(logits.numpy().argmax())
        assert drawn(Sampling(temperature=5.0, top_k=1, seed=seed), 3, logits) == [expected] * 3
        assert drawn(Sampling(temperature=5.0, top_p=1e-6, seed=seed), 3, logits) == [expected] * 3
    assert drawn(Sampling(temperature=0.1, top_k=1), 1) == [1]


def test_the_seed_decides() -> None:
    one, same, other = (drawn(Sampling(temperature=1.0, seed=seed), 40) for seed in (3, 3, 4))
    assert one == same != other


def test_tokens_come_as_often_as_their_probability_says() -> None:
    """Expected shares by hand: e^(logit / temperature) over their sum."""
    found = Counter(drawn(Sampling(temperature=2.0, seed=1), 20_000))
    weights = [2.718281828459045 ** (float(logit) / 2.0) for logit in LOGITS]
    for token, weight in enumerate(weights):
        assert found[token] / 20_000 == pytest.approx(weight / sum(weights), abs=0.01)


@dataclass(frozen=True)
class Kept:
    sampling: Sampling
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"k{self.sampling.top_k}-p{self.sampling.top_p}"


KEPT = (
    Kept(Sampling(1.0), (0, 1, 2, 3, 4, 5)),
    Kept(Sampling(1.0, top_k=3), (1, 3, 4)),
    Kept(Sampling(1.0, top_k=99), (1, 3, 4, 0, 2, 5)),
    # Shares are 0.084, 0.378, 0.019, 0.378, 0.139 and 0.003.
    Kept(Sampling(1.0, top_p=0.37), (1,)),
    Kept(Sampling(1.0, top_p=0.75), (1, 3)),
    Kept(Sampling(1.0, top_p=0.76), (1, 3, 4)),
    Kept(Sampling(1.0, top_k=2, top_p=0.51), (1, 3)),
    Kept(Sampling(1.0, top_k=2, top_p=0.49), (1,)),
)


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_what_may_be_chosen(case: Kept) -> None:
    kept, shares = candidates(LOGITS, case.sampling)
    assert tuple(kept.tolist()) == case.tokens and len(shares) == len(kept)
    assert set(drawn(case.sampling, 300)) <= set(case.tokens)


# Generating


@dataclass
class Counting:
    """An engine whose likeliest token is the last one plus one."""

    length: int = 0

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        self.length += len(tokens)
        return torch.nn.functional.one_hot(torch.tensor(tokens) + 1, 100).float()

    def trace(self, tokens: Sequence[int]) -> Trace:
        raise NotImplementedError


def test_generation_ends_at_the_number_or_the_stop_token() -> None:
    engine = Counting()
    assert list(generate(engine, [7, 3], Wish(4))) == [4, 5, 6, 7]
    assert engine.length == 5, "the last token is not appended"
    assert list(generate(Counting(), [3], Wish(9, frozenset({6, 8})))) == [4, 5, 6]


# Text


def streamed(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_character_is_shown_when_all_its_bytes_are_there() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("é🙂x").ids
    assert len(ids) == 7
    assert streamed(tokenizer, ids) == ["", "é", "", "", "", "🙂", "x", ""]


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_the_space_of_the_first_word_is_kept() -> None:
    tokenizer = fallback_tokenizer()
    before, ids = tokenizer.encode("one").ids, tokenizer.encode("two one").ids
    assert (before, ids) == ([1], [2, 1]) and tokenizer.decode(ids) == "two one"
    assert "".join(streamed(tokenizer, ids, before)) == " two one"


def test_special_tokens_are_not_shown() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert "".join(streamed(tokenizer, tokenizer.encode("a<end>b").ids)) == "ab"


@given(ids=st.lists(st.integers(0, 255), max_size=40), text=st.text(max_size=12))
def test_pieces_are_the_whole_text_for_any_bytes(ids: list[int], text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = [*ids, *tokenizer.encode(text).ids]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(st.sampled_from("one tw\né🙂中\N{REPLACEMENT CHARACTER}"), max_size=30))
def test_pieces_are_the_whole_text_with_a_fallback_to_bytes(text: str) -> None:
    tokenizer = fallback_tokenizer()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
