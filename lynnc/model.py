"""What a model is: dimensions, layer pattern, experts for each layer, precision rules.

In: nothing but Python values; ``lynnc.modelfile`` reads them from YAML and ``lynnc.hfconfig`` from a published
configuration. Out: a frozen ``ModelSpec`` that ``lynnc.build`` turns into a graph.

Example::

    spec = load_model("tiny-moe")          # lynnc.modelfile
    spec.moe.experts                       # (6, 5, 4, 7)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from lynnc.tensors import Format


class Family(StrEnum):
    """Checkpoint naming and block structure, by the name ``transformers`` gives the family."""

    QWEN3_5_MOE = "qwen3_5_moe"
    QWEN3_5 = "qwen3_5"
    QWEN3_MOE = "qwen3_moe"


class Mixer(StrEnum):
    """What mixes tokens in a layer: a Gated DeltaNet or full attention."""

    GDN = "gdn"
    FULL = "full"


TENSOR_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "token embedding table",
        "lm_head": "output projection to the vocabulary",
        "gdn_in": "GDN in_proj_qkv and in_proj_z",
        "gdn_gates": "GDN in_proj_a and in_proj_b",
        "gdn_out": "GDN out_proj",
        "attention_in": "q_proj, k_proj and v_proj",
        "attention_out": "o_proj",
        "router": "expert router",
        "shared_gate": "shared expert gate",
        "experts": "routed experts, gate_up and down",
        "shared_expert": "shared expert, gate, up and down",
        "mlp": "dense feed-forward, gate, up and down",
    }
)
"""Tensor classes that a precision rule may name. Norms, conv1d, A_log and dt_bias are always BF16 or FP32."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Full attention. ``rotary_dim`` of ``head_dim`` rotate; ``output_gate`` doubles q_proj (per head: q, gate)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    output_gate: bool


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Gated DeltaNet; value head v uses key head ``v // (value_heads // key_heads)``."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts for each layer, and a shared expert unless ``shared_intermediate`` is 0."""

    experts: tuple[int, ...]
    top_k: int
    intermediate: int
    normalize_top_k: bool
    shared_intermediate: int


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense SwiGLU feed-forward block."""

    intermediate: int


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """Storage format of each tensor class, and the precision in which activations meet the weights."""

    formats: Mapping[str, Format]
    activations: str = "bf16"

    def format(self, tensor_class: str) -> Format:
        """Storage format of a tensor class."""
        return self.formats[tensor_class]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Exactly one of ``moe`` and ``dense`` is set; ``gdn`` is set if a layer of the pattern is GDN."""

    name: str
    description: str
    family: Family
    hidden: int
    vocabulary: int
    layers: tuple[Mixer, ...]
    max_context: int
    norm_eps: float
    norm_shifted: bool
    tied_embeddings: bool
    attention: AttentionSpec
    gdn: GdnSpec | None
    moe: MoeSpec | None
    dense: DenseSpec | None
    mtp_layers: int
    precision: PrecisionSpec
    tensor_prefix: str
    representative: bool = False
    """The experts for each layer are a plausible map, not the published one; a checkpoint's own spec wins."""
