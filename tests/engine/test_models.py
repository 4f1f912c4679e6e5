"""The decoder against `transformers`, and its folders against every way they can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models import Decoder, ModelConfig, PackedCausal, hf

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "llama-bias-linear": (
        "Llama",
        {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama-no-gqa": ("Llama", {"num_key_value_heads": 6, "rope_theta": 5e5}),
    "qwen2": ("Qwen2", {"hidden_size": 96}),
    "qwen3": ("Qwen3", {"rms_norm_eps": 1e-5}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True}),
}


def oracle(family: str, folder: Path) -> Any:
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SMALL | changes))
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        # Norm weights of one and biases of zero would hide a mistake in how they are used.
        torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_logprobs_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = oracle(family, tmp_path)
    model = hf.load(tmp_path, torch.float32)
    lengths = [64, 1, 17, 40]
    tokens_T = torch.randint(0, 97, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    attention = PackedCausal(torch.tensor([0, *lengths]).cumsum(0))
    with torch.no_grad():
        logits_TV = model.logits(model(tokens_T, attention.positions(), attention))
        expected_TV = torch.cat(
            [reference(part[None]).logits[0] for part in tokens_T.split(lengths)]
        )
    assert logits_TV.dtype == torch.float32
    assert expected_TV.std() > 0.5
    assert (logits_TV - expected_TV).abs().max() <= 2e-5
    difference = logits_TV.log_softmax(-1) - expected_TV.log_softmax(-1)
    assert difference.abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llama-tied-llama3", "llama-bias-linear", "qwen2", "qwen3"])
def test_config_round_trip_means_the_same_to_transformers(family: str, tmp_path: Path) -> None:
    oracle(family, tmp_path)
    config = ModelConfig.load(tmp_path)
    assert ModelConfig.from_hf(config.to_hf()) == config
    written = transformers.AutoConfig.for_model(**config.to_hf())
    original = transformers.AutoConfig.from_pretrained(tmp_path)
    for key in ("rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(written, key, None) == getattr(original, key, None), key
    assert written.tie_word_embeddings == original.tie_word_embeddings


@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
def test_round_trip_is_bit_equal(family: str, tmp_path: Path) -> None:
    oracle(family, tmp_path / "a")
    hf.save(hf.load(tmp_path / "a"), tmp_path / "b")
    hf.save(hf.load(tmp_path / "b"), tmp_path / "c")
    first, second = load_file(tmp_path / "a" / hf.WEIGHTS), load_file(tmp_path / "b" / hf.WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "b" / hf.WEIGHTS).read_bytes() == (tmp_path / "c" / hf.WEIGHTS).read_bytes()
    name = FAMILIES[family][0]
    reloaded = getattr(transformers, f"{name}ForCausalLM").from_pretrained(tmp_path / "b")
    state = reloaded.state_dict()
    assert all(torch.equal(state[key], value) for key, value in first.items())


def test_sharded_folder_loads(tmp_path: Path) -> None:
    oracle("qwen3", tmp_path / "a")
    whole = load_file(tmp_path / "a" / hf.WEIGHTS)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    names = sorted(whole)
    shards = {"s1.safetensors": names[::2], "s2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: whole[name] for name in held}, tmp_path / "b" / shard)
    placed = {name: shard for shard, held in shards.items() for name in held}
    (tmp_path / "b" / hf.INDEX).write_text(json.dumps({"weight_map": placed}))
    state = hf.load(tmp_path / "b").state_dict()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)


def reshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(47)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_one, r"missing tensors \['model.layers.1.mlp.up_proj.weight'\]"),
        (add_one, r"unknown tensors \['model.layers.9.mlp.up_proj.weight'\]"),
        (reshape_one, r"model.norm.weight has shape \[47\], not \[48\]"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    spoil: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    oracle("qwen3", tmp_path)
    tensors = load_file(tmp_path / hf.WEIGHTS)
    spoil(tensors)
    save_file(tensors, tmp_path / hf.WEIGHTS)
    with pytest.raises(ValueError, match=message):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "unknown architecture .*Mixtral"),
        ({"architectures": None, "model_type": "gpt2"}, "unknown architecture .*gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    raw = SMALL | {"architectures": ["Qwen3ForCausalLM"]}
    ModelConfig.from_hf(raw)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(raw | changes)


def tiny(layers: int = 2) -> Decoder:
    torch.manual_seed(5)
    raw = SMALL | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}
    return Decoder(ModelConfig.from_hf(raw)).double()


@pytest.mark.parametrize(
    "lengths", [[5, 5, 5], [7, 3, 6, 5], [1, 600, 2], [40, 2, 3, 20, 33, 2], [20, 3]]
)
def test_packing_changes_neither_outputs_nor_gradients(lengths: list[int]) -> None:
    model = tiny()
    tokens_T = torch.randint(0, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    attention = PackedCausal(torch.tensor([0, *lengths]).cumsum(0))
    packed_TV = model.logits(model(tokens_T, attention.positions(), attention))
    packed_TV.square().sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    outputs = []
    for part in tokens_T.split(lengths):
        alone = PackedCausal([0, len(part)])
        outputs.append(model.logits(model(part, alone.positions(), alone)))
    torch.cat(outputs).square().sum().backward()
    assert (packed_TV - torch.cat(outputs)).abs().max() <= 1e-12
    assert len(packed) == len(list(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (packed[name] - parameter.grad).abs().max() <= 1e-10 * parameter.grad.abs().max()


def test_buckets_make_few_calls_and_pad_less_than_half() -> None:
    lengths = [3, 600, 5, 17, 30, 16, 700, 33, 512]
    attention = PackedCausal(torch.tensor([0, *lengths]).cumsum(0))
    shapes = sorted(bucket.shape for bucket in attention.buckets)
    assert shapes == [(1, 33), (1, 512), (1, 600), (1, 700), (2, 30), (3, 16)]
    assert PackedCausal([0, 5, 10]).in_order
    assert not PackedCausal([0, 7, 10]).in_order


def test_empty_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets must start at 0 and grow"):
        PackedCausal([0, 3, 3])


def test_bfloat16_keeps_its_rotary_frequencies() -> None:
    model = tiny().to(torch.bfloat16)
    attention = PackedCausal([0, 200])
    hidden_TD = model(torch.arange(200) % 97, attention.positions(), attention)
    assert hidden_TD.dtype == torch.bfloat16
    assert model.logits(hidden_TD).dtype == torch.float32
    assert model._inv_freq_F.dtype == torch.float32
