"""The passes from the ``model`` to the ``fused`` stage, in order. Nothing else knows the order.

A pass is a function from graph to graph in a file of its own; it may be left out by name (``--without NAME``) and the
plan stays correct, only slower: every op has a kernel of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lynnc.errors import OptionError
from lynnc.ir import Graph, Stage
from lynnc.passes.chunk_delta import chunk_delta
from lynnc.passes.fuse_advance import fuse_advance
from lynnc.passes.fuse_append import fuse_append
from lynnc.passes.fuse_attention import fuse_attention
from lynnc.passes.fuse_experts_down import fuse_experts_down
from lynnc.passes.fuse_experts_up import fuse_experts_up
from lynnc.passes.fuse_gate_up import fuse_gate_up
from lynnc.passes.fuse_gdn import fuse_gdn
from lynnc.passes.fuse_norm import fuse_norm
from lynnc.passes.fuse_output_gate import fuse_output_gate
from lynnc.passes.fuse_projections import fuse_projections
from lynnc.passes.fuse_residual import fuse_residual
from lynnc.passes.group_experts import group_experts
from lynnc.passes.order_columns import order_columns
from lynnc.passes.quantise_activations import quantise_activations
from lynnc.passes.split_argmax import split_argmax
from lynnc.passes.split_attention import split_attention
from lynnc.passes.split_columns import split_columns
from lynnc.programs import is_prefill
from lynnc.verify import verify


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass, and whether it applies to prefill too: there a norm is computed once, not by every tile of rows."""

    run: Callable[[Graph], Graph]
    in_prefill: bool

    @property
    def name(self) -> str:
        """What ``--without`` calls it."""
        return self.run.__name__

    @property
    def why(self) -> str:
        """First line of the pass's module docstring."""
        return (self.run.__doc__ or "").splitlines()[0]


PIPELINE: tuple[Pass, ...] = (
    Pass(fuse_projections, in_prefill=True),
    Pass(split_attention, in_prefill=False),
    Pass(split_argmax, in_prefill=True),
    Pass(fuse_advance, in_prefill=False),
    Pass(fuse_gdn, in_prefill=False),
    Pass(chunk_delta, in_prefill=True),
    Pass(fuse_attention, in_prefill=False),
    Pass(fuse_append, in_prefill=True),
    Pass(fuse_output_gate, in_prefill=True),
    Pass(fuse_experts_up, in_prefill=False),
    Pass(fuse_experts_down, in_prefill=False),
    Pass(group_experts, in_prefill=True),
    Pass(fuse_gate_up, in_prefill=False),
    Pass(split_columns, in_prefill=True),
    Pass(fuse_residual, in_prefill=True),
    Pass(fuse_norm, in_prefill=False),
    Pass(quantise_activations, in_prefill=True),
    Pass(order_columns, in_prefill=True),
)


def check_pass_names(names: Collection[str]) -> None:
    """Raises ``OptionError`` for a name that is no pass, with the nearest one that is."""
    known = [step.name for step in PIPELINE]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the passes are {', '.join(known)}."
            raise OptionError(f"--without {name}: no such pass; {hint}")


def run_passes(graph: Graph, without: Collection[str] = ()) -> Graph:
    """The ``fused`` stage of a ``model`` stage graph; every result is verified."""
    check_pass_names(without)
    of_prompts = is_prefill(graph.program)
    graph = replace(graph, stage=Stage.FUSED)
    for step in PIPELINE:
        if step.name in without or (of_prompts and not step.in_prefill):
            continue
        graph = verify(step.run(graph), after=step.name)
    return graph
