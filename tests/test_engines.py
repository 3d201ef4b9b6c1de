"""Both engines against ``transformers``: logits of every token, and the residual stream after every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from executing import HostWeights, executor_for, executor_on, meaning_device, plan_for, plan_of
from gating import CONTEXT as GATE_CONTEXT
from gating import MOE, failed, gate
from harness import assert_close
from meaning import few_splits
from packing import MULTIPLIED, packed_to, written
from reference import FAMILIES, LIMIT, PROMPT, Case, judged, make
from runners import CONTEXT, Followed, check
from simulated import SimulatedDevice

from lynnc.compiler import fused_graph
from lynnc.engines.compiled import STREAMED, Compiled, compiled_engine
from lynnc.engines.engine import Engine
from lynnc.engines.interpreted import CHUNK, Interpreted, open_interpreted
from lynnc.engines.optrace import OpOutput, entry_of_section, section_names
from lynnc.errors import OptionError, PlanError
from lynnc.runtime.budget import Room
from lynnc.runtime.executor import Executor

TINY = Case("tiny-moe")
DOUBLED = 2
"""How much further from the judge's the residual stream may be than logits, which a norm divides."""


def interpreted(case: Case, context: int = CONTEXT) -> Engine:
    return Interpreted(case.spec, make(case).values, "interpreted", context)


def compiled(case: Case, context: int = CONTEXT) -> Compiled:
    return compiled_engine(executor_for(case, context=context))


Open = Callable[[Case], Engine]
each_engine = pytest.mark.parametrize("opened", (interpreted, compiled), ids=("interpreted", "compiled"))
each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)


@pytest.fixture(autouse=True)
def splits_of_the_tests():
    with few_splits():
        yield


@cache
def judged_stream(case: Case) -> torch.Tensor:
    """What the judge's embedding and layers give for the tokens of the judged run, FP32 [layers + 1, n, hidden]."""
    model, found = make(case).model, []
    inner = model.get_submodule("model")

    def keep(_module: object, _inputs: object, output: object) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).float())

    with ExitStack() as hooks, torch.no_grad():
        for module in (inner.embed_tokens, *inner.layers):
            hooks.callback(module.register_forward_hook(keep).remove)
        model(torch.tensor([judged(case).tokens]), use_cache=False)
    return torch.stack([values.reshape(-1, case.spec.hidden) for values in found])


def everywhere(logits: torch.Tensor) -> Followed:
    return Followed(list(range(len(logits))), logits, logits.argmax(-1))


@each_engine
@each_family
def test_every_token_has_the_logits_of_transformers(case: Case, opened: Open) -> None:
    engine, run = opened(case), judged(case)
    pieces = run.tokens[:PROMPT], run.tokens[PROMPT : PROMPT + 1], run.tokens[PROMPT + 1 :]
    found = torch.cat([engine.append(piece) for piece in pieces])
    check(everywhere(found), run, LIMIT, str(case))
    assert engine.length == len(run.tokens) and found.dtype == torch.float32


@each_engine
@each_family
def test_the_stream_after_each_layer_is_that_of_transformers(case: Case, opened: Open) -> None:
    engine, run = opened(case), judged(case)
    traces = [engine.trace(run.tokens[:PROMPT]), engine.trace(run.tokens[PROMPT:])]
    check(everywhere(torch.cat([trace.logits for trace in traces])), run, LIMIT, str(case))
    hidden, expected = torch.cat([trace.hidden for trace in traces], dim=1), judged_stream(case)
    assert hidden.shape == (len(case.spec.layers) + 1, len(run.tokens), case.spec.hidden)
    for layer, (found, judge) in enumerate(zip(hidden, expected, strict=True)):
        assert_close(found, judge, DOUBLED * LIMIT, f"{case} after {layer} layers")
    assert engine.length == len(run.tokens)


@each_engine
def test_a_sequence_goes_on_behind_a_trace_and_a_new_one_begins_at_reset(opened: Open) -> None:
    engine, tokens = opened(TINY), judged(TINY).tokens
    first = engine.append(tokens[:5])
    engine.reset()
    assert engine.length == 0
    assert torch.equal(engine.append(tokens[:5]), first)
    engine.trace(tokens[5:8])
    check_tail = engine.append(tokens[8:12])
    assert_close(check_tail, judged(TINY).logits[8:12], 1.5 * LIMIT, "behind a trace")


@each_engine
def test_what_does_not_fit_is_refused_and_changes_nothing(opened: Open) -> None:
    engine = opened(TINY)
    engine.append([1, 2, 3])
    for tokens, words in (
        ([], "There are no tokens"),
        ([5, 384], "384 is no token of tiny-moe"),
        ([1] * (CONTEXT - 2), f"{CONTEXT + 1} tokens do not fit a context of {CONTEXT}"),
    ):
        for call in (engine.append, engine.trace):
            with pytest.raises(OptionError, match=words):
                call(tokens)
    assert engine.length == 3
    engine.append([1] * (CONTEXT - 3))
    assert engine.length == CONTEXT


def test_launches_of_a_section_leave_what_the_ops_of_its_graph_do() -> None:
    """Every section from the same stream, in steps of eight and fewer rows; the interpreter sees more tensors."""
    engine, base, tokens = compiled(TINY), interpreted(TINY), judged(TINY).tokens[:11]
    hidden = base.trace(tokens).hidden
    seen = set()
    for section in section_names(len(TINY.spec.layers)):
        entry = entry_of_section(section, len(TINY.spec.layers))
        stream = hidden[int(entry[2:])] if entry else None
        engine.reset()
        base.reset()
        known = {output.tensor: output for output in base.trace_ops(section, tokens, stream)}
        for name, output in joined(engine.trace_ops(section, tokens, stream)).items():
            if name in known and output.values.is_floating_point():
                expected = known[name].values
                assert_close(output.values.float(), expected.float(), 2 * LIMIT, f"{section}: {output.op} at {name}")
                assert output.is_state == known[name].is_state
                seen.add(name)
    assert {"h.0", "h.4", "layers.0.gated", "layers.3.k_cache", "logits"} <= seen, sorted(seen)
    assert engine.length == base.length == len(tokens)


def joined(outputs: Iterable[OpOutput]) -> dict[str, OpOutput]:
    """By tensor, the rows of all steps; of a state, what the last one left."""
    found: dict[str, OpOutput] = {}
    for output in outputs:
        before = found.get(output.tensor)
        if before and not output.is_state:
            output = replace(output, values=torch.cat([before.values, output.values]))
        found[output.tensor] = output
    return found


def test_the_gate_names_the_launch_of_a_plan_with_damaged_weights() -> None:
    """A plan on a (simulated) GPU with two experts of one layer exchanged, against the model's own graph."""
    case = MOE
    arrays = {**make(case).packed}
    for array in ("data", "scale", "global"):
        key = "layers.2.experts_down_weight", array
        arrays[key] = arrays[key].flip(0)
    plan, room = plan_for(case), Room(1, GATE_CONTEXT)
    damaged = compiled_engine(executor_on(plan, HostWeights(arrays), room, meaning_device(plan, room)))
    report = gate(damaged)
    assert not report.passed and report.location is not None and report.location.culprit is not None
    assert (report.location.section, report.location.culprit.op) == ("layers.2", "layers.2.experts_down")
    whole = compiled_engine(executor_on(plan, HostWeights(make(case).packed), room, meaning_device(plan, room)))
    assert "hidden state, relative L2" not in failed(gate(whole))


class LateByOne(Compiled):
    """A plan whose prefill program leaves out the last token of a prompt."""

    def begin(self, prompt: Sequence[int]) -> torch.Tensor:
        before = super().begin(prompt[:-1])
        self.executor.assume(len(prompt), prompt[-1])
        return before


def test_the_gate_judges_the_prefill_program_of_a_plan_on_a_gpu() -> None:
    """By what is generated behind prompts: all else goes through decode programs, and stays right here."""
    plan, room = plan_for(MOE), Room(1, GATE_CONTEXT)
    engine = compiled_engine(executor_on(plan, HostWeights(make(MOE).packed), room, meaning_device(plan, room)))
    broken = LateByOne(engine.executor, engine.spec, engine.label, engine.context)
    report = gate(broken)
    assert "prompts that are wrong" in failed(report) and "KL, mean" not in failed(report)


def test_memory_of_a_compiled_plan_is_what_the_gpu_gave() -> None:
    engine = compiled(TINY)
    device = engine.executor.device
    assert isinstance(device, SimulatedDevice) and engine.memory_bytes == device.taken > 0


def test_the_interpreter_reads_a_packed_folder(tmp_path) -> None:
    checkpoint = written(tmp_path, flavour=MULTIPLIED)
    with torch.no_grad():
        expected = checkpoint.model(torch.tensor([[5, 6, 7]])).logits[0]
    engine = open_interpreted(packed_to(tmp_path))
    assert_close(engine.append([5, 6, 7]), expected, LIMIT, "logits")
    assert engine.context == 512 and engine.label == "checkpoint, interpreted"


def test_a_long_text_runs_in_chunks() -> None:
    engine = interpreted(Case("tiny-full"), context=4 * CHUNK)
    tokens = torch.randint(384, (2 * CHUNK + 7,), generator=torch.Generator().manual_seed(1)).tolist()
    model = make(Case("tiny-full")).model
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert engine.append(tokens).argmax(-1).eq(expected.argmax(-1)).float().mean() > 0.9


def programs_launched(executor: Executor) -> list[int]:
    """Rows of each step, by the grid of its first launch."""
    device = executor.device
    assert isinstance(device, SimulatedDevice)
    return [call.grid[0] for call in device.launched if call.op == "embed"]


@pytest.mark.parametrize("count, steps", [(1, [1]), (3, [4]), (4, [4]), (11, [4, 4, 4]), (9, [4, 4, 1])])
def test_steps_are_as_large_as_programs_allow(count: int, steps: list[int]) -> None:
    engine = compiled(TINY)
    engine.append(judged(TINY).tokens[:count])
    assert programs_launched(engine.executor) == steps
    assert engine.length == count


def test_greedy_tokens_of_a_gpu_are_the_judges() -> None:
    run = judged(TINY)
    engine = compiled(TINY)
    tokens = list(engine.decode(run.tokens[:PROMPT], 6))
    with torch.no_grad():
        expected = run.tokens[:PROMPT]
        for _ in range(6):
            logits = make(TINY).model(torch.tensor([expected]), use_cache=False).logits[0, -1]
            expected += (int(logits.argmax()),)
    assert tokens == list(expected[PROMPT:])
    assert len(programs_launched(engine.executor)) == 6 and engine.length == PROMPT + 5


def test_few_steps_are_launched_ahead() -> None:
    engine = compiled(TINY)
    taken = engine.decode([1, 2, 3], 2 * STREAMED)
    next(taken)
    assert engine.length == 3
    next(taken)
    assert engine.length == 3 + STREAMED


def test_a_plan_without_prefill_decodes_too(monkeypatch) -> None:
    expected = list(compiled(TINY).decode([1, 2, 3], 5))
    plan = plan_of(TINY.spec, ("decode/1", "decode/4"))
    monkeypatch.setattr("executing.plan_for", lambda case: plan)
    engine = compiled(TINY)
    assert "prefill" not in engine.executor.plan.programs
    assert list(engine.decode([1, 2, 3], 5)) == expected


def test_a_plan_of_another_lynnc_is_refused(monkeypatch) -> None:
    engine = compiled(TINY)
    monkeypatch.setattr("lynnc.readback.graph_of", lambda _, program: fused_graph(TINY.spec, program, ("fuse_norm",)))
    with pytest.raises(PlanError, match="was compiled by another lynnc"):
        engine.trace([1])


def test_programs_that_were_not_loaded_are_not_used() -> None:
    executor = executor_for(TINY)
    executor.room = Room(1, CONTEXT, ("prefill",))
    with pytest.raises(PlanError, match="has no decode program"):
        compiled_engine(executor).append([1])
