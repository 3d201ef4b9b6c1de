"""Times of what would do the work of a prompt's kernels otherwise: torch's products and attention, FLA's delta rule.

In: sizes. Out: a ``Timing`` of one call on random BF16 inputs, in a captured chain, so that none waits for the host.

Example::

    time_matmul(rows=256, height=12288, width=2048, l2_bytes=50 << 20).median
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module

import torch
from gputiming import time_on_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from lynnc.bench.timing import Timing

REPEATS = 15
CHAIN = 20
"""Calls of a chain, at least."""
BEYOND_L2 = 3
"""Bytes of the weights that a chain goes through, over those of the L2 cache."""
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DEVICE = "cuda"

Call = Callable[[], object]


def time_matmul(rows: int, height: int, width: int, l2_bytes: int) -> Timing:
    """One BF16 ``x @ weight.T``, x [rows, width] and weight [height, width]."""
    unlike = max(2, BEYOND_L2 * l2_bytes // (2 * height * width) + 1)
    x = _random(rows, width)
    weights = [_random(height, width) for _ in range(unlike)]
    return _time_calls([partial(torch.matmul, x, weight.T) for weight in weights])


@cache
def expert_weights(count: int, width: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights [count, width, 2 * hidden] of gate and up, and [count, hidden, width], as views with rows of the
    outputs in memory: more than any cache holds."""
    up = _random(count, 2 * hidden, width) * width**-0.5
    down = _random(count, width, hidden) * hidden**-0.5
    return up.transpose(1, 2), down.transpose(1, 2)


def time_experts(sizes: tuple[int, int, int, int, int], with_choice: bool = False) -> Timing:
    """Experts of one layer, for rows, experts, experts of a row, and widths of model and expert; random logits.

    The rows are sorted by expert already, or top-k, sort, gather and weighted sum count too.
    """
    rows, count, slots, width, hidden = sizes
    up, down = expert_weights(count, width, hidden)
    x, logits, numbers = _random(rows, width), _random(rows, count).float(), torch.arange(count, device=DEVICE)
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def sort() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, chosen = logits.softmax(-1).topk(slots, -1)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        return scores, order, torch.searchsorted(pairs[order], numbers, right=True).int()

    def products(gathered: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, linear = grouped(gathered, up, offs=ends).chunk(2, -1)
        return grouped(torch.nn.functional.silu(gate) * linear, down, offs=ends)

    def whole() -> torch.Tensor:
        scores, order, ends = sort()
        found = products(x[order // slots], ends)
        back = torch.empty_like(found)
        back[order] = found
        return (back.reshape(rows, slots, width) * scores[..., None].bfloat16()).sum(1)

    _, order, ends = sort()
    return _time_calls([whole if with_choice else partial(products, x[order // slots], ends)])


def time_attention(sizes: tuple[int, int, int, int], backend: str, gqa: bool) -> Timing:
    """Causal attention of rows, heads, heads of keys and their width, repeated beforehand if they are not shared."""
    rows, heads, shared, width = sizes
    q, k, v = (_random(1, count, rows, width) for count in (heads, shared, shared))
    if not gqa:
        k, v = (x.repeat_interleave(heads // shared, 1).contiguous() for x in (k, v))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=gqa)
    with sdpa_kernel(BACKENDS[backend]):
        return _time_calls([attend])


def time_fla(rows: int, heads: tuple[int, int], widths: tuple[int, int]) -> Timing:
    """flash-linear-attention's rule for heads of keys and of values, their widths; the state FP32 in and out."""
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    (keys, values), (width, value_width) = heads, widths
    q, k = (_random(1, rows, keys, width) for _ in range(2))
    v, g, beta = (_random(1, rows, values, *rest) for rest in ((value_width,), (), ()))
    state = torch.zeros(1, values, width, value_width, device=DEVICE)
    a_log, dt_bias = (torch.rand(values, device=DEVICE) for _ in range(2))
    inside = {f"use_{what}_in_kernel": True for what in ("qk_l2norm", "beta_sigmoid", "gate")}
    gates = {"A_log": a_log, "dt_bias": dt_bias, **inside}
    return _time_calls([partial(rule, q, k, v, g, beta, initial_state=state, output_final_state=True, **gates)])


def _time_calls(calls: Sequence[Call]) -> Timing:
    """GPU time of one call in a captured chain that goes through them in turn."""
    chain = list(calls) * -(-CHAIN // len(calls))
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for call in chain:
                call()
    return time_on_gpu(graph.replay, REPEATS).over(len(chain))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
