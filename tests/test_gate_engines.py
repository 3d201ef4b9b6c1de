"""Engines of the gate: a plan's graphs without a GPU, a checkpoint as it stands, and sections run by themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Flavour, write_checkpoint
from gating import CONTEXT, DENSE, FULL, MOE, engine_of, random_ids
from harness import assert_close
from packing import packed_to, written
from reference import Case, make

from lynnc.build import build_graph
from lynnc.compiler import Request, assemble_plan, lower_programs
from lynnc.engines.interpreted import open_interpreted
from lynnc.engines.optrace import entry_of_section, ops_of_section, section_names
from lynnc.engines.planned import Planned, open_planned
from lynnc.engines.reference import open_reference, unquantised
from lynnc.errors import OptionError, PlanError
from lynnc.ir import Fused, primitive_ops
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.planfile import save_plan
from lynnc.target import find_target
from lynnc.tensors import Format

ROUNDING = 1e-2
TOKENS = random_ids(40, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, packed, and a plan without machine code of the same model."""
    root = tmp_path_factory.mktemp("engines")
    written(root)
    packed_to(root)
    save_uncompiled(load_model(root / "packed" / "model.yaml"), root / "mine.plan", ("decode/1", "prefill"))
    return root


def save_uncompiled(spec: object, folder: Path, programs: tuple[str, ...]) -> None:
    request = Request(find_target("sm_90"), options=Options(programs=programs))
    lowered = lower_programs(spec, request)  # type: ignore[arg-type]
    kernels = {key: call.entry for _, low in lowered.values() for key, call in low.kernels.items()}
    save_plan(assemble_plan(spec, request, lowered, kernels, {}), {}, folder)  # type: ignore[arg-type]


def patterns(engine: Planned, rows: int) -> set[str]:
    return {op.kind for op in engine._graph(rows).ops if isinstance(op, Fused)}


def test_a_plan_runs_its_own_programs_with_its_own_passes() -> None:
    spec, values = make(MOE).spec, make(MOE).values
    engine = Planned(spec, values, "plan", CONTEXT)
    assert "ExpertsUp" in patterns(engine, 1) and "ExpertsUp" not in patterns(engine, 20)
    assert [len(piece) for piece, _ in engine._pieces(TOKENS)] == [40]
    decoding = Planned(spec, values, "plan", CONTEXT, options=Options(programs=("decode/1", "decode/8")))
    assert [len(piece) for piece, _ in decoding._pieces(TOKENS[:18])] == [8, 8, 1, 1]
    assert "ExpertsUp" in patterns(decoding, 8)
    without = Planned(spec, values, "plan", CONTEXT, options=Options(without=("fuse_experts_up",)))
    assert "ExpertsUp" not in patterns(without, 1) and "ExpertsDown" in patterns(without, 1)
    few = Planned(spec, values, "plan", CONTEXT, options=Options(prefill_rows=16))
    assert [len(piece) for piece, _ in few._pieces(TOKENS)] == [16, 16, 8]


@pytest.mark.parametrize("case", [MOE, FULL, DENSE], ids=str)
def test_a_plan_means_what_its_model_means(case: Case) -> None:
    """Every row has logits, in prefill too; hidden states are there."""
    model = engine_of(make(case))
    planned = Planned(make(case).spec, make(case).values, "plan", CONTEXT)
    for tokens in (TOKENS[:33], TOKENS[33:34], TOKENS[34:]):
        ours, theirs = model.trace(tokens), planned.trace(tokens)
        assert ours.logits.shape == theirs.logits.shape == (len(tokens), 384)
        assert_close(theirs.logits, ours.logits, ROUNDING, "logits")
        assert_close(theirs.hidden, ours.hidden, ROUNDING, "hidden states")


def test_a_plan_of_another_model_is_refused(folder: Path) -> None:
    engine = open_planned(folder / "mine.plan", folder / "packed", CONTEXT)
    assert engine.options.programs == ("decode/1", "prefill") and "its graph interpreted" in engine.label
    expected = open_interpreted(folder / "packed", CONTEXT).append(TOKENS)
    assert_close(engine.append(TOKENS), expected, 5 * ROUNDING, "logits")  # results of experts are BF16 in prompts
    other = folder / "other.plan"
    save_uncompiled(replace(load_model("tiny-moe"), max_context=256), other, ("decode/1",))
    with pytest.raises(PlanError, match=r"compiled for another model than .*packed holds: run `lynnc compile"):
        open_planned(other, folder / "packed")


def test_a_reference_has_the_checkpoints_values(folder: Path) -> None:
    """Against transformers on what was written: nothing is quantised, FP32 becomes BF16."""
    spec = load_model(folder / "packed" / "model.yaml")
    reference = open_reference(folder / "checkpoint", CONTEXT)
    assert set(reference.spec.precision.formats.values()) == {Format.BF16}
    assert unquantised(spec).precision.formats.keys() == spec.precision.formats.keys()
    model = write_checkpoint(folder / "again", MOE, Flavour("plain")).model
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    assert_close(reference.append(TOKENS), expected, 3e-2, "logits")
    quantised = open_interpreted(folder / "packed", CONTEXT).append(TOKENS)
    distance = (quantised - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert distance > 0.1, "the packed folder is not what the reference must be"


def test_a_quantised_checkpoint_is_a_reference_of_its_own_values(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", MOE, Flavour("modelopt"))
    packed = open_interpreted(packed_to(tmp_path), CONTEXT)
    reference = open_reference(tmp_path / "checkpoint", CONTEXT)
    assert reference.spec.precision.format("experts") is Format.NVFP4
    assert torch.equal(reference.append(TOKENS), packed.append(TOKENS))


def test_a_reference_keeps_half_of_the_bytes(folder: Path) -> None:
    reference = open_reference(folder / "checkpoint", CONTEXT)
    widened = sum(value.nbytes for value in reference.weights.values())
    assert 0.5 <= reference.memory_bytes / widened < 0.51
    assert set(reference.weights) == set(build_graph(reference.spec, 1).weights)
    assert len(reference.weights) == len(list(reference.weights))


@pytest.mark.parametrize("planned", [False, True], ids=["model", "plan"])
def test_sections_make_up_the_graph(planned: bool) -> None:
    spec, values = make(MOE).spec, make(MOE).values
    engine = Planned(spec, values, "plan", CONTEXT) if planned else engine_of(make(MOE))
    graph = engine._graph(1)
    names = section_names(len(spec.layers))
    assert names == ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
    parts = [ops_of_section(graph, name) for name in names]
    assert tuple(op for part in parts for op in part) == graph.ops and all(parts)
    assert [entry_of_section(name, 4) for name in names] == ["", "h.0", "h.1", "h.2", "h.3", "h.4"]


@pytest.mark.parametrize("planned", [False, True], ids=["model", "plan"])
def test_a_section_by_itself_does_what_it_does_in_the_step(planned: bool) -> None:
    """Of a layer of each kind: in a prompt, then in a step of one row, from states that the section itself left."""
    spec, values = make(MOE).spec, make(MOE).values
    engine = Planned(spec, values, "plan", CONTEXT) if planned else engine_of(make(MOE))
    traces = [engine.trace(TOKENS[:30]), engine.trace(TOKENS[30:31])]
    for section, layer in (("layers.1", 1), ("layers.3", 3)):
        engine.reset()
        for trace, tokens in zip(traces, (TOKENS[:30], TOKENS[30:31]), strict=True):
            found = engine.trace_ops(section, tokens, trace.hidden[layer])
            last = [output for output in found if output.tensor == f"h.{layer + 1}"]
            assert torch.equal(last[-1].values.float(), trace.hidden[layer + 1])
            written_names = {name for op in ops_of_section(engine._graph(len(tokens)), section) for name in op.writes}
            assert written_names <= {output.tensor for output in found}
            inner = {kind.kind for op in ops_of_section(engine._graph(1), section) for kind in primitive_ops(op)}
            assert {output.inner for output in found} <= inner | {
                "Attention",
                "GroupByExpert",
                "GroupedLinear",
                "DeltaChunk",
                "DeltaScan",
            }
    caches = [output for output in found if output.is_state]
    assert [output.tensor for output in caches] == ["layers.3.k_cache", "layers.3.v_cache"]
    assert all(output.values.shape == (2, 31, 64) for output in caches)


def test_the_ends_by_themselves() -> None:
    engine = engine_of(make(MOE))
    trace = engine.trace(TOKENS[:9])
    engine.reset()
    assert torch.equal(engine.trace_ops("embed", TOKENS[:9], None)[0].values.float(), trace.hidden[0])
    engine.reset()
    head = {output.tensor: output.values for output in engine.trace_ops("head", TOKENS[:9], trace.hidden[-1])}
    assert torch.equal(head["logits"], trace.logits)


def test_an_engine_refuses_what_does_not_fit() -> None:
    engine = engine_of(make(MOE))
    engine.append(TOKENS)
    for tokens, words in (((), "no tokens"), ((384,), "384 is no token"), (TOKENS * 3, "do not fit a context of 128")):
        with pytest.raises(OptionError, match=words):
            engine.append(tokens)
    assert engine.length == len(TOKENS)
    assert not torch.is_inference_mode_enabled()
