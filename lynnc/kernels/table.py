"""Every kernel, and which one computes an op in a program."""

from __future__ import annotations

from lynnc.errors import GraphError
from lynnc.ir import Graph, Op
from lynnc.kernels import attention, experts, gdn, gemm, gemm_fp4, greedy, linear, mlp, moe, simple
from lynnc.kernels.kernel import Family, Kernel
from lynnc.programs import is_prefill

KERNELS: tuple[Kernel, ...] = (
    *linear.KERNELS,
    *gemm.KERNELS,
    *gemm_fp4.KERNELS,
    *simple.KERNELS,
    *greedy.KERNELS,
    *gdn.KERNELS,
    *attention.KERNELS,
    *moe.KERNELS,
    *experts.KERNELS,
    *mlp.KERNELS,
)


def kernel_for(graph: Graph, op: Op) -> Kernel:
    """The kernel of an op: one of the program's own family before one that serves any."""
    family = Family.PREFILL if is_prefill(graph.program) else Family.DECODE
    fitting = [kernel for kernel in KERNELS if op.kind in kernel.patterns and kernel.family in (family, Family.ANY)]
    if not fitting:
        raise GraphError(
            f"{graph.model} {graph.program}: no kernel computes {op.kind} ({op.name}); add one to the table."
        )
    return min(fitting, key=lambda kernel: kernel.family is Family.ANY)
