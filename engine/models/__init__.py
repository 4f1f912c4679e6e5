"""Archon's own decoder and its Hugging Face folders."""

from engine.models.attention import PackedCausal
from engine.models.config import ModelConfig
from engine.models.decoder import Attention, Decoder

__all__ = ["Attention", "Decoder", "ModelConfig", "PackedCausal"]
