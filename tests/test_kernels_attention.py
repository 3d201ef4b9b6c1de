"""Attention's kernels against the interpreter, and the interpreter against ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from harness import assert_close, pack_graph, run_both
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.interpret import interpret, new_states
from lynnc.ir import (
    Attention,
    AttentionCombine,
    AttentionPartial,
    CacheAppend,
    DType,
    Format,
    Fused,
    Graph,
    HeadNormRope,
    Op,
    OutputGate,
    Part,
    S,
    Stage,
    State,
    T,
    Tensor,
    Weight,
)
from lynnc.kernels.attention import KERNELS
from lynnc.passes.fuse_attention import fuse_attention
from lynnc.passes.fuse_output_gate import fuse_output_gate
from lynnc.records import Records
from lynnc.target import find_target

BF16_LIMIT, F32_LIMIT = 2.5e-3, 5e-5
LAST_POSITION = 262143


@dataclass(frozen=True)
class Shape:
    """One attention block."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    theta: float = 1e7
    gate: bool = True
    shifted: bool = True
    splits: int = 4
    tile: int = 16

    @property
    def q_stride(self) -> int:
        return self.head_dim * (2 if self.gate else 1)

    @property
    def width(self) -> int:
        return self.heads * self.q_stride + 2 * self.kv_heads * self.head_dim


SMALL = Shape()
LINE = Shape(heads=2, kv_heads=1, splits=3)
REAL = Shape(heads=16, kv_heads=2, head_dim=256, rotary_dim=64, splits=64, tile=32)


def _tensors(shape: Shape, rows) -> dict[str, Tensor]:
    q, kv = shape.heads * shape.q_stride, shape.kv_heads * shape.head_dim
    heads = (rows, shape.heads, shape.head_dim)
    found = (
        Tensor("position", DType.I32, (rows, 1)),
        Tensor("slot", DType.I32, (rows, 1)),
        Tensor("qkv", DType.BF16, (rows, q + 2 * kv)),
        Tensor("q", DType.BF16, (rows, q), "qkv", 0),
        Tensor("k", DType.BF16, (rows, kv), "qkv", q),
        Tensor("v", DType.BF16, (rows, kv), "qkv", q + kv),
        Tensor("q_rotated", DType.BF16, heads),
        Tensor("k_rotated", DType.BF16, (rows, shape.kv_heads, shape.head_dim)),
        Tensor("attended", DType.BF16, heads),
        Tensor("gated", DType.BF16, heads),
        Tensor("partial", DType.F32, (rows, shape.heads, shape.splits, shape.head_dim + 2)),
    )
    return {tensor.name: tensor for tensor in found}


def _norm_ops(shape: Shape) -> tuple[Op, ...]:
    common = {
        "head_dim": shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "theta": shape.theta,
        "eps": 1e-6,
        "shifted": shape.shifted,
    }
    return (
        HeadNormRope(
            "q_rope", "q", "position", "q_norm", "q_rotated", heads=shape.heads, head_stride=shape.q_stride, **common
        ),
        HeadNormRope(
            "k_rope", "k", "position", "k_norm", "k_rotated", heads=shape.kv_heads, head_stride=shape.head_dim, **common
        ),
        CacheAppend(
            "append", "k_rotated", "v", "position", "slot", "k_cache", "v_cache", shape.kv_heads, shape.head_dim
        ),
    )


def _attention_ops(shape: Shape, split: bool) -> tuple[Op, ...]:
    reads = ("q_rotated", "position", "slot", "k_cache", "v_cache")
    facts = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    gate = OutputGate(
        "gate", "attended", "q", "gated", shape.heads, shape.head_dim, stride=shape.q_stride, offset=shape.head_dim
    )
    gates = (gate,) if shape.gate else ()
    if not split:
        return (Attention("attention", *reads, "attended", *facts), *gates)
    return (
        AttentionPartial("attention_partial", *reads, "partial", *facts, splits=shape.splits, tile=shape.tile),
        AttentionCombine(
            "combine", "partial", "position", "attended", shape.heads, shape.head_dim, shape.splits, shape.tile
        ),
        *gates,
    )


def graph_of(shape: Shape, rows=1, *, split: bool = True, fused: bool = True) -> Graph:
    """An attention block between its joint projection ``qkv`` and its output, as a launch graph."""
    names = ("q_norm", "k_norm")
    cache = (shape.kv_heads, S, shape.head_dim)
    output = "gated" if shape.gate else "attended"
    graph = Graph(
        model="test",
        program="prefill" if rows == T else f"decode/{rows}",
        stage=Stage.FUSED,
        rows=rows,
        ops=(*_norm_ops(shape), *_attention_ops(shape, split)),
        tensors=_tensors(shape, rows),
        weights={n: Weight(n, Format.BF16, (shape.head_dim,), (Part(n, shape.head_dim),), "vector") for n in names},
        states={n: State(n, DType.BF16, cache) for n in ("k_cache", "v_cache")},
        inputs=("position", "slot", "qkv"),
        outputs=(output, "partial") if split else (output,),
    )
    graph = graph.with_ops(graph.ops)
    return fuse_output_gate(fuse_attention(graph)) if fused else graph


@dataclass(frozen=True)
class Step:
    """Rows of one step: position (negative: padding) and slot of each."""

    name: str
    positions: tuple[int, ...]
    slots: tuple[int, ...] = ()
    shape: Shape = LINE

    def inputs(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """The step's inputs; rows of q, k and v depend on slot and position alone."""
        slots = self.slots or (0,) * len(self.positions)
        rows = [_row(self.shape, slot, at, seed) for slot, at in zip(slots, self.positions, strict=True)]
        column = {"position": self.positions, "slot": slots}
        found = {name: torch.tensor(values, dtype=torch.int32)[:, None] for name, values in column.items()}
        return {**found, "qkv": torch.stack(rows)}


def _row(shape: Shape, slot: int, position: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + slot * 10_007 + position + 1)
    return torch.randn(shape.width, generator=generator).bfloat16()


def _states(shape: Shape, slots: int, context: int) -> dict[str, torch.Tensor]:
    """Full caches: what stands at and after a row's position is stale and must not matter."""
    states = new_states(graph_of(shape), slots, context)
    for index, state in enumerate(states.values()):
        state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(index)))
    return states


def _written(partial: torch.Tensor, step: Step, row: int) -> torch.Tensor:
    """The non-empty runs of a row's partial results."""
    tiles = step.positions[row] // step.shape.tile + 1
    run = -(-tiles // step.shape.splits)
    return partial[row, :, : -(-tiles // run)]


def _check(step: Step, graph: Graph, context: int = 320):
    slots = max(step.slots or (0,)) + 1
    found = run_both(graph, step.inputs(), states=_states(step.shape, slots, context), slots=slots, context=context)
    real = [row for row, position in enumerate(step.positions) if position >= 0]
    for name in ("gated", "attended"):
        if name in graph.outputs:
            assert found.kernels[name].isfinite().all()
            assert_close(found.kernels[name][real].float(), found.reference[name][real].float(), BF16_LIMIT, name)
    if "partial" in graph.outputs:
        for row in real:
            pair = (_written(values["partial"], step, row) for values in (found.kernels, found.reference))
            assert_close(*pair, F32_LIMIT, f"partial of row {row}")
    for name, state in found.kernel_states.items():
        assert_close(state.float(), found.reference_states[name].float(), BF16_LIMIT / 10, name)
    return found


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
    _check(step, graph)


@pytest.mark.parametrize("knobs", [{"BLOCK_T": 16}, {"BLOCK_T": 64, "STAGES": 1}], ids=str)
def test_other_blocks_of_a_long_run(knobs: dict[str, int]) -> None:
    step = Step("long", (137, 138), shape=replace(LINE, splits=1))
    found = run_both(
        graph_of(step.shape, 2),
        step.inputs(),
        states=_states(step.shape, 1, 160),
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
        states=_states(step.shape, 2, 200),
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
    _check(step, graph_of(step.shape, len(step.positions), fused=False))


PREFILLS = (
    Step("one-slot", tuple(range(11))),
    Step("continued", tuple(range(28, 36))),
    Step("two-slots", (*range(3), *range(30, 34)), (*[1] * 3, *[0] * 4)),
    Step("padded-end", (*range(5), -1, -1)),
    Step("no-gate-full-rope", tuple(range(6)), shape=replace(LINE, gate=False, rotary_dim=64, shifted=False)),
)


@pytest.mark.parametrize("step", PREFILLS, ids=lambda step: step.name)
def test_single_ops_of_a_prefill(step: Step) -> None:
    _check(step, graph_of(step.shape, T, split=False, fused=False), context=64)


def test_real_shape() -> None:
    _check(Step("real", (64,), shape=replace(REAL, splits=4)), graph_of(replace(REAL, splits=4)), context=96)


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
    states = _states(step.shape, 2, 80)
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
            _written(together.kernels["partial"], step, row), _written(alone.kernels["partial"], single, 0)
        )
    for name, state in states.items():
        assert torch.equal(together.kernel_states[name], state)


def test_zero_weights_are_a_plain_norm() -> None:
    """A shifted weight of zero leaves the normed head as it is."""
    step = Step("zero", (0,), shape=replace(LINE, gate=False))
    graph = graph_of(step.shape, fused=False)
    packed, values = pack_graph(graph)
    weights = tuple({name: torch.zeros_like(value) for name, value in part.items()} for part in (packed, values))
    found = run_both(graph, step.inputs(), states=_states(step.shape, 1, 16), context=16, weights=weights)
    head = step.inputs()["qkv"][0, 128:192].float()
    plain = head * torch.rsqrt(head.square().mean() + 1e-6)
    assert_close(found.kernel_states["k_cache"][0, 0, 0].float(), plain.bfloat16().float(), BF16_LIMIT)


@pytest.mark.parametrize("fused", [True, False])
def test_the_epsilon_of_the_head_norm_counts(fused: bool) -> None:
    """Heads whose mean square is a hundredth of epsilon."""
    step = Step("small", (3,))
    inputs = {**step.inputs(), "qkv": (step.inputs()["qkv"].float() * 1e-4).bfloat16()}
    found = run_both(graph_of(step.shape, fused=fused), inputs, states=_states(step.shape, 1, 16), context=16)
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


def _config(shape: Shape) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(
        hidden_size=shape.heads * shape.head_dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_section": [3, 3, 2],
        },
    )


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
    rope = Qwen3_5MoeTextRotaryEmbedding(_config(shape))
    cos, sin = rope(torch.zeros(1), inputs["position"].long().T.expand(3, 1, -1))
    theirs = apply_rotary_pos_emb(normed, normed, cos, sin)[0][0].transpose(0, 1).detach().bfloat16()
    assert (ours == theirs).float().mean() > 0.999
    assert_close(ours.float(), theirs.float(), BF16_LIMIT)


def test_fused_kernels_match_transformers() -> None:
    """Four tokens through the library's attention in FP32 (outputs before o_proj) and through our decode steps."""
    shape, count = LINE, 4
    config = _config(shape)
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
    states = _states(shape, 1, 16)
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
