"""Embedding, norm, addition, last row, argmax and what follows it against the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from harness import assert_close, op_graph, run_both

from lynnc.ops import Add, Advance, Argmax, Embed, LastRow, RmsNorm
from lynnc.passes import run_passes
from lynnc.passes.split_argmax import split_argmax
from lynnc.tensors import DType, Format, Part, S, State, T, Weight

CONTEXT = 64

FORMATS = (Format.NVFP4, Format.NVFP4_FP16, Format.FP8, Format.BF16)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shifted", [True, False])
def test_embed_norm_add_and_last_row(fmt: Format, shifted: bool) -> None:
    table = Weight("table", fmt, (40, 80), (Part("table", 40),), "embed")
    norm = Weight("norm", Format.BF16, (80,), (Part("norm", 80),), "vector")
    graph = op_graph(
        Embed("embed", "token", "table", "h"),
        RmsNorm("norm", "h", "norm", "x", 1e-6, shifted),
        Add("add", "h", "x", "y"),
        LastRow("last", "y", "z"),
        tensors={
            "token": (DType.I32, (T, 1)),
            "h": (DType.BF16, (T, 80)),
            "x": (DType.BF16, (T, 80)),
            "y": (DType.BF16, (T, 80)),
            "z": (DType.BF16, (1, 80)),
        },
        weights=(table, norm),
        rows=T,
        inputs=("token",),
        outputs=("h", "y", "z"),
        program="prefill",
    )
    token = torch.tensor([3, 39, 0, 7, 7, 21], dtype=torch.int32)[:, None]
    outcome = run_both(graph, {"token": token})
    assert torch.equal(outcome.kernels["h"], outcome.reference["h"])
    assert_close(outcome.kernels["y"], outcome.reference["y"], 2e-3, "sum")
    assert torch.equal(outcome.kernels["z"], outcome.kernels["y"][-1:])


def test_plain_norm_with_zero_shifted_weight_is_the_norm_alone() -> None:
    norm = Weight("norm", Format.BF16, (64,), (Part("norm", 64),), "vector")
    graph = op_graph(
        RmsNorm("norm", "h", "norm", "x", 1e-6, True),
        tensors={"h": (DType.BF16, (2, 64)), "x": (DType.BF16, (2, 64))},
        weights=(norm,),
        rows=2,
        inputs=("h",),
        outputs=("x",),
    )
    h = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    zeros = ({("norm", "data"): torch.zeros(64).bfloat16()}, {"norm": torch.zeros(64)})
    outcome = run_both(graph, {"h": h}, weights=zeros)
    expected = h.float() / (h.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(outcome.kernels["x"].float(), expected, 4e-3, "norm alone")


@pytest.mark.parametrize("vocabulary", [384, 5000])
def test_argmax_takes_the_lower_index_of_a_tie_and_never_nan(vocabulary: int) -> None:
    graph = op_graph(
        Argmax("argmax", "logits", "next"),
        tensors={"logits": (DType.F32, (4, vocabulary)), "next": (DType.I32, (4, 1))},
        rows=4,
        inputs=("logits",),
        outputs=("next",),
    )
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1, [5, vocabulary - 1]] = 9.0
    logits[2, 0] = torch.nan
    logits[3] = 1.0
    expected = torch.tensor([int(logits[0].argmax()), 5, int(logits[2, 1:].argmax()) + 1, 0])
    outcome = run_both(split_argmax(graph), {"logits": logits})
    assert outcome.kernels["next"][:, 0].tolist() == expected.tolist() == outcome.reference["next"][:, 0].tolist()


@dataclass(frozen=True)
class Going:
    """Positions of four rows, each in a slot of its own, before a step in a context of ``CONTEXT``."""

    label: str
    vocabulary: int
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.label


@pytest.mark.parametrize(
    "case",
    [Going("one launch", 384), Going("two launches", 5000), Going("alone", 384, ("fuse_advance",))],
    ids=str,
)
def test_a_row_goes_on_behind_its_token_and_padding_and_the_end_of_the_context_stay(case: Going) -> None:
    rows = {name: (DType.I32, (4, 1)) for name in ("position", "slot", "next", "following", "begin")}
    graph = op_graph(
        Argmax("argmax", "logits", "next"),
        Advance("advance", "next", "position", "slot", "history", "following", "begin"),
        tensors={"logits": (DType.F32, (4, case.vocabulary)), **rows},
        states=(State("history", DType.I32, (S,)),),
        rows=4,
        inputs=("logits", "position", "slot"),
        outputs=("next", "following", "begin"),
    )
    graph = run_passes(graph, case.without)
    assert ("advance" in [op.name for op in graph.ops]) == bool(case.without)
    logits = torch.randn(4, case.vocabulary, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0], [-1], [CONTEXT - 1], [5]], dtype=torch.int32)
    slots = torch.tensor([[2], [0], [1], [3]], dtype=torch.int32)
    outcome = run_both(graph, {"logits": logits, "position": positions, "slot": slots}, slots=4, context=CONTEXT)
    token = logits.argmax(-1)
    for values in (outcome.kernels, outcome.reference):
        assert values["following"][:, 0].tolist() == values["begin"][:, 0].tolist() == [1, -1, CONTEXT, 6]
    for states in (outcome.kernel_states, outcome.reference_states):
        expected = torch.zeros(4, CONTEXT, dtype=torch.int32)
        expected[2, 1], expected[3, 6] = token[0], token[3]
        assert torch.equal(states["history"], expected)
