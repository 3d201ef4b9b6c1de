"""A pass changes how a step is cut into launches, never what it computes: the interpreter before and after each.

Steps start from the states that a prompt left. Tensors and states are compared, not only the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from harness import assert_close
from reference import FAMILIES, PROMPT, VARIANTS, Case, judged, make
from runners import CONTEXT, unrounded

from lynnc.build import build_graph
from lynnc.interpret import interpret, new_states, step_inputs
from lynnc.ir import Fused, Graph, Stage
from lynnc.model import Mixer, ModelSpec
from lynnc.modelfile import load_model, shipped_models
from lynnc.ops import Linear
from lynnc.passes import PIPELINE, run_passes
from lynnc.tensors import Format, T
from lynnc.verify import verify

SAME = 3e-6
"""RMS error that another order of FP32 sums may cost."""
NAMES = tuple(step.name for step in PIPELINE)
MOST_LAUNCHES = {Mixer.GDN: 6, Mixer.FULL: 7}
MOST_AT_THE_ENDS = 4


@dataclass(frozen=True)
class Step:
    """A step of 1 or more rows: of one sequence that goes on after the prompt, or of as many slots as rows."""

    name: str
    rows: int | None
    slots: int = 1

    def __str__(self) -> str:
        return self.name

    def graph(self, spec: ModelSpec) -> Graph:
        return build_graph(spec, self.rows or T)


STEPS = (
    Step("decode/1", 1),
    Step("decode/4", 4),
    Step("decode/4 of 4 slots", 4, slots=4),
    Step("prefill", None),
)
each_step = pytest.mark.parametrize("step", STEPS, ids=str)
each_case = pytest.mark.parametrize("case", FAMILIES + VARIANTS[:3], ids=str)


@dataclass(frozen=True)
class Outcome:
    """Tensors and states after a step."""

    values: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 everywhere: else the last bit of a sum decides about a BF16 rounding, whose error hides that of a pass."""
    monkeypatch.setattr("lynnc.interpret.bf16", lambda x: x)


def lengths(step: Step) -> list[int]:
    """Tokens that each slot holds before the step."""
    return [PROMPT + 7 * slot for slot in range(step.slots)]


@cache
def prompted(case: Case, step: Step) -> Mapping[str, torch.Tensor]:
    """The states that the prompts leave."""
    prompt = unrounded(build_graph(case.spec, T))
    states = new_states(prompt, step.slots, CONTEXT)
    for slot, length in enumerate(lengths(step)):
        tokens = (judged(case).tokens * 2)[slot : slot + length]
        interpret(prompt, make(case).values, states, step_inputs(tokens, slot=slot))
    return states


def run_step(case: Case, step: Step, graph: Graph) -> Outcome:
    """The step after prompts of different lengths in every slot."""
    states = {name: state.clone() for name, state in prompted(case, step).items()}
    tokens = judged(case).tokens[PROMPT : PROMPT + (step.rows or 6)]
    starts, slots = (lengths(step), list(range(step.slots))) if step.slots > 1 else (PROMPT, 0)
    inputs = step_inputs(tokens, starts, slots)
    return Outcome(interpret(unrounded(graph), make(case).values, states, inputs), states)


def assert_same(found: Outcome, expected: Outcome, what: str) -> None:
    assert torch.equal(found.values["next_token"], expected.values["next_token"]), what
    assert {"logits", "next_token"} <= found.values.keys() & expected.values.keys(), what
    for name in found.values.keys() & expected.values.keys() - {"next_token"}:
        assert_close(found.values[name].float(), expected.values[name].float(), SAME, f"{what}: {name}")
    assert found.states.keys() == expected.states.keys()
    for name, state in found.states.items():
        assert_close(state, expected.states[name], SAME, f"{what}: {name}")


@each_step
@each_case
def test_every_pass_keeps_the_meaning(case: Case, step: Step) -> None:
    graph = replace(step.graph(case.spec), stage=Stage.FUSED)
    expected = run_step(case, step, graph)
    for current in PIPELINE:
        if step.rows is None and not current.in_prefill:
            continue
        graph = verify(current.run(graph), after=current.name)
        assert_same(run_step(case, step, graph), expected, f"after {current.name}")
    assert str(graph) == str(run_passes(step.graph(case.spec)))


@each_step
@each_case
def test_every_pass_may_be_left_out(case: Case, step: Step) -> None:
    expected = run_step(case, step, step.graph(case.spec))
    for without in (*((name,) for name in NAMES), NAMES):
        graph = run_passes(step.graph(case.spec), without)
        assert_same(run_step(case, step, graph), expected, f"without {', '.join(without)}")


@pytest.mark.parametrize("rows", [1, 4, None], ids=["decode/1", "decode/4", "prefill"])
@each_case
def test_all_passes_off_launches_every_op(case: Case, rows: int | None) -> None:
    graph = build_graph(case.spec, rows or T)
    assert run_passes(graph, NAMES).ops == graph.ops


def launches(graph: Graph) -> Counter[str]:
    """Launches of each layer by its number; ``ends`` counts those outside the layers."""
    return Counter(op.name.split(".")[1] if op.name.startswith("layers.") else "ends" for op in graph.ops)


def assert_few_launches(spec: ModelSpec, rows: int) -> None:
    counts = launches(run_passes(build_graph(spec, rows)))
    assert counts["ends"] <= MOST_AT_THE_ENDS
    for layer, mixer in enumerate(spec.layers):
        assert counts[str(layer)] <= MOST_LAUNCHES[mixer], f"layer {layer} ({mixer})"


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", shipped_models())
def test_decode_launches(name: str, rows: int) -> None:
    assert_few_launches(load_model(name), rows)


def test_launches_of_lynn_27b() -> None:
    spec = load_model("lynn-27b-a3b")
    counts = launches(run_passes(build_graph(spec, 1)))
    assert {counts[str(layer)] for layer, mixer in enumerate(spec.layers) if mixer is Mixer.GDN} == {6}
    assert {counts[str(layer)] for layer, mixer in enumerate(spec.layers) if mixer is Mixer.FULL} == {7}
    assert counts.total() == 30 * 6 + 10 * 7 + 4


@dataclass(frozen=True)
class Precision:
    """Formats that differ from the model file's."""

    name: str
    formats: Mapping[str, Format]

    def __str__(self) -> str:
        return self.name


PRECISIONS = (
    Precision("gates-bf16", {"gdn_gates": Format.BF16, "gdn_in": Format.NVFP4}),
    Precision("attention-fp8", {"attention_in": Format.FP8}),
    Precision("head-bf16", {"lm_head": Format.BF16}),
    Precision("embed-nvfp4", {"embed": Format.NVFP4}),
    Precision("shared-bf16", {"shared_expert": Format.BF16}),
    Precision("experts-fp8", {"experts": Format.FP8}),
    Precision("router-fp8", {"router": Format.FP8, "shared_gate": Format.BF16}),
    Precision("all", dict(VARIANTS[0].formats)),
)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ["lynn-27b-a3b", "tiny-moe", "tiny-dense"])
def test_mixed_precision_costs_no_launch(name: str, precision: Precision) -> None:
    spec = load_model(name)
    formats = {**spec.precision.formats, **precision.formats}
    assert_few_launches(replace(spec, precision=replace(spec.precision, formats=formats)), 1)


def test_gates_of_another_format_are_a_second_segment() -> None:
    spec = load_model("tiny-moe")
    formats = {**spec.precision.formats, **PRECISIONS[0].formats}
    graph = run_passes(build_graph(replace(spec, precision=replace(spec.precision, formats=formats)), 1))
    joint = next(op for op in graph.ops if op.name.startswith("layers.0."))
    assert isinstance(joint, Fused)
    segments = [op for op in joint.body if isinstance(op, Linear)]
    assert [graph.weights[op.weight].format for op in segments] == [Format.NVFP4, Format.BF16]
