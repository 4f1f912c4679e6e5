"""Small model folders for tests: a trained byte-level BPE, a template, nothing downloaded."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "You may call one or more functions to assist with the user query. <tools></tools>",
    '{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}',
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "exact": true}}',
    "The weather in Paris is fine: 21 degrees, no rain. Let me look, let me think again.",
    "Pan tom Pantom Phantom phantom pantomime Pan Pan tom tom Pantom",
    "naïve café déjà vu, Größe, señor, привет, 你好世界, 😀😁👍🏽",
] * 4

CHATML: dict[str, Any] = {
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "added": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None},
    "eos": ["<|im_end|>", "<|endoftext|>"],
}
THINKING = CHATML | {"added": [*CHATML["added"], "<think>", "</think>"]}
LLAMA = {
    "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"]
    + ["<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
    "added": [],
    "tokens": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "eos": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
}
OTHER = {
    "special": ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"],
    "added": [],
    "tokens": {"bos_token": "<s>", "eos_token": "</s>"},
    "eos": ["</s>"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": THINKING,
    "qwen25": CHATML,
    "plain": CHATML,
    "llama31": LLAMA,
    "alternating": OTHER,
    "items": OTHER,
}


@cache
def trained(special: tuple[str, ...], added: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer.to_str()


def write_model(folder: Path, family: str, template: str | None = None) -> Path:
    """A folder as Hugging Face lays it out, without weights."""
    kind = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    text = trained(tuple(kind["special"]), tuple(kind["added"]))
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    (folder / "tokenizer.json").write_text(text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    settings["clean_up_tokenization_spaces"] = False
    settings |= kind["tokens"]
    settings["chat_template"] = template or (TEMPLATES / f"{family}.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    eos = [ids[token] for token in kind["eos"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return folder
