"""From a model to its graph: one op for each mathematical step.

In: a ``ModelSpec`` and the rows of the step (a number for decode, the symbol T for prefill). Out: ``Graph`` of stage
``model``. The order of ops and every rounding point (the dtype of each tensor) follow the reference implementation of
the family in ``transformers``.

Example::

    graph = build_graph(load_model("tiny-moe"), rows=1)      # program decode/1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

from lynnc.ir import (
    Add,
    Argmax,
    Attention,
    CacheAppend,
    CausalConv,
    Combine,
    DeltaGates,
    Dim,
    DType,
    Embed,
    ExpertLinear,
    Format,
    GatedDelta,
    GatedNorm,
    Graph,
    HeadNormRope,
    LastRow,
    Linear,
    Op,
    OutputGate,
    Part,
    RmsNorm,
    S,
    SharedAdd,
    SiluMul,
    Stage,
    State,
    T,
    Tensor,
    TopK,
    Weight,
)
from lynnc.model import DenseSpec, Mixer, ModelSpec, MoeSpec

CONV_RING = 16
"""Positions that the convolution state keeps: room for the 3 previous inputs and 8 rows a step, as a power of two."""


@dataclass(slots=True)
class _Builder:
    """Collects the graph's tables while the layers are written down in order."""

    spec: ModelSpec
    rows: Dim
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def tensor(self, name: str, dtype: DType, *columns: int, rows: Dim | None = None) -> str:
        self.tensors[name] = Tensor(name, dtype, (self.rows if rows is None else rows, *columns))
        return name

    def state(self, name: str, dtype: DType, *shape: Dim) -> str:
        self.states[name] = State(name, dtype, shape)
        return name

    def vector(self, name: str, source: str, length: int, fmt: Format = Format.BF16) -> str:
        """A norm, bias or gate vector: never quantised."""
        self.weights[name] = Weight(name, fmt, (length,), (Part(source, length),), "vector")
        return name

    def matrix(self, name: str, tensor_class: str, columns: int, parts: Mapping[str, int], experts: int = 0) -> str:
        """A matrix of ``parts`` (checkpoint name to rows) in the format the model's rule for the class asks for."""
        rows = sum(parts.values())
        shape = (experts, rows, columns) if experts else (rows, columns)
        named = tuple(Part(source, count) for source, count in parts.items())
        self.weights[name] = Weight(name, self.spec.precision.format(tensor_class), shape, named, tensor_class)
        return name

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def linears(self, prefix: str, x: str, projections: tuple[_Projection, ...], dtype: DType) -> tuple[str, ...]:
        """Linear ops that read the same x; neighbours of one format share one weight, so they can become one launch."""
        outs = []
        for _, group in groupby(projections, lambda p: self.spec.precision.format(p.tensor_class)):
            shared = tuple(group)
            weight = f"{prefix}.{'_'.join(p.name for p in shared)}_weight"
            self.matrix(weight, shared[0].tensor_class, self.spec.hidden, {p.source: p.rows for p in shared})
            first_row = 0
            for projection in shared:
                out = self.tensor(f"{prefix}.{projection.name}", dtype, projection.rows)
                self.add(Linear(name=f"{out}_proj", x=x, weight=weight, out=out, first_row=first_row))
                first_row += projection.rows
                outs.append(out)
        return tuple(outs)


@dataclass(frozen=True, slots=True)
class _Projection:
    """One matrix that multiplies the layer's normed input."""

    name: str
    tensor_class: str
    source: str
    rows: int


def build_graph(spec: ModelSpec, rows: Dim = T) -> Graph:
    """The ``model`` stage graph of one step of ``rows`` tokens; only the last row gets logits where rows is T."""
    b = _Builder(spec, rows)
    inputs = tuple(b.tensor(name, DType.I32, 1) for name in ("token", "position", "slot", "start"))
    table = b.matrix("embed", "embed", spec.hidden, {f"{spec.tensor_prefix}embed_tokens.weight": spec.vocabulary})
    h = b.tensor("h.0", DType.BF16, spec.hidden)
    b.add(Embed(name="embed", token="token", table=table, out=h))
    for layer, mixer in enumerate(spec.layers):
        mixed = _MIXERS[mixer](b, layer, _norm(b, layer, "input", h))
        h = _residual(b, f"layers.{layer}.mixer_add", h, mixed, f"layers.{layer}.h")
        x = _norm(b, layer, "post_attention", h)
        change = _moe(b, layer, spec.moe, x) if spec.moe else _dense(b, layer, spec.dense, x)
        h = _residual(b, f"layers.{layer}.mlp_add", h, change, f"h.{layer + 1}")
    outputs = _head(b, h)
    program = "prefill" if rows == T else f"decode/{rows}"
    return Graph(
        model=spec.name,
        program=program,
        stage=Stage.MODEL,
        rows=rows,
        ops=tuple(b.ops),
        tensors=MappingProxyType(b.tensors),
        weights=MappingProxyType(b.weights),
        states=MappingProxyType(b.states),
        inputs=inputs,
        outputs=outputs,
    )


def _source(b: _Builder, layer: int, rest: str) -> str:
    return f"{b.spec.tensor_prefix}layers.{layer}.{rest}"


def _norm(b: _Builder, layer: int, which: str, h: str) -> str:
    name = f"layers.{layer}.{which}_norm"
    source = "input_layernorm" if which == "input" else "post_attention_layernorm"
    weight = b.vector(f"{name}_weight", _source(b, layer, f"{source}.weight"), b.spec.hidden)
    x = b.tensor(f"layers.{layer}.{'x' if which == 'input' else 'y'}", DType.BF16, b.spec.hidden)
    b.add(RmsNorm(name=name, x=h, weight=weight, out=x, eps=b.spec.norm_eps, shifted=b.spec.norm_shifted))
    return x


def _residual(b: _Builder, name: str, h: str, change: str, out: str) -> str:
    b.add(Add(name=name, a=h, b=change, out=b.tensor(out, DType.BF16, b.spec.hidden)))
    return out


def _gdn(b: _Builder, layer: int, x: str) -> str:
    gdn = b.spec.gdn
    assert gdn is not None
    p = f"layers.{layer}"
    key, value = gdn.key_heads * gdn.key_dim, gdn.value_heads * gdn.value_dim
    qkv, z, beta_in, decay_in = b.linears(
        p,
        x,
        (
            _Projection("qkv", "gdn_in", _source(b, layer, "linear_attn.in_proj_qkv.weight"), 2 * key + value),
            _Projection("z", "gdn_in", _source(b, layer, "linear_attn.in_proj_z.weight"), value),
            _Projection("b", "gdn_gates", _source(b, layer, "linear_attn.in_proj_b.weight"), gdn.value_heads),
            _Projection("a", "gdn_gates", _source(b, layer, "linear_attn.in_proj_a.weight"), gdn.value_heads),
        ),
        DType.BF16,
    )
    channels = 2 * key + value
    conv_source = _source(b, layer, "linear_attn.conv1d.weight")
    conv_name = f"{p}.conv_weight"
    parts = (Part(conv_source, channels),)
    b.weights[conv_name] = Weight(conv_name, Format.BF16, (channels, gdn.conv_width), parts, "vector")
    conv = CausalConv(
        name=f"{p}.conv",
        x=qkv,
        position="position",
        slot="slot",
        start="start",
        weight=conv_name,
        state=b.state(f"{p}.conv_state", DType.BF16, CONV_RING, channels),
        out=b.tensor(f"{p}.conv_out", DType.BF16, channels),
        width=gdn.conv_width,
        ring=CONV_RING,
    )
    b.add(conv)
    gates = DeltaGates(
        name=f"{p}.gates",
        b=beta_in,
        a=decay_in,
        a_log=b.vector(f"{p}.a_log", _source(b, layer, "linear_attn.A_log"), gdn.value_heads, Format.F32),
        dt_bias=b.vector(f"{p}.dt_bias", _source(b, layer, "linear_attn.dt_bias"), gdn.value_heads, Format.F32),
        beta=b.tensor(f"{p}.beta", DType.F32, gdn.value_heads),
        g=b.tensor(f"{p}.g", DType.F32, gdn.value_heads),
    )
    b.add(gates)
    delta = GatedDelta(
        name=f"{p}.delta",
        qkv=conv.out,
        beta=gates.beta,
        g=gates.g,
        position="position",
        slot="slot",
        state=b.state(f"{p}.delta_state", DType.F32, gdn.value_heads, gdn.key_dim, gdn.value_dim),
        out=b.tensor(f"{p}.delta_out", DType.BF16, gdn.value_heads, gdn.value_dim),
        key_heads=gdn.key_heads,
        value_heads=gdn.value_heads,
        key_dim=gdn.key_dim,
        value_dim=gdn.value_dim,
    )
    b.add(delta)
    norm_weight = b.vector(f"{p}.gated_norm_weight", _source(b, layer, "linear_attn.norm.weight"), gdn.value_dim)
    normed = b.tensor(f"{p}.gated", DType.BF16, value)
    b.add(GatedNorm(name=f"{p}.gated_norm", x=delta.out, z=z, weight=norm_weight, out=normed, eps=b.spec.norm_eps))
    return _output(b, layer, "gdn_out", "linear_attn.out_proj.weight", normed)


def _output(b: _Builder, layer: int, tensor_class: str, source: str, x: str) -> str:
    """The projection from a mixer's heads back to the hidden size."""
    out = b.tensor(f"layers.{layer}.mixed", DType.BF16, b.spec.hidden)
    width = b.tensors[x].width
    weight = b.matrix(f"layers.{layer}.out_weight", tensor_class, width, {_source(b, layer, source): b.spec.hidden})
    b.add(Linear(name=f"layers.{layer}.out_proj", x=x, weight=weight, out=out, first_row=0))
    return out


def _full_attention(b: _Builder, layer: int, x: str) -> str:
    spec = b.spec.attention
    p = f"layers.{layer}"
    q_stride = spec.head_dim * (2 if spec.output_gate else 1)
    q, k, v = b.linears(
        p,
        x,
        (
            _Projection("q", "attention_in", _source(b, layer, "self_attn.q_proj.weight"), spec.heads * q_stride),
            _Projection(
                "k", "attention_in", _source(b, layer, "self_attn.k_proj.weight"), spec.kv_heads * spec.head_dim
            ),
            _Projection(
                "v", "attention_in", _source(b, layer, "self_attn.v_proj.weight"), spec.kv_heads * spec.head_dim
            ),
        ),
        DType.BF16,
    )
    q_rotated = _head_norm_rope(b, layer, "q", q, spec.heads, q_stride)
    k_rotated = _head_norm_rope(b, layer, "k", k, spec.kv_heads, spec.head_dim)
    cache = tuple(b.state(f"{p}.{n}_cache", DType.BF16, spec.kv_heads, S, spec.head_dim) for n in ("k", "v"))
    b.add(
        CacheAppend(
            name=f"{p}.append",
            k=k_rotated,
            v=v,
            position="position",
            slot="slot",
            k_cache=cache[0],
            v_cache=cache[1],
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
        )
    )
    attended = b.tensor(f"{p}.attended", DType.BF16, spec.heads, spec.head_dim)
    b.add(
        Attention(
            name=f"{p}.attention",
            q=q_rotated,
            position="position",
            slot="slot",
            k_cache=cache[0],
            v_cache=cache[1],
            out=attended,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
        )
    )
    if spec.output_gate:
        gated = b.tensor(f"{p}.gated", DType.BF16, spec.heads, spec.head_dim)
        b.add(
            OutputGate(
                name=f"{p}.output_gate",
                x=attended,
                gate=q,
                out=gated,
                heads=spec.heads,
                head_dim=spec.head_dim,
                stride=q_stride,
                offset=spec.head_dim,
            )
        )
        attended = gated
    return _output(b, layer, "attention_out", "self_attn.o_proj.weight", attended)


def _head_norm_rope(b: _Builder, layer: int, which: str, x: str, heads: int, head_stride: int) -> str:
    spec = b.spec.attention
    p = f"layers.{layer}"
    out = b.tensor(f"{p}.{which}_rotated", DType.BF16, heads, spec.head_dim)
    b.add(
        HeadNormRope(
            name=f"{p}.{which}_norm_rope",
            x=x,
            position="position",
            weight=b.vector(
                f"{p}.{which}_norm_weight", _source(b, layer, f"self_attn.{which}_norm.weight"), spec.head_dim
            ),
            out=out,
            heads=heads,
            head_dim=spec.head_dim,
            head_stride=head_stride,
            rotary_dim=spec.rotary_dim,
            theta=spec.rope_theta,
            eps=b.spec.norm_eps,
            shifted=b.spec.norm_shifted,
        )
    )
    return out


_MIXERS: Mapping[Mixer, Callable[[_Builder, int, str], str]] = MappingProxyType(
    {Mixer.GDN: _gdn, Mixer.FULL: _full_attention}
)


def _moe(b: _Builder, layer: int, moe: MoeSpec, x: str) -> str:
    p = f"layers.{layer}"
    experts = moe.experts[layer]
    router = _Projection("logits", "router", _source(b, layer, "mlp.gate.weight"), experts)
    gate = _Projection("shared_gate", "shared_gate", _source(b, layer, "mlp.shared_expert_gate.weight"), 1)
    gates = b.linears(p, x, (router, gate) if moe.shared_intermediate else (router,), DType.F32)
    ids, scores = b.tensor(f"{p}.ids", DType.I32, moe.top_k), b.tensor(f"{p}.scores", DType.F32, moe.top_k)
    b.add(
        TopK(
            name=f"{p}.top_k",
            logits=gates[0],
            ids=ids,
            scores=scores,
            experts=experts,
            k=moe.top_k,
            normalize=moe.normalize_top_k,
        )
    )
    size = moe.intermediate
    source = _source(b, layer, "mlp.experts.{expert}.")
    up_parts = {f"{source}gate_proj.weight": size, f"{source}up_proj.weight": size}
    up = b.matrix(f"{p}.experts_up_weight", "experts", b.spec.hidden, up_parts, experts)
    down_parts = {f"{source}down_proj.weight": b.spec.hidden}
    down = b.matrix(f"{p}.experts_down_weight", "experts", size, down_parts, experts)
    gate_up = b.tensor(f"{p}.experts_gate_up", DType.BF16, moe.top_k, 2 * size)
    b.add(ExpertLinear(name=f"{p}.experts_up", x=x, ids=ids, weight=up, out=gate_up))
    act = b.tensor(f"{p}.experts_act", DType.BF16, moe.top_k, size)
    b.add(SiluMul(name=f"{p}.experts_silu", x=gate_up, out=act))
    shared = _shared_act(b, layer, moe, x) if moe.shared_intermediate else None
    y = b.tensor(f"{p}.experts_out", DType.F32, moe.top_k, b.spec.hidden)
    b.add(ExpertLinear(name=f"{p}.experts_down", x=act, ids=ids, weight=down, out=y))
    combined = b.tensor(f"{p}.experts_sum", DType.F32, b.spec.hidden)
    b.add(Combine(name=f"{p}.combine", x=y, scores=scores, out=combined))
    return _shared_down(b, layer, moe, combined, shared, gates[1]) if shared else combined


def _shared_act(b: _Builder, layer: int, moe: MoeSpec, x: str) -> str:
    return _gate_up(b, layer, "shared", "shared_expert", "mlp.shared_expert.", (x, moe.shared_intermediate))


def _gate_up(
    b: _Builder, layer: int, which: str, tensor_class: str, source: str, x_and_size: tuple[str, int]
) -> str:
    """``silu(gate(x)) * up(x)`` of a dense block or a shared expert."""
    x, size = x_and_size
    p = f"layers.{layer}.{which}"
    parts = {_source(b, layer, f"{source}{name}_proj.weight"): size for name in ("gate", "up")}
    weight = b.matrix(f"{p}_up_weight", tensor_class, b.spec.hidden, parts)
    gate_up = b.tensor(f"{p}_gate_up", DType.BF16, 2 * size)
    b.add(Linear(name=f"{p}_up", x=x, weight=weight, out=gate_up, first_row=0))
    act = b.tensor(f"{p}_act", DType.BF16, size)
    b.add(SiluMul(name=f"{p}_silu", x=gate_up, out=act))
    return act


def _shared_down(
    b: _Builder, layer: int, moe: MoeSpec, experts_sum: str, act: str, gate: str
) -> str:
    p = f"layers.{layer}"
    parts = {_source(b, layer, "mlp.shared_expert.down_proj.weight"): b.spec.hidden}
    weight = b.matrix(f"{p}.shared_down_weight", "shared_expert", moe.shared_intermediate, parts)
    shared = b.tensor(f"{p}.shared_out", DType.F32, b.spec.hidden)
    b.add(Linear(name=f"{p}.shared_down", x=act, weight=weight, out=shared, first_row=0))
    out = b.tensor(f"{p}.mlp_out", DType.BF16, b.spec.hidden)
    b.add(SharedAdd(name=f"{p}.shared_add", experts=experts_sum, shared=shared, gate=gate, out=out))
    return out


def _dense(b: _Builder, layer: int, dense: DenseSpec | None, x: str) -> str:
    assert dense is not None
    act = _gate_up(b, layer, "mlp", "mlp", "mlp.", (x, dense.intermediate))
    p = f"layers.{layer}"
    parts = {_source(b, layer, "mlp.down_proj.weight"): b.spec.hidden}
    weight = b.matrix(f"{p}.mlp_down_weight", "mlp", dense.intermediate, parts)
    out = b.tensor(f"{p}.mlp_out", DType.BF16, b.spec.hidden)
    b.add(Linear(name=f"{p}.mlp_down", x=act, weight=weight, out=out, first_row=0))
    return out


def _head(b: _Builder, h: str) -> tuple[str, str]:
    """Final norm, vocabulary projection and greedy choice; prefill keeps only the last row."""
    spec = b.spec
    rows = b.rows
    if rows == T:
        rows = 1
        last = b.tensor("h.last", DType.BF16, spec.hidden, rows=rows)
        b.add(LastRow(name="last_row", x=h, out=last))
        h = last
    norm = b.vector("final_norm_weight", f"{spec.tensor_prefix}norm.weight", spec.hidden)
    x = b.tensor("final", DType.BF16, spec.hidden, rows=rows)
    b.add(RmsNorm(name="final_norm", x=h, weight=norm, out=x, eps=spec.norm_eps, shifted=spec.norm_shifted))
    source = f"{spec.tensor_prefix}embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
    weight = b.matrix("lm_head", "lm_head", spec.hidden, {source: spec.vocabulary})
    logits = b.tensor("logits", DType.F32, spec.vocabulary, rows=rows)
    b.add(Linear(name="lm_head", x=x, weight=weight, out=logits, first_row=0))
    following = b.tensor("next_token", DType.I32, 1, rows=rows)
    b.add(Argmax(name="argmax", logits=logits, out=following))
    return logits, following
