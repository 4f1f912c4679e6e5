"""Returns, worked out by hand."""

from typing import Any

import pytest

from archon.records import Interaction, InteractionStatus, Reward
from archon.storage.credit import counted, discounted, superseded, unplaced
from tests.workflows.scene import call, chain, reward


def returns(calls: list[Interaction], rewards: list[Reward], gamma: float) -> list[Any]:
    return [pytest.approx(v) for v in discounted(calls, rewards, gamma).values()]


def line(n: int) -> list[Interaction]:
    """Calls that follow each other by conversation only: no common prefix of tokens."""
    return [call(f"c{i}", i, previous=f"c{i - 1}" if i > 1 else None) for i in range(1, n + 1)]


def test_five_calls_without_a_common_prefix_all_get_the_reward() -> None:
    assert discounted(line(5), [reward(1.0)], 1.0) == dict.fromkeys(
        ["c1", "c2", "c3", "c4", "c5"], 1.0
    )


def test_own_rewards_are_discounted_once_from_the_last_to_the_first() -> None:
    assert returns(line(3), [reward(1.0, interaction="c3")], 0.9) == [0.81, 0.9, 1.0]
    own = [reward(0.5, 1, interaction="c1"), reward(1.0, 2, interaction="c3")]
    assert returns(line(3), own, 0.5) == [0.75, 0.5, 1.0]


def test_a_call_followed_by_two_gets_their_mean() -> None:
    a = call("a", 1)
    b, c = call("b", 2, previous="a"), call("c", 3, previous="a")
    own = [reward(1.0, 1, interaction="b"), reward(0.0, 2, interaction="c")]
    assert discounted([a, b, c], own, 0.5) == {"a": 0.25, "b": 1.0, "c": 0.0}


def test_the_newest_of_each_slot_counts_and_components_are_summed() -> None:
    rewards = [
        reward(0.25, 1, component="style"),
        reward(1.0, 2),
        reward(0.5, 3),
        reward(0.0, 4, component="style"),
        reward(None, 5, rejected="not a number"),
    ]
    assert [r.seq for r in counted(rewards)] == [3, 4]
    assert discounted(line(1), rewards, 1.0) == {"c1": 0.5}


def test_a_zero_is_a_reward_and_nothing_is_none() -> None:
    assert [r.value for r in counted([reward(0.0)])] == [0.0]
    assert counted([reward(None, rejected="no value given")]) == []


def test_a_retry_that_is_continued_stays_and_the_other_is_dropped_before_discounting() -> None:
    a = call("a", 1)
    lost = call("lost", 2, previous="a", request_digest="same")
    kept = call("kept", 3, previous="a", request_digest="same")
    after = call("after", 4, previous="kept")
    calls = [a, lost, kept, after]
    assert superseded(calls) == {"lost"}
    assert discounted(calls, [reward(1.0)], 1.0) == {"a": 1.0, "kept": 1.0, "after": 1.0}
    first = call("after", 4, previous="lost")
    assert superseded([a, lost, kept, first]) == {"kept"}


def test_of_retries_that_nobody_continued_the_latest_to_end_stays() -> None:
    early = call("early", 2, request_digest="same", at=2)
    late = call("late", 1, request_digest="same", at=9)
    assert superseded([early, late]) == {"early"}
    twin = call("twin", 3, request_digest="same", at=9)
    assert superseded([early, late, twin]) == {"early", "late"}  # a tie: by insertion


def test_a_retry_whose_previous_is_the_attempt_before_is_a_retry_still() -> None:
    first = call("first", 1, request_digest="same")
    again = call("again", 2, request_digest="same", previous="first")
    assert superseded([first, again]) == {"first"}
    assert discounted([first, again], [reward(1.0)], 0.5) == {"again": 1.0}


def test_a_reward_belongs_to_the_call_that_had_begun() -> None:
    a, b = call("a", 1, at=4), call("b", 2, at=6, previous="a")
    assert discounted([a, b], [reward(1.0, at=5)], 1.0) == {"a": 1.0, "b": 0.0}
    assert discounted([a, b], [reward(1.0, at=7)], 1.0) == {"a": 1.0, "b": 1.0}
    early = discounted([a, b], [reward(1.0, at=0)], 1.0)
    assert early == {"a": 1.0, "b": 1.0}, "before all calls it is for the whole episode"


def test_only_the_main_thread_gets_the_sessions_reward() -> None:
    main, more = call("main", 1), call("more", 3, previous="main")
    helper = call("helper", 2)
    assert discounted([main, helper, more], [reward(1.0)], 1.0) == {
        "main": 1.0,
        "helper": 0.0,
        "more": 1.0,
    }


@pytest.mark.parametrize("status", ["side_call", "aborted", "failed", "superseded"])
def test_other_calls_take_no_part_and_credit_goes_past_them(status: str) -> None:
    a = call("a", 1)
    other = call("other", 2, previous="a", status=InteractionStatus(status))
    c = call("c", 3, previous="other")
    assert discounted([a, other, c], [reward(1.0)], 0.5) == {"a": 0.5, "c": 1.0}
    rewards = [reward(1.0, interaction="other")]
    assert unplaced([a, other, c], rewards) == rewards


def test_a_link_that_leaves_the_session_or_goes_forward_is_no_link() -> None:
    a = call("a", 1, previous="elsewhere")
    b = call("b", 2, previous="c")
    c = call("c", 3, previous="a")
    assert discounted([a, b, c], [reward(1.0)], 1.0) == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_a_branch_of_three_turns() -> None:
    calls = chain([7], [8], [9])
    assert list(discounted(calls, [reward(0.84)], 1.0).values()) == [0.84] * 3
