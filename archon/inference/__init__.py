"""The client of the token-level inference protocol (docs/protocol.md)."""

from archon.inference.client import EngineClient
from archon.inference.errors import (
    EngineDied,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    VersionConflict,
)
from archon.inference.protocol import (
    EngineModel,
    EngineVersions,
    EvidenceGap,
    GapKind,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    PromptLogprobs,
    SamplingParams,
    UpdateResult,
    merge_ranges,
    ranges_of,
    versions_of,
)
from archon.records import VersionRange

__all__ = [
    "EngineClient",
    "EngineDied",
    "EngineError",
    "EngineModel",
    "EngineRefused",
    "EngineUnavailable",
    "EngineVersions",
    "EvidenceGap",
    "GapKind",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResult",
    "PromptLogprobs",
    "SamplingParams",
    "UpdateResult",
    "VersionConflict",
    "VersionRange",
    "merge_ranges",
    "ranges_of",
    "versions_of",
]
