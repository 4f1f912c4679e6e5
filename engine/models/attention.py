"""Causal attention over packed sequences, for training and for reading whole prompts.

A token attends to itself and to what stands before it in its own sequence; the result does not
depend on which sequences are packed together, nor on the padding used inside.

Shapes: T packed tokens, S sequences, L longest sequence, N query heads, K key-value heads,
H head dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDED_LENGTH = 512
MAX_PADDING_RATIO = 2.0


class PackedCausal:
    """Short sequences go through one padded call, long or uneven ones through a call each."""

    def __init__(self, offsets: Tensor | list[int]) -> None:
        """`offsets` has S+1 entries: sequence s is tokens offsets[s]:offsets[s+1]."""
        bounds = [int(offset) for offset in offsets]
        lengths = [end - start for start, end in pairwise(bounds)]
        if bounds[:1] != [0] or any(length < 1 for length in lengths):
            raise ValueError(f"offsets must start at 0 and grow, not {bounds[:8]}")
        self.bounds = bounds
        longest = max(lengths, default=0)
        padded = longest * len(lengths)
        self.padded = longest <= MAX_PADDED_LENGTH and padded <= MAX_PADDING_RATIO * bounds[-1]
        self.dense = padded == bounds[-1]
        self.shape = (len(lengths), longest)
        if self.padded and not self.dense:
            self._index_padding(lengths, longest)

    def _index_padding(self, lengths: list[int], longest: int) -> None:
        column_L = torch.arange(longest)
        start_S1 = torch.tensor(self.bounds[:-1], dtype=torch.int64)[:, None]
        length_S1 = torch.tensor(lengths, dtype=torch.int64)[:, None]
        valid_SL = column_L < length_S1
        # Padding repeats the sequence's last token; it stands last, so no real token sees it.
        self.gather = (start_S1 + torch.minimum(column_L, length_S1 - 1)).flatten()
        self.scatter = valid_SL.flatten().nonzero().squeeze(1)

    def positions(self) -> Tensor:
        """Positions of the packed tokens in their own sequences."""
        parts = [torch.arange(end - start) for start, end in pairwise(self.bounds)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if self.padded:
            return self._in_one_call(q_TNH, k_TKH, v_TKH)
        parts = [
            _causal(q_TNH[None, a:b], k_TKH[None, a:b], v_TKH[None, a:b])[0]
            for a, b in pairwise(self.bounds)
        ]
        return torch.cat(parts)

    def _in_one_call(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if self.dense:
            o_SLNH = _causal(*(x.unflatten(0, self.shape) for x in (q_TNH, k_TKH, v_TKH)))
            return o_SLNH.flatten(0, 1)
        gather = self.gather.to(q_TNH.device)
        o_SLNH = _causal(
            *(x.index_select(0, gather).unflatten(0, self.shape) for x in (q_TNH, k_TKH, v_TKH))
        )
        return o_SLNH.flatten(0, 1).index_select(0, self.scatter.to(q_TNH.device))


def _causal(q_SLNH: Tensor, k_SLKH: Tensor, v_SLKH: Tensor) -> Tensor:
    o_SNLH = F.scaled_dot_product_attention(
        q_SLNH.transpose(1, 2),
        k_SLKH.transpose(1, 2),
        v_SLKH.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_SLNH.shape[2] != k_SLKH.shape[2],
    )
    return o_SNLH.transpose(1, 2)
