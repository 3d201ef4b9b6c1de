"""The kernels of Gated DeltaNet against the interpreter, and the interpreter against ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from harness import Outcome, assert_close, op_graph, pack_graph, run_both
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from lynnc.choose import choose_all
from lynnc.errors import OptionError
from lynnc.interpret import interpret
from lynnc.ir import Fused, Graph, Op
from lynnc.mixerops import CausalConv, DeltaGates, GatedDelta, GatedNorm
from lynnc.records import Records
from lynnc.target import find_target
from lynnc.tensors import DType, Format, Part, State, T, Tensor, Weight

EPS = 1e-6
BF16_LIMIT = 2e-3
F32_LIMIT = 1e-5
Values = dict[str, torch.Tensor]
NOWHERE = 1 << 20
"""Slot of padded rows: an address made of it lies in no state."""


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer. ``ring`` is the length of the convolution's state."""

    name: str
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    width: int = 4
    ring: int = 16

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values


GROUPED = Heads("two value heads a key head")
HEADS = (
    GROUPED,
    Heads("as many key heads", key_heads=2),
    Heads("three value heads a key head", key_heads=2, value_heads=6),
    Heads("narrow values", key_dim=128, value_dim=64),
    Heads("no powers of two", key_dim=24, value_dim=40),
    Heads("width 3, ring 11", width=3, ring=11),
)


@dataclass(frozen=True)
class Step:
    """Rows of one step: position and slot of each; rows of a slot are neighbours."""

    name: str
    positions: tuple[int, ...]
    slots: tuple[int, ...]

    def columns(self) -> Values:
        first: dict[int, int] = {}
        for position, slot in zip(self.positions, self.slots, strict=True):
            first.setdefault(slot, position)
        columns = {"position": self.positions, "slot": self.slots, "start": [first[slot] for slot in self.slots]}
        return {name: torch.tensor(values, dtype=torch.int32)[:, None] for name, values in columns.items()}


def run_of(name: str, start: int, count: int, slot: int = 1) -> Step:
    """Rows of one sequence."""
    return Step(name, tuple(range(start, start + count)), (slot,) * count)


STEPS = (
    run_of("first token", 0, 1),
    run_of("second token", 1, 1),
    run_of("third token", 2, 1),
    run_of("later token", 37, 1),
    run_of("start of a sequence", 0, 6),
    run_of("eight rows over the ring's end", 13, 8),
    Step("two slots", (5, 6, 7, 0, 1), (2, 2, 2, 0, 0)),
    Step("four slots", (0, 9, 1, 33), (3, 0, 2, 1)),
    Step("padding at the end", (4, 5, -1, -1), (1, 1, NOWHERE, NOWHERE)),
    Step("padding alone", (-1,), (NOWHERE,)),
    Step("padding between", (4, -1, 7), (1, NOWHERE, 2)),
)
LONG_STEPS = (
    run_of("17 rows", 0, 17),
    run_of("33 rows", 0, 33),
    run_of("14 rows later: the ring's oldest entries are read and written", 3, 14),
    Step("long, then short, then padding", (*range(2, 22), 5, 6, -1), (*(2,) * 20, 0, 0, NOWHERE)),
)


def layer_ops(heads: Heads) -> dict[str, Op]:
    conv = CausalConv(
        "conv", "qkv", "position", "slot", "start", "conv_weight", "conv_state", "conv_out", heads.width, heads.ring
    )
    gates = DeltaGates("gates", "b", "a", "a_log", "dt_bias", "beta", "g")
    sizes = (heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
    delta = GatedDelta("delta", "conv_out", "beta", "g", "position", "slot", "delta_state", "delta_out", *sizes)
    norm = GatedNorm("norm", "delta_out", "z", "norm_weight", "out", EPS)
    return {op.name: op for op in (conv, gates, delta, norm)}


def layer_tensors(heads: Heads, rows: object) -> dict[str, Tensor]:
    """As after ``fuse_projections``: the projections' results are columns of one tensor."""
    tensors, offset = {}, 0
    for name, width in (
        ("qkv", heads.channels),
        ("z", heads.values),
        ("b", heads.value_heads),
        ("a", heads.value_heads),
    ):
        tensors[name] = Tensor(name, DType.BF16, (rows, width), "joint", offset)
        offset += width
    for name, dtype, shape in (
        ("joint", DType.BF16, (offset,)),
        ("position", DType.I32, (1,)),
        ("slot", DType.I32, (1,)),
        ("start", DType.I32, (1,)),
        ("token", DType.I32, (1,)),
        ("conv_out", DType.BF16, (heads.channels,)),
        ("beta", DType.F32, (heads.value_heads,)),
        ("g", DType.F32, (heads.value_heads,)),
        ("delta_out", DType.BF16, (heads.value_heads, heads.value_dim)),
        ("out", DType.BF16, (heads.values,)),
    ):
        tensors[name] = Tensor(name, dtype, (rows, *shape))
    return tensors


def layer_weights(heads: Heads) -> tuple[Weight, ...]:
    shapes = {
        "conv_weight": (Format.BF16, (heads.channels, heads.width)),
        "a_log": (Format.F32, (heads.value_heads,)),
        "dt_bias": (Format.F32, (heads.value_heads,)),
        "norm_weight": (Format.BF16, (heads.value_dim,)),
    }
    return tuple(Weight(name, fmt, shape, (Part(name, shape[0]),), "vector") for name, (fmt, shape) in shapes.items())


def layer_graph(heads: Heads, names: tuple[str, ...], rows: object, fused: bool = False) -> Graph:
    """Some ops of a layer; what they read and nothing writes is an input."""
    every = layer_ops(heads)
    ops: tuple[Op, ...] = tuple(every[name] for name in names)
    used = {role: tuple(dict.fromkeys(n for op in ops for n in op.names(role))) for role in ("weight", "state")}
    written = [tensor for op in ops for tensor in op.writes]
    reads = dict.fromkeys(tensor for op in ops for tensor in op.reads if tensor not in written)
    tensors = layer_tensors(heads, rows)
    inputs = tuple(
        dict.fromkeys([tensors[name].base or name for name in reads] + ["position", "slot", "start", "token"])
    )
    outputs = tuple(written)
    if fused:
        outputs = ("out",)
        ops = (Fused("step", "GdnStep", ops, tuple(reads), used["weight"], used["state"], outputs),)
    states = (
        State("conv_state", DType.BF16, (heads.ring, heads.channels)),
        State("delta_state", DType.F32, (heads.value_heads, heads.key_dim, heads.value_dim)),
    )
    program = "prefill" if rows == T else f"decode/{rows}"
    graph = op_graph(*ops, tensors={}, rows=rows, inputs=inputs, outputs=outputs, program=program)
    weights = {weight.name: weight for weight in layer_weights(heads)}
    return replace(graph, tensors=tensors, weights=weights, states={s.name: s for s in states}).with_ops(ops)


WHOLE = ("conv", "gates", "delta", "norm")


def random_inputs(graph: Graph, step: Step, seed: int = 1) -> Values:
    generator = torch.Generator().manual_seed(seed)
    inputs = step.columns()
    rows = len(step.positions)
    inputs["token"] = torch.zeros(rows, 1, dtype=torch.int32)
    for name in graph.inputs:
        if name not in inputs:
            value = torch.randn(rows, graph.tensors[name].width, generator=generator)
            value = {"beta": value.sigmoid(), "g": -value.abs()}.get(name, value)
            dtype = torch.bfloat16 if graph.tensors[name].dtype is DType.BF16 else torch.float32
            inputs[name] = value.to(dtype).unflatten(1, [int(dim) for dim in graph.tensors[name].shape[1:]])
    return inputs


def stale_states(heads: Heads, slots: int = 4) -> Values:
    """What other sequences left behind."""
    generator = torch.Generator().manual_seed(7)
    ring = torch.randn(slots, heads.ring, heads.channels, generator=generator).bfloat16()
    shape = (slots, heads.value_heads, heads.key_dim, heads.value_dim)
    return {"conv_state": ring, "delta_state": torch.randn(shape, generator=generator)}


def check(graph: Graph, found: Outcome) -> None:
    """Every output and state; the convolution's inputs must be kept bit for bit."""
    for name in graph.outputs:
        limit = BF16_LIMIT if graph.tensors[name].dtype is DType.BF16 else F32_LIMIT
        assert_close(found.kernels[name], found.reference[name], limit, name)
    assert torch.equal(found.kernel_states["conv_state"], found.reference_states["conv_state"])
    # The fused step's inputs to the rule may differ by a rounding of the convolution.
    limit = F32_LIMIT if len(graph.ops) == 1 and not isinstance(graph.ops[0], Fused) else BF16_LIMIT
    assert_close(found.kernel_states["delta_state"], found.reference_states["delta_state"], limit, "delta_state")


def run_layer(
    heads: Heads, names: tuple[str, ...], step: Step, *, rows: object = None, fused: bool = False, seed: int = 1
) -> tuple[Graph, Outcome]:
    graph = layer_graph(heads, names, len(step.positions) if rows is None else rows, fused)
    states = stale_states(heads)
    return graph, run_both(graph, random_inputs(graph, step, seed), states=states, slots=4)


def name_of(case: Heads | Step | str) -> str:
    return case if isinstance(case, str) else case.name


@pytest.mark.parametrize("step", STEPS, ids=name_of)
def test_step_of_few_rows(step: Step) -> None:
    graph, found = run_layer(GROUPED, WHOLE, step, fused=True)
    check(graph, found)


@pytest.mark.parametrize("heads", HEADS[1:], ids=name_of)
def test_step_of_other_heads(heads: Heads) -> None:
    graph, found = run_layer(heads, WHOLE, run_of("three rows", 2, 3), fused=True)
    check(graph, found)


@pytest.mark.parametrize("knobs", [{"STATE_FIRST": 1}, {"num_warps": 16}], ids=str)
def test_step_of_other_knobs(knobs: dict[str, int]) -> None:
    """A row that stores its state, one that hands it on and one that starts afresh."""
    graph = layer_graph(GROUPED, WHOLE, 3, fused=True)
    inputs = random_inputs(graph, Step("mixed", (7, 8, 0), (2, 2, 0)))
    found = run_both(graph, inputs, knobs={"gdn_step": knobs}, states=stale_states(GROUPED), slots=4)
    check(graph, found)


@pytest.mark.parametrize("step", [*STEPS, *LONG_STEPS], ids=name_of)
def test_conv(step: Step) -> None:
    graph, found = run_layer(GROUPED, ("conv",), step, rows=T)
    check(graph, found)


@pytest.mark.parametrize("step", [*STEPS, LONG_STEPS[-1]], ids=name_of)
def test_delta(step: Step) -> None:
    graph, found = run_layer(GROUPED, ("delta",), step, rows=T)
    check(graph, found)


@pytest.mark.parametrize("heads", HEADS, ids=name_of)
@pytest.mark.parametrize("name", WHOLE)
def test_op_of_other_heads(name: str, heads: Heads) -> None:
    graph, found = run_layer(heads, (name,), run_of("three rows", 2, 3))
    check(graph, found)


@pytest.mark.parametrize("block", [8, 32])
def test_blocks_of_value_columns(block: int) -> None:
    heads = Heads("blocks", key_dim=16, value_dim=24)
    graph = layer_graph(heads, ("delta",), T)
    inputs = random_inputs(graph, run_of("rows", 1, 5))
    knobs = {"gated_delta": {"BLOCK_V": block}}
    check(graph, run_both(graph, inputs, states=stale_states(heads), knobs=knobs))


def test_rows_of_one_sequence_equal_single_rows_bit_for_bit() -> None:
    """Four rows in one step, and one after another."""
    whole = run_of("four rows", 2, 4)
    graph, together = run_layer(GROUPED, WHOLE, whole, fused=True)
    inputs = random_inputs(graph, whole)
    outs, states = single_rows(graph, inputs, stale_states(GROUPED))
    assert torch.equal(outs, together.kernels["out"])
    assert all(torch.equal(states[name], together.kernel_states[name]) for name in states)


def test_rows_of_several_sequences_equal_single_rows_bit_for_bit() -> None:
    step = Step("mixed", (5, 6, 0, 30), (2, 2, 0, 1))
    graph, together = run_layer(GROUPED, WHOLE, step, fused=True)
    outs, states = single_rows(graph, random_inputs(graph, step), stale_states(GROUPED))
    assert torch.equal(outs, together.kernels["out"])
    assert all(torch.equal(states[name], together.kernel_states[name]) for name in states)


def single_rows(graph: Graph, inputs: Values, states: Values) -> tuple[torch.Tensor, Values]:
    """The rows of a step in steps of their own."""
    alone = layer_graph(GROUPED, WHOLE, 1, fused=True)
    outs = []
    for row in range(inputs["position"].shape[0]):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        one["start"] = one["position"]
        found = run_both(alone, one, states=states, weights=pack_graph(graph))
        states = found.kernel_states
        outs.append(found.kernels["out"])
    return torch.cat(outs), states


def test_two_chunks_equal_one() -> None:
    """A prompt in two steps of odd lengths, cut early and late: same bits, same states."""
    names = ("conv", "delta")
    graph = layer_graph(GROUPED, names, T)
    inputs = random_inputs(graph, run_of("20 rows", 0, 20))
    whole = run_both(graph, inputs, states=stale_states(GROUPED))
    for cut in (3, 17):
        first = {name: value[:cut] for name, value in inputs.items()}
        second = {name: value[cut:] for name, value in inputs.items()} | {"start": torch.full((20 - cut, 1), cut).int()}
        begun = run_both(graph, first, states=stale_states(GROUPED))
        ended = run_both(graph, second, states=begun.kernel_states)
        joined = torch.cat([begun.kernels["delta_out"], ended.kernels["delta_out"]])
        assert torch.equal(joined, whole.kernels["delta_out"])
        assert all(torch.equal(ended.kernel_states[name], whole.kernel_states[name]) for name in whole.kernel_states)


def test_fused_step_equals_its_ops() -> None:
    step = Step("mixed", (5, 6, 0, -1), (2, 2, 0, NOWHERE))
    _, fused = run_layer(GROUPED, WHOLE, step, fused=True)
    _, apart = run_layer(GROUPED, WHOLE, step)
    assert_close(fused.kernels["out"], apart.kernels["out"], BF16_LIMIT)
    assert torch.equal(fused.kernel_states["conv_state"], apart.kernel_states["conv_state"])
    assert_close(fused.kernel_states["delta_state"], apart.kernel_states["delta_state"], BF16_LIMIT)


def test_padding_may_hold_anything() -> None:
    """NaN in a padded row stays there, and the row's output is finite."""
    step = Step("padding between", (4, -1, 7), (1, NOWHERE, 2))
    graph = layer_graph(GROUPED, WHOLE, 3, fused=True)
    inputs = random_inputs(graph, step)
    clean = run_both(graph, inputs, states=stale_states(GROUPED))
    inputs["joint"][1] = torch.nan
    found = run_both(graph, inputs, states=stale_states(GROUPED))
    assert torch.equal(found.kernels["out"], clean.kernels["out"])
    assert all(torch.equal(found.kernel_states[name], clean.kernel_states[name]) for name in clean.kernel_states)


def gate_case(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """beta and g of the kernel for a = b = ``values``, and of the formula in FP64."""
    heads = Heads("many", key_heads=1, value_heads=len(values), key_dim=16, value_dim=1)
    graph = layer_graph(heads, ("gates",), 1)
    inputs = random_inputs(graph, run_of("one", 0, 1))
    inputs["joint"][:, heads.channels + heads.values :] = values.repeat(2)
    packed, weights = pack_graph(graph)
    found = run_both(graph, inputs, weights=(packed, weights), states=stale_states(heads))
    x = values.bfloat16().double()
    log_rate, bias = weights["a_log"].double(), weights["dt_bias"].double()
    softplus = torch.where(x + bias > 0, x + bias, 0) + torch.log1p((-(x + bias).abs()).exp())
    return found.kernels["beta"][0], found.kernels["g"][0], x.sigmoid(), -log_rate.exp() * softplus


def test_gates_keep_their_digits() -> None:
    """Relative error of each value, where softplus is 1e-13 as where it is 40."""
    beta, g, beta_exact, g_exact = gate_case(torch.linspace(-30, 40, 64))
    assert ((beta.double() - beta_exact).abs() <= 4e-6 * beta_exact + 1e-30).all()  # a GPU's exp(-30) is off by 2e-6
    assert ((g.double() - g_exact).abs() <= 4e-6 * g_exact.abs()).all()


def test_gates_of_extreme_inputs_are_finite() -> None:
    beta, g, beta_exact, g_exact = gate_case(torch.tensor([-3e38, -1e4, -200.0, 200.0, 1e4, 1e30]))
    assert_close(beta, beta_exact, F32_LIMIT)
    assert g.isfinite().all() and ((g.double() - g_exact).abs() <= 2e-6 * g_exact.abs() + 1e-30).all()


def test_extreme_gates_in_the_step() -> None:
    """A decay to nothing and none at all."""
    graph = layer_graph(GROUPED, WHOLE, 2, fused=True)
    inputs = random_inputs(graph, run_of("two", 9, 2))
    inputs["joint"][:, -2:] = torch.tensor([3e4, -3e4])
    check(graph, run_both(graph, inputs, states=stale_states(GROUPED)))


def test_state_after_64_rows_against_fp64() -> None:
    heads, step = Heads("one head", value_heads=1), run_of("64 rows", 0, 64)
    graph = layer_graph(heads, ("delta",), T)
    inputs = random_inputs(graph, step)
    inputs["g"] = inputs["g"] / 50  # a slow decay: errors would add up
    found = run_both(graph, inputs, states=stale_states(heads))
    _, k, v = inputs["conv_out"].double().split([heads.key_dim, heads.key_dim, heads.values], dim=1)
    k = k * torch.rsqrt(k.square().sum(1, keepdim=True) + 1e-6)
    s = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64)
    for row in range(64):
        s = s * inputs["g"][row].double().exp()[:, None, None]
        change = v[row].view(heads.value_heads, -1) - torch.einsum("hkv,k->hv", s, k[row])
        s = s + k[row][None, :, None] * (inputs["beta"][row].double()[:, None] * change)[:, None, :]
    assert_close(found.kernel_states["delta_state"][1], s, 1e-6)


@dataclass(frozen=True)
class Refusal:
    name: str
    heads: Heads
    op: str
    knobs: dict[str, int]
    reason: str


REFUSALS = (
    Refusal("short ring", Heads("", ring=8), "step", {}, "a ring of 8 positions is shorter than the 11"),
    Refusal("ring under the width", Heads("", ring=3), "conv", {}, "a convolution of width 4"),
    Refusal("few warps", Heads("", key_dim=128, value_dim=128), "step", {"num_warps": 2}, "takes 256 registers"),
    Refusal("heads", Heads("", key_heads=2, value_heads=3), "delta", {}, "3 value heads are no multiple of 2"),
)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refused(case: Refusal) -> None:
    fused = case.op == "step"
    graph = layer_graph(case.heads, WHOLE if fused else (case.op,), 1, fused)
    kernel = {"step": "gdn_step", "conv": "causal_conv", "delta": "gated_delta"}[case.op]
    with pytest.raises(OptionError, match=case.reason):
        choose_all(graph, find_target("sm_90"), Records(), {kernel: case.knobs})


def reference_of(name: str, step: Step) -> tuple[Values, Values, Values]:
    """Inputs, weights and the interpreter's values of one op."""
    graph = layer_graph(GROUPED, (name,), len(step.positions))
    inputs, (_, weights) = random_inputs(graph, step), pack_graph(graph)
    return inputs, weights, interpret(graph, weights, stale_states(GROUPED), inputs)


def test_interpreter_conv_against_transformers() -> None:
    inputs, weights, values = reference_of("conv", run_of("nine", 0, 9))
    x = inputs["joint"][:, : GROUPED.channels].T[None]
    expected = modeling.causal_conv1d_fn(x, weights["conv_weight"].bfloat16(), None, activation="silu")
    assert_close(values["conv_out"], expected[0].T, BF16_LIMIT)


def test_interpreter_delta_against_transformers() -> None:
    inputs, _, values = reference_of("delta", run_of("nine", 3, 9))
    widths = [GROUPED.key_dim, GROUPED.key_dim, GROUPED.values]
    q, k, v = (x.view(1, 9, -1, 16) for x in inputs["conv_out"].split(widths, dim=1))
    expected, _ = modeling.torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=inputs["g"][None],
        beta=inputs["beta"][None],
        initial_state=stale_states(GROUPED)["delta_state"][1:2],
        use_qk_l2norm_in_kernel=True,
    )
    assert_close(values["delta_out"], expected[0], BF16_LIMIT)


def test_interpreter_norm_against_transformers() -> None:
    inputs, weights, values = reference_of("norm", run_of("nine", 0, 9))
    norm = modeling.Qwen3_5MoeRMSNormGated(GROUPED.value_dim, eps=EPS)
    norm.weight.data = weights["norm_weight"].bfloat16()
    z = inputs["joint"][:, GROUPED.channels : GROUPED.channels + GROUPED.values]
    expected = norm(inputs["delta_out"].reshape(-1, GROUPED.value_dim), z.reshape(-1, GROUPED.value_dim))
    assert_close(values["out"], expected.detach().view(9, -1), BF16_LIMIT)


def test_interpreter_layer_against_transformers() -> None:
    """The whole layer between its projections, head mapping and gates included; ``transformers`` in FP32."""
    heads = Heads("grouped", key_heads=2, value_heads=4)
    config = Qwen3_5MoeTextConfig(
        hidden_size=32,
        linear_num_key_heads=heads.key_heads,
        linear_num_value_heads=heads.value_heads,
        linear_key_head_dim=heads.key_dim,
        linear_value_head_dim=heads.value_dim,
        linear_conv_kernel_dim=heads.width,
    )
    torch.manual_seed(0)
    layer = modeling.Qwen3_5MoeGatedDeltaNet(config, layer_idx=0).eval()
    graph = layer_graph(heads, WHOLE, 12)
    _, weights = pack_graph(graph)
    layer.conv1d.weight.data = weights["conv_weight"][:, None]
    layer.A_log.data, layer.dt_bias.data = weights["a_log"], weights["dt_bias"]
    layer.norm.weight.data, layer.norm.variance_epsilon = weights["norm_weight"], EPS
    layer.out_proj = torch.nn.Identity()
    x = torch.randn(1, 12, 32)
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    with torch.no_grad():
        for projection in projections:
            projection.weight.data *= 20
        expected = layer(x)[0]
        joint = torch.cat([projection(x)[0] for projection in projections], dim=1)
    inputs = {**random_inputs(graph, run_of("twelve", 0, 12)), "joint": joint.bfloat16()}
    values = interpret(graph, weights, stale_states(heads), inputs)
    assert_close(values["out"], expected, 1.5e-2)
