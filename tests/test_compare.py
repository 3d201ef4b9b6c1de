"""Launches are compared with the interpreter by the size of what they leave, and a remainder by that of the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness import op_graph

from lynnc.compare import Comparison
from lynnc.promptops import DeltaChunk
from lynnc.stepvalues import Run
from lynnc.tensors import DType

HEADS, CHUNK, ROWS = 2, 16, 16
READS, WRITES = ("qkv", "beta", "g", "position", "slot"), ("inverse", "rest", "scores", "scales")
OP = DeltaChunk("chunk", *READS, *WRITES, 1, HEADS, 16, 16, CHUNK, -30.0)


def agreements(change) -> dict[str, bool]:
    """Which of the op's tensors are close, where the launch left what ``change`` makes of the expected values."""
    square = (DType.BF16, (ROWS, HEADS, CHUNK))
    tensors = {name: square for name in ("inverse", "rest", "scores")} | {"scales": (DType.F32, (ROWS, HEADS, 4))}
    reads = {name: (DType.F32, (ROWS, 1)) for name in READS}
    graph = op_graph(OP, tensors={**tensors, **reads}, rows=ROWS, inputs=tuple(reads), outputs=("inverse",))
    exact = torch.randn(ROWS, HEADS, CHUNK, generator=torch.Generator().manual_seed(1))
    expected = Run(graph, {}, {}, ROWS)
    expected.put("inverse", exact)
    expected.put("rest", exact - exact.bfloat16().float())
    expected.put("scores", exact)
    expected.put("scales", torch.ones(ROWS, HEADS, 4))
    found = {name: expected.get(name).clone() for name in tensors}
    change(found)
    step = SimpleNamespace(executor=None, rows=ROWS, graph=graph, tensor=found.__getitem__)
    return {item.tensor: item.is_close for item in Comparison(step).after(OP, expected)}  # type: ignore[arg-type]


def test_equal_values_are_close() -> None:
    assert all(agreements(lambda found: None).values())


@pytest.mark.parametrize("name", ["inverse", "scores", "scales"])
def test_an_error_of_a_tensor_is_measured_by_its_own_size(name: str) -> None:
    found = agreements(lambda found: found[name].mul_(1.03))
    assert [tensor for tensor, is_close in found.items() if not is_close] == [name]


def test_a_remainder_may_differ_by_a_part_of_itself_but_must_not_be_missing() -> None:
    assert all(agreements(lambda found: found["rest"].mul_(1.1)).values())
    assert not agreements(lambda found: found["rest"].zero_())["rest"]
    assert not agreements(lambda found: found["rest"].copy_(-found["rest"]))["rest"]
    assert not agreements(lambda found: found["rest"].fill_(float("nan")))["rest"]
