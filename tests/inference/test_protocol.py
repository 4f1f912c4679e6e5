"""The words of the protocol: ranges, and what counts as a gap in the evidence."""

from typing import Any

import orjson
import pytest

from archon.inference import (
    GapKind,
    GenerateRequest,
    SamplingParams,
    VersionRange,
    merge_ranges,
    ranges_of,
    versions_of,
)
from archon.inference.protocol import parse_choice, parse_prompt_logprobs


def choice(**changes: Any) -> dict[str, Any]:
    whole = {
        "index": 0,
        "token_ids": [11, 12],
        "logprobs": {
            "content": [
                {"token": "token_id:11", "logprob": -0.25},
                {"token": "token_id:12", "logprob": -1.5},
            ]
        },
        "finish_reason": None,
        "weight_versions": [
            {"version": "4", "start": 3, "end": 4},
            {"version": "5", "start": 4, "end": 5},
        ],
    }
    return whole | changes


def test_ranges_round_trip() -> None:
    versions = (4, 4, 5, 5, 5, 7)
    ranges = ranges_of(versions, start=10)
    assert ranges == (VersionRange(4, 10, 12), VersionRange(5, 12, 15), VersionRange(7, 15, 16))
    assert versions_of(ranges) == versions
    assert ranges_of(()) == ()


def test_merge_joins_touching_ranges_of_one_version() -> None:
    parts = [VersionRange(4, 0, 1), VersionRange(4, 1, 3), VersionRange(5, 3, 4)]
    assert merge_ranges(parts) == (VersionRange(4, 0, 3), VersionRange(5, 3, 4))


@pytest.mark.parametrize(
    "ranges",
    [
        [VersionRange(4, 0, 1), VersionRange(4, 2, 3)],
        [VersionRange(4, 0, 2), VersionRange(4, 1, 3)],
        [VersionRange(4, 1, 1)],
    ],
)
def test_merge_refuses_holes_overlaps_and_empty_ranges(ranges: list[VersionRange]) -> None:
    with pytest.raises(ValueError, match="range"):
        merge_ranges(ranges)


def test_whole_choice_has_no_gap() -> None:
    chunk = parse_choice(choice(), 3)
    assert chunk.token_ids == (11, 12)
    assert chunk.logprobs == (-0.25, -1.5)
    assert chunk.weight_versions == (VersionRange(4, 3, 4), VersionRange(5, 4, 5))
    assert chunk.evidence_gap is None


ENTRY_11 = {"token": "token_id:11", "logprob": -0.25}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"logprobs": None}, GapKind.LOGPROBS_MISSING),
        ({"logprobs": {"content": [ENTRY_11]}}, GapKind.LOGPROBS_LENGTH),
        (
            {"logprobs": {"content": [ENTRY_11, {"token": "token_id:12", "logprob": None}]}},
            GapKind.LOGPROBS_INVALID,
        ),
        (
            {"logprobs": {"content": [ENTRY_11, {"token": "token_id:12", "logprob": 0.5}]}},
            GapKind.LOGPROBS_INVALID,
        ),
        (
            {"logprobs": {"content": [ENTRY_11, {"token": "token_id:13", "logprob": -1.0}]}},
            GapKind.LOGPROBS_MISLABELLED,
        ),
        ({"weight_versions": None}, GapKind.VERSIONS_MISSING),
        (
            {"weight_versions": [{"version": "default", "start": 3, "end": 5}]},
            GapKind.VERSIONS_INVALID,
        ),
        ({"weight_versions": [{"version": "4", "start": 3, "end": 4}]}, GapKind.VERSIONS_COVERAGE),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 2}]}, GapKind.VERSIONS_COVERAGE),
        (
            {
                "weight_versions": [
                    {"version": "4", "start": 3, "end": 5},
                    {"version": "5", "start": 4, "end": 5},
                ]
            },
            GapKind.VERSIONS_COVERAGE,
        ),
    ],
)
def test_gaps_are_flagged_and_ids_kept(changes: dict[str, Any], kind: GapKind) -> None:
    chunk = parse_choice(choice(**changes), 3)
    assert chunk.evidence_gap is not None and chunk.evidence_gap.kind == kind
    assert chunk.token_ids == (11, 12)


def test_a_chunk_that_only_ends_the_answer_has_no_gap() -> None:
    chunk = parse_choice({"token_ids": [], "finish_reason": "abort"}, 3)
    assert chunk.evidence_gap is None and chunk.finish_reason == "abort"


def test_unknown_finish_reason_is_not_an_end() -> None:
    with pytest.raises(ValueError, match="finish_reason"):
        parse_choice(choice(finish_reason="tired"), 3)


def test_request_body_is_the_documented_one() -> None:
    sampling = SamplingParams(16, seed=7, stop_token_ids=(2,))
    body = GenerateRequest("int_1", (3, 17, 4, 9), sampling).body()
    assert orjson.loads(body) == {
        "request_id": "int_1",
        "model": "default",
        "token_ids": [3, 17, 4, 9],
        "sampling_params": {
            "max_tokens": 16,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 7,
            "stop_token_ids": [2],
            "n": 1,
            "logprobs": 1,
            "prompt_logprobs": None,
        },
        "stream": True,
    }


def test_prompt_logprobs_are_looked_up_by_the_prompts_own_ids() -> None:
    entries: list[dict[str, Any] | None] = [
        None,
        {"3": {"logprob": -0.1}, "7": {"logprob": -2.3}},
        {"9": {"logprob": -0.5}},
    ]
    assert parse_prompt_logprobs(entries, (1, 7, 9)) == (-2.3, -0.5)
    with pytest.raises(ValueError, match="token 8"):
        parse_prompt_logprobs(entries, (1, 8, 9))
    with pytest.raises(ValueError, match="3 prompt log-probs for 2"):
        parse_prompt_logprobs(entries, (1, 7))
