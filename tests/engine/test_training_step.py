"""The step: its gradient against plain formulas, its invariances, and what it refuses."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.records.policy import AlgorithmSettings
from archon.records.training import BatchManifest
from engine import checkpoint
from engine.checkpoint import TrainerState
from engine.models import PackedCausal
from engine.training.batch import Batch, build
from engine.training.step import Spans, _minibatches, train_step
from tests.engine.batches import VOCAB, Made, assemble, make_batch, make_model, quiet, two_groups

ONE_PASS = AlgorithmSettings(epochs=1, minibatches=1, lr=0.0, max_grad_norm=1e6)


def run(
    batch: Batch, algorithm: AlgorithmSettings, seed: int = 7, micro: int = 8192
) -> tuple[TrainerState, dict[str, float]]:
    state = checkpoint.fresh_state(make_model().double())
    return state, train_step(state, batch, algorithm, seed, quiet, Spans(), micro)


def gradients(state: TrainerState) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(state.model.named_parameters()))
    return found


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(
        float((first[name] - second[name]).abs().max() / second[name].abs().max())
        for name in second
    )


def written_out(
    batch: Batch, samples: list[Made], algorithm: AlgorithmSettings
) -> dict[str, Tensor]:
    """The gradient of a first pass, token by token and sample by sample, from the definition."""
    values = {
        group: {
            s.session: sum(turn[2] for turn in s.turns) / len(s.turns)
            for s in samples
            if s.group == group
        }
        for group in "ab"
    }
    model = make_model().double()
    loss = torch.zeros((), dtype=torch.float64)
    count = 0
    for at, sample in enumerate(samples):
        start, end = batch.bounds[at], batch.bounds[at + 1]
        attention = PackedCausal([0, end - start])
        tokens = batch.tokens_T[start:end]
        logits = model.logits(model(tokens, attention.positions(), attention))
        logprobs = (logits / algorithm.temperature).log_softmax(-1)
        group = torch.tensor(list(values[sample.group].values()), dtype=torch.float64)
        for t in range(1, end - start):
            turn = int(sample.columns["interaction"][t])
            if turn < 0:
                continue
            advantage = (sample.turns[turn][2] - group.mean()) / (group.std(correction=0) + 1e-6)
            logprob = logprobs[t - 1, tokens[t]]
            weight = torch.exp(logprob.detach() - sample.columns["logprobs"][t].double())
            entropy = -(logprobs[t - 1].exp() * logprobs[t - 1]).sum()
            loss = loss - min(weight, torch.tensor(algorithm.behaviour_cap)) * advantage * logprob
            loss = loss - algorithm.entropy_coef * entropy
            count += 1
    (loss / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "algorithm",
    [
        ONE_PASS,
        dataclasses.replace(ONE_PASS, temperature=0.7, entropy_coef=0.1),
        dataclasses.replace(ONE_PASS, behaviour_cap=1.0),
    ],
)
def test_the_gradient_is_that_of_the_definition(algorithm: AlgorithmSettings) -> None:
    samples = two_groups()
    _, batch = make_batch(samples, algorithm=algorithm)
    state, metrics = run(batch, algorithm)
    assert furthest(gradients(state), written_out(batch, samples, algorithm)) < 1e-5
    assert metrics["tokens"] == sum(turn[1] for sample in samples for turn in sample.turns)
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["groups"] == 2
    assert metrics["sessions"] == 6


@pytest.mark.parametrize("micro", [1, 12, 20])
def test_micro_batching_does_not_change_the_gradient(micro: int) -> None:
    _, batch = make_batch()
    whole, metrics = run(batch, ONE_PASS)
    cut, other = run(batch, ONE_PASS, micro=micro)
    assert furthest(gradients(cut), gradients(whole)) < 1e-6
    for name in ("loss", "entropy", "grad_norm", "behaviour_kl", "tokens"):
        assert other[name] == pytest.approx(metrics[name], rel=1e-6), name


def test_tokens_that_are_not_trained_count_in_no_denominator() -> None:
    short = [Made("a", "s1", [(3, 2, 1.0)]), Made("a", "s2", [(3, 2, 0.0)])]
    _, batch = make_batch(short)
    reference, _ = run(batch, ONE_PASS)
    padded = [dataclasses.replace(sample) for sample in short]
    manifest, columns = assemble(padded)
    longer = {
        name: torch.cat([column[:5], column[:3], column[5:], column[:3]])
        for name, column in columns.items()
        if name != "offsets"
    }
    longer["offsets"] = torch.tensor([0, 8, 16])
    for name, filler in (("mask", 0), ("logprobs", 0.0), ("versions", -1), ("interaction", -1)):
        longer[name][[5, 6, 7, 13, 14, 15]] = filler
    manifest = dataclasses.replace(manifest, samples=tuple(redigest(manifest, longer)))
    other, _ = run(build(longer, manifest, VOCAB), ONE_PASS)
    assert furthest(gradients(other), gradients(reference)) < 1e-6


def test_what_stands_in_masked_places_reaches_nothing() -> None:
    manifest, columns = assemble(two_groups())
    reference, expected = run(build(columns, manifest, VOCAB), ONE_PASS)
    columns["logprobs"][columns["mask"] == 0] = -torch.inf
    manifest = dataclasses.replace(manifest, samples=tuple(redigest(manifest, columns)))
    other, metrics = run(build(columns, manifest, VOCAB), ONE_PASS)
    assert metrics == expected
    assert furthest(gradients(other), gradients(reference)) == 0.0


def redigest(manifest: BatchManifest, columns: dict[str, Tensor]) -> list[Any]:
    found = []
    offsets = columns["offsets"].tolist()
    for sample, start, end in zip(manifest.samples, offsets, offsets[1:], strict=False):
        digest = hashlib.sha256()
        for name in ("tokens", "mask", "logprobs", "versions", "interaction"):
            digest.update(columns[name][start:end].numpy().tobytes())
        found.append(
            dataclasses.replace(
                sample,
                digest=digest.hexdigest(),
                n_tokens=end - start,
                n_trainable=int(columns["mask"][start:end].sum()),
            )
        )
    return found


def test_minibatches_cover_every_token_once_an_epoch_in_an_order_of_the_seed() -> None:
    _, batch = make_batch()
    trained = set(batch.trained_T.nonzero().squeeze(1).tolist())
    orders = []
    for seed, epoch in ((7, 0), (7, 1), (8, 0), (7, 0)):
        minibatches = _minibatches(batch, 3, seed, epoch, 8192)
        assert len(minibatches) == 3
        seen = [int(t) for part in minibatches for micro in part for t in micro.index_A]
        assert sorted(seen) == sorted(trained)
        orders.append(seen)
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


CHANGES: list[dict[str, Any]] = [
    {"name": "rloo", "normalize_std": False},
    {"clip_low": 0.01},
    {"clip_high": 0.001},
    {"dual_clip": 1.01},
    {"behaviour_cap": 1.0},
    {"epochs": 5},
    {"minibatches": 1},
    {"lr": 2e-2},
    {"beta1": 0.5},
    {"beta2": 0.9},
    {"eps": 1e-3},
    {"weight_decay": 0.1},
    {"max_grad_norm": 0.01},
    {"entropy_coef": 0.1},
    {"normalize_std": False},
    {"temperature": 0.5},
]
BASE = AlgorithmSettings(epochs=4, minibatches=2, lr=1e-2)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_setting_changes_the_step(change: dict[str, Any]) -> None:
    def weights(algorithm: AlgorithmSettings) -> Tensor:
        _, batch = make_batch(algorithm=algorithm)
        state, _ = run(batch, algorithm)
        return torch.cat([p.detach().flatten() for p in state.model.parameters()])

    assert not torch.equal(weights(dataclasses.replace(BASE, **change)), weights(BASE))


def test_every_setting_is_named_above_or_refused() -> None:
    named = {name for change in CHANGES for name in change}
    assert {f.name for f in dataclasses.fields(AlgorithmSettings)} - named == {"kl_coef"}
    _, batch = make_batch()
    with pytest.raises(ValueError, match="kl_coef"):
        run(batch, dataclasses.replace(BASE, kl_coef=0.1))


def test_a_step_raises_what_was_better_and_reports_itself() -> None:
    algorithm = dataclasses.replace(BASE, epochs=8, minibatches=1)
    samples = [Made("a", "s1", [(3, 1, 1.0)]), Made("a", "s2", [(3, 1, 0.0)])]
    _, batch = make_batch(samples, algorithm=algorithm)
    state, metrics = run(batch, algorithm)
    before, after = make_model().double(), state.model
    attention = PackedCausal(list(batch.bounds))
    picked = []
    for model in (before, after):
        hidden = model(batch.tokens_T, attention.positions(), attention)
        logprobs = model.logits(hidden).log_softmax(-1)
        picked.append([logprobs[t - 1, batch.tokens_T[t]].item() for t in (3, 7)])
    assert picked[1][0] > picked[0][0]
    assert picked[1][1] < picked[0][1]
    assert metrics["ratio_max"] > 1.0
    assert metrics["approx_kl"] > 0.0
    assert metrics["clip_fraction"] > 0.0
    assert state.step == 1
    assert not any(isinstance(value, Tensor) for value in metrics.values())


def test_a_singleton_learns_from_the_running_baseline() -> None:
    alone = [Made("a", "s1", [(3, 2, 0.7)])]
    assert make_batch(alone)[1].signal is False
    _, batch = make_batch([Made("a", "s1", [(3, 2, 0.7)])], baseline=0.2)
    assert batch.signal
    assert batch.advantage_T.tolist() == pytest.approx([0, 0, 0, 0.5, 0.5])


def test_staleness_is_counted_along_the_parents_and_bounded() -> None:
    samples = two_groups()
    samples[0].version = 3
    for sample in samples[1:]:
        sample.version = 9
    _, batch = make_batch(samples, base_version=9, parents=(9, 4, 3))
    assert batch.metrics["staleness_max"] == 2
    assert batch.metrics["staleness_mean"] == pytest.approx(2 * 3 / 19)
    with pytest.raises(ValueError, match="2 steps stale, max_staleness is 1"):
        make_batch(samples, base_version=9, parents=(9, 4, 3), max_staleness=1)
    with pytest.raises(ValueError, match="tokens of version 3, which is not in the parents"):
        make_batch(samples, base_version=9, parents=(9, 4))


def rename_interaction(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    first, second, *rest = manifest.samples
    second = dataclasses.replace(second, returns=first.returns)
    return dataclasses.replace(manifest, samples=(first, second, *rest))


def flip_token(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["tokens"][1] = (columns["tokens"][1] + 1) % VOCAB
    return manifest


def big_token(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["tokens"][1] = VOCAB
    return dataclasses.replace(manifest, samples=tuple(redigest(manifest, columns)))


def train_first(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["mask"][0] = 1
    return dataclasses.replace(manifest, samples=tuple(redigest(manifest, columns)))


def orphan(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["interaction"][3] = -1
    return dataclasses.replace(manifest, samples=tuple(redigest(manifest, columns)))


def infinite(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["logprobs"][3] = -torch.inf
    return dataclasses.replace(manifest, samples=tuple(redigest(manifest, columns)))


def drop_sample(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    return dataclasses.replace(manifest, samples=manifest.samples[1:])


def wrong_type(manifest: BatchManifest, columns: dict[str, Tensor]) -> BatchManifest:
    columns["tokens"] = columns["tokens"].long()
    return manifest


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename_interaction, "interaction s1/0 is trained in two samples"),
        (flip_token, "sample sample0: digest"),
        (big_token, "outside the model's vocabulary"),
        (train_first, "its first token has no predictor"),
        (orphan, "a trained token has no interaction"),
        (infinite, "log-prob that is not finite"),
        (drop_sample, "batch offsets give 6 samples .* names 5"),
        (wrong_type, "batch columns are"),
    ],
)
def test_a_batch_that_is_not_its_manifest_is_refused(
    spoil: Callable[[BatchManifest, dict[str, Tensor]], BatchManifest], message: str
) -> None:
    manifest, columns = assemble(two_groups())
    build(columns, manifest, VOCAB)
    with pytest.raises(ValueError, match=message):
        build(columns, spoil(manifest, columns), VOCAB)


def test_an_overflowing_gradient_is_an_error() -> None:
    _, batch = make_batch()
    broken = dataclasses.replace(batch, advantage_T=batch.advantage_T * torch.inf)
    with pytest.raises(ValueError, match="gradient norm"):
        run(broken, ONE_PASS)
