"""The running requests, each in the cache slot of its own index.

Invariant: rows[:ready] have every token but their last in the cache and decode together; the rest
still have tokens to be read. So the decoding slots are always a prefix of the cache, and attention
over them needs no gathering.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.serving.cache import KVCache, Span
from engine.serving.sampling import Draw
from engine.serving.wire import Output, Request


@dataclass(eq=False)
class Row:
    """One request. `deliver` is called from the decoding thread's side with what is new."""

    request: Request
    seed: int
    deliver: Callable[[Output], None]
    ids: list[int]
    cached: int = 0
    """ids[:cached] have their keys and values in the slot."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    sent: int = 0
    abandoned: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def reads_prompt(self) -> bool:
        """Prompt log-probs go with the version of the first sampled token."""
        return self.request.prompt_logprobs and not self.versions

    def draw(self) -> Draw:
        r = self.request
        return Draw(r.temperature, r.top_p, r.top_k, self.seed, len(self.versions))

    def forget_cache(self) -> None:
        self.cached = 0
        if not self.versions:
            self.prompt_logprobs.clear()

    def append(self, token_id: int, logprob: float, version: int) -> str | None:
        """The finish reason, if that was the last token."""
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.request.stop:
            return "stop"
        return "length" if len(self.versions) >= self.request.max_tokens else None

    def output(self, finish_reason: str | None = None, error: str | None = None) -> Output:
        """What was not delivered yet; for a request that is not streamed, only at the end."""
        start, self.sent = self.sent, len(self.versions)
        return Output(
            start=start,
            token_ids=self.ids[self.prompt_length + start :],
            logprobs=self.logprobs[start:],
            versions=self.versions[start:],
            finish_reason=finish_reason,
            error=error,
            prompt_logprobs=self.prompt_logprobs if self.request.prompt_logprobs else None,
        )


class Rows:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ready = 0

    def __len__(self) -> int:
        return len(self.rows)

    def plan(self, budget: int) -> list[Span]:
        """What to read of the rows that are not ready, at most `budget` tokens of them in their
        order, so that only the last row is left unfinished. Spans that start at 0 come first."""
        spans: list[Span] = []
        for slot in range(self.ready, len(self.rows)):
            row = self.rows[slot]
            end = min(len(row.ids), row.cached + budget)
            budget -= end - row.cached
            # The keys of a row whose next token is its last are never looked at again; but a span
            # that goes on from what was read before looks at its own in the cache.
            last = len(row.versions) + 1 >= row.request.max_tokens and end == len(row.ids)
            spans.append(Span(slot, row.cached, end, keep=not last or row.cached > 0))
            if budget == 0:
                break
        return sorted(spans, key=lambda s: s.start > 0)

    def remove(self, slot: int, cache: KVCache) -> Row:
        """Fill the hole from behind, so that the ready rows stay a prefix."""
        row = self.rows[slot]
        if slot < self.ready:
            self.ready -= 1
            self._move(self.ready, slot, cache)
            slot = self.ready
        self._move(len(self.rows) - 1, slot, cache)
        self.rows.pop()
        return row

    def _move(self, source: int, target: int, cache: KVCache) -> None:
        if source != target:
            row = self.rows[source]
            cache.copy(source, target, row.cached)
            self.rows[target] = row

    def forget_cache(self) -> None:
        self.ready = 0
        for row in self.rows:
            row.forget_cache()
