"""The parts of the gate by themselves: divergences, intervals, margins, thresholds, prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from gating import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lynnc.cli.gate import read_heldout
from lynnc.errors import ModelError, OptionError
from lynnc.quality.bootstrap import bootstrap
from lynnc.quality.divergence import HeldOut, compare_on_text, kl_divergence
from lynnc.quality.greedy import Flip, Noise, NoiseMeter, Outcome, allowance, classify, find_flip
from lynnc.quality.prompts import KINDS as PROMPT_KINDS
from lynnc.quality.prompts import encode_prompts, read_prompts, shipped_heldout
from lynnc.quality.thresholds import KINDS, read_thresholds
from lynnc.quality.verdict import Check

LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=12)
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(LOGITS, st.randoms())
def test_kl_is_not_negative_and_zero_for_equals(row: list[float], random: object) -> None:
    ours = torch.tensor([row])
    theirs = ours[:, torch.randperm(len(row), generator=torch.Generator().manual_seed(len(row)))]
    assert float(kl_divergence(ours, ours)) == 0.0
    assert float(kl_divergence(ours, theirs)) >= 0.0
    assert float(kl_divergence(ours, ours + 3.0)) == pytest.approx(0.0, abs=1e-6)


def test_kl_of_two_coins() -> None:
    ours, theirs = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert float(kl_divergence(ours, theirs)) == pytest.approx(expected)
    assert float(kl_divergence(theirs, ours)) != pytest.approx(expected)
    assert kl_divergence(ours, torch.tensor([[math.nan, 0.0]])).isnan().all()


@QUICK
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(0, 5))
def test_intervals_hold_the_mean(values: list[float], seed: int) -> None:
    found = bootstrap(torch.tensor(values), torch.ones(len(values)), seed)
    assert found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert min(values) - 1e-3 <= found.low and found.high <= max(values) + 1e-3


def test_intervals_are_repeatable_and_shrink() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(400)
    assert bootstrap(values, ones) == bootstrap(values, ones)
    few, many = bootstrap(values[:25], ones[:25]), bootstrap(values, ones)
    assert many.high - many.low < few.high - few.low
    assert many.high - many.low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.2)


def test_a_ratio_counts_weights() -> None:
    assert bootstrap(torch.tensor([8.0, 1.0]), torch.tensor([4.0, 1.0])).mean == pytest.approx(9 / 5)
    assert math.isnan(bootstrap(torch.tensor([1.0, math.nan]), torch.ones(2)).high)


@QUICK
@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 10))
def test_a_gap_is_explained_up_to_the_allowance(gap: float, margin: float, rms: float, scale: float) -> None:
    for thresholds in KINDS.values():
        widest = allowance(Noise(rms, rms, scale, 5, 0), thresholds)
        assert widest <= thresholds.margin_multiple * thresholds.noise * scale + 1e-9
        outcome = classify(Flip(0, 1, 2, margin, gap), widest)
        assert (outcome is Outcome.EXPLAINED) is (gap <= widest)
    assert classify(Flip(0, 1, 2, math.inf, math.inf), 1e9) is Outcome.WRONG


def test_a_flip_has_the_bases_margin_and_the_gap_to_the_candidates_choice() -> None:
    base, candidate = torch.tensor([1.0, 4.0, 3.5, 2.0]), torch.tensor([1.0, 4.0, 3.5, 4.5])
    assert find_flip(7, base, candidate) == Flip(7, 1, 3, margin=0.5, gap=2.0)
    assert find_flip(7, base, base) is None
    damaged = find_flip(0, base, torch.tensor([1.0, math.nan, 3.5, 2.0]))
    assert damaged and damaged.base == 1 and damaged.candidate == 2 and math.isinf(damaged.gap)


def test_noise_leaves_out_constants_flips_and_damage() -> None:
    base = torch.tensor([[0.0, 4.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    candidate = base + 5.0
    candidate[1] = torch.tensor([0.0, 9.0, 0.0, 0.0])
    candidate[2, 0] = math.inf
    meter = NoiseMeter()
    meter.add(base, candidate)
    found = meter.result()
    assert (found.rms, found.largest, found.positions, found.damaged) == (0.0, 0.0, 1, 1)
    assert found.scale == pytest.approx(math.sqrt(3))
    assert math.isinf(NoiseMeter().result().relative)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_keeps_no_limit(value: float) -> None:
    assert not Check("x", value, 1e300, "").is_ok
    assert not Check("x", -value, -1e300, "", is_least=True).is_ok


def test_kinds_go_from_strict_to_loose() -> None:
    kinds = list(KINDS.values())
    assert list(KINDS) == ["bit-exact", "tuning", "fusion", "compilation", "quantisation"]
    for name in ("divergent_share", "noise", "mean_kl", "max_kl", "bits_per_byte", "layer_l2", "most_l2", "op_l2"):
        found = [getattr(kind, name) for kind in kinds]
        assert found == sorted(found) and found[0] == 0
    assert [kind.agreement for kind in kinds] == sorted((kind.agreement for kind in kinds), reverse=True)


def test_the_band_widens_with_depth_to_its_limit() -> None:
    kind = KINDS["fusion"]
    assert kind.band(0) == kind.band(1) == kind.layer_l2 and kind.band(4) == 2 * kind.layer_l2
    assert kind.band(1000) == kind.most_l2 and kind.least_cosine(1000) == 1 - kind.most_l2**2


def test_a_file_replaces_limits_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"quantisation": {"mean_kl": 0.05, "noise": 0}, "fusion": {"agreement": 0.5}}))
    found = read_thresholds("quantisation", path)
    assert (found.mean_kl, found.noise, found.agreement) == (0.05, 0.0, KINDS["quantisation"].agreement)
    assert read_thresholds("tuning", path) == KINDS["tuning"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"quantization": {}}', "quantization is no known kind of change; write quantisation instead"),
        ('{"fusion": {"mean_lk": 1}}', "fusion.mean_lk is no known limit; write mean_kl instead"),
        ('{"fusion": {"mean_kl": -1}}', "fusion.mean_kl is -1"),
        ('{"fusion": {"mean_kl": NaN}}', "fusion.mean_kl is nan"),
        ('{"fusion": {"mean_kl": "1"}}', "fusion.mean_kl is the text '1'"),
        ("[1]", "the content is a list"),
        ("{", "are not JSON"),
    ],
)
def test_bad_limits_are_refused_with_their_place(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        read_thresholds("fusion", tmp_path / "limits.json")
    assert "limits.json" in str(caught.value) and words in str(caught.value)


def test_shipped_prompts_are_of_all_kinds() -> None:
    prompts = read_prompts()
    assert len(prompts) >= 40
    by_kind = {kind: [prompt for prompt in prompts if prompt.kind == kind] for kind in PROMPT_KINDS}
    assert all(len(found) >= 6 for found in by_kind.values())
    assert all((prompt.share > 0) is (prompt.kind == "long-context") for prompt in prompts)
    assert len({prompt.text for prompt in prompts if prompt.text}) == len(prompts) - len(by_kind["long-context"])
    assert len(shipped_heldout()) > 5000


def test_long_prompts_fill_their_share_and_short_ones_keep_their_end() -> None:
    encoded = encode_prompts(read_prompts(), lambda text: list(text.encode()), (7, 8, 9), room=40)
    by_name = {prompt.name: prompt for prompt in encoded}
    assert by_name["long-100-percent"].ids == ((7, 8, 9) * 14)[:40]
    assert len(by_name["long-50-percent"].ids) == 20
    assert bytes(by_name["tool-none"].ids).decode().endswith("Middlemarch?\nAssistant: ")
    assert max(len(prompt.ids) for prompt in encoded) == 40
    with pytest.raises(ModelError, match="code-fibonacci has no tokens"):
        encode_prompts(read_prompts(), lambda text: [], (7,), room=40)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(["one", {"name": "two", "kind": "code", "text": "def f"}, {"name": "l", "share": 0.5}]))
    assert [(prompt.name, prompt.kind, prompt.share) for prompt in read_prompts(path)] == [
        ("[0]", "prose", 0.0),
        ("two", "code", 0.0),
        ("l", "prose", 0.5),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "is an empty list"),
        ('{"a": 1}', "is a mapping, not a list"),
        ('["  "]', "[0] is empty"),
        ("[3]", "[0] is 3, not a mapping"),
        ('[{"name": "a", "kind": "poem", "text": "x"}]', "[0].kind is the text 'poem'"),
        ('[{"name": "a"}]', "[0] has neither text nor share"),
        ('[{"name": "a", "text": "x", "share": 1}]', "[0] has neither text nor share, or both"),
        ('[{"name": "a", "share": 1.5}]', "[0].share is 1.5"),
        ('[{"name": "a", "text": "x"}, {"name": "a", "text": "y"}]', "[1].name is 'a' a second time"),
        ("[", "are not JSON"),
    ],
)
def test_bad_prompts_are_refused_with_their_place(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        read_prompts(tmp_path / "mine.json")
    assert "mine.json" in str(caught.value) and words in str(caught.value)


def test_bytes_of_a_text_add_up(tmp_path: Path) -> None:
    text = "Straße, 東京 🚀 and a plain end"
    (tmp_path / "a.txt").write_text(text)
    byte_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = read_heldout(tmp_path / "a.txt", tokenizer)
    assert found.name == "a.txt" and len(found.ids) == sum(found.bytes) == len(text.encode())
    assert sorted(set(found.bytes)) == [0, 1, 2, 3, 4], "the first token of a character has all of its bytes"
    assert len(found.first(5).ids) == len(found.first(5).bytes) == 5
    with pytest.raises(OptionError, match=r"a.txt has 1 tokens and nothing to predict"):
        compare_on_text(None, HeldOut("a.txt", (1,), (1,)), 8)  # type: ignore[arg-type]
