"""One forward pass for all running requests: decoding rows and prompts still to be read together.

Invariant: a token is stamped with the version of the weights that gave its logits, and its
log-prob is the one that teacher forcing under those weights gives.

Shapes: T tokens of a step, D hidden size, R rows that sample, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.serving.cache import KVCache, Span, StepAttention
from engine.serving.rows import Rows
from engine.serving.sampling import sample
from engine.serving.weights import Weights

STEP_TOKENS = 512
DEFAULT_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Sampled:
    slot: int
    token_id: int
    logprob: float


class Runner:
    def __init__(self, max_batch: int, max_model_len: int | None, dtype: torch.dtype) -> None:
        self.max_batch = max_batch
        self.dtype = dtype
        self.weights: Weights | None = None
        self._limit = max_model_len or DEFAULT_MODEL_LEN
        self._cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "no weights yet"
        return self._cache

    def swap(self, weights: Weights) -> None:
        """The caller makes the rows forget what the cache holds."""
        self.weights = weights
        if self._cache is None:
            config = weights.decoder.config
            length = min(self._limit, config.max_position_embeddings)
            self._cache = KVCache(config, self.max_batch, length, self.dtype)

    @torch.inference_mode()
    def step(self, rows: Rows) -> list[Sampled]:
        """Read at most STEP_TOKENS of prompts and sample for each row that is read to its end."""
        assert self.weights is not None
        decoder, ready = self.weights.decoder, rows.rows[: rows.ready]
        spans = rows.plan(STEP_TOKENS)
        tokens = [row.ids[-1] for row in ready]
        for span in spans:
            tokens.extend(rows.rows[span.slot].ids[span.start : span.end])
        attention = StepAttention(self.cache, [row.cached for row in ready], spans)
        hidden_TD = decoder(torch.tensor(tokens), attention.positions_T, attention)
        slots, sources = list(range(len(ready))), list(range(len(ready)))
        first = len(ready)
        for span in spans:
            self._prompt_logprobs(rows, span, hidden_TD[first : first + span.end - span.start])
            first += span.end - span.start
            if span.end == len(rows.rows[span.slot].ids):
                slots.append(span.slot)
                sources.append(first - 1)
        for row in ready:
            row.cached += 1
        for span in spans:
            rows.rows[span.slot].cached = span.end
        if not slots:
            return []
        rows.ready = len(slots)
        return self._sample(rows, slots, hidden_TD[torch.tensor(sources)])

    def _sample(self, rows: Rows, slots: list[int], hidden_RD: Tensor) -> list[Sampled]:
        assert self.weights is not None
        draws = [rows.rows[slot].draw() for slot in slots]
        ids, logprobs = sample(self.weights.decoder.logits(hidden_RD), draws)
        return [Sampled(*s) for s in zip(slots, ids, logprobs, strict=True)]

    def _prompt_logprobs(self, rows: Rows, span: Span, hidden_CD: Tensor) -> None:
        row = rows.rows[span.slot]
        if not row.reads_prompt or self.weights is None:
            return
        targets = row.request.token_ids[span.start + 1 : span.end + 1]
        logits_CV = self.weights.decoder.logits(hidden_CD[: len(targets)])
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        row.prompt_logprobs.extend(
            logp_CV.gather(1, torch.tensor(targets, dtype=torch.int64)[:, None])[:, 0].tolist()
        )
