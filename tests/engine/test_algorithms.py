"""Advantages and losses against values worked out by hand, and float64 formulas."""

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

from engine.algorithms import advantages, importance, kl
from engine.algorithms.advantages import Scored
from engine.algorithms.policy_loss import clipped_surrogate, token_mean


def group(values: list[float], group_id: str = "g") -> list[Scored]:
    return [Scored(group_id, f"{group_id}/{at}", value) for at, value in enumerate(values)]


THREE_OF_EIGHT = [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize(
    ("ddof", "right", "wrong"), [(1, 1.207612, -0.724567), (0, 1.290992, -0.774596)]
)
def test_grpo_golden(ddof: int, right: float, wrong: float) -> None:
    got = advantages.grpo(group(THREE_OF_EIGHT), None, ddof=ddof)
    assert got == pytest.approx([right] * 3 + [wrong] * 5, abs=1e-6)


def test_grpo_divides_by_the_population_std_unless_told() -> None:
    assert advantages.grpo(group([1.0, 0.0]), None) == pytest.approx([1.0, -1.0], abs=3e-6)


def test_rloo_golden() -> None:
    got = advantages.rloo(group(THREE_OF_EIGHT), None)
    assert got == pytest.approx([0.714286] * 3 + [-0.428571] * 5, abs=1e-6)
    assert advantages.rloo(group([1, 0, 0, 0]), None) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_a_group_of_one_is_0_or_measured_by_the_running_baseline() -> None:
    for function in (advantages.grpo, advantages.rloo):
        assert function(group([0.7]), None) == [0.0]
        assert function(group([0.7]), 0.2) == pytest.approx([0.5])
        assert function(group([0.7]), 0.0) == [0.7]
        assert function(group([1.0, 0.0]), 0.9) == function(group([1.0, 0.0]), None)


def test_groups_go_by_id_not_by_position_and_may_differ_in_size() -> None:
    rng = random.Random(4)
    scored = [
        item
        for name, size in (("a", 8), ("b", 7), ("c", 8))
        for item in group([rng.random() for _ in range(size)], name)
    ]
    expected = dict(zip(scored, advantages.grpo(scored, None), strict=True))
    for name in "abc":
        values = [item.value for item in scored if item.group_id == name]
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        for item in scored:
            if item.group_id == name:
                assert expected[item] == pytest.approx(
                    (item.value - mean) / (std + 1e-6), rel=1e-12
                )
    rng.shuffle(scored)
    assert advantages.grpo(scored, None) == pytest.approx([expected[item] for item in scored])


def test_a_session_counts_once_however_many_interactions_it_has() -> None:
    scored = [Scored("g", "long", 1.0)] * 9 + [Scored("g", "short", 0.0)]
    got = advantages.grpo(scored, None, normalize_std=False)
    assert got == [0.5] * 9 + [-0.5]
    assert advantages.rloo(scored, None) == [1.0] * 9 + [-1.0]


def test_sessions_that_agree_keep_the_differences_inside_them() -> None:
    scored = [Scored("g", s, v) for s in ("a", "b") for v in (0.25, 0.75)]
    assert advantages.grpo(scored, None) == [-0.25, 0.25, -0.25, 0.25]


def test_equal_returns_give_exactly_zero() -> None:
    # The mean of three times 0.1 is not 0.1, and the std is not 0: both would be blown up.
    for function in (advantages.grpo, advantages.rloo):
        got = function(group([0.1, 0.1, 0.1]), None)
        assert got == [0.0, 0.0, 0.0]
        assert advantages.all_zero(got)
        assert not advantages.all_zero(function(group([0.1, 0.1, 0.2]), None))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_returns_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="session g/1: return .* is not finite"):
        advantages.grpo(group([0.0, bad]), None)


def test_a_session_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="session s is in two groups"):
        advantages.rloo([Scored("a", "s", 1.0), Scored("b", "s", 1.0)], None)


RATIOS = torch.tensor([0.2, 1.0, 1.5, 4.0], dtype=torch.float64)


def loss(advantage: float, dual_clip: float | None = None, high: float = 0.2) -> list[float]:
    zeros_T, advantage_T = torch.zeros_like(RATIOS), torch.full_like(RATIOS, advantage)
    made = clipped_surrogate(
        RATIOS.log(), zeros_T, advantage_T, clip_low=0.2, clip_high=high, dual_clip=dual_clip
    )
    return made.loss_T.tolist()


def test_clipping_golden() -> None:
    assert loss(1.0) == pytest.approx([-0.2, -1, -1.2, -1.2])
    assert loss(-1.0) == pytest.approx([0.8, 1, 1.5, 4.0])
    assert loss(-1.0, dual_clip=3.0) == pytest.approx([0.8, 1, 1.5, 3.0])
    assert loss(1.0, dual_clip=3.0) == loss(1.0)
    assert loss(1.0, high=0.28) == pytest.approx([-0.2, -1, -1.28, -1.28])


def test_clipped_tokens_are_counted_and_have_no_gradient() -> None:
    logprob_T = RATIOS.log().requires_grad_()
    advantage_T = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    made = clipped_surrogate(
        logprob_T, torch.zeros(4), advantage_T, clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    made.loss_T.sum().backward()
    assert made.clipped_T.tolist() == [False, False, True, True]
    assert made.ratio_T.tolist() == pytest.approx(RATIOS.tolist())
    assert logprob_T.grad is not None
    assert logprob_T.grad.tolist() == pytest.approx([-0.2, -1.0, 0.0, 0.0])
    assert not made.ratio_T.requires_grad
    assert not made.clipped_T.requires_grad


def test_each_term_reads_its_own_policy() -> None:
    new_T, proximal_T, behaviour_T, reference_T = (
        torch.tensor([x]) for x in (-1.0, -2.0, -4.0, -7.0)
    )
    made = clipped_surrogate(new_T, proximal_T, torch.ones(1), clip_low=0.9, clip_high=9.0)
    assert made.ratio_T.item() == pytest.approx(math.e)
    assert importance.truncated(proximal_T, behaviour_T, 100.0).item() == pytest.approx(math.e**2)
    assert importance.truncated(proximal_T, behaviour_T, 5.0).item() == 5.0
    assert importance.truncated(behaviour_T, proximal_T, 5.0).item() == pytest.approx(math.e**-2)
    assert kl.k3(new_T, reference_T).item() == pytest.approx(math.exp(-6) + 6 - 1)


def test_k3_golden_and_gradient() -> None:
    logprob_T = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value_T = kl.k3(logprob_T, torch.full_like(logprob_T, math.log(2)))
    assert value_T.item() == pytest.approx(0.306853, abs=1e-6)
    value_T.sum().backward()
    assert logprob_T.grad is not None
    assert logprob_T.grad.item() == pytest.approx(1 - 2)


def test_window_golden() -> None:
    logprob_T = torch.tensor([0.0, 0.0], requires_grad=True)
    weight_T = importance.windowed(torch.tensor([1000.0, 0.0]), torch.zeros(2), 0.5, 5.0)
    made = clipped_surrogate(logprob_T, torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.2)
    total = (weight_T * made.loss_T).sum() / 2
    total.backward()
    assert total.item() == -0.5
    assert logprob_T.grad is not None
    assert logprob_T.grad.tolist() == [0.0, -0.5]


def test_token_mean_golden() -> None:
    parts = [torch.tensor([4.0]), torch.tensor([1.0, 1.0, 1.0])]
    assert sum(token_mean(part, 4).item() for part in parts) == 1.75


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def test_huge_log_ratios_stay_finite() -> None:
    logprob_T = torch.tensor([1000.0, -1000.0], requires_grad=True)
    made = clipped_surrogate(
        logprob_T, torch.zeros(2), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    total = made.loss_T.sum() + kl.k3(logprob_T, torch.zeros(2)).sum()
    total.backward()
    assert finite(total)
    assert logprob_T.grad is not None
    assert finite(logprob_T.grad)
    assert finite(importance.truncated(torch.tensor([1000.0]), torch.zeros(1), 5.0))
    assert finite(importance.windowed(torch.tensor([-1000.0]), torch.zeros(1), 0.5, 5.0))
