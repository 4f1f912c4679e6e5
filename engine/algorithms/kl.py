"""The k3 estimate of the KL divergence to a reference policy.

Never negative, unbiased for samples of the trained policy: Schulman, "Approximating KL
divergence", 2020.

Shapes: T tokens.
"""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.importance import MAX_LOG_RATIO


def k3(logprob_T: Tensor, reference_T: Tensor) -> Tensor:
    """exp(d) − d − 1 with d = log π_ref − log π."""
    difference_T = (reference_T - logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_T.exp() - difference_T - 1
