"""Draw one token for each row, and say with which log-prob.

Invariant: a draw is a function of (logits, parameters, seed, token number) alone. The random
number is computed from seed and token number, so that neither the other rows of the batch nor a
recomputation after a weight update shifts it.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample one row. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep all tokens."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    number: int

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0)


def uniform(seed: int, number: int) -> float:
    """In [0, 1 − 2⁻⁵²]: splitmix64 of the seed, then of seed and number."""
    return (_mix(_mix(seed & MASK) + number * GOLDEN) >> 12) * 2.0**-52


def _mix(x: int) -> int:
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Ids, and their log-probs in the distribution that was sampled from: at the temperature and
    after truncation; greedy ones in the untempered whole softmax."""
    if any(d.temperature not in (0.0, 1.0) for d in draws):
        temperatures_R1 = torch.tensor([[d.temperature or 1.0] for d in draws])
        logits_RV = logits_RV / temperatures_R1.to(logits_RV.dtype)
    if any(d.truncates for d in draws):
        logits_RV = torch.stack(
            [
                truncate(row_V, d.top_k, d.top_p) if d.truncates else row_V
                for row_V, d in zip(logits_RV, draws, strict=True)
            ]
        )
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    greedy = [d.temperature == 0.0 for d in draws]
    if all(greedy):
        picked_R1 = logp_RV.argmax(dim=-1, keepdim=True)
    else:
        picked_R1 = _invert(logp_RV, draws)
        if any(greedy):
            best_R1 = logp_RV.argmax(dim=-1, keepdim=True)
            picked_R1 = torch.where(torch.tensor(greedy)[:, None], best_R1, picked_R1)
    chosen_R = logp_RV.gather(1, picked_R1).squeeze(1)
    return picked_R1.squeeze(1).tolist(), chosen_R.tolist()


def _invert(logp_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Inverse of the cumulated probabilities, in float64. `right` skips tokens of probability 0."""
    cumulated_RV = logp_RV.double().exp_().cumsum_(dim=-1)
    u_R1 = torch.tensor([[uniform(d.seed, d.number)] for d in draws], dtype=torch.float64)
    picked_R1 = torch.searchsorted(cumulated_RV, u_R1 * cumulated_RV[:, -1:], right=True)
    # Only rows of NaN reach V; their log-prob is NaN too, and the caller refuses those.
    return picked_R1.clamp_(max=logp_RV.shape[1] - 1)


def truncate(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """−inf everywhere but at the `top_k` best, and of these at the fewest whose probabilities,
    renormalised, reach `top_p`."""
    count = min(top_k, logits_V.shape[0]) if top_k > 0 else logits_V.shape[0]
    best_K, ids_K = torch.sort(logits_V, descending=True, stable=True)
    best_K, ids_K = best_K[:count], ids_K[:count]
    if top_p < 1.0:
        probs_K = torch.softmax(best_K.double(), dim=-1)
        before_K = probs_K.cumsum(dim=-1) - probs_K
        kept = max(1, int((before_K < top_p).sum()))
        best_K, ids_K = best_K[:kept], ids_K[:kept]
    return torch.full_like(logits_V, -torch.inf).scatter_(0, ids_K, best_K)
