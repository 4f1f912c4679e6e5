"""The clipped policy-gradient loss of a token, against the proximal policy.

Callers pass only tokens that are trained: what is masked is selected away before it gets here, so
no infinity of a masked place can reach an exponential or a gradient.

Clipping: Schulman et al., 2017 (arXiv 1707.06347), with a higher upper bound as in DAPO (Yu et
al., 2025, arXiv 2503.14476). Dual clip: Ye et al., 2020 (arXiv 1912.09729).

Shapes: T trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.importance import MAX_LOG_RATIO


@dataclass(frozen=True)
class Surrogate:
    """`loss_T` has the gradient; the others are what the metrics are made of."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


def clipped_surrogate(
    logprob_T: Tensor,
    proximal_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """−min(ρA, clip(ρ)A), and for A < 0 no more than −cA with a dual clip c."""
    log_ratio_T = logprob_T - proximal_T.detach()
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_T = -ratio_T * advantage_T
    bounded_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    loss_T = torch.maximum(free_T, bounded_T)
    clipped_T = bounded_T > free_T
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantage_T
        dual_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(dual_T, ceiling_T, loss_T)
        clipped_T = clipped_T | dual_T
    return Surrogate(loss_T, ratio_T.detach(), clipped_T.detach())


def token_mean(loss_T: Tensor, global_tokens: int) -> Tensor:
    """This part's share of the mean over all tokens: shares of micro-batches and ranks add up."""
    return loss_T.sum() / global_tokens
