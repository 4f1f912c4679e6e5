"""The words of the token-level inference protocol (docs/protocol.md), typed.

Invariant: what an engine answered is never dropped or repaired here. A chunk whose ids, log-probs
and versions disagree is handed on as it came, with an `EvidenceGap` that says what is wrong.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from archon.records import VersionRange

FINISH_REASONS = frozenset({"stop", "length", "abort"})


def ranges_of(versions: Sequence[int], start: int = 0) -> tuple[VersionRange, ...]:
    """Run-length form of one version per token, the first token being number `start`."""
    ranges: list[VersionRange] = []
    begin = 0
    for i in range(1, len(versions) + 1):
        if i == len(versions) or versions[i] != versions[begin]:
            ranges.append(VersionRange(versions[begin], start + begin, start + i))
            begin = i
    return tuple(ranges)


def merge_ranges(ranges: Iterable[VersionRange]) -> tuple[VersionRange, ...]:
    """Join touching ranges of one version; a hole, an overlap or an empty range is a ValueError."""
    merged: list[VersionRange] = []
    for r in ranges:
        if r.end <= r.start:
            raise ValueError(f"empty version range {r}")
        if merged and merged[-1].end != r.start:
            raise ValueError(f"version ranges {merged[-1]} and {r} do not touch")
        if merged and merged[-1].version == r.version:
            merged[-1] = VersionRange(r.version, merged[-1].start, r.end)
        else:
            merged.append(r)
    return tuple(merged)


def versions_of(ranges: Iterable[VersionRange]) -> tuple[int, ...]:
    """One version per token."""
    return tuple(r.version for r in merge_ranges(ranges) for _ in range(r.start, r.end))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    model: str = "default"

    def body(self, stream: bool = True, prompt_logprobs: bool = False) -> bytes:
        s = self.sampling
        return orjson.dumps(
            {
                "request_id": self.request_id,
                "model": self.model,
                "token_ids": self.token_ids,
                "sampling_params": {
                    "max_tokens": s.max_tokens,
                    "temperature": s.temperature,
                    "top_p": s.top_p,
                    "top_k": s.top_k,
                    "seed": s.seed,
                    "stop_token_ids": s.stop_token_ids,
                    "n": 1,
                    "logprobs": 1,
                    "prompt_logprobs": 0 if prompt_logprobs else None,
                },
                "stream": stream,
            }
        )


class GapKind(StrEnum):
    """Each way in which the evidence for sampled tokens can be incomplete."""

    LOGPROBS_MISSING = "logprobs_missing"
    LOGPROBS_LENGTH = "logprobs_length"
    LOGPROBS_INVALID = "logprobs_invalid"
    LOGPROBS_MISLABELLED = "logprobs_mislabelled"
    VERSIONS_MISSING = "versions_missing"
    VERSIONS_INVALID = "versions_invalid"
    VERSIONS_COVERAGE = "versions_coverage"


@dataclass(frozen=True, slots=True)
class EvidenceGap:
    kind: GapKind
    detail: str


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """What is new in a stream. `start` and `end` of the ranges count tokens of the whole answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionRange, ...]
    finish_reason: str | None
    evidence_gap: EvidenceGap | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer; `evidence_gap` is the first gap of its chunks."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[VersionRange, ...]
    finish_reason: str
    evidence_gap: EvidenceGap | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probs of prompt tokens 1, 2, … (token 0 has none) under weights `version`."""

    logprobs: tuple[float, ...]
    version: int


@dataclass(frozen=True, slots=True)
class UpdateResult:
    version: int
    changed: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineModel:
    architecture: str
    max_model_len: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class EngineVersions:
    """`version`, `sha256` and `model` are None while the engine is empty."""

    engine: str
    build: str
    instance: str
    version: int | None
    sha256: str | None
    paused: bool
    running: int
    queued: int
    model: EngineModel | None


def parse_choice(choice: dict[str, Any], offset: int) -> GenerateChunk:
    """One choice of an answer or of a stream's event; `offset` tokens came before it."""
    token_ids = tuple(choice["token_ids"])
    finish_reason = choice.get("finish_reason")
    if finish_reason is not None and finish_reason not in FINISH_REASONS:
        raise ValueError(f"unknown finish_reason {finish_reason!r}")
    logprobs, logprobs_gap = _logprobs(choice.get("logprobs"), token_ids)
    ranges, ranges_gap = _ranges(choice.get("weight_versions"), offset, offset + len(token_ids))
    return GenerateChunk(token_ids, logprobs, ranges, finish_reason, logprobs_gap or ranges_gap)


def _logprobs(
    field: dict[str, Any] | None, token_ids: tuple[int, ...]
) -> tuple[tuple[float, ...], EvidenceGap | None]:
    content = (field or {}).get("content")
    if content is None:
        detail = f"{len(token_ids)} ids without log-probs"
        return (), EvidenceGap(GapKind.LOGPROBS_MISSING, detail) if token_ids else None
    logprobs = tuple(entry["logprob"] for entry in content)
    if len(logprobs) != len(token_ids):
        detail = f"{len(token_ids)} ids, {len(logprobs)} log-probs"
        return logprobs, EvidenceGap(GapKind.LOGPROBS_LENGTH, detail)
    for token_id, entry in zip(token_ids, content, strict=True):
        value = entry["logprob"]
        if type(value) not in (float, int) or not math.isfinite(value) or value > 1e-4:
            detail = f"log-prob {value!r} of token {token_id}"
            return logprobs, EvidenceGap(GapKind.LOGPROBS_INVALID, detail)
        label = entry.get("token")
        if label != f"token_id:{token_id}":
            detail = f"log-prob of {label!r} stands at token {token_id}"
            return logprobs, EvidenceGap(GapKind.LOGPROBS_MISLABELLED, detail)
    return logprobs, None


def _ranges(
    field: list[dict[str, Any]] | None, start: int, end: int
) -> tuple[tuple[VersionRange, ...], EvidenceGap | None]:
    if not field:
        detail = f"tokens {start} to {end} without versions"
        return (), EvidenceGap(GapKind.VERSIONS_MISSING, detail) if end > start else None
    try:
        ranges = tuple(VersionRange(int(r["version"]), r["start"], r["end"]) for r in field)
    except (ValueError, TypeError, KeyError) as e:
        return (), EvidenceGap(GapKind.VERSIONS_INVALID, f"{field!r}: {e!r}")
    position = start
    for r in ranges:
        if r.start != position or r.end <= r.start:
            break
        position = r.end
    else:
        if position == end:
            return ranges, None
    detail = f"{ranges} do not cover tokens {start} to {end}"
    return ranges, EvidenceGap(GapKind.VERSIONS_COVERAGE, detail)


def parse_prompt_logprobs(
    entries: list[dict[str, Any] | None], token_ids: tuple[int, ...]
) -> tuple[float, ...]:
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} prompt log-probs for {len(token_ids)} prompt tokens")
    values: list[float] = []
    for token_id, entry in zip(token_ids[1:], entries[1:], strict=True):
        if entry is None or str(token_id) not in entry:
            raise ValueError(f"no prompt log-prob for token {token_id}")
        values.append(float(entry[str(token_id)]["logprob"]))
    return tuple(values)


def parse_versions(body: dict[str, Any]) -> EngineVersions:
    model = body.get("model")
    return EngineVersions(
        engine=body["engine"],
        build=body["build"],
        instance=body["instance"],
        version=body["version"],
        sha256=body["sha256"],
        paused=body["paused"],
        running=body["running"],
        queued=body["queued"],
        model=None
        if model is None
        else EngineModel(
            architecture=model["architecture"],
            max_model_len=model["max_model_len"],
            vocab_size=model["vocab_size"],
            dtype=model["dtype"],
        ),
    )
