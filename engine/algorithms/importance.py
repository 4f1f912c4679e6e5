"""Importance weights from the behaviour policy to the proximal one.

The behaviour is what sampled, perhaps versions ago and in another engine; the proximal policy is
the step's base weights, against which the clipping works. Weights carry no gradient.

Decoupled PPO: Hilton et al., 2022 (arXiv 2110.00641). The window is IcePop's (Ling team, 2025).

Shapes: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def truncated(proximal_T: Tensor, behaviour_T: Tensor, cap: float) -> Tensor:
    """min(π_proximal / π_behaviour, cap)."""
    return _ratio(proximal_T, behaviour_T).clamp(max=cap)


def windowed(proximal_T: Tensor, behaviour_T: Tensor, low: float, high: float) -> Tensor:
    """The ratio inside [low, high]; 0, which drops the token, outside."""
    ratio_T = _ratio(proximal_T, behaviour_T)
    return torch.where((ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def _ratio(proximal_T: Tensor, behaviour_T: Tensor) -> Tensor:
    log_ratio_T = (proximal_T - behaviour_T).detach()
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
