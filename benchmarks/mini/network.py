"""lynn-mini as ``transformers`` has it, and the multi-token prediction head that the library lacks.

In: a model file. Out: the library's own model class, its experts computed all at once (few and small as they are, that
is faster than choosing), and an ``MtpHead``. A pruned model is the same with experts cut out of each layer.

Example::

    spec = load_model("benchmarks/mini/lynn-mini.yaml")
    model = new_model(spec, seed=0)
    head = MtpHead(model.config)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

from lynnc.model import Mixer, ModelSpec

MTP_LAYER = "full_attention"
MTP_PREFIX = "mtp."
"""What stands before the draft head's names in a checkpoint."""


def config_of(spec: ModelSpec) -> Qwen3_5MoeTextConfig:
    """The library's configuration of a model; the largest layer's number of experts."""
    attention, gdn, moe = spec.attention, spec.gdn, spec.moe
    assert gdn is not None and moe is not None
    third = attention.rotary_dim // 6
    rope = {
        "rope_type": "default",
        "rope_theta": attention.rope_theta,
        "partial_rotary_factor": attention.rotary_dim / attention.head_dim,
        "mrope_section": [attention.rotary_dim // 2 - 2 * third, third, third],
        "mrope_interleaved": True,
    }
    make: Any = Qwen3_5MoeTextConfig
    config: Qwen3_5MoeTextConfig = make(
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        rope_parameters=rope,
        linear_num_key_heads=gdn.key_heads,
        linear_num_value_heads=gdn.value_heads,
        linear_key_head_dim=gdn.key_dim,
        linear_value_head_dim=gdn.value_dim,
        linear_conv_kernel_dim=gdn.conv_width,
        layer_types=[MTP_LAYER if mixer is Mixer.FULL else "linear_attention" for mixer in spec.layers],
        num_experts=max(moe.experts),
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.intermediate,
        shared_expert_intermediate_size=moe.shared_intermediate,
        mtp_num_hidden_layers=spec.mtp_layers,
        eos_token_id=0,
        bos_token_id=None,
    )
    return config


class MtpHead(nn.Module):
    """From the residual stream at a position and the token that follows it to the token after that one."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.pre_fc_norm_embedding = library.Qwen3_5MoeRMSNorm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = library.Qwen3_5MoeRMSNorm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(
            [library.Qwen3_5MoeDecoderLayer(config, (config.layer_types or []).index(MTP_LAYER))]
        )
        self.norm = library.Qwen3_5MoeRMSNorm(size, eps=config.rms_norm_eps)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range) if parameter.ndim > 1 else nn.init.zeros_(
                parameter
            )
        choose_all_experts(self.layers[0])

    def forward(self, model: Any, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] of the tokens after ``following`` [B, n], which come after ``hidden`` [B, n, D]."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(following))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))
        positions = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[0], -1)
        rotary = model.model.rotary_emb(x, positions[None].expand(3, -1, -1))
        x = self.layers[0](x, position_embeddings=rotary, attention_mask=None, position_ids=positions)
        logits: torch.Tensor = model.lm_head(self.norm(x))
        return logits


def new_model(spec: ModelSpec, seed: int) -> Any:
    """A ``Qwen3_5MoeForCausalLM`` with random weights, ready to be trained."""
    torch.manual_seed(seed)
    config = config_of(spec)
    config._attn_implementation = "sdpa"
    model: Any = Qwen3_5MoeForCausalLM(config)
    for layer in model.model.layers:
        choose_all_experts(layer)
    library.torch_chunk_gated_delta_rule = _in_full_precision(library.torch_chunk_gated_delta_rule)
    return model


def _in_full_precision(function: Any) -> Any:
    """The recurrence without automatic BF16: its state loses too much in it."""
    if getattr(function, "is_full_precision", False):
        return function

    def wrapped(*arguments: Any, **options: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return function(*arguments, **options)

    wrapped.is_full_precision = True  # type: ignore[attr-defined]
    return wrapped


def choose_all_experts(layer: Any) -> None:
    """Has a layer compute every expert for every token; those that were not chosen have weight 0."""
    layer.mlp.experts.forward = MethodType(_every_expert, layer.mlp.experts)


def _every_expert(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    count, two, hidden = self.gate_up_proj.shape
    share = torch.zeros(len(x), count, dtype=weights.dtype, device=x.device).scatter(1, chosen, weights)
    gate, up = F.linear(x, self.gate_up_proj.reshape(-1, hidden)).view(len(x), count, two).chunk(2, dim=-1)
    inside = F.silu(gate) * up * share[:, :, None]
    return F.linear(inside.flatten(1), self.down_proj.permute(1, 0, 2).reshape(hidden, -1))


def cut_experts(layers: Sequence[Any], kept: Sequence[Sequence[int]]) -> None:
    """Leaves each layer only the experts that it keeps, numbered anew."""
    for layer, ids in zip(layers, kept, strict=True):
        block, index = layer.mlp, torch.tensor(ids)
        for owner, name in ((block.gate, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
            values = getattr(owner, name).detach()
            setattr(owner, name, nn.Parameter(values[index.to(values.device)].clone()))
        block.gate.num_experts = block.experts.num_experts = len(ids)


def load_values(model: Any, head: MtpHead, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts a checkpoint's tensors, by their names there, into a model and its draft head."""
    model.load_state_dict({name: value for name, value in tensors.items() if not name.startswith(MTP_PREFIX)})
    head.load_state_dict(
        {name.removeprefix(MTP_PREFIX): value for name, value in tensors.items() if name.startswith(MTP_PREFIX)}
    )


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


class Recorder(AbstractContextManager["Recorder"]):
    """What a forward pass leaves out of its result: the stream before the final norm, and every router's logits."""

    def __init__(self, model: Any, head: MtpHead | None) -> None:
        self.hidden = torch.empty(0)
        self.routers: list[torch.Tensor] = []
        layers = [*model.model.layers, *(head.layers if head else [])]
        self._hooks = [model.model.norm.register_forward_pre_hook(self._keep_hidden)]
        self._hooks += [layer.mlp.gate.register_forward_hook(self._keep_router) for layer in layers]

    def _keep_hidden(self, _module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self.hidden = arguments[0]

    def _keep_router(self, _module: nn.Module, _arguments: Any, found: tuple[torch.Tensor, ...]) -> None:
        self.routers.append(found[0])

    def take_routers(self) -> list[torch.Tensor]:
        """Logits of the routers since the last call, in the order of the layers."""
        found, self.routers = self.routers, []
        return found

    def __exit__(self, *_error: object) -> None:
        for hook in self._hooks:
            hook.remove()
