"""Who gets the credit: from the calls and rewards of one session to a return per interaction.

Invariant: returns are computed from the rewards each time anew and never from other returns, so
they cannot be discounted twice; and each counted reward is given to one interaction.

An interaction's return is its own reward + γ · the mean return of the calls that follow it by
``previous``. A session-level reward is its last call's own: the last of the main thread that had
begun when the reward came.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from archon.records import Interaction, InteractionStatus, Reward


def counted(rewards: Iterable[Reward]) -> list[Reward]:
    """The newest accepted reward of each slot, oldest first. A rejected one displaces nothing."""
    newest: dict[tuple[str, str | None, str, str], Reward] = {}
    for reward in sorted(rewards, key=lambda r: r.seq):
        if not reward.rejected and reward.value is not None:
            slot = (reward.session_id, reward.interaction_id, reward.component, reward.source)
            newest[slot] = reward
    return sorted(newest.values(), key=lambda r: r.seq)


def superseded(interactions: Sequence[Interaction]) -> set[str]:
    """Complete calls that a retry replaced: the answer that was continued stays, else the last."""
    complete = _complete(interactions)
    by_id = {i.interaction_id: i for i in complete}
    continued = {
        parent
        for i in complete
        for parent in (i.previous, i.prefix_parent)
        if parent in by_id and by_id[parent].request_digest != i.request_digest
    }
    siblings: dict[tuple[str, str | None], list[Interaction]] = defaultdict(list)
    for i in complete:
        siblings[i.request_digest, _before_retries(i, by_id)].append(i)
    out: set[str] = set()
    for calls in siblings.values():
        kept = {i.interaction_id for i in calls if i.interaction_id in continued}
        if not kept:
            kept = {max(calls, key=lambda i: (i.ended_at, i.seq)).interaction_id}
        out |= {i.interaction_id for i in calls} - kept
    return out


def taking_part(interactions: Sequence[Interaction]) -> list[Interaction]:
    """The calls that credit is given to, by sequence: complete, and no retry replaced them."""
    gone = superseded(interactions)
    return [i for i in _complete(interactions) if i.interaction_id not in gone]


def discounted(
    interactions: Sequence[Interaction], rewards: Iterable[Reward], gamma: float
) -> dict[str, float]:
    """The return of every interaction that takes part, by id, in the order of the calls."""
    calls = taking_part(interactions)
    previous = _previous(interactions, calls)
    own = _own(calls, previous, counted(rewards))
    followers: dict[str, list[str]] = defaultdict(list)
    for call, before in previous.items():
        if before is not None:
            followers[before].append(call)
    value: dict[str, float] = {}
    names = [call.interaction_id for call in calls]
    for name in reversed(names):
        later = [value[f] for f in followers[name]]
        value[name] = own.get(name, 0.0) + (gamma * fmean(later) if later else 0.0)
    return {name: value[name] for name in names}


def unplaced(interactions: Sequence[Interaction], rewards: Iterable[Reward]) -> list[Reward]:
    """Counted rewards that no interaction which takes part can be given."""
    ids = {i.interaction_id for i in taking_part(interactions)}
    return [
        r for r in counted(rewards) if not ids or (r.interaction_id and r.interaction_id not in ids)
    ]


def _complete(interactions: Sequence[Interaction]) -> list[Interaction]:
    done = (i for i in interactions if i.status == InteractionStatus.COMPLETE)
    return sorted(done, key=lambda i: i.seq)


def _earlier(call: Interaction, every: dict[str, Interaction]) -> Interaction | None:
    """What ``call`` follows. A link that leaves the session, or does not go back, is none."""
    before = every.get(call.previous or "")
    return before if before is not None and before.seq < call.seq else None


def _before_retries(call: Interaction, every: dict[str, Interaction]) -> str | None:
    """What ``call`` follows, beyond the attempts that it repeats."""
    while (before := _earlier(call, every)) and before.request_digest == call.request_digest:
        call = before
    return call.previous


def _previous(
    interactions: Sequence[Interaction], calls: Sequence[Interaction]
) -> dict[str, str | None]:
    """For each call that takes part the nearest one before it that does too."""
    every = {i.interaction_id: i for i in interactions}
    ids = {i.interaction_id for i in calls}
    out: dict[str, str | None] = {}
    for call in calls:
        before = _earlier(call, every)
        while before is not None and before.interaction_id not in ids:
            before = _earlier(before, every)
        out[call.interaction_id] = before.interaction_id if before else None
    return out


def _own(
    calls: Sequence[Interaction], previous: dict[str, str | None], rewards: Sequence[Reward]
) -> dict[str, float]:
    own: dict[str, float] = defaultdict(float)
    main = _main_thread(calls, previous)
    for reward in rewards:
        assert reward.value is not None, f"reward {reward.reward_id} is counted without a value"
        if reward.interaction_id is not None:
            own[reward.interaction_id] += reward.value
        elif main:
            begun = [i for i in main if i.started_at <= reward.created_at]
            own[(begun or main)[-1].interaction_id] += reward.value
    return own


def _main_thread(
    calls: Sequence[Interaction], previous: dict[str, str | None]
) -> list[Interaction]:
    """The thread of the session's first call."""
    root: dict[str, str] = {}
    for call in calls:
        before = previous[call.interaction_id]
        root[call.interaction_id] = call.interaction_id if before is None else root[before]
    return [i for i in calls if root[i.interaction_id] == calls[0].interaction_id]
