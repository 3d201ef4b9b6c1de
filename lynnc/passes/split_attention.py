"""Attention of a few rows is split over runs of the row's own context, then combined.

Before::

    attended = Attention(q, &k_cache, &v_cache)

After::

    partial = AttentionPartial(q, &k_cache, &v_cache, splits=128, tile=32)
    attended = AttentionCombine(partial)

Why: one row has only as many programs as key/value heads, too few to fill a GPU. Runs are cut by the row's own
position, read from device memory, so a short context costs little in a graph captured for a long one, and the order
of the sums of a row does not depend on how many rows share the step.
"""

from __future__ import annotations

from lynnc.ir import Graph, Op
from lynnc.mixerops import Attention, AttentionCombine, AttentionPartial
from lynnc.passes.patterns import ops_of, replace_ops
from lynnc.tensors import DType, Tensor

SPLITS = 128
"""Runs for each key/value head: with 2 of them, 256 programs, about two for each multiprocessor of a large GPU."""
TILE = 32
"""Positions that a program reads at once."""


def split_attention(graph: Graph) -> Graph:
    """Replaces every Attention by a partial and a combining op."""
    replacements, tensors = {}, []
    for attention in ops_of(graph, Attention):
        prefix = attention.name.rpartition(".")[0]
        shape = (graph.rows, attention.heads, SPLITS, attention.head_dim + 2)
        tensors.append(Tensor(f"{prefix}.partial", DType.F32, shape))
        replacements[attention.name] = _split(attention, tensors[-1].name)
    return replace_ops(graph, replacements, tensors)


def _split(attention: Attention, partial: str) -> tuple[Op, ...]:
    part = AttentionPartial(
        name=f"{attention.name}_partial",
        q=attention.q,
        position=attention.position,
        slot=attention.slot,
        k_cache=attention.k_cache,
        v_cache=attention.v_cache,
        partial=partial,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        splits=SPLITS,
        tile=TILE,
    )
    combine = AttentionCombine(
        name=f"{attention.name}_combine",
        partial=partial,
        position=attention.position,
        out=attention.out,
        heads=attention.heads,
        head_dim=attention.head_dim,
        splits=SPLITS,
        tile=TILE,
    )
    return part, combine
