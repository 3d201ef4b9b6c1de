"""The greedy choice over a large vocabulary is made in two launches.

Before::

    next_token = Argmax(logits)

After::

    best, where = ArgmaxPartial(logits, block=1024)
    next_token = ArgmaxFinal(best, where)

Why: one program would read a megabyte of logits alone; 243 programs read it together and a last one compares them.
"""

from __future__ import annotations

from lynnc.ir import Graph
from lynnc.ops import Argmax, ArgmaxFinal, ArgmaxPartial
from lynnc.passes.patterns import ops_of, replace_ops
from lynnc.tensors import DType, Tensor

BLOCK = 1024
"""Logits that one program compares."""


def split_argmax(graph: Graph) -> Graph:
    """Replaces Argmax by a partial and a final op where the vocabulary has more than one block."""
    for argmax in ops_of(graph, Argmax):
        logits = graph.tensors[argmax.logits]
        blocks = -(-logits.width // BLOCK)
        if blocks == 1:
            continue
        values = Tensor("argmax.values", DType.F32, (logits.shape[0], blocks))
        indices = Tensor("argmax.indices", DType.I32, (logits.shape[0], blocks))
        partial = ArgmaxPartial("argmax_partial", argmax.logits, values.name, indices.name, BLOCK)
        final = ArgmaxFinal("argmax_final", values.name, indices.name, argmax.out)
        graph = replace_ops(graph, {argmax.name: (partial, final)}, (values, indices))
    return graph
