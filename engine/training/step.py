"""One training step: a pure function of state, batch, settings and seed.

Invariant: the gradient of a minibatch is the sum over its trained tokens divided by their number in
the whole minibatch, so it does not depend on how the minibatch is cut into micro-batches.

Shapes: T packed tokens of a micro-batch, A its trained tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from archon.failpoints import failpoint
from archon.records.policy import AlgorithmSettings
from engine.algorithms import importance, kl
from engine.algorithms.policy_loss import clipped_surrogate, token_mean
from engine.checkpoint import TrainerState
from engine.models import Decoder, PackedCausal
from engine.training.batch import Batch

MICRO_BATCH_TOKENS = 8192
MICRO_BATCH_LOGITS = 1 << 28
Progress = Callable[[str, int, int], None]


class NonFiniteGradientError(ValueError):
    """The gradient overflowed; the same inputs would overflow again."""


@dataclass(frozen=True)
class MicroBatch:
    """Whole samples; `predictor_A` is the place before each trained token, whose logits give it."""

    tokens_T: Tensor
    attention: PackedCausal
    predictor_A: Tensor
    label_A: Tensor
    index_A: Tensor


@dataclass
class Totals:
    """Sums over trained tokens, over all epochs."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    ratio_max: float = 0.0
    weight_max: float = 0.0
    grad_norms: list[float] = field(default_factory=list)

    def add(self, **values_A: Tensor) -> None:
        for name, value_A in values_A.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value_A.detach().double().sum())

    def metrics(self) -> dict[str, float]:
        means = {name: value / self.tokens for name, value in self.sums.items()}
        norms = self.grad_norms
        return means | {
            "ratio_max": self.ratio_max,
            "behaviour_weight_max": self.weight_max,
            "grad_norm": sum(norms) / len(norms),
            "grad_norm_max": max(norms),
        }


class Spans:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed


def train_step(
    state: TrainerState,
    batch: Batch,
    algorithm: AlgorithmSettings,
    seed: int,
    progress: Progress,
    spans: Spans,
    micro_batch_tokens: int | None = None,
) -> dict[str, float]:
    """Change `state` by one step and return the metrics. `batch` has a signal."""
    _configure(state.optimizer, algorithm)
    size = micro_batch_tokens or _micro_batch_size(state.model)
    epochs = [
        _minibatches(batch, algorithm.minibatches, seed, epoch, size)
        for epoch in range(algorithm.epochs)
    ]
    with spans("logprobs"):
        proximal_T = _proximal(state.model, batch, algorithm.temperature, size, progress)
    total = sum(len(minibatch) for epoch in epochs for minibatch in epoch)
    totals, done = Totals(), 0
    for minibatch in (minibatch for epoch in epochs for minibatch in epoch):
        count = sum(len(micro.index_A) for micro in minibatch)
        state.optimizer.zero_grad()
        for micro in minibatch:
            with spans("forward_backward"):
                _backward(state.model, micro, batch, proximal_T, algorithm, count, totals)
            done += 1
            progress("forward_backward", done, total)
        with spans("optimizer"):
            totals.grad_norms.append(_apply(state, algorithm.max_grad_norm))
        failpoint("trainer.mid_step")
    state.step += 1
    return totals.metrics() | batch.metrics | {"tokens": float(batch.trained_tokens)}


def _micro_batch_size(model: Decoder) -> int:
    """Tokens; fewer for a large vocabulary, whose logits are the largest thing in memory."""
    return max(1, min(MICRO_BATCH_TOKENS, MICRO_BATCH_LOGITS // model.config.vocab_size))


def _configure(optimizer: torch.optim.AdamW, algorithm: AlgorithmSettings) -> None:
    for group in optimizer.param_groups:
        group["lr"] = algorithm.lr
        group["betas"] = (algorithm.beta1, algorithm.beta2)
        group["eps"] = algorithm.eps
        group["weight_decay"] = algorithm.weight_decay


def _minibatches(
    batch: Batch, count: int, seed: int, epoch: int, micro_batch_tokens: int
) -> list[list[MicroBatch]]:
    """Whole samples in an order drawn from the seed; those without a trained token drop out."""
    samples = [s for s in range(len(batch.bounds) - 1) if _trained(batch, s)]
    if count > 1:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(samples), generator=generator).tolist()
        samples = [samples[at] for at in order]
    size = math.ceil(len(samples) / count)
    return [
        _micro_batches(batch, samples[at : at + size], micro_batch_tokens)
        for at in range(0, len(samples), size)
    ]


def _trained(batch: Batch, sample: int) -> bool:
    return bool(batch.trained_T[batch.bounds[sample] : batch.bounds[sample + 1]].any())


def _micro_batches(batch: Batch, samples: list[int], tokens: int) -> list[MicroBatch]:
    """Samples of like length together, so that little is padded; one sample at least in each."""
    length = {s: batch.bounds[s + 1] - batch.bounds[s] for s in samples}
    parts: list[list[int]] = []
    held = tokens + 1
    for sample in sorted(samples, key=lambda s: (length[s], s)):
        if held + length[sample] > tokens:
            parts.append([])
            held = 0
        parts[-1].append(sample)
        held += length[sample]
    return [_pack(batch, part) for part in parts]


def _pack(batch: Batch, samples: list[int]) -> MicroBatch:
    places = [torch.arange(batch.bounds[s], batch.bounds[s + 1]) for s in samples]
    at_T = torch.cat(places)
    offsets = torch.tensor([0] + [len(place) for place in places]).cumsum(0)
    tokens_T = batch.tokens_T[at_T]
    trained_A = batch.trained_T[at_T].nonzero().squeeze(1)
    return MicroBatch(
        tokens_T=tokens_T,
        attention=PackedCausal(offsets),
        predictor_A=trained_A - 1,
        label_A=tokens_T[trained_A],
        index_A=at_T[trained_A],
    )


def _log_softmax(model: Decoder, micro: MicroBatch, temperature: float) -> Tensor:
    positions_T = micro.attention.positions()
    hidden_TD = model(micro.tokens_T, positions_T, micro.attention)
    logits_AV = model.logits(hidden_TD.index_select(0, micro.predictor_A))
    return (logits_AV / temperature).log_softmax(-1)


def _pick(logprobs_AV: Tensor, label_A: Tensor) -> Tensor:
    return logprobs_AV.gather(1, label_A[:, None]).squeeze(1)


def _proximal(
    model: Decoder, batch: Batch, temperature: float, micro_tokens: int, progress: Progress
) -> Tensor:
    """Log-probs of the trained tokens under the weights that the step starts from."""
    samples = [s for s in range(len(batch.bounds) - 1) if _trained(batch, s)]
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    proximal_T = torch.zeros(len(batch.tokens_T), dtype=dtype)
    micro_batches = _micro_batches(batch, samples, micro_tokens)
    with torch.no_grad():
        for done, micro in enumerate(micro_batches, start=1):
            logprobs_AV = _log_softmax(model, micro, temperature)
            proximal_T[micro.index_A] = _pick(logprobs_AV, micro.label_A)
            progress("logprobs", done, len(micro_batches))
    return proximal_T


def _backward(
    model: Decoder,
    micro: MicroBatch,
    batch: Batch,
    proximal_T: Tensor,
    algorithm: AlgorithmSettings,
    count: int,
    totals: Totals,
) -> None:
    logprobs_AV = _log_softmax(model, micro, algorithm.temperature)
    logprob_A = _pick(logprobs_AV, micro.label_A)
    proximal_A, behaviour_A = proximal_T[micro.index_A], batch.behaviour_T[micro.index_A]
    surrogate = clipped_surrogate(
        logprob_A,
        proximal_A,
        batch.advantage_T[micro.index_A],
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    weight_A = importance.truncated(proximal_A, behaviour_A, algorithm.behaviour_cap)
    entropy_A = -(logprobs_AV.exp() * logprobs_AV).sum(-1)
    loss_A = weight_A * surrogate.loss_T - algorithm.entropy_coef * entropy_A
    token_mean(loss_A, count).backward()
    totals.tokens += len(logprob_A)
    totals.ratio_max = max(totals.ratio_max, float(surrogate.ratio_T.max()))
    totals.weight_max = max(totals.weight_max, float(weight_A.max()))
    totals.add(
        loss=loss_A,
        entropy=entropy_A,
        clip_fraction=surrogate.clipped_T,
        approx_kl=kl.k3(proximal_A, logprob_A),
        behaviour_kl=kl.k3(behaviour_A, proximal_A),
    )


def _apply(state: TrainerState, max_grad_norm: float) -> float:
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), max_grad_norm)
    if not torch.isfinite(norm):
        raise NonFiniteGradientError(f"gradient norm {float(norm)} at step {state.step + 1}")
    state.optimizer.step()
    return float(norm)
