"""One forward pass for all running requests: decoding rows and prompts still to be read together.

Invariant: a token is stamped with the version of the weights that gave its logits, and its
log-prob is the one that teacher forcing under those weights gives.

Shapes: T tokens of a step, D hidden size, R rows that sample, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.serving.cache import KVCache, Span, StepAttention
from engine.serving.rows import Row, Rows
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
        self.max_model_len = max_model_len or DEFAULT_MODEL_LEN
        self._cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "no weights yet"
        return self._cache

    def swap(self, weights: Weights) -> None:
        """The caller makes the rows forget what the cache holds."""
        self.weights = weights
        if self._cache is None:
            config, length = weights.decoder.config, weights.positions
            self._cache = KVCache(config, self.max_batch, length, self.dtype)

    @torch.inference_mode()
    def step(self, rows: Rows) -> list[Sampled]:
        """Read at most STEP_TOKENS of prompts and sample for each row that is read to its end."""
        assert self.weights is not None
        ready = rows.rows[: rows.ready]
        spans = rows.plan(STEP_TOKENS)
        tokens = [row.ids[-1] for row in ready]
        slots, sources = list(range(len(ready))), list(range(len(ready)))
        for span in spans:
            ids = rows.rows[span.slot].ids
            tokens.extend(ids[span.start : span.end])
            if span.end == len(ids):
                slots.append(span.slot)
                sources.append(len(tokens) - 1)
        attention = StepAttention(self.cache, [row.cached for row in ready], spans)
        hidden_RD = self._hidden(rows, tokens, sources, spans, attention)
        for row in ready:
            row.cached += 1
        for span in spans:
            rows.rows[span.slot].cached = span.end
        if not slots:
            return []
        rows.ready = len(slots)
        draws = [rows.rows[slot].draw() for slot in slots]
        ids, logprobs = sample(self.weights.decoder.logits(hidden_RD), draws)
        return [Sampled(*s) for s in zip(slots, ids, logprobs, strict=True)]

    def _hidden(
        self,
        rows: Rows,
        tokens: list[int],
        sources: list[int],
        spans: list[Span],
        attention: StepAttention,
    ) -> Tensor:
        """hidden_RD of the tokens that are sampled after. All are computed only where asked for."""
        assert self.weights is not None
        tokens_T, sources_R = torch.tensor(tokens), torch.tensor(sources, dtype=torch.int64)
        hidden = self.weights.decoder.hidden
        if not any(rows.rows[span.slot].reads_prompt for span in spans):
            asked_R = None if len(sources) == len(tokens) else sources_R
            return hidden(tokens_T, attention.positions_T, attention, asked_R)
        hidden_TD = hidden(tokens_T, attention.positions_T, attention, None)
        first = rows.ready
        for span in spans:
            if rows.rows[span.slot].reads_prompt:
                self._read_prompt(rows.rows[span.slot], span, hidden_TD[first:])
            first += span.end - span.start
        return hidden_TD.index_select(0, sources_R)

    def _read_prompt(self, row: Row, span: Span, hidden_TD: Tensor) -> None:
        assert self.weights is not None
        following = row.request.token_ids[span.start + 1 : span.end + 1]
        logits_CV = self.weights.decoder.logits(hidden_TD[: len(following)])
        logp_CV = torch.log_softmax(logits_CV, dim=-1)
        ids_C1 = torch.tensor(following, dtype=torch.int64)[:, None]
        row.prompt_logprobs.extend(logp_CV.gather(1, ids_C1)[:, 0].tolist())
