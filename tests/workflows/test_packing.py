"""Samples of a session, compared with arrays written by hand."""

from dataclasses import replace

import numpy as np
import pytest

from archon.records import Interaction, InteractionStatus
from archon.storage.packing import Packed, pack
from tests.workflows.scene import call, chain, floats, ints


def arrays(sample: Packed) -> dict[str, list[float]]:
    kinds = {
        "tokens": "<i4",
        "mask": "u1",
        "logprobs": "<f4",
        "versions": "<i4",
        "interaction": "<i4",
    }
    return {
        name: np.frombuffer(getattr(sample, name), kind).tolist() for name, kind in kinds.items()
    }


def packed(calls: list[Interaction], kind: str = "concat", context: tuple = ()) -> list[Packed]:
    return pack(calls, context, kind).samples


def trained(samples: list[Packed]) -> list[tuple[str, int]]:
    """Which interaction each trained token belongs to, and the token."""
    out = []
    for s in samples:
        a = arrays(s)
        for token, mask, index in zip(a["tokens"], a["mask"], a["interaction"], strict=True):
            if mask:
                out.append((s.interactions[int(index)], int(token)))
    return sorted(out)


def test_three_turns_are_one_sample() -> None:
    calls = chain([7], [8, 9], [4], version=2)
    calls[1] = replace(
        calls[1],
        logprobs=floats(-1, -2),
        versions=[{"version": 2, "start": 0, "end": 1}, {"version": 3, "start": 1, "end": 2}],
    )
    (sample,) = packed(calls)
    assert arrays(sample) == {
        "tokens": [1, 2, 7, 3, 8, 9, 3, 4],
        "mask": [0, 0, 1, 0, 1, 1, 0, 1],
        "logprobs": [0, 0, -0.5, 0, -1, -2, 0, -0.5],
        "versions": [-1, -1, 2, -1, 2, 3, -1, 2],
        "interaction": [-1, -1, 0, -1, 1, 1, -1, 2],
    }
    assert sample.interactions == [c.interaction_id for c in calls]
    assert (sample.n_tokens, sample.n_trainable) == (8, 4)
    assert (sample.min_version, sample.max_version) == (2, 3)
    assert sample.leaf == calls[-1].interaction_id


def test_a_fork_gives_two_samples_and_trains_each_token_once() -> None:
    root = call("root", 1, (1, 2), (7,))
    left = call("left", 2, (3,), (8,), parent=root)
    right = call("right", 3, (4,), (9,), parent=root)
    samples = packed([root, left, right])
    assert [arrays(s)["tokens"] for s in samples] == [[1, 2, 7, 3, 8], [1, 2, 7, 4, 9]]
    assert trained(samples) == [("left", 8), ("right", 9), ("root", 7)]
    assert samples[1].interactions == ["right"]


def test_a_rewritten_history_gives_samples_of_their_own() -> None:
    first = call("first", 1, (1, 2), (7,))
    second = call("second", 2, (1, 5), (8,), previous="first")
    assert trained(packed([first, second])) == [("first", 7), ("second", 8)]


def test_individual_is_a_sample_per_call_with_its_whole_prompt() -> None:
    samples = packed(chain([7], [8]), "individual")
    assert [arrays(s)["tokens"] for s in samples] == [[1, 2, 7], [1, 2, 7, 3, 8]]
    assert [arrays(s)["mask"] for s in samples] == [[0, 0, 1], [0, 0, 0, 0, 1]]


def test_only_full_support_is_trained() -> None:
    (sample,) = packed([call("a", 1, (1,), (7, 8, 9), support=bytes([0, 1, 2]))])
    assert arrays(sample)["mask"] == [0, 1, 0, 0]
    assert packed([call("a", 1, (1,), (7,), support=bytes([1]))]) == []


def test_a_call_with_gaps_is_context_only() -> None:
    root = call("root", 1, (1, 2), (7,), evidence_gaps=["logprobs_missing"])
    child = call("child", 2, (3,), (8,), parent=root)
    (sample,) = packed([root, child])
    assert arrays(sample)["tokens"] == [1, 2, 7, 3, 8]
    assert trained([sample]) == [("child", 8)]


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"prompt_sha256": "0" * 64}, "prompt_sha256"),
        ({"prompt_length": 3}, "prompt_length"),
        ({"logprobs": floats(-1, -1)}, "output_length"),
        ({"support": bytes(2)}, "output_length"),
        ({"output_ids": ints(7, 7)}, "output_length"),
        ({"logprobs": floats(float("nan"))}, "logprobs_not_finite"),
        ({"versions": []}, "versions"),
        ({"versions": [{"version": 0, "start": 0, "end": 2}]}, "versions"),
        ({"versions": [{"version": 0, "start": 1, "end": 1}]}, "versions"),
        ({"prefix_parent": "gone"}, "prefix_missing"),
        ({"prefix_parent": "a"}, "prefix_missing"),
    ],
)
def test_what_fails_the_check_is_named_and_not_trained(change: dict, gap: str) -> None:
    packing = pack([call("a", 1, (1, 2), (7,), **change), call("b", 2)], (), "concat")
    assert gap in packing.gaps["a"]
    assert trained(packing.samples) == [("b", 7)]


def test_a_broken_call_takes_nobody_with_it_but_its_descendants() -> None:
    root = call("root", 1, (1, 2), (7,))
    child = call("child", 2, (3,), (8,), parent=root, prompt_sha256="0" * 64)
    grandchild = call("grandchild", 3, (4,), (9,), parent=child)
    packing = pack([root, child, grandchild], (), "concat")
    assert set(packing.gaps) == {"child"}, "the grandchild's own prompt is as it was sent"
    assert trained(packing.samples) == [("grandchild", 9), ("root", 7)]


def test_a_prefix_may_come_from_another_session_or_an_aborted_call() -> None:
    earlier = call("earlier", 1, (1, 2), (7,), session="ses_0")
    cut = call("cut", 1, (3,), (8,), parent=earlier, status=InteractionStatus.ABORTED)
    now = call("now", 2, (4,), (9,), parent=cut)
    (sample,) = packed([now], context=(earlier, cut))
    assert arrays(sample)["tokens"] == [1, 2, 7, 3, 8, 4, 9]
    assert trained([sample]) == [("now", 9)]


def test_an_empty_answer_is_no_sample() -> None:
    assert packed([call("a", 1, (1,), (), versions=[])]) == []


def test_a_long_chain_is_packed_without_recursion() -> None:
    calls = chain(*[[7]] * 1500)
    (sample,) = packed(calls)
    assert sample.n_trainable == 1500
