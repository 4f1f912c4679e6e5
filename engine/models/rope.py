"""Rotary positions, in float32 whatever the model's dtype, as `transformers` computes them.

Shapes: T tokens, N heads, H head dim, F = H/2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    exponents_F = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    inv_freq_F = 1.0 / (config.rope_theta ** (exponents_F / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq_F
    if scaling.rope_type == "linear":
        return inv_freq_F / scaling.factor
    return _llama3(inv_freq_F, scaling)


def _llama3(inv_freq_F: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, the middle blended."""
    original = scaling.original_max_position_embeddings
    low_wavelength = original / scaling.low_freq_factor
    high_wavelength = original / scaling.high_freq_factor
    wavelength_F = 2 * math.pi / inv_freq_F
    scaled_F = torch.where(wavelength_F > low_wavelength, inv_freq_F / scaling.factor, inv_freq_F)
    smooth_F = (original / wavelength_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_F = (1 - smooth_F) * scaled_F / scaling.factor + smooth_F * scaled_F
    middle_F = (wavelength_F >= high_wavelength) & (wavelength_F <= low_wavelength)
    return torch.where(middle_F, blended_F, scaled_F)


def rotations(positions_T: Tensor, inv_freq_F: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) as T1H, to be broadcast over heads."""
    angles_TF = positions_T[:, None].float() * inv_freq_F
    angles_T1H = torch.cat((angles_TF, angles_TF), dim=-1)[:, None]
    return angles_T1H.cos().to(dtype), angles_T1H.sin().to(dtype)


def rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    first, second = x_TNH.chunk(2, dim=-1)
    return x_TNH * cos_T1H + torch.cat((-second, first), dim=-1) * sin_T1H
