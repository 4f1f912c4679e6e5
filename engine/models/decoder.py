"""One decoder for the Llama and Qwen families, over packed tokens without a batch dimension.

It knows nothing of sequences: what a token may look at is decided by the `attention` that the
caller passes, so training, serving and tree walks share every other line of arithmetic. Parameter
names are Hugging Face's own.

Shapes: T packed tokens, D hidden size, N query heads, K key-value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.rope import inverse_frequencies, rotate, rotations


class Attention(Protocol):
    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """o_TNH. Rotary positions and QK-norm are already in q and k."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        query_width = config.num_heads * config.head_dim
        key_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attention: Attention
    ) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = rotate(q_TNH, cos_T1H, sin_T1H), rotate(k_TKH, cos_T1H, sin_T1H)
        o_TNH = attention(self.layer, q_TNH, k_TKH, v_TKH)
        return self.o_proj(o_TNH.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attention: Attention
    ) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_T1H, sin_T1H, attention)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Body(nn.Module):
    """What Hugging Face calls `model`: it exists for its parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        embedding_VD = torch.empty(config.vocab_size, config.hidden_size)
        if not embedding_VD.is_meta:  # there `normal_` draws nothing, and imports sympy for 2 s
            nn.init.normal_(embedding_VD)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=embedding_VD
        )
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        # A plain attribute: a buffer would be rounded by `.to(bfloat16)`.
        self._inv_freq_F = inverse_frequencies(config)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """hidden_TD after the final norm."""
        x_TD = self.model.embed_tokens(tokens_T)
        self._inv_freq_F = self._inv_freq_F.to(positions_T.device)
        cos_T1H, sin_T1H = rotations(positions_T, self._inv_freq_F, x_TD.dtype)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos_T1H, sin_T1H, attention)
        return self.model.norm(x_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """logits_TV, in float32 at least."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits_TV = F.linear(hidden_TD, head.weight)
        return logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
