"""Top-k of rows that have broken routers, against the interpreter, and the interpreter against the published router."""

from __future__ import annotations

import pytest
import torch
from harness import assert_close, op_graph, run_both
from moe_graphs import router_rows
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from lynnc.interpret import interpret
from lynnc.ir import Graph
from lynnc.ops import TopK
from lynnc.tensors import DType

ROUTES = [(1, 1), (3, 2), (7, 3), (8, 8), (96, 8), (100, 8), (192, 6), (205, 8), (255, 8), (256, 8), (512, 10)]


def top_k_graph(experts: int, k: int, normalize: bool, rows: int) -> Graph:
    return op_graph(
        TopK("top_k", "logits", "ids", "scores", experts, k, normalize),
        tensors={
            "logits": (DType.F32, (rows, experts)),
            "ids": (DType.I32, (rows, k)),
            "scores": (DType.F32, (rows, k)),
        },
        rows=rows,
        inputs=("logits",),
        outputs=("ids", "scores"),
    )


@pytest.mark.parametrize("experts, k", ROUTES)
@pytest.mark.parametrize("normalize", [True, False])
def test_top_k_of_difficult_rows(experts: int, k: int, normalize: bool) -> None:
    rows = router_rows(experts)
    logits = torch.stack(list(rows.values()))
    found = run_both(top_k_graph(experts, k, normalize, len(rows)), {"logits": logits})
    ids = found.kernels["ids"]
    for name, row, expected in zip(rows, ids.tolist(), found.reference["ids"].tolist(), strict=True):
        assert row == expected and len(set(row)) == k and 0 <= min(row) <= max(row) < experts, name
    for name in ("equal", "nan", "minus-infinity"):
        assert ids[list(rows).index(name)].tolist() == list(range(k)), name
    assert_close(found.kernels["scores"], found.reference["scores"], 1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_interpreter_routes_like_the_published_router(normalize: bool) -> None:
    sizes = {"num_experts": 96, "num_experts_per_tok": 8, "hidden_size": 32}
    if normalize:
        router = Qwen3_5MoeTopKRouter(Qwen3_5MoeTextConfig(**sizes))
    else:
        router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes, norm_topk_prob=False))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight.copy_(torch.randn(96, 32, generator=generator))
        logits, scores, ids = router(torch.randn(16, 32, generator=generator))
    graph = top_k_graph(96, 8, normalize, 16)
    step = {"logits": logits, "token": torch.zeros(16, 1, dtype=torch.int32)}
    found = interpret(graph, {}, {}, step)
    assert torch.equal(found["ids"].long(), ids)
    assert_close(found["scores"], scores, 1e-6)
