"""Every kernel, and which one computes an op in a program."""

from __future__ import annotations

from lynnc.errors import GraphError
from lynnc.ir import Graph, Op
from lynnc.kernels import (
    attention,
    experts,
    gdn,
    gdnchunks,
    gemm,
    gemm_fp4,
    greedy,
    grouped,
    grouped_fp4,
    linear,
    mlp,
    moe,
    parts,
    simple,
)
from lynnc.kernels.kernel import Family, Kernel
from lynnc.programs import MOST_DECODE_ROWS, is_prefill
from lynnc.tensors import T

KERNELS: tuple[Kernel, ...] = (
    *linear.KERNELS,
    *gemm.KERNELS,
    *gemm_fp4.KERNELS,
    *simple.KERNELS,
    *greedy.KERNELS,
    *gdn.KERNELS,
    *gdnchunks.KERNELS,
    *attention.KERNELS,
    *moe.KERNELS,
    *experts.KERNELS,
    *grouped.KERNELS,
    *grouped_fp4.KERNELS,
    *parts.KERNELS,
    *mlp.KERNELS,
)


def kernel_for(graph: Graph, op: Op) -> Kernel:
    """The kernel of an op: one of the family of its rows before one that serves any."""
    family = Family.PREFILL if is_prefill(graph.program) and not _has_few_rows(graph, op) else Family.DECODE
    fitting = [kernel for kernel in KERNELS if op.kind in kernel.patterns and kernel.family in (family, Family.ANY)]
    if not fitting:
        raise GraphError(
            f"{graph.model} {graph.program}: no kernel computes {op.kind} ({op.name}); add one to the table."
        )
    return min(fitting, key=lambda kernel: kernel.family is Family.ANY)


def _has_few_rows(graph: Graph, op: Op) -> bool:
    """Whether an op writes no more rows than a decode step whatever the step's, as the head does after the last row."""
    rows = [graph.tensors[name].shape[0] for name in op.writes]
    return bool(rows) and all(count != T and int(count) <= MOST_DECODE_ROWS for count in rows)
