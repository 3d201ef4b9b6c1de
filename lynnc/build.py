"""From a model to its graph: one op for each mathematical step.

In: a ``ModelSpec`` and the rows of the step (a number for decode, the symbol T for prefill). Out: ``Graph`` of stage
``model``. The order of ops and every rounding point (the dtype of each tensor) follow the reference implementation of
the family in ``transformers``.

Example::

    graph = build_graph(load_model("tiny-moe"), rows=1)      # program decode/1
"""

from __future__ import annotations

from types import MappingProxyType

from lynnc.builder import Builder
from lynnc.feedforward import feed_forward
from lynnc.ir import Graph, Stage
from lynnc.mixers import MIXERS
from lynnc.model import ModelSpec
from lynnc.ops import Add, Advance, Argmax, Embed, LastRow, Linear, RmsNorm
from lynnc.tensors import Dim, DType, S, T


def build_graph(spec: ModelSpec, rows: Dim = T) -> Graph:
    """The ``model`` stage graph of one step of ``rows`` tokens; only the last row gets logits where rows is T."""
    b = Builder(spec, rows)
    inputs = tuple(b.tensor(name, DType.I32, 1) for name in ("token", "position", "slot", "start"))
    table = b.matrix("embed", "embed", spec.hidden, {f"{spec.tensor_prefix}embed_tokens.weight": spec.vocabulary})
    h = b.tensor("h.0", DType.BF16, spec.hidden)
    b.add(Embed(name="embed", token="token", table=table, out=h))
    for layer, mixer in enumerate(spec.layers):
        mixed = MIXERS[mixer](b, layer, _norm(b, layer, "input", h))
        h = _residual(b, f"layers.{layer}.mixer_add", h, mixed, f"layers.{layer}.h")
        change = feed_forward(b, layer, _norm(b, layer, "post_attention", h))
        h = _residual(b, f"layers.{layer}.mlp_add", h, change, f"h.{layer + 1}")
    outputs = _head(b, h)
    history = b.state("history", DType.I32, S)  # of the slots, so every program of a plan knows it
    if rows != T:
        outputs += _advance(b, outputs[-1], history)
    return Graph(
        model=spec.name,
        program="prefill" if rows == T else f"decode/{rows}",
        stage=Stage.MODEL,
        rows=rows,
        ops=tuple(b.ops),
        tensors=MappingProxyType(b.tensors),
        weights=MappingProxyType(b.weights),
        states=MappingProxyType(b.states),
        inputs=inputs,
        outputs=outputs,
    )


def _norm(b: Builder, layer: int, which: str, h: str) -> str:
    name = f"layers.{layer}.{which}_norm"
    weight = b.vector(f"{name}_weight", b.source(layer, f"{which}_layernorm.weight"), b.spec.hidden)
    x = b.tensor(f"layers.{layer}.{'x' if which == 'input' else 'y'}", DType.BF16, b.spec.hidden)
    b.add(RmsNorm(name=name, x=h, weight=weight, out=x, eps=b.spec.norm_eps, shifted=b.spec.norm_shifted))
    return x


def _residual(b: Builder, name: str, h: str, change: str, out: str) -> str:
    b.add(Add(name=name, a=h, b=change, out=b.tensor(out, DType.BF16, b.spec.hidden)))
    return out


def _head(b: Builder, h: str) -> tuple[str, ...]:
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


def _advance(b: Builder, token: str, history: str) -> tuple[str, ...]:
    """What a decode step leaves for the next one, so that no host stands between two of them."""
    following, start = (b.tensor(f"next_{name}", DType.I32, 1) for name in ("position", "start"))
    b.add(Advance("advance", token, "position", "slot", history, following, start))
    return following, start
