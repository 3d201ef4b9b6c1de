"""The feed-forward half of a layer: routed and shared experts, or a dense block.

In: the builder, a layer's number and its normed input. Out: the name of the block's output, before the residual.
"""

from __future__ import annotations

from lynnc.builder import Builder, Projection
from lynnc.model import DenseSpec, MoeSpec
from lynnc.ops import Combine, ExpertLinear, Linear, SharedAdd, SiluMul, TopK
from lynnc.tensors import DType


def feed_forward(b: Builder, layer: int, x: str) -> str:
    """The block that the model declares."""
    if b.spec.moe:
        return _experts(b, layer, b.spec.moe, x)
    assert b.spec.dense is not None
    return _dense(b, layer, b.spec.dense, x)


def _experts(b: Builder, layer: int, moe: MoeSpec, x: str) -> str:
    p = f"layers.{layer}"
    ids, scores, gate = _route(b, layer, moe, x)
    size = moe.intermediate
    source = b.source(layer, "mlp.experts.{expert}.")
    up_parts = {f"{source}gate_proj.weight": size, f"{source}up_proj.weight": size}
    up = b.matrix(f"{p}.experts_up_weight", "experts", b.spec.hidden, up_parts, moe.experts[layer])
    down_parts = {f"{source}down_proj.weight": b.spec.hidden}
    down = b.matrix(f"{p}.experts_down_weight", "experts", size, down_parts, moe.experts[layer])
    gate_up = b.tensor(f"{p}.experts_gate_up", DType.BF16, moe.top_k, 2 * size)
    b.add(ExpertLinear(name=f"{p}.experts_up", x=x, ids=ids, weight=up, out=gate_up))
    act = b.tensor(f"{p}.experts_act", DType.BF16, moe.top_k, size)
    b.add(SiluMul(name=f"{p}.experts_silu", x=gate_up, out=act))
    shared = _gate_up(b, layer, "shared", x, moe.shared_intermediate) if gate else None
    y = b.tensor(f"{p}.experts_out", DType.F32, moe.top_k, b.spec.hidden)
    b.add(ExpertLinear(name=f"{p}.experts_down", x=act, ids=ids, weight=down, out=y))
    combined = b.tensor(f"{p}.experts_sum", DType.F32, b.spec.hidden)
    b.add(Combine(name=f"{p}.combine", x=y, scores=scores, out=combined))
    return _shared_down(b, layer, combined, shared, gate) if shared and gate else combined


def _route(b: Builder, layer: int, moe: MoeSpec, x: str) -> tuple[str, str, str | None]:
    """Expert ids, their scores, and the shared expert's gate where there is one."""
    p, experts = f"layers.{layer}", moe.experts[layer]
    projections = [Projection("logits", "router", b.source(layer, "mlp.gate.weight"), experts)]
    if moe.shared_intermediate:
        source = b.source(layer, "mlp.shared_expert_gate.weight")
        projections.append(Projection("shared_gate", "shared_gate", source, 1))
    logits, *gate = b.linears(p, x, tuple(projections), DType.F32)
    top_k = TopK(
        name=f"{p}.top_k",
        logits=logits,
        ids=b.tensor(f"{p}.ids", DType.I32, moe.top_k),
        scores=b.tensor(f"{p}.scores", DType.F32, moe.top_k),
        experts=experts,
        k=moe.top_k,
        normalize=moe.normalize_top_k,
    )
    b.add(top_k)
    return top_k.ids, top_k.scores, gate[0] if gate else None


def _gate_up(b: Builder, layer: int, which: str, x: str, size: int) -> str:
    """``silu(gate(x)) * up(x)`` of a dense block (``mlp``) or a shared expert (``shared``)."""
    p = f"layers.{layer}.{which}"
    folder, tensor_class = ("mlp.", "mlp") if which == "mlp" else ("mlp.shared_expert.", "shared_expert")
    parts = {b.source(layer, f"{folder}{name}_proj.weight"): size for name in ("gate", "up")}
    weight = b.matrix(f"{p}_up_weight", tensor_class, b.spec.hidden, parts)
    gate_up = b.tensor(f"{p}_gate_up", DType.BF16, 2 * size)
    b.add(Linear(name=f"{p}_up", x=x, weight=weight, out=gate_up, first_row=0))
    act = b.tensor(f"{p}_act", DType.BF16, size)
    b.add(SiluMul(name=f"{p}_silu", x=gate_up, out=act))
    return act


def _shared_down(b: Builder, layer: int, experts_sum: str, act: str, gate: str) -> str:
    p = f"layers.{layer}"
    parts = {b.source(layer, "mlp.shared_expert.down_proj.weight"): b.spec.hidden}
    weight = b.matrix(f"{p}.shared_down_weight", "shared_expert", b.tensors[act].width, parts)
    shared = b.tensor(f"{p}.shared_out", DType.F32, b.spec.hidden)
    b.add(Linear(name=f"{p}.shared_down", x=act, weight=weight, out=shared, first_row=0))
    out = b.tensor(f"{p}.mlp_out", DType.BF16, b.spec.hidden)
    b.add(SharedAdd(name=f"{p}.shared_add", experts=experts_sum, shared=shared, gate=gate, out=out))
    return out


def _dense(b: Builder, layer: int, dense: DenseSpec, x: str) -> str:
    p = f"layers.{layer}"
    act = _gate_up(b, layer, "mlp", x, dense.intermediate)
    parts = {b.source(layer, "mlp.down_proj.weight"): b.spec.hidden}
    weight = b.matrix(f"{p}.mlp_down_weight", "mlp", dense.intermediate, parts)
    out = b.tensor(f"{p}.mlp_out", DType.BF16, b.spec.hidden)
    b.add(Linear(name=f"{p}.mlp_down", x=act, weight=weight, out=out, first_row=0))
    return out
