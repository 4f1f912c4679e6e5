"""Batches and manifests for the trainer's tests, and a policy small enough to step in no time."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from archon.records.policy import AlgorithmSettings
from archon.records.training import BatchManifest, ReturnRef, SampleRef
from archon.records.wire import dumps
from engine import checkpoint
from engine.models import Decoder, ModelConfig, hf
from engine.training.batch import COLUMNS, Batch, build

VOCAB = 23
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 5,
    }
)


def make_model(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(CONFIG)


def write_model(folder: Path, seed: int = 0) -> Path:
    hf.save(make_model(seed), folder, CONFIG.to_hf() | {"eos_token_id": 5})
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


@dataclass
class Made:
    """One sample in the making: `turns` are (prompt length, sampled length, return) triples."""

    group: str
    session: str
    turns: list[tuple[int, int, float]]
    version: int = 0
    columns: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, generator: torch.Generator) -> None:
        mask: list[int] = []
        interaction: list[int] = []
        for at, (prompt, sampled, _) in enumerate(self.turns):
            mask += [0] * prompt + [1] * sampled
            interaction += [-1] * prompt + [at] * sampled
        mask_T = torch.tensor(mask, dtype=torch.uint8)
        length = len(mask)
        drawn_T = -torch.rand(length, generator=generator) * 2 - 2
        self.columns = {
            "tokens": torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32),
            "mask": mask_T,
            "logprobs": torch.where(mask_T == 1, drawn_T, 0.0),
            "versions": torch.where(mask_T == 1, self.version, -1).to(torch.int32),
            "interaction": torch.tensor(interaction, dtype=torch.int32),
        }

    def reference(self, at: int) -> SampleRef:
        digest = hashlib.sha256()
        for name in COLUMNS:
            digest.update(self.columns[name].numpy().tobytes())
        return SampleRef(
            sample_id=f"sample{at}",
            session_id=self.session,
            group_id=self.group,
            digest=digest.hexdigest(),
            n_tokens=len(self.columns["mask"]),
            n_trainable=int(self.columns["mask"].sum()),
            min_version=self.version,
            max_version=self.version,
            returns=tuple(
                ReturnRef(f"{self.session}/{turn}", value, 1)
                for turn, (_, _, value) in enumerate(self.turns)
            ),
        )


def two_groups() -> list[Made]:
    return [
        Made("a", "s1", [(3, 2, 1.0), (2, 1, 1.0)]),
        Made("b", "s2", [(4, 3, 0.0)]),
        Made("a", "s3", [(3, 1, 0.0)]),
        Made("b", "s4", [(4, 2, 0.5), (3, 2, 0.25)]),
        Made("a", "s5", [(3, 2, 0.0)]),
        Made("b", "s6", [(4, 6, 0.75)]),
    ]


def assemble(
    samples: list[Made], base_digest: str = "d0", **changes: Any
) -> tuple[BatchManifest, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    for sample in samples:
        sample.fill(generator)
    columns = {name: torch.cat([s.columns[name] for s in samples]) for name in COLUMNS}
    lengths = [len(sample.columns["mask"]) for sample in samples]
    columns["offsets"] = torch.tensor([0, *lengths]).cumsum(0)
    fields: dict[str, Any] = {
        "manifest_id": "m1",
        "tenant_id": "t",
        "policy_id": "p",
        "kind": "fresh",
        "base_version": 0,
        "base_checkpoint": "c0",
        "base_digest": base_digest,
        "parents": (0,),
        "samples": tuple(sample.reference(at) for at, sample in enumerate(samples)),
        "baseline": None,
        "algorithm": AlgorithmSettings(epochs=2, minibatches=2, lr=1e-2),
        "max_staleness": 2,
        "codec_digest": "",
        "engine_build": "test",
        "seed": 7,
        "created_at": "2025-01-01T00:00:00+00:00",
    }
    return BatchManifest(**(fields | changes)), columns


def make_batch(samples: list[Made] | None = None, **changes: Any) -> tuple[BatchManifest, Batch]:
    manifest, columns = assemble(samples or two_groups(), **changes)
    return manifest, build(columns, manifest, VOCAB)


def write_step(
    folder: Path, base: Path, samples: list[Made] | None = None, **changes: Any
) -> dict[str, str]:
    """The files of a step on `base`; returns the fields of its request."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = checkpoint.read(base).model_sha256
    manifest, columns = assemble(samples or two_groups(), digest, **changes)
    (folder / "manifest.json").write_text(dumps(manifest))
    save_file(columns, folder / "batch.safetensors")
    return {
        "manifest": str(folder / "manifest.json"),
        "batch": str(folder / "batch.safetensors"),
        "base": str(base),
    }


def quiet(span: str, done: int, total: int) -> None:
    json.dumps([span, done, total])
