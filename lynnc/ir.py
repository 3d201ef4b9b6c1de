"""The intermediate representation: one dataclass for each kind of op, and the graph that holds them.

Grammar
-------
::

    graph   := stage, tensors, weights, states, ops          # ops in execution order
    tensor  := name : dtype [rows, columns...]               # an activation; rows may be the symbol T
             | name = base[:, start : start + columns]       # a view of columns of another tensor
             | ... in the order of lanes                     # how its columns stand in memory (lynnc/columnorder.py)
    weight  := name : format [experts?, rows, columns]       # constant for the plan, packed by parts
    state   := name : dtype [per slot shape]                 # lives between steps; the context S may appear
    op      := Kind(reads..., weights..., states...) -> writes
    op      := Fused(kind, body)                             # one launch; its meaning is its body's

Every op kind states which of its fields name tensors it reads or writes, weights or states, so passes, the verifier
and the printer need no table beside this file. The stages are ``model`` (one op for each mathematical step) and
``fused`` (one op for each kernel launch). ``str(graph)`` is stable text: golden tests and ``lynnc show`` print it.

Example::

    RmsNorm(h -> x, weight=layers.0.input_norm, eps=1e-06, shifted=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

import sympy

from lynnc.columnorder import ColumnOrder

T = sympy.Symbol("T", integer=True, positive=True)
"""Rows (tokens) in the step."""
S = sympy.Symbol("S", integer=True, positive=True)
"""Context: positions that a slot's key/value cache holds."""

Dim: TypeAlias = sympy.Expr | int


class DType(StrEnum):
    """Element type of an activation or state."""

    BF16 = "bf16"
    F32 = "f32"
    I32 = "i32"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return 2 if self is DType.BF16 else 4


class Format(StrEnum):
    """How a weight is stored. ``nvfp4``: E2M1 codes, a scale for each 16 columns, one FP32 scale for each part."""

    NVFP4 = "nvfp4"
    NVFP4_FP16 = "nvfp4-fp16"
    FP8 = "fp8"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def is_packed(self) -> bool:
        """Whether values are 4-bit codes in 64-bit words."""
        return self in (Format.NVFP4, Format.NVFP4_FP16)


GROUP = 16
"""Columns that share one NVFP4 block scale."""


class Stage(StrEnum):
    """How far a graph has come: one op for each step of the model, or for each kernel launch."""

    MODEL = "model"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation of shape ``[rows, *columns]``; a view if ``base`` is set, starting at column ``offset`` of it."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    base: str | None = None
    offset: int = 0
    order: ColumnOrder = ColumnOrder.NATURAL

    @property
    def width(self) -> int:
        """Elements of one row."""
        product = 1
        for columns in self.shape[1:]:
            product *= int(columns)
        return product

    def __str__(self) -> str:
        shape = ", ".join(str(dim) for dim in self.shape)
        view = f" = {self.base}[:, {self.offset}:{self.offset + self.width}]" if self.base else ""
        order = "" if self.order is ColumnOrder.NATURAL else f" in the order of {self.order}"
        return f"{self.name}: {self.dtype}[{shape}]{view}{order}"


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor inside a weight: its name in the checkpoint and the rows it fills (for each expert)."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant matrix ``[experts?, rows, columns]`` or vector ``[rows]``, made of parts stacked along the rows.

    Each part of a packed weight keeps its own global scale: index ``row // part_rows`` of ``[experts *] rows /
    part_rows`` FP32 values, where ``part_rows`` is the greatest common divisor of the parts' rows.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    tensor_class: str
    activations: str = "bf16"
    """Precision in which activations are declared to meet it in prefill."""

    @property
    def experts(self) -> int:
        """Matrices of the weight: 1 but for expert weights."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """Rows of one matrix, or elements of a vector."""
        return self.shape[-2] if len(self.shape) > 1 else self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of one matrix; 1 for a vector."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def part_rows(self) -> int:
        """Rows that are certain to share one global scale."""
        return int(sympy.igcd(*(part.rows for part in self.parts))) if len(self.parts) > 1 else self.rows

    def bytes_by_array(self) -> Mapping[str, int]:
        """Bytes of each array that stores the weight: ``data``, ``scale`` (one for each group), ``global``."""
        elements = self.experts * self.rows * self.columns
        if self.format.is_packed:
            scale_bytes = 1 if self.format is Format.NVFP4 else 2
            scales = self.experts * self.rows * (self.columns // GROUP)
            return {"data": elements // 2, "scale": scales * scale_bytes, "global": self.global_scales * 4}
        if self.format is Format.FP8:
            return {"data": elements, "global": self.global_scales * 4}
        return {"data": elements * (4 if self.format is Format.F32 else 2)}

    @property
    def global_scales(self) -> int:
        """FP32 scales over all experts and parts."""
        return self.experts * (self.rows // self.part_rows)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.bytes_by_array().values())

    def __str__(self) -> str:
        sources = " + ".join(f"{part.source}[{part.rows}]" for part in self.parts)
        declared = f", {self.activations} activations" if self.activations != "bf16" else ""
        return f"{self.name}: {self.format}{list(self.shape)} = {sources}{declared}"


@dataclass(frozen=True, slots=True)
class State:
    """Memory of one sequence (slot) that lives between steps, of shape ``[slot, *shape]``."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes of one slot; a function of S for a key/value cache."""
        return sympy.Integer(self.dtype.bytes) * sympy.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[slot, {', '.join(str(dim) for dim in self.shape)}]"


def _named(role: str) -> Any:
    return field(metadata={"role": role})


def read_field() -> Any:
    """A field that names a tensor the op reads."""
    return _named("read")


def write_field() -> Any:
    """A field that names a tensor the op writes."""
    return _named("write")


def weight_field() -> Any:
    """A field that names a weight."""
    return _named("weight")


def state_field() -> Any:
    """A field that names a state, which the op may read and write."""
    return _named("state")


@cache
def _fields_of(kind: type, role: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.metadata.get("role") == role)


@dataclass(frozen=True, slots=True)
class Op:
    """One step. ``name`` is unique in the graph and starts with the layer: ``layers.3.attention``."""

    name: str

    def names(self, role: str) -> tuple[str, ...]:
        """Names in the fields of ``role`` (read, write, weight, state), in field order."""
        found: list[str] = []
        kind: type = type(self)
        for name in _fields_of(kind, role):
            value = getattr(self, name)
            if isinstance(value, str):
                found.append(value)
            else:
                found.extend(value)
        return tuple(found)

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that the op reads, in field order."""
        return self.names("read")

    @property
    def writes(self) -> tuple[str, ...]:
        """Tensors that the op writes, in field order."""
        return self.names("write")

    @property
    def kind(self) -> str:
        """What the op is called in text: its class, or the pattern of a fused one."""
        return type(self).__name__

    def __str__(self) -> str:
        attributes = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if "role" not in item.metadata and item.name != "name"
        ]
        arguments = [*self.reads, *self.names("weight"), *(f"&{name}" for name in self.names("state")), *attributes]
        return f"{self.kind}({', '.join(arguments)}) -> {', '.join(self.writes) or '()'}"


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """``out[t] = table[token[t]]``. token I32 [T, 1], table [vocabulary, D], out BF16 [T, D]."""

    token: str = read_field()
    table: str = weight_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """``out = x / rms(x) * w`` in FP32, ``* (1 + w)`` if ``shifted``; w plain BF16 [D]."""

    x: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """``out = x @ w[first_row : first_row + N].T`` with FP32 accumulation, rounded once to out's dtype [T, N]."""

    x: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    first_row: int


@dataclass(frozen=True, slots=True)
class Add(Op):
    """``out = a + b`` in FP32, each rounded to BF16 first where it is FP32, rounded once to out's dtype."""

    a: str = read_field()
    b: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class SiluMul(Op):
    """``out = bf16(silu(gate)) * up``; x holds gate then up along its last axis: [T, ..., 2 I] -> [T, ..., I]."""

    x: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class CausalConv(Op):
    """Depthwise causal convolution, then SiLU: FP32 sums over ``width`` inputs, rounded to BF16, silu, rounded to BF16.

    x BF16 [T, C], weight BF16 [C, width], state BF16 [ring, C]: the input at position p is kept at ``p % ring``.
    Inputs at positions before 0 are zero whatever the state holds. position, slot: I32 [T, 1].
    """

    x: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    start: str = read_field()
    weight: str = weight_field()
    state: str = state_field()
    out: str = write_field()
    width: int
    ring: int


@dataclass(frozen=True, slots=True)
class DeltaGates(Op):
    """``beta = sigmoid(b)``, ``g = -exp(a_log) * softplus(a + dt_bias)``, FP32 [T, value_heads]; stable softplus."""

    b: str = read_field()
    a: str = read_field()
    a_log: str = weight_field()
    dt_bias: str = weight_field()
    beta: str = write_field()
    g: str = write_field()


@dataclass(frozen=True, slots=True)
class GatedDelta(Op):
    """The gated delta rule, token by token in FP32; out is rounded to BF16 [T, value_heads, value_dim].

    q, k = L2 normalised over ``key_dim`` (eps 1e-6 inside the root), q also * key_dim ** -0.5;
    S *= exp(g); d = beta * (v - S^T k); S += k d^T; out = S^T q.
    qkv BF16 [T, 2 * key_heads * key_dim + value_heads * value_dim]; state F32 [value_heads, key_dim, value_dim].
    A row at position 0 starts from a zero state whatever the slot holds.
    """

    qkv: str = read_field()
    beta: str = read_field()
    g: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    state: str = state_field()
    out: str = write_field()
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class GatedNorm(Op):
    """Per head: ``bf16(bf16(x / rms(x)) * w) * silu(z in FP32)``, rounded to BF16; w plain, [head_dim].

    x BF16 [T, heads, head_dim], z BF16 [T, heads * head_dim], out BF16 [T, heads * head_dim].
    """

    x: str = read_field()
    z: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNormRope(Op):
    """Per head: RMS norm over head_dim (``shifted``: * (1 + w)), rounded to BF16, then RoPE.

    Head i of row t stands at ``x[t, i * head_stride : i * head_stride + head_dim]``. The first ``rotary_dim`` of
    head_dim are rotated in half-split pairs (i, i + rotary_dim / 2) by position * theta ** (-2 i / rotary_dim) in
    FP32; the rest pass. out BF16 [T, heads, head_dim].
    """

    x: str = read_field()
    position: str = read_field()
    weight: str = weight_field()
    out: str = write_field()
    heads: int
    head_dim: int
    head_stride: int
    rotary_dim: int
    theta: float
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class CacheAppend(Op):
    """Stores k [T, kv_heads, head_dim] and v [T, kv_heads * head_dim] at each row's slot and position.

    k_cache, v_cache: BF16 [kv_heads, S, head_dim] for each slot. Rows with position < 0 are padding: nothing stored.
    """

    k: str = read_field()
    v: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Causal attention of each row over positions 0..position of its slot; softmax in FP32.

    out BF16 [T, heads, head_dim].
    """

    q: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    out: str = write_field()
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class AttentionPartial(Op):
    """Attention over one of ``splits`` contiguous runs of tiles of ``tile`` positions.

    A row at position p has ``n = p // tile + 1`` tiles and a run is ``ceil(n / splits)`` of them, so the work follows
    the row's own length and the result of a row does not depend on other rows. partial F32
    [T, heads, splits, head_dim + 2]: the unnormalised sum, then the running maximum and the sum of exponentials.
    Runs past the end are not written.
    """

    q: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    k_cache: str = state_field()
    v_cache: str = state_field()
    partial: str = write_field()
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    splits: int
    tile: int


@dataclass(frozen=True, slots=True)
class AttentionCombine(Op):
    """Joins the partial results of the non-empty runs in order. out BF16 [T, heads, head_dim]."""

    partial: str = read_field()
    position: str = read_field()
    out: str = write_field()
    heads: int
    head_dim: int
    splits: int
    tile: int


@dataclass(frozen=True, slots=True)
class OutputGate(Op):
    """``out = x * bf16(sigmoid(gate))``; the gate of head i stands at ``gate[t, i * stride + offset : + head_dim]``."""

    x: str = read_field()
    gate: str = read_field()
    out: str = write_field()
    heads: int
    head_dim: int
    stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class TopK(Op):
    """Softmax over all E logits in FP32, the k largest (ties: lower index), divided by their sum if ``normalize``.

    logits F32 [T, E]; ids I32 [T, k], distinct and in range even for NaN logits (NaN counts as -inf); scores F32
    [T, k].
    """

    logits: str = read_field()
    ids: str = write_field()
    scores: str = write_field()
    experts: int
    k: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class ExpertLinear(Op):
    """``out[t, a] = x[t] (or x[t, a]) @ weight[ids[t, a]].T``; out [T, k, N]. FP32 accumulation, rounded once."""

    x: str = read_field()
    ids: str = read_field()
    weight: str = weight_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """``out[t] = sum over a, in order, of scores[t, a] * x[t, a]`` in FP32; x [T, k, D], out F32 [T, D]."""

    x: str = read_field()
    scores: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class SharedAdd(Op):
    """``out = experts + sigmoid(gate) * shared`` in FP32, rounded to BF16; gate F32 [T, 1], the others [T, D]."""

    experts: str = read_field()
    shared: str = read_field()
    gate: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Argmax(Op):
    """Index of the largest logit (ties: lower index; NaN never wins). logits F32 [T, V] -> out I32 [T, 1]."""

    logits: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class ArgmaxPartial(Op):
    """Largest logit of each run of ``block`` columns: values F32 [T, blocks], indices I32 [T, blocks]."""

    logits: str = read_field()
    values: str = write_field()
    indices: str = write_field()
    block: int


@dataclass(frozen=True, slots=True)
class ArgmaxFinal(Op):
    """The index that belongs to the largest value (ties: lower index). out I32 [T, 1]."""

    values: str = read_field()
    indices: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Advance(Op):
    """The inputs of a next step of one row for each sequence: the row's position + 1, a padding row's as it was.

    ``history[slot, position + 1] = token`` keeps what was chosen, as far as the context reaches. token, position, slot,
    following, following_start I32 [T, 1]; history I32 [S].
    """

    token: str = read_field()
    position: str = read_field()
    slot: str = read_field()
    history: str = state_field()
    following: str = write_field()
    following_start: str = write_field()


@dataclass(frozen=True, slots=True)
class LastRow(Op):
    """``out[0] = x[T - 1]``: the row whose logits a prefill needs. x BF16 [T, D], out BF16 [1, D]."""

    x: str = read_field()
    out: str = write_field()


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """One launch that computes ``body``; tensors written and read only inside need no memory."""

    pattern: str
    body: tuple[Op, ...]
    inputs: tuple[str, ...] = read_field()
    used_weights: tuple[str, ...] = weight_field()
    used_states: tuple[str, ...] = state_field()
    outputs: tuple[str, ...] = write_field()

    @property
    def kind(self) -> str:
        """The pattern."""
        return self.pattern

    def __str__(self) -> str:
        lines = [f"{self.pattern}({', '.join(self.inputs)}) -> {', '.join(self.outputs)} {{"]
        lines += [f"    {op}" for op in self.body]
        return "\n".join([*lines, "}"])


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in execution order with the tables of what they name. ``inputs`` and ``outputs`` name tensors."""

    model: str
    program: str
    stage: Stage
    rows: Dim
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, Weight]
    states: Mapping[str, State]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def with_ops(self, ops: tuple[Op, ...], *new_tensors: Tensor) -> Graph:
        """The same graph with other ops; tensors that no op names any more are dropped."""
        tensors = {**self.tensors, **{tensor.name: tensor for tensor in new_tensors}}
        named = set(self.inputs) | set(self.outputs)
        for op in walk(ops):
            named.update(op.reads, op.writes)
        while bases := {tensors[name].base for name in named} - named - {None}:
            named.update(base for base in bases if base)
        kept = {name: tensor for name, tensor in tensors.items() if name in named}
        return replace(self, ops=ops, tensors=kept)

    def __str__(self) -> str:
        lines = [f"graph {self.model} {self.program} stage={self.stage} rows={self.rows}"]
        lines += [f"  input {self.tensors[name]}" for name in self.inputs]
        for op in self.ops:
            lines.append(f"  {op.name}:")
            lines += [f"    {line}" for line in str(op).splitlines()]
        lines += [f"  output {self.tensors[name]}" for name in self.outputs]
        return "\n".join(lines) + "\n"


def walk(ops: tuple[Op, ...]) -> Iterator[Op]:
    """Every op, and the ops inside each fused one."""
    for op in ops:
        yield op
        if isinstance(op, Fused):
            yield from walk(op.body)


def primitive_ops(op: Op) -> tuple[Op, ...]:
    """The body of a fused op, or the op itself."""
    return op.body if isinstance(op, Fused) else (op,)
