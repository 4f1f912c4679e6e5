"""Small models, and a runner and an engine in this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from engine.models import Decoder, ModelConfig, PackedCausal, hf
from engine.serving.fused import FusedDecoder
from engine.serving.rows import Row, Rows
from engine.serving.runner import Runner
from engine.serving.server import Engine, Options
from engine.serving.weights import Weights
from engine.serving.wire import Request

QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    qk_norm=True,
    tie_word_embeddings=True,
)
LLAMA = replace(
    QWEN3, architecture="LlamaForCausalLM", qk_norm=False, tie_word_embeddings=False, num_kv_heads=4
)
QWEN2 = replace(QWEN3, architecture="Qwen2ForCausalLM", qk_norm=False, attention_bias=True)
QWEN3_BIAS = replace(QWEN3, attention_bias=True, num_kv_heads=1)
CONFIGS = {"qwen3": QWEN3, "llama": LLAMA, "qwen2": QWEN2, "qwen3-bias": QWEN3_BIAS}


def decoder(config: ModelConfig = QWEN3, seed: int = 0) -> Decoder:
    """Weights wide enough that a wrong key or value changes every log-prob visibly."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(float("norm" in name), 0.2, generator=generator)
    return model


def save(folder: Path, seed: int, config: ModelConfig = QWEN3) -> Decoder:
    model = decoder(config, seed)
    hf.save(model, folder)
    return model


def request(
    token_ids: list[int],
    max_tokens: int = 16,
    *,
    seed: int | None = 1,
    temperature: float = 1.0,
    stop: frozenset[int] = frozenset(),
    prompt_logprobs: bool = False,
    top_k: int = 0,
) -> Request:
    return Request(
        request_id=f"r{seed}",
        token_ids=token_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=top_k,
        seed=seed,
        stop=stop,
        prompt_logprobs=prompt_logprobs,
        stream=True,
    )


def teacher_forced(model: Decoder, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[1:], by one pass over the whole."""
    with torch.no_grad():
        attention = PackedCausal([0, len(ids)])
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attention)
        logp = torch.log_softmax(model.logits(hidden).double() / temperature, dim=-1)
    return [float(logp[i, token]) for i, token in enumerate(ids[1:])]


class Batch:
    """Rows stepped by hand, without the decoding thread."""

    def __init__(self, model: Decoder) -> None:
        self.runner = Runner(16, None, torch.float32)
        self.rows = Rows()
        self.finished: list[Row] = []
        self.swap(model, 1)

    def swap(self, model: Decoder, version: int) -> None:
        positions = model.config.max_position_embeddings
        self.runner.swap(Weights(FusedDecoder(model, positions), version, "", positions))
        self.rows.forget_cache()

    def add(self, r: Request) -> Row:
        assert r.seed is not None
        row = Row(r, r.seed, lambda _: None, list(r.token_ids))
        self.rows.rows.append(row)
        return row

    def step(self) -> None:
        assert self.runner.weights is not None
        sampled = self.runner.step(self.rows)
        ended = [
            s.slot
            for s in sampled
            if self.rows.rows[s.slot].append(s.token_id, s.logprob, self.runner.weights.version)
        ]
        for slot in sorted(ended, reverse=True):
            self.finished.append(self.rows.remove(slot, self.runner.cache))

    def run(self, *requests: Request) -> list[Row]:
        rows = [self.add(r) for r in requests]
        while self.rows.rows:
            self.step()
        return rows


def answer(row: Row) -> list[int]:
    return row.ids[row.prompt_length :]


@contextmanager
def running(**options: object) -> Iterator[tuple[Engine, str]]:
    """An engine with a thread and an event loop of its own, and its address."""
    engine = Engine(Options(**options))  # type: ignore[arg-type]
    listening = threading.Event()
    ports: list[int] = []

    def on_port(port: int) -> None:
        ports.append(port)
        listening.set()

    thread = threading.Thread(target=lambda: asyncio.run(engine.run(on_port)), daemon=True)
    thread.start()
    assert listening.wait(10)
    try:
        yield engine, f"http://127.0.0.1:{ports[0]}"
    finally:
        engine.stop()
        thread.join(10)
        assert not thread.is_alive()
