"""What the compiler says, word for word: graphs, choices and one rendered source for each template.

After a wanted change: ``pytest tests/test_golden.py --update-golden``, then read the diff.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lynnc.choose import choose_all
from lynnc.compiler import Request, fused_graph, lower_programs, model_graph
from lynnc.model import ModelSpec
from lynnc.modelfile import load_model
from lynnc.plan import Options
from lynnc.records import Records
from lynnc.target import find_target

GOLDEN = Path(__file__).parent / "golden"
TARGET = find_target("sm_90")


def check(name: str, text: str, update: bool) -> None:
    path = GOLDEN / name
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run pytest with --update-golden and read the new file"
    assert text == path.read_text(), f"{path} changed: if that was wanted, run pytest with --update-golden"


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense", "tiny-full"])
@pytest.mark.parametrize("program", ["decode/1", "prefill"])
def test_graph_of_stage_model(model: str, program: str, update: bool) -> None:
    name = f"{model}.{program.replace('/', '-')}.model.txt"
    check(name, str(model_graph(load_model(model), program)), update)


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense", "tiny-full"])
@pytest.mark.parametrize("program", ["decode/1", "prefill"])
def test_graph_of_stage_fused(model: str, program: str, update: bool) -> None:
    name = f"{model}.{program.replace('/', '-')}.fused.txt"
    check(name, str(fused_graph(load_model(model), program)), update)


def with_4_bit_activations(model: str) -> ModelSpec:
    spec = load_model(model)
    return replace(spec, precision=replace(spec.precision, activations="nvfp4"))


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense"])
def test_graph_with_4_bit_activations(model: str, update: bool) -> None:
    graph = fused_graph(with_4_bit_activations(model), "prefill")
    check(f"{model}-w4a4.prefill.fused.txt", str(graph), update)


@pytest.mark.parametrize("program", ["decode/1", "prefill"])
def test_choices_of_the_large_model(program: str, update: bool) -> None:
    graph = fused_graph(load_model("lynn-27b-a3b"), program)
    lines = [f"{op.name}: {choice}" for op, choice in zip(graph.ops, choose_all(graph, TARGET, Records()), strict=True)]
    kept = [
        line
        for line in lines
        if line.startswith(("embed", "layers.0.", "layers.3.", "last", "final", "lm_head", "arg"))
    ]
    check(f"lynn-27b-a3b.{program.replace('/', '-')}.choices.txt", "\n".join(kept) + "\n", update)


@cache
def rendered_sources() -> dict[str, str]:
    """The first source of each template over the tiny models, fused and not; of one with wide layers, sums by parts."""
    found: dict[str, str] = {}
    unfused = Options(
        without=(
            "fuse_advance",
            "fuse_gdn",
            "fuse_attention",
            "fuse_append",
            "fuse_output_gate",
            "fuse_experts_up",
            "fuse_experts_down",
        )
    )
    for model in ("tiny-moe", "tiny-dense"):
        for options in (Options(), unfused):
            for _, low in lower_programs(load_model(model), Request(TARGET, options=options)).values():
                for call in low.kernels.values():
                    found.setdefault(call.entry.name, call.source.text)
    few_rows = Request(TARGET, options=Options(programs=("prefill/16",)))
    for _, low in lower_programs(load_model("lynn-27b-a3b"), few_rows).values():
        for call in low.kernels.values():
            found.setdefault(call.entry.name, call.source.text)
    fp4 = Request(find_target("sm_120"), options=Options(programs=("prefill",)))
    for model in ("tiny-dense", "tiny-moe"):
        for _, low in lower_programs(with_4_bit_activations(model), fp4).values():
            for call in low.kernels.values():
                found.setdefault(call.entry.name, call.source.text)
    return found


@pytest.mark.parametrize("template", sorted(rendered_sources()))
def test_rendered_source(template: str, update: bool) -> None:
    check(f"source.{template}.py.txt", rendered_sources()[template], update)


def test_every_kernel_has_a_golden_source() -> None:
    from lynnc.kernels.table import KERNELS

    assert {kernel.name for kernel in KERNELS} - set(rendered_sources()) <= {"argmax_partial", "argmax_final"}
