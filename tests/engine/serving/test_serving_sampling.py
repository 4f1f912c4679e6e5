"""Draws and their log-probs against values worked out by hand and in numpy."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.serving.sampling import Draw, _mix, sample, truncate, uniform

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0]


def whole(seed: int = 0, number: int = 0, temperature: float = 1.0) -> Draw:
    return Draw(temperature, 1.0, 0, seed, number)


def log_softmax(logits: list[float], temperature: float = 1.0) -> np.ndarray:
    x = np.array(logits, dtype=np.float64) / temperature
    return x - np.log(np.exp(x).sum())


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for the seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [_mix(1234567 + i * golden & (2**64 - 1)) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_covers_the_interval_and_never_reaches_one() -> None:
    values = np.array([uniform(seed, number) for seed in range(100) for number in range(100)])
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert np.abs(counts - 1000).max() < 150  # 5 standard deviations of a fair bin
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    count = 5000
    rows = torch.tensor([LOGITS]).expand(count, -1)
    ids, _ = sample(rows, [whole(seed, temperature=temperature) for seed in range(count)])
    expected = np.exp(log_softmax(LOGITS, temperature))
    for token_id, drawn in Counter(ids).items():
        p = expected[token_id]
        assert abs(drawn / count - p) < 5 * math.sqrt(p * (1 - p) / count)


def test_logprobs_are_of_the_tempered_softmax() -> None:
    draws = [whole(seed, temperature=0.5) for seed in range(50)]
    ids, logprobs = sample(torch.tensor([LOGITS]).expand(50, -1), draws)
    assert logprobs == pytest.approx([log_softmax(LOGITS, 0.5)[i] for i in ids], abs=1e-6)


def test_greedy_is_the_best_token_with_its_untempered_logprob() -> None:
    ids, logprobs = sample(torch.tensor([LOGITS]), [Draw(0.0, 0.5, 1, 7, 0)])
    assert ids == [0]
    assert logprobs[0] == pytest.approx(log_softmax(LOGITS)[0], abs=1e-6)


def test_rows_with_other_parameters_do_not_touch_each_other() -> None:
    draws = [whole(1), Draw(0.0, 1.0, 0, 2, 0), Draw(0.7, 0.8, 3, 3, 5), whole(4, 2, 1.5)]
    rows = torch.tensor([LOGITS, LOGITS[::-1], LOGITS, LOGITS])
    together = sample(rows, draws)
    alone = [sample(rows[i : i + 1], [draws[i]]) for i in range(4)]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-7)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, {0, 1}),
        (0, 0.55, {0}),  # 0.5630 alone reaches it
        (0, 0.57, {0, 1}),  # 0.5630, 0.2071
        (0, 0.78, {0, 1, 2}),  # 0.7701 with two is too little
        (2, 0.74, {0, 1}),  # of the two best the first has 0.7311
        (2, 0.73, {0}),
        (99, 1.0, {0, 1, 2, 3, 4}),
        (1, 0.01, {0}),
    ],
)
def test_truncation_keeps_the_fewest_that_reach_the_bound(
    top_k: int, top_p: float, kept: set[int]
) -> None:
    cut = truncate(torch.tensor(LOGITS), top_k, top_p)
    assert {i for i, x in enumerate(cut.tolist()) if x > -math.inf} == kept
    draws = [Draw(1.0, top_p, top_k, seed, 0) for seed in range(200)]
    ids, logprobs = sample(torch.tensor([LOGITS]).expand(200, -1), draws)
    assert set(ids) <= kept
    norm = np.log(sum(np.exp(LOGITS[i]) for i in kept))
    assert logprobs == pytest.approx([LOGITS[i] - norm for i in ids], abs=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    rows = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(500, -1)
    ids, logprobs = sample(rows, [whole(seed) for seed in range(500)])
    assert set(ids) == {1, 3}
    assert logprobs == pytest.approx([math.log(0.5)] * 500)


def test_nan_logits_give_a_nan_logprob() -> None:
    _, logprobs = sample(torch.full((1, 5), math.nan), [whole()])
    assert math.isnan(logprobs[0])
