"""The shape of a decoder, read from a Hugging Face `config.json`.

Whatever changes the arithmetic is either honoured or refused with its name: a config that loads
is a config whose every number we compute with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class RopeScaling:
    """`linear` reads only `factor`; `llama3` reads all four."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    def to_hf(self) -> dict[str, Any]:
        keys = ROPE_KEYS[self.rope_type]
        return {"rope_type": self.rope_type} | {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    torch_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.architecture not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            raise ValueError(f"unknown architecture {self.architecture!r}: one of {known}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if self.torch_dtype not in DTYPES:
            raise ValueError(f"torch_dtype {self.torch_dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def output_bias(self) -> bool:
        """Qwen2 has a bias on q, k and v only; the others put it on the output, too."""
        return self.attention_bias and self.architecture != "Qwen2ForCausalLM"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        heads = _required(raw, "num_attention_heads")
        hidden = _required(raw, "hidden_size")
        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        theta, scaling = _rope(raw)
        return cls(
            architecture=architecture,
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(raw, "intermediate_size"),
            num_layers=_required(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or (128 if qwen3 else hidden // heads),
            max_position_embeddings=_required(raw, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=qwen3,
            attention_bias=qwen2 or bool(raw.get("attention_bias", False)),
            torch_dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        )

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"no config.json in {folder}: not a Hugging Face model folder")
        try:
            return cls.from_hf(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.torch_dtype,
        }
        if self.architecture != "Qwen2ForCausalLM":
            raw["attention_bias"] = self.attention_bias
        return raw


def _required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} must be an integer, not {value!r}")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    if not named:
        by_type = {model_type: name for name, model_type in MODEL_TYPES.items()}
        named = [by_type.get(raw.get("model_type", ""), raw.get("model_type"))]
    if len(named) != 1 or named[0] not in MODEL_TYPES:
        raise ValueError(f"unknown architecture {named!r}: one of {', '.join(MODEL_TYPES)}")
    return str(named[0])


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Each of these would change the arithmetic behind our back."""
    layer_types = set(raw.get("layer_types") or [])
    faults = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "layer_types": bool(layer_types - {"full_attention"}),
        "attention_dropout": bool(raw.get("attention_dropout", 0.0)),
        "quantization_config": raw.get("quantization_config") is not None,
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name, fault in faults.items():
        if fault:
            raise ValueError(f"unsupported {name}: {raw[name]!r}")


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters` of transformers 5."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    rope_type = found.get("rope_type") or found.get("type") or "default"
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor: {found['partial_rotary_factor']!r}")
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_KEYS:
        raise ValueError(f"unsupported rope_type {rope_type!r}: one of {', '.join(ROPE_KEYS)}")
    missing = [key for key in ROPE_KEYS[rope_type] if key not in found]
    if missing:
        raise ValueError(f"rope_scaling of type {rope_type!r} lacks {', '.join(missing)}")
    return theta, RopeScaling(rope_type, **{key: found[key] for key in ROPE_KEYS[rope_type]})
