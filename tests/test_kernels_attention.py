"""Attention's kernels against the interpreter, and the interpreter against ``transformers``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_graphs import (
    BF16_LIMIT,
    LINE,
    REAL,
    SMALL,
    Shape,
    Step,
    check,
    graph_of,
    library_config,
    new_caches,
    written,
)
from harness import assert_close, pack_graph, run_both
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.interpret import interpret
from lynnc.ir import Fused, Graph
from lynnc.kernels.attention import KERNELS
from lynnc.records import Records
from lynnc.target import find_target

LAST_POSITION = 262143


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257)
STEPS = (
    *(Step(f"length-{length}", (length - 1,)) for length in LENGTHS),
    Step("two-key-heads", (64,), shape=SMALL),
    Step("four-rows", (61, 62, 63, 64)),
    Step("first-four-rows", (0, 1, 2, 3)),
    Step("eight-rows-over-a-tile", tuple(range(43, 51))),
    Step("four-slots", (0, 15, 80, 16), (0, 1, 2, 3)),
    Step("two-rows-of-two-slots", (31, 32, 63, 64), (0, 0, 1, 1)),
    Step("same-positions", (32, 33, 33, 34), (1, 1, 0, 0)),
    Step("padded", (40, -1, -1, -1)),
    Step("padding-first", (-1, 0)),
    Step("splits-beyond-tiles", (70, 71), shape=replace(LINE, splits=8)),
    Step("one-split", (70,), shape=replace(LINE, splits=1)),
    Step("long-run", (100,), shape=replace(LINE, splits=1)),
    Step("rows-after-a-long-run", (100, 101, 102, 103), shape=replace(LINE, splits=1)),
    Step("several-long-runs", (250, 251), shape=replace(LINE, splits=3)),
    Step("full-rope", (33, 34), shape=replace(LINE, rotary_dim=64, theta=1e6)),
    Step("plain-norm-no-gate", (33, 34), shape=replace(LINE, shifted=False, gate=False)),
    Step("odd-sizes", (33, 34), shape=replace(LINE, heads=3, head_dim=48, rotary_dim=12)),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_fused_step(step: Step) -> None:
    graph = graph_of(step.shape, len(step.positions))
    assert [op.kind for op in graph.ops if isinstance(op, Fused)] == ["AttentionStep", "CombineGate"][
        : 2 if step.shape.gate else 1
    ]
    check(step, graph)


@pytest.mark.parametrize("knobs", [{"BLOCK_T": 16}, {"BLOCK_T": 64, "STAGES": 1}], ids=str)
def test_other_blocks_of_a_long_run(knobs: dict[str, int]) -> None:
    step = Step("long", (137, 138), shape=replace(LINE, splits=1))
    found = run_both(
        graph_of(step.shape, 2),
        step.inputs(),
        states=new_caches(step.shape, 1, 160),
        context=160,
        knobs={"attention_step": knobs},
    )
    assert_close(found.kernels["gated"].float(), found.reference["gated"].float(), BF16_LIMIT)


@pytest.mark.parametrize("block", [8, 16])
def test_runs_combined_in_turn(block: int) -> None:
    step = Step("many-runs", (190, 20), (0, 1), shape=replace(LINE, splits=12))
    found = run_both(
        graph_of(step.shape, 2),
        step.inputs(),
        states=new_caches(step.shape, 2, 200),
        slots=2,
        context=200,
        knobs={"combine_gate": {"BLOCK_SPLITS": block}},
    )
    assert_close(found.kernels["gated"].float(), found.reference["gated"].float(), BF16_LIMIT)


UNFUSED = (
    Step("length-1", (0,)),
    Step("length-65", (64,)),
    Step("mixed-slots", (31, 32, 63, 64), (0, 0, 1, 1)),
    Step("padded", (40, -1)),
    Step("odd-sizes", (33, 34), shape=replace(LINE, heads=3, head_dim=48, rotary_dim=12)),
)


@pytest.mark.parametrize("step", UNFUSED, ids=lambda step: step.name)
def test_single_ops_of_a_split_step(step: Step) -> None:
    check(step, graph_of(step.shape, len(step.positions), fused=False))


def test_real_shape() -> None:
    check(Step("real", (64,), shape=replace(REAL, splits=4)), graph_of(replace(REAL, splits=4)), context=96)


BIT_CASES = (
    Step("one-slot", (30, 31, 32, 33)),
    Step("from-nothing", (0, 1, 2, 3)),
    Step("two-slots", (15, 16, 64, 65), (0, 0, 1, 1)),
    Step("padded", (63, 64, -1, -1)),
    Step("long-run", (69, 70, 71, 72), shape=replace(LINE, splits=1)),
)


BIT_RUNS = [
    *(pytest.param(step, True, id=step.name) for step in BIT_CASES),
    pytest.param(BIT_CASES[2], False, id=f"{BIT_CASES[2].name}-single-ops"),
]


@pytest.mark.parametrize(("step", "fused"), BIT_RUNS)
def test_rows_do_not_depend_on_each_other(step: Step, fused: bool) -> None:
    """Four rows at once, and the same rows one step after the other, leave the same bits everywhere."""
    states = new_caches(step.shape, 2, 80)
    together = run_both(graph_of(step.shape, 4, fused=fused), step.inputs(), states=states, slots=2, context=80)
    slots = step.slots or (0,) * 4
    for row, position in enumerate(step.positions):
        if position < 0:
            continue
        single = Step("single", (position,), (slots[row],), step.shape)
        alone = run_both(graph_of(step.shape, 1, fused=fused), single.inputs(), states=states, slots=2, context=80)
        states = alone.kernel_states
        assert torch.equal(together.kernels["gated"][row], alone.kernels["gated"][0])
        assert torch.equal(
            written(together.kernels["partial"], step, row), written(alone.kernels["partial"], single, 0)
        )
    for name, state in states.items():
        assert torch.equal(together.kernel_states[name], state)


def test_zero_weights_are_a_plain_norm() -> None:
    """A shifted weight of zero leaves the normed head as it is."""
    step = Step("zero", (0,), shape=replace(LINE, gate=False))
    graph = graph_of(step.shape, fused=False)
    packed, values = pack_graph(graph)
    weights = tuple({name: torch.zeros_like(value) for name, value in part.items()} for part in (packed, values))
    found = run_both(graph, step.inputs(), states=new_caches(step.shape, 1, 16), context=16, weights=weights)
    head = step.inputs()["qkv"][0, 128:192].float()
    plain = head * torch.rsqrt(head.square().mean() + 1e-6)
    assert_close(found.kernel_states["k_cache"][0, 0, 0].float(), plain.bfloat16().float(), BF16_LIMIT)


@pytest.mark.parametrize("fused", [True, False])
def test_the_epsilon_of_the_head_norm_counts(fused: bool) -> None:
    """Heads whose mean square is a hundredth of epsilon."""
    step = Step("small", (3,))
    inputs = {**step.inputs(), "qkv": (step.inputs()["qkv"].float() * 1e-4).bfloat16()}
    found = run_both(graph_of(step.shape, fused=fused), inputs, states=new_caches(step.shape, 1, 16), context=16)
    keys = (states["k_cache"][0, 0, 3].float() for states in (found.kernel_states, found.reference_states))
    assert_close(*keys, BF16_LIMIT, "new key")


def rope_graph(shape: Shape, rows=1) -> Graph:
    """Norm and rotation of the query heads alone."""
    graph = replace(graph_of(shape, rows, fused=False), outputs=("q_rotated",), inputs=("position", "qkv"), states={})
    return graph.with_ops(graph.ops[:1])


@pytest.mark.parametrize("shape", [LINE, replace(LINE, rotary_dim=64, theta=1e6)], ids=["quarter", "full"])
def test_far_positions(shape: Shape) -> None:
    positions = (LAST_POSITION, LAST_POSITION - 1, 105615, 4097, 1, 0)
    step = Step("far", positions, shape=shape)
    inputs = {name: value for name, value in step.inputs().items() if name != "slot"}
    found = run_both(rope_graph(shape, len(positions)), inputs)
    assert_close(found.kernels["q_rotated"].float(), found.reference["q_rotated"].float(), BF16_LIMIT)
    same = (found.kernels["q_rotated"] == found.reference["q_rotated"]).float().mean()
    assert same > 0.995, f"only {same} of the values are equal"


@pytest.mark.parametrize("first", [0, 4096, LAST_POSITION - 7])
def test_interpreter_rotates_like_transformers(first: int) -> None:
    """The library in FP32 but for the norm's rounding, which is the contract's; it would round cos and sin to BF16."""
    shape = SMALL
    graph, step = rope_graph(shape, 8), Step("rope", tuple(range(first, first + 8)), shape=shape)
    inputs = step.inputs()
    _, values = pack_graph(graph)
    ours = interpret(graph, values, {}, {**inputs, "token": inputs["position"]})["q_rotated"]
    heads = inputs["qkv"][:, : shape.heads * shape.q_stride].unflatten(1, (shape.heads, -1))[..., : shape.head_dim]
    norm = Qwen3_5MoeRMSNorm(shape.head_dim, eps=1e-6)
    norm.weight.data.copy_(values["q_norm"])
    normed = norm(heads).transpose(0, 1)[None].float()
    rope = Qwen3_5MoeTextRotaryEmbedding(library_config(shape))
    cos, sin = rope(torch.zeros(1), inputs["position"].long().T.expand(3, 1, -1))
    theirs = apply_rotary_pos_emb(normed, normed, cos, sin)[0][0].transpose(0, 1).detach().bfloat16()
    assert (ours == theirs).float().mean() > 0.999
    assert_close(ours.float(), theirs.float(), BF16_LIMIT)


def test_fused_kernels_match_transformers() -> None:
    """Four tokens through the library's attention in FP32 (outputs before o_proj) and through our decode steps."""
    shape, count = LINE, 4
    config = library_config(shape)
    attention = Qwen3_5MoeAttention(config, 0).float()
    graph = graph_of(shape)
    packed, values = pack_graph(graph, gain=0.5)
    hidden = torch.randn(1, count, config.hidden_size, generator=torch.Generator().manual_seed(5))
    attention.q_norm.weight.data.copy_(values["q_norm"])
    attention.k_norm.weight.data.copy_(values["k_norm"])
    attention.o_proj.weight.data.copy_(torch.eye(shape.heads * shape.head_dim))
    with torch.no_grad():
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([projection(hidden) for projection in projections], -1)[0].bfloat16()
        embedding = Qwen3_5MoeTextRotaryEmbedding(config)(torch.zeros(1), torch.arange(count).expand(3, 1, -1))
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        theirs = attention(hidden, embedding, mask)[0][0]
    states = new_caches(shape, 1, 16)
    for position in range(count):
        inputs = {**Step("token", (position,), shape=shape).inputs(), "qkv": qkv[position : position + 1]}
        found = run_both(graph, inputs, states=states, context=16, weights=(packed, values))
        states = found.kernel_states
        assert_close(found.kernels["gated"][0].flatten().float(), theirs[position], 8e-3, f"position {position}")


REFUSALS = (
    (replace(SMALL, heads=6, kv_heads=4), "no multiple"),
    (replace(SMALL, head_dim=8, rotary_dim=4), "shorter than"),
    (replace(SMALL, tile=24), "no power of two"),
    (replace(SMALL, rotary_dim=15), "not pairs"),
)


@pytest.mark.parametrize(("shape", "reason"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_name_the_reason(shape: Shape, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        choose_all(graph_of(shape), find_target("sm_90"), Records())


def test_a_kernel_is_the_same_for_every_number_of_rows() -> None:
    """What the code of a decode kernel depends on holds no rows, so a row's bits cannot depend on them."""
    kernels = {kernel.name: kernel for kernel in KERNELS}
    for op_of_one, op_of_eight in zip(graph_of(REAL, 1).ops, graph_of(REAL, 8).ops, strict=True):
        kernel = kernels[{"AttentionStep": "attention_step", "CombineGate": "combine_gate"}[op_of_one.kind]]
        one, eight = graph_of(REAL, 1), graph_of(REAL, 8)
        knobs = kernel.default(kernel.problem(one, op_of_one), find_target("sm_90"))
        assert kernel.bind(one, op_of_one, knobs).constants == kernel.bind(eight, op_of_eight, knobs).constants
