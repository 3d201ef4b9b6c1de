"""The meaning of the intermediate representation: runs a graph of any stage in torch.

In: a graph, dequantised FP32 weights by name, the state of the slots and the inputs of a step. Out: every tensor the
graph's ops wrote outside fused bodies. States are updated in place. Products accumulate in FP32 and each tensor is
rounded to its own dtype, which are the rounding points of the contract; the kernels are judged against this module,
and this module is judged against ``transformers``.

Example::

    states = new_states(graph, slots=1, context=64)
    values = interpret(graph, weights, states, step_inputs([7], start=0))
    values["logits"]                                  # FP32 [1, vocabulary]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lynnc import mixerops, ops, promptops
from lynnc.deltachunks import Chunks, delta_chunk, delta_scan
from lynnc.ir import Graph, Op, primitive_ops
from lynnc.rowquantise import QuantisedRows, dequantise_rows, quantise_rows
from lynnc.stepvalues import TORCH_DTYPE, Run, Weights, bf16
from lynnc.tensors import S


def new_states(graph: Graph, slots: int, context: int) -> dict[str, torch.Tensor]:
    """Zeroed states ``[slots, ...]`` with room for ``context`` positions."""
    states = {}
    for state in graph.states.values():
        shape = [int(dim.subs(S, context)) if not isinstance(dim, int) else dim for dim in state.shape]
        states[state.name] = torch.zeros(slots, *shape, dtype=TORCH_DTYPE[state.dtype])
    return states


def step_inputs(
    tokens: Sequence[int], start: int | Sequence[int] = 0, slot: int | Sequence[int] = 0
) -> dict[str, torch.Tensor]:
    """Inputs of one step, I32 [T, 1] each: rows of one sequence if ``start`` is a number, else one sequence a row."""
    count = len(tokens)
    consecutive = isinstance(start, int)
    starts = [start] * count if isinstance(start, int) else list(start)
    slots = [slot] * count if isinstance(slot, int) else list(slot)
    positions = [first + (row if consecutive else 0) for row, first in enumerate(starts)]
    columns = {"token": list(tokens), "position": positions, "slot": slots, "start": starts}
    return {name: torch.tensor(values, dtype=torch.int32)[:, None] for name, values in columns.items()}


def interpret(
    graph: Graph, weights: Weights, states: dict[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Runs every op in order; see the module's docstring. ``inputs`` holds I32 [T, 1] tensors by name."""
    run = Run(graph, weights, states, rows=inputs["token"].shape[0])
    for name in graph.inputs:
        run.put(name, inputs[name])
    for op in graph.ops:
        run_op(run, op)
    return {name: run.get(name) for name in run.written}


def run_op(run: Run, op: Op) -> None:
    """Runs one op, or the body of a fused one."""
    for inner in primitive_ops(op):
        _MEANING[type(inner)](run, inner)


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _embed(run: Run, op: ops.Embed) -> None:
    run.put(op.out, run.weights[op.table][run.index(op.token)])


def _rms_norm(run: Run, op: ops.RmsNorm) -> None:
    weight = run.weights[op.weight] + (1.0 if op.shifted else 0.0)
    run.put(op.out, _rms(run.f32(op.x), op.eps) * weight)


def _linear(run: Run, op: ops.Linear) -> None:
    width = run.graph.tensors[op.out].width
    run.put(op.out, run.flat(op.x) @ run.weights[op.weight][op.first_row : op.first_row + width].T)


def _partial_linear(run: Run, op: promptops.PartialLinear) -> None:
    width = int(run.graph.tensors[op.out].shape[-1])
    x = run.flat(op.x).unflatten(1, [op.parts, -1])
    weight = run.weights[op.weight][op.first_row : op.first_row + width].unflatten(1, [op.parts, -1])
    run.put(op.out, torch.einsum("tpk,npk->tpn", x, weight))


def _sum_parts(run: Run, op: promptops.SumParts) -> None:
    run.put(op.out, run.f32(op.x).sum(1))


def _quantise_activations(run: Run, op: promptops.QuantiseActivations) -> None:
    columns = promptops.CODES_IN_WORD * int(run.graph.tensors[op.codes].shape[-1])
    rows = quantise_rows(run.f32(op.x).reshape(-1, columns))
    run.put(op.codes, rows.codes)
    run.put(op.scales, rows.scales)
    run.put(op.row_scale, rows.row_scale)


def _quantised_linear(run: Run, op: promptops.QuantisedLinear) -> None:
    width = run.graph.tensors[op.out].width
    weight = run.weights[op.weight][op.first_row : op.first_row + width]
    rows = QuantisedRows(run.get(op.codes), run.get(op.scales), run.get(op.row_scale))
    run.put(op.out, dequantise_rows(rows, weight.shape[1]) @ weight.T * rows.row_scale)


def _add(run: Run, op: ops.Add) -> None:
    run.put(op.out, bf16(run.f32(op.a)) + bf16(run.f32(op.b)))


def _silu_mul(run: Run, op: ops.SiluMul) -> None:
    gate, up = run.f32(op.x).chunk(2, dim=-1)
    run.put(op.out, bf16(F.silu(gate)) * up)


def _causal_conv(run: Run, op: mixerops.CausalConv) -> None:
    x, weight, state = run.f32(op.x), run.weights[op.weight], run.states[op.state]
    outs = []
    for row, (position, slot) in enumerate(_positions(run, op)):
        if position < 0:
            outs.append(torch.zeros_like(x[row]))
            continue
        state[slot, position % op.ring] = x[row].to(state.dtype)
        taps = [
            state[slot, (position - back) % op.ring].float() * weight[:, op.width - 1 - back]
            for back in reversed(range(op.width))
            if position - back >= 0
        ]
        outs.append(bf16(F.silu(bf16(sum(taps[1:], taps[0])))))
    run.put(op.out, torch.stack(outs))


def _positions(run: Run, op: Any) -> list[tuple[int, int]]:
    return list(zip(run.index(op.position).tolist(), run.index(op.slot).tolist(), strict=True))


def _delta_gates(run: Run, op: mixerops.DeltaGates) -> None:
    run.put(op.beta, torch.sigmoid(run.f32(op.b)))
    run.put(op.g, -run.weights[op.a_log].exp() * F.softplus(run.f32(op.a) + run.weights[op.dt_bias]))


def _gated_delta(run: Run, op: mixerops.GatedDelta) -> None:
    q, k, v = _delta_heads(run, op)
    q, k = _l2(q) * op.key_dim**-0.5, _l2(k)
    beta, decay, state = run.f32(op.beta)[:, :, None], run.f32(op.g).exp()[:, :, None, None], run.states[op.state]
    outs = []
    for row, (position, slot) in enumerate(_positions(run, op)):
        if position < 0:
            outs.append(torch.zeros_like(v[row]))
            continue
        old = state[slot] if position > 0 else torch.zeros_like(state[slot])
        s = old * decay[row]
        delta = beta[row] * (v[row] - _read_state(s, k[row]))
        s = s + k[row][:, :, None] * delta[:, None, :]
        outs.append(_read_state(s, q[row]))
        state[slot] = s
    run.put(op.out, torch.stack(outs))


def _delta_chunk(run: Run, op: promptops.DeltaChunk) -> None:
    q, k, _ = _delta_heads(run, op)
    g = run.f32(op.g).clamp_min(op.least_decay)
    found = delta_chunk(q, k, run.f32(op.beta), g, _positions(run, op), op.chunk)
    run.put(op.inverse, found.inverse)
    run.put(op.inverse_rest, found.inverse - run.f32(op.inverse))
    run.put(op.scores, found.scores)
    run.put(op.scales, found.scales)


def _delta_scan(run: Run, op: promptops.DeltaScan) -> None:
    inverse = run.f32(op.inverse) + run.f32(op.inverse_rest)
    chunks = Chunks(inverse, run.f32(op.scores), run.f32(op.scales))
    run.put(op.out, delta_scan(_delta_heads(run, op), chunks, _positions(run, op), run.states[op.state]))


def _delta_heads(run: Run, op: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k [T, value_heads, key_dim] of each value head, and v [T, value_heads, value_dim], as they are stored."""
    key_width = op.key_heads * op.key_dim
    q, k, v = run.f32(op.qkv).split([key_width, key_width, op.value_heads * op.value_dim], dim=-1)
    repeat = op.value_heads // op.key_heads
    q, k = (x.unflatten(1, [op.key_heads, op.key_dim]).repeat_interleave(repeat, dim=1) for x in (q, k))
    return q, k, v.unflatten(1, [op.value_heads, op.value_dim])


def _read_state(s: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What a state [heads, K, V] holds for a key [heads, K]: [heads, V]."""
    found: torch.Tensor = torch.bmm(s.transpose(1, 2), key[:, :, None])[:, :, 0]
    return found


def _l2(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gated_norm(run: Run, op: mixerops.GatedNorm) -> None:
    x = run.f32(op.x)
    normed = bf16(bf16(_rms(x, op.eps)) * run.weights[op.weight])
    run.put(op.out, normed.flatten(1) * F.silu(run.flat(op.z)))


def _head_norm_rope(run: Run, op: mixerops.HeadNormRope) -> None:
    heads = run.f32(op.x).unflatten(1, [op.heads, op.head_stride])[:, :, : op.head_dim]
    x = bf16(_rms(heads, op.eps) * (run.weights[op.weight] + (1.0 if op.shifted else 0.0)))
    half = op.rotary_dim // 2
    frequency = 1.0 / op.theta ** (torch.arange(half, dtype=torch.float32) / half)
    angle = run.index(op.position).float()[:, None] * frequency
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    low, high = x[:, :, :half], x[:, :, half : op.rotary_dim]
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin, x[:, :, op.rotary_dim :]], dim=-1)
    run.put(op.out, rotated)


def _cache_append(run: Run, op: mixerops.CacheAppend) -> None:
    k, v = run.get(op.k), run.get(op.v).unflatten(1, [op.kv_heads, op.head_dim])
    for row, (position, slot) in enumerate(_positions(run, op)):
        if position >= 0:
            run.states[op.k_cache][slot, :, position] = k[row]
            run.states[op.v_cache][slot, :, position] = v[row]


def _attention(run: Run, op: mixerops.Attention) -> None:
    q, positions = run.f32(op.q), _positions(run, op)
    longest = {slot: max(at for at, other in positions if other == slot) for _, slot in positions}
    caches = {slot: _cached(run, op, slot, position + 1) for slot, position in longest.items()}
    outs = []
    for row, (position, slot) in enumerate(positions):
        keys, values = (cache[:, : max(position + 1, 1)] for cache in caches[slot])
        weights = torch.softmax(torch.einsum("hd,hsd->hs", q[row], keys) * op.scale, dim=-1)
        outs.append(torch.einsum("hs,hsd->hd", weights, values))
    run.put(op.out, torch.stack(outs))


def _cached(run: Run, op: Any, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first ``length`` positions, FP32 [heads, length, head_dim]; zeros for a padded row."""
    repeat = op.heads // op.kv_heads
    caches = (run.states[name][slot, :, : max(length, 1)].float() for name in (op.k_cache, op.v_cache))
    keys, values = (cache.repeat_interleave(repeat, dim=0) for cache in caches)
    return keys, values


def _run_of_tiles(op: Any, position: int) -> int:
    """Positions in each of a row's runs."""
    tiles = position // int(op.tile) + 1
    return -(-tiles // int(op.splits)) * int(op.tile)


def _attention_partial(run: Run, op: mixerops.AttentionPartial) -> None:
    q = run.f32(op.q)
    partial = run.get(op.partial)
    for row, (position, slot) in enumerate(_positions(run, op)):
        if position < 0:
            continue
        keys, values = _cached(run, op, slot, position + 1)
        scores = torch.einsum("hd,hsd->hs", q[row], keys) * op.scale
        run_length = _run_of_tiles(op, position)
        for split, first in enumerate(range(0, position + 1, run_length)):
            part = scores[:, first : first + run_length]
            largest = part.amax(-1)
            weights = (part - largest[:, None]).exp()
            partial[row, :, split, : op.head_dim] = torch.einsum(
                "hs,hsd->hd", weights, values[:, first : first + run_length]
            )
            partial[row, :, split, op.head_dim] = largest
            partial[row, :, split, op.head_dim + 1] = weights.sum(-1)
    run.written[op.partial] = None


def _attention_combine(run: Run, op: mixerops.AttentionCombine) -> None:
    partial = run.get(op.partial)
    outs = []
    for row, position in enumerate(run.index(op.position).tolist()):
        used = -(-(position + 1) // _run_of_tiles(op, max(position, 0)))
        sums = partial[row, :, :used, : op.head_dim]
        largest, total = partial[row, :, :used, op.head_dim], partial[row, :, :used, op.head_dim + 1]
        if used == 0:
            outs.append(torch.zeros(op.heads, op.head_dim))
            continue
        factor = (largest - largest.amax(-1, keepdim=True)).exp()
        outs.append((sums * factor[:, :, None]).sum(1) / (total * factor).sum(1)[:, None])
    run.put(op.out, torch.stack(outs))


def _output_gate(run: Run, op: mixerops.OutputGate) -> None:
    gate = run.f32(op.gate).unflatten(1, [op.heads, op.stride])[:, :, op.offset : op.offset + op.head_dim]
    run.put(op.out, run.f32(op.x) * bf16(torch.sigmoid(gate)))


def _top_k(run: Run, op: ops.TopK) -> None:
    logits = run.f32(op.logits)
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : op.k]
    largest = logits.amax(-1, keepdim=True)
    weights = torch.where(largest.isinf(), torch.zeros_like(logits), (logits - largest).exp())
    scores = (weights / _sum_or_one(weights)).gather(1, order)
    run.put(op.ids, order.to(torch.int32))
    run.put(op.scores, scores / _sum_or_one(scores) if op.normalize else scores)


def _sum_or_one(x: torch.Tensor) -> torch.Tensor:
    """Row sums to divide by: a row without any finite logit keeps scores of zero."""
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, total, torch.ones_like(total))


def _expert_linear(run: Run, op: ops.ExpertLinear) -> None:
    x, ids, weight = run.f32(op.x), run.get(op.ids).tolist(), run.weights[op.weight]
    rows = []
    for row, experts in zip(x, ids, strict=True):
        slots = [row] * len(experts) if row.dim() == 1 else row
        rows += [weight[expert] @ slot for expert, slot in zip(experts, slots, strict=True)]
    run.put(op.out, torch.stack(rows))


def _group_by_expert(run: Run, op: promptops.GroupByExpert) -> None:
    ids = run.get(op.ids).flatten().long()
    counts = torch.bincount(ids, minlength=op.experts).tolist()
    run.put(op.order, torch.sort(ids, stable=True).indices)
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        end = start + count
        slots = end // op.tile - start // op.tile + 1
        firsts = [min(start + slot * op.tile, end) for slot in range(slots)]
        tiles += [(expert, first, min(first + op.tile, end)) for first in firsts]
        start = end
    run.put(op.tiles, torch.tensor(tiles, dtype=torch.int32))


def _grouped_linear(run: Run, op: promptops.GroupedLinear) -> None:
    run.put(op.out, _by_tiles(run, op, _pairs(run, op, run.f32(op.x))))


def _quantised_grouped_linear(run: Run, op: promptops.QuantisedGroupedLinear) -> None:
    codes, scales, row_scale = (_pairs(run, op, run.get(name)) for name in (op.codes, op.scales, op.row_scale))
    pairs = dequantise_rows(QuantisedRows(codes, scales, row_scale), run.weights[op.weight].shape[-1])
    run.put(op.out, _by_tiles(run, op, pairs) * row_scale)


def _pairs(run: Run, op: Any, x: torch.Tensor) -> torch.Tensor:
    """A row for each pair: [T, K], which all slots of a row read, or [T, k, K] to [T * k, K]."""
    slots = int(run.graph.tensors[op.order].shape[1])
    return x.repeat_interleave(slots, dim=0) if x.dim() == 2 else x.flatten(0, 1)


def _by_tiles(run: Run, op: Any, pairs: torch.Tensor) -> torch.Tensor:
    """FP32 products [T * k, N] of pairs with the weights of their experts."""
    order, weight = run.get(op.order).flatten().long(), run.weights[op.weight]
    out = torch.zeros(len(pairs), weight.shape[1])
    for expert, first, end in run.get(op.tiles).tolist():
        found = order[first:end]
        out[found] = pairs[found] @ weight[expert].T
    return out


def _combine(run: Run, op: ops.Combine) -> None:
    x, scores = run.f32(op.x), run.f32(op.scores)
    total = torch.zeros_like(x[:, 0])
    for slot in range(x.shape[1]):
        total = total + scores[:, slot, None] * x[:, slot]
    run.put(op.out, total)


def _shared_add(run: Run, op: ops.SharedAdd) -> None:
    run.put(op.out, run.f32(op.experts) + torch.sigmoid(run.f32(op.gate)) * run.f32(op.shared))


def _argmax(run: Run, op: ops.Argmax) -> None:
    logits = run.f32(op.logits)
    run.put(op.out, torch.where(logits.isnan(), -torch.inf, logits).argmax(-1, keepdim=True))


def _argmax_partial(run: Run, op: ops.ArgmaxPartial) -> None:
    logits = run.f32(op.logits)
    blocks = run.graph.tensors[op.values].width
    padded = torch.full((logits.shape[0], blocks * op.block), -torch.inf)
    padded[:, : logits.shape[1]] = torch.where(logits.isnan(), -torch.inf, logits)
    largest, where = padded.unflatten(1, [blocks, op.block]).max(-1)
    run.put(op.values, largest)
    run.put(op.indices, where + torch.arange(blocks) * op.block)


def _argmax_final(run: Run, op: ops.ArgmaxFinal) -> None:
    best = run.f32(op.values).argmax(-1, keepdim=True)
    run.put(op.out, run.get(op.indices).gather(1, best))


def _advance(run: Run, op: ops.Advance) -> None:
    history, positions = run.states[op.history], run.index(op.position)
    following = torch.where(positions < 0, positions, positions + 1)
    for token, at, slot in zip(run.index(op.token), following, run.index(op.slot), strict=True):
        if 0 <= at < history.shape[1]:
            history[slot, at] = token
    run.put(op.following, following[:, None])
    run.put(op.following_start, following[:, None])


def _last_row(run: Run, op: ops.LastRow) -> None:
    run.put(op.out, run.get(op.x)[-1:])


_MEANING: Mapping[type[Op], Callable[[Run, Any], None]] = {
    ops.Embed: _embed,
    ops.RmsNorm: _rms_norm,
    ops.Linear: _linear,
    promptops.PartialLinear: _partial_linear,
    promptops.SumParts: _sum_parts,
    promptops.QuantiseActivations: _quantise_activations,
    promptops.QuantisedLinear: _quantised_linear,
    ops.Add: _add,
    ops.SiluMul: _silu_mul,
    mixerops.CausalConv: _causal_conv,
    mixerops.DeltaGates: _delta_gates,
    mixerops.GatedDelta: _gated_delta,
    promptops.DeltaChunk: _delta_chunk,
    promptops.DeltaScan: _delta_scan,
    mixerops.GatedNorm: _gated_norm,
    mixerops.HeadNormRope: _head_norm_rope,
    mixerops.CacheAppend: _cache_append,
    mixerops.Attention: _attention,
    mixerops.AttentionPartial: _attention_partial,
    mixerops.AttentionCombine: _attention_combine,
    mixerops.OutputGate: _output_gate,
    ops.TopK: _top_k,
    ops.ExpertLinear: _expert_linear,
    promptops.GroupByExpert: _group_by_expert,
    promptops.GroupedLinear: _grouped_linear,
    promptops.QuantisedGroupedLinear: _quantised_grouped_linear,
    ops.Combine: _combine,
    ops.SharedAdd: _shared_add,
    ops.Argmax: _argmax,
    ops.ArgmaxPartial: _argmax_partial,
    ops.ArgmaxFinal: _argmax_final,
    ops.Advance: _advance,
    ops.LastRow: _last_row,
}
