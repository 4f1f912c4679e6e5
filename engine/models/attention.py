"""Causal attention over packed sequences, for training and for reading whole prompts.

A token attends to itself and to what stands before it in its own sequence; the result does not
depend on which sequences are packed together, nor on the padding used inside.

Shapes: T packed tokens, S sequences of a bucket, L its longest, P places of all buckets, padding
included, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST_BUCKET = 16
LONGEST_BUCKET = 512


@dataclass(frozen=True)
class Bucket:
    """Sequences of like length, padded to the longest of them, for one call of the kernel."""

    shape: tuple[int, int]
    gather_P: Tensor
    real_P: Tensor


class PackedCausal:
    """Few kernel calls for many short sequences, and no padding for a long one."""

    def __init__(self, offsets: Tensor | list[int]) -> None:
        """`offsets` has S+1 entries: sequence s is tokens offsets[s]:offsets[s+1]."""
        self.bounds = [int(offset) for offset in offsets]
        lengths = [end - start for start, end in pairwise(self.bounds)]
        if self.bounds[:1] != [0] or any(length < 1 for length in lengths):
            raise ValueError(f"offsets must start at 0 and grow, not {self.bounds[:8]}")
        members: dict[tuple[int, int], list[int]] = {}
        for sequence, length in enumerate(lengths):
            members.setdefault(_bucket_of(sequence, length), []).append(sequence)
        self.buckets = [self._bucket(sequences, lengths) for sequences in members.values()]
        self.place_T = torch.zeros(self.bounds[-1], dtype=torch.int64)
        filled = 0
        for bucket in self.buckets:
            real_P = bucket.real_P.nonzero().squeeze(1)
            self.place_T[bucket.gather_P[real_P]] = filled + real_P
            filled += len(bucket.gather_P)
        self.in_order = filled == len(self.place_T) and torch.equal(
            self.place_T, torch.arange(filled)
        )

    def _bucket(self, sequences: list[int], lengths: list[int]) -> Bucket:
        length_S1 = torch.tensor([lengths[s] for s in sequences])[:, None]
        start_S1 = torch.tensor([self.bounds[s] for s in sequences])[:, None]
        column_L = torch.arange(int(length_S1.max()))
        # Padding repeats the last token; it stands last, so that no real token sees it.
        gather_SL = start_S1 + torch.minimum(column_L, length_S1 - 1)
        shape = (len(sequences), len(column_L))
        return Bucket(shape, gather_SL.flatten(), (column_L < length_S1).flatten())

    def positions(self) -> Tensor:
        """Positions of the packed tokens in their own sequences."""
        parts = [torch.arange(end - start) for start, end in pairwise(self.bounds)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if self.in_order and len(self.buckets) == 1:
            return _causal(self.buckets[0].shape, q_TNH, k_TKH, v_TKH)
        parts = []
        for bucket in self.buckets:
            gather_P = bucket.gather_P.to(q_TNH.device)
            parts.append(
                _causal(bucket.shape, *(x.index_select(0, gather_P) for x in (q_TNH, k_TKH, v_TKH)))
            )
        return torch.cat(parts).index_select(0, self.place_T.to(q_TNH.device))


def _bucket_of(sequence: int, length: int) -> tuple[int, int]:
    """Powers of two, so less than half is padding; a long sequence has a bucket to itself."""
    if length > LONGEST_BUCKET:
        return length, sequence
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()), -1


def _causal(shape: tuple[int, int], q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor) -> Tensor:
    q_SNLH, k_SKLH, v_SKLH = (x.unflatten(0, shape).transpose(1, 2) for x in (q_PNH, k_PKH, v_PKH))
    o_SNLH = F.scaled_dot_product_attention(
        q_SNLH, k_SKLH, v_SKLH, is_causal=True, enable_gqa=q_PNH.shape[1] != k_PKH.shape[1]
    )
    return o_SNLH.transpose(1, 2).flatten(0, 1)
