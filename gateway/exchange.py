"""One chat call: what was asked, what the engine said, and the row that it becomes.

Invariant: the row holds exactly the ids, log-probs and versions that the engine reported, in its
order. What does not fit together is kept and named in ``evidence_gaps``.
"""

import math
from array import array
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from archon.codec import ParsedAnswer, messages_digest
from archon.inference import GenerateChunk, GenerateRequest, SamplingParams, VersionRange
from archon.inference import merge_ranges as merge
from archon.records import Interaction, InteractionStatus
from gateway.catalog import Served
from gateway.history import Prompt, pack_ids
from gateway.pool import Member
from gateway.request import ChatRequest
from gateway.slots import Target

FULL, FORCED, TRUNCATED = b"\0", b"\1", b"\2"


@dataclass(slots=True)
class Exchange:
    """``winner`` is (id, request digest) of the continued call where it had rivals."""

    interaction_id: str
    session_id: str
    target: Target
    served: Served
    request: ChatRequest
    request_digest: str
    prompt: Prompt
    previous: str | None
    winner: tuple[str, str] | None
    max_tokens: int
    started_at: datetime
    large: bool = False
    protocol: str = "openai.chat"
    replica: Member | None = None
    dispatched_version: int = -1
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranges: list[VersionRange] = field(default_factory=list)
    gaps: dict[str, str] = field(default_factory=dict)

    def generate_request(self) -> GenerateRequest:
        r = self.request
        stops = self.served.codec.stop_token_ids
        sampling = SamplingParams(
            self.max_tokens, r.temperature, r.top_p, r.top_k, r.seed, tuple(stops)
        )
        return GenerateRequest(self.interaction_id, tuple(self.prompt.ids), sampling)

    def dispatched_to(self, member: Member) -> None:
        self.replica, self.dispatched_version = member, member.version

    def add(self, chunk: GenerateChunk) -> None:
        self.output_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.ranges += chunk.weight_versions
        if (gap := chunk.evidence_gap) is not None:
            detail = f"{gap.kind.value}: {gap.detail}"
            self.gaps.setdefault(gap.kind.value, f"{detail}; sent at {self.dispatched_version}")

    def usage(self) -> dict[str, int]:
        prompt, said = len(self.prompt.ids), len(self.output_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
        }

    @property
    def output_bytes(self) -> bytes:
        return pack_ids(self.output_ids)

    def version(self) -> int | None:
        return self.ranges[-1].version if self.ranges else None

    def row(
        self, status: InteractionStatus, finish_reason: str, answer: ParsedAnswer, ended: datetime
    ) -> Interaction:
        r, codec = self.request, self.served.codec
        message = codec.answer_message(answer)
        return Interaction(
            interaction_id=self.interaction_id,
            session_id=self.session_id,
            tenant_id=self.target.tenant_id,
            policy_id=self.target.policy_id,
            seq=0,
            status=status,
            protocol=self.protocol,
            request_digest=self.request_digest,
            messages_digest=messages_digest([*r.messages, message], r.tools),
            prompt_ids=self.prompt.own,
            prompt_length=len(self.prompt.ids),
            prompt_sha256=self.prompt.sha256,
            output_ids=self.output_bytes,
            logprobs=array("f", map(_number, self.logprobs)).tobytes(),
            support=self._support() * len(self.output_ids),
            versions=self._versions(),
            sampling=self._sampling(),
            finish_reason=finish_reason,
            started_at=self.started_at,
            ended_at=ended,
            prefix_parent=self.prompt.prefix_parent,
            previous=self.previous,
            replica_id=self.replica.replica_id if self.replica else "",
            evidence_gaps=list(self.gaps.values()),
            codec_digest=codec.digest,
            messages=r.messages[self.prompt.kept :],
            answer=message,
        )

    def _support(self) -> bytes:
        if self.request.temperature == 0:
            return FORCED
        whole = self.request.top_p == 1 and self.request.top_k == 0
        return FULL if whole else TRUNCATED

    def _versions(self) -> list[dict[str, int]]:
        try:
            ranges = merge(self.ranges)
        except ValueError:
            ranges = tuple(self.ranges)
        return [{"version": r.version, "start": r.start, "end": r.end} for r in ranges]

    def _sampling(self) -> dict[str, Any]:
        r = self.request
        return {
            "max_tokens": self.max_tokens,
            "temperature": r.temperature,
            "top_p": r.top_p,
            "top_k": r.top_k,
            "seed": r.seed,
        }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
