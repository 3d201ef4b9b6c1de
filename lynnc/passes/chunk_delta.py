"""The delta rule of a prefill goes by chunks of rows, in two launches.

Before::

    beta, g = DeltaGates(b, a); o = GatedDelta(qkv, beta, g)

After::

    inverse, inverse_rest, scores, scales = DeltaPrepare(qkv, b, a) { DeltaGates; DeltaChunk }
    o = DeltaScan(qkv, inverse, inverse_rest, scores, scales)

Why: rows one after another take as many steps as there are rows. Within a chunk the rule is a triangular system, whose
inverse does not need the state: the first launch finds it for all chunks at once, and in the second only the products
with the state follow each other, on tensor cores.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.mixerops import DeltaGates, GatedDelta
from lynnc.passes.patterns import Group, Uses, fuse, ops_of, replace_ops
from lynnc.programs import expected_rows
from lynnc.promptops import DeltaChunk, DeltaScan
from lynnc.tensors import DType, T, Tensor

CHUNK = 64
"""Rows: the lines of one tensor core product; twice as many would double the work on squares."""
SHORT_CHUNK = 16
"""Of programs for as few rows: the fewest that a product takes."""

LEAST_DECAY = -30.0
"""Log decays below count as this: exp(-30) of a state is nothing beside a new row, and sums of g keep their digits."""


def chunk_delta(graph: Graph) -> Graph:
    """Replaces every GatedDelta whose gates are computed for it alone, where the rows of a step may be many."""
    if graph.rows != T:
        return graph
    uses, groups, replacements = Uses(graph), [], {}
    tensors: list[Tensor] = []
    for delta in ops_of(graph, GatedDelta):
        gates = uses.writer(delta.beta, DeltaGates)
        if gates and uses.only_reader(delta.beta, GatedDelta) and uses.only_reader(delta.g, GatedDelta):
            rows = SHORT_CHUNK if expected_rows(graph.program) <= SHORT_CHUNK else CHUNK
            scratch = _scratch(delta, rows)
            chunk, scan = _ops(delta, scratch, rows)
            tensors.extend(scratch)
            replacements[delta.name] = (chunk, scan)
            groups.append(Group("DeltaPrepare", (gates, chunk), chunk))
    return fuse(replace_ops(graph, replacements, tensors), groups)


def _scratch(delta: GatedDelta, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    prefix = delta.name
    square = (T, delta.value_heads, rows)
    return (
        Tensor(f"{prefix}_inverse", DType.BF16, square),
        Tensor(f"{prefix}_inverse_rest", DType.BF16, square),
        Tensor(f"{prefix}_scores", DType.BF16, square),
        Tensor(f"{prefix}_scales", DType.F32, (T, delta.value_heads, 4)),
    )


def _ops(delta: GatedDelta, scratch: tuple[Tensor, Tensor, Tensor, Tensor], rows: int) -> tuple[DeltaChunk, DeltaScan]:
    inverse, inverse_rest, scores, scales = (tensor.name for tensor in scratch)
    chunk = DeltaChunk(
        name=f"{delta.name}_chunk",
        qkv=delta.qkv,
        beta=delta.beta,
        g=delta.g,
        position=delta.position,
        slot=delta.slot,
        inverse=inverse,
        inverse_rest=inverse_rest,
        scores=scores,
        scales=scales,
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        chunk=rows,
        least_decay=LEAST_DECAY,
    )
    scan = DeltaScan(
        name=delta.name,
        qkv=delta.qkv,
        inverse=inverse,
        inverse_rest=inverse_rest,
        scores=scores,
        scales=scales,
        position=delta.position,
        slot=delta.slot,
        state=delta.state,
        out=delta.out,
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        chunk=rows,
    )
    return chunk, scan
