"""In programs for few tokens of a prompt, narrow projections are summed by parts of their columns.

Before::

    m = Linear(x); h2 = Add(h, m); y = RmsNorm(h2)

After::

    p = PartialLinear(x, parts=4)
    h2, y = SumPartsNorm(p, h) { m = SumParts(p); h2 = Add(h, m); y = RmsNorm(h2) }
    h2 = SumPartsAdd(p, h) { m = SumParts(p); h2 = Add(h, m) }                         # where no norm follows

Why: with few rows a projection has a program for each ``TILE`` rows of its weight, too few to fill a GPU where the
weight is narrow, and each goes through all columns. The launch that norms the result, which is there anyway, sums the
parts in order.
"""

from __future__ import annotations

from lynnc.columnorder import BLOCK
from lynnc.ir import Graph, Op
from lynnc.ops import Add, Linear, RmsNorm
from lynnc.passes.patterns import Group, Uses, fuse, ops_of, replace_ops
from lynnc.programs import most_rows
from lynnc.promptops import PartialLinear, SumParts
from lynnc.tensors import DType, Tensor

MOST_ROWS = 64
"""Of a step; with more, tiles of rows fill a GPU, and the parts' sums are traffic."""
TILE = 64
"""Rows of a weight that a program takes."""
PROGRAMS = 128
"""About as many as a large GPU has multiprocessors."""
LEAST_COLUMNS = 512
"""Of a part: a program that has less to read waits more than it reads."""


def split_columns(graph: Graph) -> Graph:
    """Splits every Linear that is added to the residual stream and whose weight has few rows."""
    if not 0 < (most_rows(graph.program) or 0) <= MOST_ROWS:
        return graph
    uses, chains = Uses(graph), []
    for linear in ops_of(graph, Linear):
        add = uses.only_reader(linear.out, Add)
        weight = graph.weights[linear.weight]
        parts = parts_of(graph.tensors[linear.out].width, weight.columns)
        if add and add.b == linear.out and parts > 1 and weight.activations == "bf16":
            norm = next((op for op in uses.readers[add.out] if isinstance(op, RmsNorm)), None)
            chains.append((linear, add, norm, parts))
    return _split(graph, chains)


def parts_of(rows: int, columns: int) -> int:
    """Parts of the columns of a weight: the largest power of two that fills a GPU at most and gives whole blocks."""
    parts, tiles = 1, -(-rows // TILE)
    while 2 * parts * tiles <= PROGRAMS and columns >= 2 * parts * LEAST_COLUMNS and columns % (2 * parts * BLOCK) == 0:
        parts *= 2
    return parts


def _split(graph: Graph, chains: list[tuple[Linear, Add, RmsNorm | None, int]]) -> Graph:
    replacements: dict[str, tuple[Op, ...]] = {}
    tensors, groups = [], []
    for linear, add, norm, parts in chains:
        out = graph.tensors[linear.out]
        tensors.append(Tensor(f"{linear.out}_parts", DType.F32, (out.shape[0], parts, out.width)))
        partial = PartialLinear(linear.name, linear.x, linear.weight, tensors[-1].name, linear.first_row, parts)
        total = SumParts(f"{linear.name}_sum", partial.out, linear.out)
        replacements[linear.name] = (partial, total)
        if norm:
            groups.append(Group("SumPartsNorm", (total, add, norm), norm))
        else:
            groups.append(Group("SumPartsAdd", (total, add), total))
    return fuse(replace_ops(graph, replacements, tensors), groups)
