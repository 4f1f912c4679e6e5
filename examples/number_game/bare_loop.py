"""Learning without the stack: does the policy learn the game with these settings?

The game, the model, the batch checks and the training step are the real ones; only what stands
between them is missing: sampling is a forward pass and versions are a list. Batches are sampled
`--behind` versions before the base of the step that trains on them, as in a run where acting and
training overlap.

    python -m examples.number_game.bare_loop --seeds 3 --behind 1
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archon.records.policy import AlgorithmSettings
from archon.records.training import BatchManifest, ReturnRef, SampleRef
from engine.checkpoint import fresh_state
from engine.models import Decoder, PackedCausal
from engine.training.batch import COLUMNS, build
from engine.training.step import Spans, train_step
from examples.number_game import settings
from examples.number_game.game import NumberGame
from examples.number_game.model import ASSISTANT, CONFIG, SPECIALS, USER, WORDS, draw

VOCABULARY = SPECIALS + WORDS
IDS = {word: at for at, word in enumerate(VOCABULARY)}


@dataclasses.dataclass
class Episode:
    group: str
    version: int
    game: NumberGame
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    turns: list[int] = dataclasses.field(default_factory=list)

    def prompt(self) -> None:
        self._append([IDS[USER], IDS[str(self.game.answer)], IDS[ASSISTANT]], 0.0, -1)

    def sampled(self, token: int, logprob: float) -> None:
        self._append([token], logprob, self.game.turns)
        word = VOCABULARY[token]
        self.game.move("" if word in SPECIALS else word)

    def _append(self, tokens: list[int], logprob: float, turn: int) -> None:
        self.tokens += tokens
        self.logprobs += [logprob] * len(tokens)
        self.turns += [turn] * len(tokens)


def play(
    model: Decoder, version: int, targets: list[dict[str, int]], generator: torch.Generator
) -> list[Episode]:
    """One group for each target, all games in step."""
    episodes = [
        Episode(f"v{version}g{at}", version, NumberGame(task["target"]))
        for at, task in enumerate(targets)
        for _ in range(settings.GROUP_SIZE)
    ]
    while live := [episode for episode in episodes if not episode.game.done]:
        for episode in live:
            episode.prompt()
        logprobs_SV = next_logprobs(model, [episode.tokens for episode in live])
        drawn_S = torch.multinomial(logprobs_SV.exp(), 1, generator=generator)
        picked_S = logprobs_SV.gather(1, drawn_S)
        for episode, token, logprob in zip(live, drawn_S, picked_S, strict=True):
            episode.sampled(int(token), float(logprob))
    return episodes


def next_logprobs(model: Decoder, prompts: Sequence[list[int]]) -> Tensor:
    attention = PackedCausal(torch.tensor([0] + [len(p) for p in prompts]).cumsum(0))
    tokens_T = torch.tensor([token for prompt in prompts for token in prompt])
    with torch.no_grad():
        hidden_TD = model(tokens_T, attention.positions(), attention)
        last_S = torch.tensor(attention.bounds[1:]) - 1
        return model.logits(hidden_TD[last_S]).log_softmax(-1)


def pack(
    episodes: list[Episode], base: int, algorithm: AlgorithmSettings, seed: int
) -> tuple[BatchManifest, dict[str, Tensor]]:
    """The batch and the manifest that an assembler would have made of these episodes."""
    turns_T = torch.tensor([t for e in episodes for t in e.turns], dtype=torch.int32)
    lengths = [len(episode.tokens) for episode in episodes]
    versions_T = torch.repeat_interleave(
        torch.tensor([e.version for e in episodes]), torch.tensor(lengths)
    )
    columns = {
        "tokens": torch.tensor([t for e in episodes for t in e.tokens], dtype=torch.int32),
        "mask": (turns_T >= 0).to(torch.uint8),
        "logprobs": torch.tensor([x for e in episodes for x in e.logprobs]),
        "versions": torch.where(turns_T >= 0, versions_T, -1).to(torch.int32),
        "interaction": turns_T,
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    samples = []
    for at, (episode, start) in enumerate(zip(episodes, columns["offsets"].tolist(), strict=False)):
        end = start + len(episode.tokens)
        digest = hashlib.sha256()
        for name in COLUMNS:
            digest.update(columns[name][start:end].numpy().data)
        session = f"{episode.group}s{at}"
        samples.append(
            SampleRef(
                sample_id=session,
                session_id=session,
                group_id=episode.group,
                digest=digest.hexdigest(),
                n_tokens=len(episode.tokens),
                n_trainable=episode.game.turns,
                min_version=episode.version,
                max_version=episode.version,
                returns=tuple(
                    ReturnRef(f"{session}/{turn}", episode.game.reward, 0)
                    for turn in range(episode.game.turns)
                ),
            )
        )
    oldest = min(episode.version for episode in episodes)
    manifest = BatchManifest(
        manifest_id=f"m{base + 1}",
        tenant_id="bare",
        policy_id="bare",
        kind="fresh",
        base_version=base,
        base_checkpoint="",
        base_digest="",
        parents=tuple(range(base, oldest - 1, -1)),
        samples=tuple(samples),
        baseline=None,
        algorithm=algorithm,
        max_staleness=settings.MAX_STALENESS,
        codec_digest="",
        engine_build="",
        seed=seed,
        created_at="",
    )
    return manifest, columns


@dataclasses.dataclass
class Curve:
    rewards: list[float]
    seconds: float
    step_seconds: float
    last: dict[str, float]

    @property
    def first(self) -> float:
        return sum(self.rewards[:320]) / 320

    @property
    def final(self) -> float:
        return sum(self.rewards[-640:]) / 640


def learn(seed: int, behind: int, steps: int, algorithm: AlgorithmSettings) -> Curve:
    generator = torch.Generator().manual_seed(seed)
    state = fresh_state(draw(CONFIG, seed))
    actors = deque([copy.deepcopy(state.model)], maxlen=behind + 1)
    groups = settings.GROUPS_PER_STEP
    targets = settings.tasks(groups * steps, seed)
    curve = Curve([], 0.0, 0.0, {})
    started = time.perf_counter()
    for step in range(steps):
        actor, version = actors[0], max(0, step - behind)
        episodes = play(actor, version, targets[step * groups : (step + 1) * groups], generator)
        manifest, columns = pack(episodes, step, algorithm, seed)
        batch = build(columns, manifest, CONFIG.vocab_size)
        before = time.perf_counter()
        if batch.signal:
            curve.last = train_step(state, batch, algorithm, step, ignore, Spans())
        curve.step_seconds += (time.perf_counter() - before) / steps
        curve.rewards += [episode.game.reward for episode in episodes]
        actors.append(copy.deepcopy(state.model))
    curve.seconds = time.perf_counter() - started
    return curve


def ignore(span: str, done: int, total: int) -> None:
    """No progress is shown."""


def main() -> int:
    parser = argparse.ArgumentParser(description="the number game in a bare loop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--behind", type=int, default=1)
    parser.add_argument("--steps", type=int, default=settings.STEPS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    changes: dict[str, Any] = {}
    for item in arguments.set:
        name, _, value = item.partition("=")
        changes[name] = type(getattr(AlgorithmSettings(), name))(value)
    algorithm = AlgorithmSettings(**(settings.ALGORITHM | changes))
    print("seed  first 320  last 640  seconds  s/step  entropy  clip")
    passed = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        curve = learn(seed, arguments.behind, arguments.steps, algorithm)
        passed += curve.first <= 0.2 and curve.final >= 0.5
        print(
            f"{seed:4d}  {curve.first:9.3f}  {curve.final:8.3f}  {curve.seconds:7.1f}  "
            f"{curve.step_seconds:6.3f}  {curve.last['entropy']:7.3f}  "
            f"{curve.last['clip_fraction']:.3f}",
            flush=True,
        )
    print(f"{passed} of {arguments.seeds} seeds: first 320 at most 0.2, last 640 at least 0.5")
    return 0 if passed == arguments.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
