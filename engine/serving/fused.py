"""The forward pass of a `Decoder`, arranged for serving: the same arithmetic in fewer operations.

A small model spends its time on the number of operations, not on their size. So q, k and v are one
product, gate and up another; q and k are normed and rotated together; and after the last layer's
attention only the rows that are asked for go on. Head dimensions are stored in rotary pairs, which
changes no product of q and k. Invariant: hidden states equal the `Decoder`'s to rounding; tests
hold it for every family.

Shapes: T tokens, R rows asked for, D hidden size, N query heads, K key-value heads, H head dim,
F rotary pairs (H/2), P positions.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Attention, Decoder, ModelConfig
from engine.models.decoder import Layer, RMSNorm
from engine.models.rope import rotations


@dataclass(frozen=True, slots=True)
class FusedLayer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm_EH: Tensor | None
    """One row for each query head, then one for each key head."""
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedDecoder:
    def __init__(self, decoder: Decoder, positions: int) -> None:
        """`positions`: no token stands at this one or later. The decoder may be dropped."""
        self.config = decoder.config
        with torch.no_grad():
            self.layers = [
                _fuse(cast(Layer, layer), decoder.config) for layer in decoder.model.layers
            ]
            self.embedding_VD = decoder.model.embed_tokens.weight.detach()
            head = decoder.lm_head
            self.head_VD = self.embedding_VD if head is None else head.weight.detach()
            self.norm_D = decoder.model.norm.weight.detach()
            self.eps = torch.tensor(self.config.rms_norm_eps)
            real = torch.promote_types(self.embedding_VD.dtype, torch.float32)
            cos_P1H, sin_P1H = rotations(torch.arange(positions), decoder._inv_freq_F, real)
            half = self.config.head_dim // 2
            self.turns_P1F = torch.complex(cos_P1H[..., :half], sin_P1H[..., :half])

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, rows_R: Tensor | None
    ) -> Tensor:
        """hidden_RD of the tokens numbered `rows_R`; None: of all."""
        turns_T1F = self.turns_P1F.index_select(0, positions_T)
        x_TD = F.embedding(tokens_T, self.embedding_VD)
        for i, layer in enumerate(self.layers):
            o_TD = self._attend(i, layer, x_TD, turns_T1F, attention)
            if rows_R is not None and i == len(self.layers) - 1:
                x_TD, o_TD = x_TD.index_select(0, rows_R), o_TD.index_select(0, rows_R)
            x_TD = _add(x_TD, o_TD, layer.output, layer.output_bias)
            gate, up = F.linear(self._norm(x_TD, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x_TD = _add(x_TD, F.silu(gate).mul_(up), layer.down, None)
        return self._norm(x_TD, self.norm_D)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """logits_RV, in float32 at least."""
        logits_RV = F.linear(hidden_RD, self.head_VD)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def _attend(
        self, i: int, layer: FusedLayer, x_TD: Tensor, turns_T1F: Tensor, attention: Attention
    ) -> Tensor:
        c = self.config
        both = c.num_heads + c.num_kv_heads
        qkv = F.linear(self._norm(x_TD, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.unflatten(-1, (-1, c.head_dim))
        qk, v_TKH = qkv[:, :both], qkv[:, both:]
        if layer.qk_norm_EH is not None:
            qk = self._norm(qk, layer.qk_norm_EH)
        pairs = torch.view_as_complex(qk.to(turns_T1F.real.dtype).unflatten(-1, (-1, 2)))
        qk = torch.view_as_real(pairs * turns_T1F).flatten(-2).to(x_TD.dtype)
        return attention(i, qk[:, : c.num_heads], qk[:, c.num_heads :], v_TKH).flatten(-2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension; in single precision half the operations of torch's."""
        size, eps = x.shape[-1], self.config.rms_norm_eps
        if x.dtype != torch.float32:
            return F.rms_norm(x, (size,), eps=eps) * weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=1 / size).rsqrt_()
        return (x * scale).mul_(weight)


def _add(x_TD: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        x_TD = x_TD + bias
    return torch.addmm(x_TD, y, weight.t())


def _fuse(layer: Layer, config: ModelConfig) -> FusedLayer:
    a, mlp = layer.self_attn, layer.mlp
    qkv_bias: Tensor | None = None
    if a.q_proj.bias is not None:
        parts = (_paired(a.q_proj.bias, config), _paired(a.k_proj.bias, config), a.v_proj.bias)
        qkv_bias = torch.cat(parts)
    return FusedLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat(
            (_paired(a.q_proj.weight, config), _paired(a.k_proj.weight, config), a.v_proj.weight)
        ),
        qkv_bias=qkv_bias,
        qk_norm_EH=_qk_norm(a.q_norm, a.k_norm, config),
        output=a.o_proj.weight.detach(),
        output_bias=None if a.o_proj.bias is None else a.o_proj.bias.detach(),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        down=mlp.down_proj.weight.detach(),
    )


def _paired(weight: Tensor, config: ModelConfig) -> Tensor:
    """Rows of each head reordered from (first half, second half) to pairs of one of each."""
    halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _qk_norm(
    q_norm: RMSNorm | nn.Module | None, k_norm: RMSNorm | nn.Module | None, config: ModelConfig
) -> Tensor | None:
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
        return None
    q_H, k_H = _paired(q_norm.weight, config), _paired(k_norm.weight, config)
    return torch.cat((q_H.expand(config.num_heads, -1), k_H.expand(config.num_kv_heads, -1)))
