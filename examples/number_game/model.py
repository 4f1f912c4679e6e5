"""Writes the folder of the demo's policy: a tiny Qwen3, drawn at random, with its own vocabulary.

A word is a token, and so is a role marker. A message is its marker and its content, with nothing
after it; so the ids of a prompt and of the move sampled from it are together the beginning of the
next prompt, id for id.

    python -m examples.number_game.model FOLDER [SEED]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from engine.models import Decoder, ModelConfig, hf

PAD, EOS, UNKNOWN, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<user>", "<assistant>"
SPECIALS = (PAD, EOS, UNKNOWN, USER, ASSISTANT)
REPLIES = ("guess", "low", "high", "right")
# Most words are no move: an untrained policy hardly ever wins.
WORDS = (*REPLIES, *"0123456789", "yes", "no", "more", "less", "done")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<assistant> ' if message.role == 'assistant' else '<user> ' -}}"
    "{{- message.content -}}{{- ' ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=len(SPECIALS) + len(WORDS),
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    qk_norm=True,
)


def write_policy(folder: str | Path, seed: int = 0) -> None:
    """The whole Hugging Face folder; the same bytes for the same seed."""
    folder = Path(folder)
    hf.save(draw(CONFIG, seed), folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def make_tokenizer() -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(SPECIALS + WORDS)}, UNKNOWN)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    return made


def draw(config: ModelConfig, seed: int) -> Decoder:
    """Matrices of variance 1/fan-in; a small head, so that the first moves are all but uniform."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float("norm" in name))
                continue
            std = 0.02 if name == "lm_head.weight" else 1 / math.sqrt(parameter.shape[1])
            parameter.normal_(std=1.0 if "embed" in name else std, generator=generator)
    return model


if __name__ == "__main__":
    write_policy(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
