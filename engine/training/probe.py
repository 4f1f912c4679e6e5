"""What the new weights say to a fixed prompt, so that a replica can be held against it.

The prompt depends on the vocabulary alone. It is short, for any replica to have room for it, and
uneven, for a transposed or misplaced tensor to show.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from engine.models import Decoder, PackedCausal

LENGTH = 16


class Probe(TypedDict):
    token_ids: list[int]
    logprobs: list[float]


def probe(model: Decoder) -> Probe:
    """`logprobs[i]` is that of `token_ids[i + 1]` after the ids up to i, at temperature 1."""
    config = model.config
    length = min(LENGTH, config.max_position_embeddings - 1)
    token_ids = [(at * at * 7 + at * 3 + 1) % config.vocab_size for at in range(length)]
    tokens_T = torch.tensor(token_ids)
    attention = PackedCausal([0, length])
    with torch.no_grad():
        hidden_TD = model(tokens_T, attention.positions(), attention)
        logprobs_TV = model.logits(hidden_TD[:-1]).log_softmax(-1)
    return {
        "token_ids": token_ids,
        "logprobs": logprobs_TV.gather(1, tokens_T[1:, None]).squeeze(1).tolist(),
    }
