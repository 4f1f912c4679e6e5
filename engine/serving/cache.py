"""Keys and values of the running requests, and the attention of one step over them.

A request lives in one slot. The memory of a slot is reserved at the start and touched only as far
as it is used. Invariant: a slot holds keys and values of one set of weights; whoever swaps the
weights starts every slot from nothing; and a row that overflowed leaves its slot cleared.

Shapes: T tokens of a step, B decoding rows, C tokens of one span, S slots, L slot length,
M longest decoding row, N query heads, K key-value heads, G query heads per key-value head (N/K),
H head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models import ModelConfig, PackedCausal


class KVCache:
    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype) -> None:
        self.length = length
        self.groups = config.num_heads // config.num_kv_heads
        shape = (slots, length, config.num_kv_heads, config.head_dim)
        layers = range(config.num_layers)
        self.k_SLKH = [_zeros(shape, dtype) for _ in layers]
        self.v_SLKH = [_zeros(shape, dtype) for _ in layers]

    def copy(self, source: int, target: int, length: int) -> None:
        for x_SLKH in (*self.k_SLKH, *self.v_SLKH):
            x_SLKH[target, :length] = x_SLKH[source, :length]

    def clear(self, slot: int) -> None:
        for x_SLKH in (*self.k_SLKH, *self.v_SLKH):
            x_SLKH[slot].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written: torch's own would touch every page.

    Zeros, because a masked place still counts when it holds NaN.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of the request in `slot`, to be read in one step.

    `keep` is false when nothing will ever look at their keys and values again.
    """

    slot: int
    start: int
    end: int
    keep: bool = True


class StepAttention:
    """The step's tokens are: one for each of the slots 0…B−1, then fresh spans, which start at 0,
    then spans that go on from what their slot holds."""

    def __init__(self, cache: KVCache, decode: Sequence[int], spans: Sequence[Span]) -> None:
        """`decode[slot]` is the position of that slot's one token."""
        self.cache = cache
        self.rows = len(decode)
        fresh = [s for s in spans if s.start == 0]
        self.later = [s for s in spans if s.start > 0]
        assert [*fresh, *self.later] == list(spans), "fresh spans come first"
        offsets = [0]
        for span in fresh:
            offsets.append(offsets[-1] + span.end)
        self.fresh_end = self.rows + offsets[-1]
        self.packed = PackedCausal(offsets) if fresh else None
        self._index(decode, spans)

    def _index(self, decode: Sequence[int], spans: Sequence[Span]) -> None:
        length = self.cache.length
        positions = list(decode)
        places = [slot * length + position for slot, position in enumerate(decode)]
        sources = list(range(self.rows))
        for span in spans:
            first = len(positions)
            positions.extend(range(span.start, span.end))
            if span.keep:
                places.extend(range(span.slot * length + span.start, span.slot * length + span.end))
                sources.extend(range(first, len(positions)))
        self.positions_T = torch.tensor(positions)
        self.places = torch.tensor(places) if places else None
        self.sources = None if len(sources) == len(positions) else torch.tensor(sources)
        if self.rows:
            self.longest = max(decode) + 1
            seen_BM = torch.arange(self.longest) <= self.positions_T[: self.rows, None]
            self.mask_B11M = seen_BM[:, None, None]

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        k_SLKH, v_SLKH = self.cache.k_SLKH[layer], self.cache.v_SLKH[layer]
        self._store(k_SLKH, k_TKH)
        self._store(v_SLKH, v_TKH)
        parts: list[Tensor] = []
        if self.rows:
            parts.append(self._decode(q_TNH[: self.rows], k_SLKH, v_SLKH))
        if self.packed is not None:
            fresh = slice(self.rows, self.fresh_end)
            parts.append(self.packed(layer, q_TNH[fresh], k_TKH[fresh], v_TKH[fresh]))
        first = self.fresh_end
        for span in self.later:
            q_CNH = q_TNH[first : first + span.end - span.start]
            first += span.end - span.start
            k_LKH, v_LKH = k_SLKH[span.slot, : span.end], v_SLKH[span.slot, : span.end]
            parts.append(self._later(q_CNH, k_LKH, v_LKH))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _store(self, x_SLKH: Tensor, x_TKH: Tensor) -> None:
        if self.places is None:
            return
        if self.sources is not None:
            x_TKH = x_TKH.index_select(0, self.sources)
        x_SLKH.flatten(0, 1).index_copy_(0, self.places, x_TKH)

    def _decode(self, q_BNH: Tensor, k_SLKH: Tensor, v_SLKH: Tensor) -> Tensor:
        """The query heads that share a key head stand where a sequence's queries would."""
        q_BKGH = q_BNH.unflatten(1, (-1, self.cache.groups))
        k_BKMH = k_SLKH[: self.rows, : self.longest].transpose(1, 2)
        v_BKMH = v_SLKH[: self.rows, : self.longest].transpose(1, 2)
        o_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKMH, v_BKMH, attn_mask=self.mask_B11M)
        return o_BKGH.flatten(1, 2)

    def _later(self, q_CNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
        count, total = q_CNH.shape[0], k_LKH.shape[0]
        mask_CL = torch.ones(count, total, dtype=torch.bool).tril_(total - count)
        o_NCH = F.scaled_dot_product_attention(
            q_CNH.transpose(0, 1)[None],
            k_LKH.transpose(0, 1)[None],
            v_LKH.transpose(0, 1)[None],
            attn_mask=mask_CL,
            enable_gqa=self.cache.groups > 1,
        )[0]
        return o_NCH.transpose(0, 1)
