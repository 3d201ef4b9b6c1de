"""Every rule of the verifier refuses a graph that breaks it, naming op and rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from lynnc.compiler import fused_graph, model_graph
from lynnc.errors import GraphError
from lynnc.ir import Fused, Graph, Stage
from lynnc.modelfile import load_model
from lynnc.ops import Linear
from lynnc.verify import RULES, verify

MODEL = model_graph(load_model("tiny-moe"), "decode/1")
FUSED = fused_graph(load_model("tiny-moe"), "decode/1")


def without_op(graph: Graph, name: str) -> Graph:
    return replace(graph, ops=tuple(op for op in graph.ops if op.name != name))


def with_tensor(graph: Graph, name: str, **changes: object) -> Graph:
    return replace(graph, tensors={**graph.tensors, name: replace(graph.tensors[name], **changes)})  # type: ignore


def changed_op(graph: Graph, name: str, **changes: object) -> Graph:
    return replace(graph, ops=tuple(replace(op, **changes) if op.name == name else op for op in graph.ops))  # type: ignore


def first(graph: Graph, kind: type) -> str:
    return next(op.name for op in graph.ops if isinstance(op, kind))


@dataclass(frozen=True)
class Broken:
    """A change that breaks one rule, and what the message must say."""

    rule: str
    change: Callable[[], Graph]
    says: str


CASES = (
    Broken("_names_exist", lambda: changed_op(MODEL, first(MODEL, Linear), weight="nope"), "names the weight 'nope'"),
    Broken("_op_names_are_unique", lambda: replace(MODEL, ops=(*MODEL.ops, MODEL.ops[-1])), "two ops are called"),
    Broken("_reads_follow_writes", lambda: without_op(MODEL, "embed"), "reads h.0 before anything writes it"),
    Broken("_reads_follow_writes", lambda: without_op(MODEL, "argmax"), "next_token is never written"),
    Broken("_views_lie_inside_their_base", lambda: with_tensor(FUSED, "layers.0.z", offset=9999), "reaches outside"),
    Broken("_linears_fit_their_weights", lambda: changed_op(MODEL, "lm_head", first_row=1), "which has"),
    Broken("_linears_fit_their_weights", lambda: with_tensor(MODEL, "final", shape=(1, 64)), "multiplies 64 columns"),
    Broken("_fused_outputs_are_written", lambda: changed_op(FUSED, first(FUSED, Fused), outputs=("h.4",)), "promises"),
    Broken("_stage_matches_ops", lambda: replace(FUSED, stage=Stage.MODEL), "is fused in a graph of stage model"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.says}")
def test_a_broken_rule_is_named(case: Broken) -> None:
    rule = next(rule for rule in RULES if rule.__name__ == case.rule)
    broken = case.change()
    assert any(case.says in complaint for complaint in rule(broken))
    with pytest.raises(GraphError, match=r"tiny-moe decode/1 after testing"):
        verify(broken, after="testing")


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in RULES} == {case.rule for case in CASES}
