"""Checkpoints: what is published is whole, stays, and is exactly what was in memory."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import checkpoint
from engine.checkpoint import CheckpointError, TrainerState
from engine.models import PackedCausal, hf
from engine.training.probe import probe
from engine.training.step import Spans, train_step
from tests.engine.batches import make_batch, make_model, quiet, write_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def trained(folder: Path) -> TrainerState:
    manifest, batch = make_batch()
    state = checkpoint.fresh_state(hf.load(folder))
    train_step(state, batch, manifest.algorithm, 7, quiet, Spans())
    return state


def publish(state: TrainerState, out: Path, attempt: str, side: Path) -> checkpoint.Checkpoint:
    return checkpoint.publish(
        out, attempt, state, side_files=side, probe=probe(state.model), metrics={"loss": 0.5}
    )


def test_the_layout_and_the_hashes(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "v1"
    made = publish(trained(model_folder), out, "a1", model_folder)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "a1/optimizer.safetensors",
        "a1/state.json",
        "a1/weights/config.json",
        "a1/weights/model.safetensors",
        "a1/weights/tokenizer.json",
        "a1/weights/tokenizer_config.json",
        "checkpoint.json",
    ]
    raw = json.loads((out / "checkpoint.json").read_text())
    assert raw["weights"] == "a1/weights"
    weights = (out / "a1/weights/model.safetensors").read_bytes()
    assert raw["model_sha256"] == hashlib.sha256(weights).hexdigest()
    tensor = load_file(out / "a1/weights/model.safetensors")["model.norm.weight"]
    by_hand = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert raw["tensor_hashes"]["model.norm.weight"] == by_hand
    assert raw["step"] == made.step == 1
    assert raw["metrics"] == {"loss": 0.5}
    config = json.loads((out / "a1/weights/config.json").read_text())
    assert config["eos_token_id"] == 5
    assert (out / "a1/weights/model.safetensors").stat().st_mode & 0o777 == 0o644


def test_loading_gives_back_every_bit_and_the_next_step_is_the_same(
    model_folder: Path, tmp_path: Path
) -> None:
    state = trained(model_folder)
    publish(state, tmp_path / "v1", "a1", model_folder)
    made, loaded = checkpoint.load(tmp_path / "v1")
    assert loaded.step == 1
    manifest, batch = make_batch(seed=9)
    hashes: list[dict[str, str]] = []
    for current in (state, loaded):
        train_step(current, batch, manifest.algorithm, 9, quiet, Spans())
        out = tmp_path / f"v2-{len(hashes)}"
        hashes.append(publish(current, out, "a1", model_folder).tensor_hashes)
    assert hashes[0] == hashes[1]
    assert hashes[0].keys() == made.tensor_hashes.keys()
    assert all(hashes[0][name] != made.tensor_hashes[name] for name in hashes[0])


def test_the_second_attempt_answers_with_what_is_published(
    model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "v1"
    first = publish(trained(model_folder), out, "a1", model_folder)
    assert publish(trained(model_folder), out, "a2", model_folder) == first
    assert publish(trained(model_folder), out, "a1", model_folder) == first
    assert sorted(path.name for path in out.iterdir()) == ["a1", "checkpoint.json"]
    checkpoint.load(out)


def test_a_second_attempt_with_other_tensors_is_refused(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "v1"
    publish(trained(model_folder), out, "a1", model_folder)
    before = (out / "checkpoint.json").read_bytes()
    other = trained(write_model(tmp_path / "other", seed=1))
    with pytest.raises(CheckpointError, match="attempt a1 published other tensors"):
        publish(other, out, "a2", model_folder)
    assert (out / "checkpoint.json").read_bytes() == before


def test_the_loser_of_a_race_answers_with_the_winner_and_clears_up(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "v1"
    slow, fast = trained(model_folder), trained(model_folder)
    seen: list[str] = []

    def overtake(name: str) -> None:
        if name == "trainer.before_publish" and not seen:
            seen.append(name)
            publish(fast, out, "fast", model_folder)

    monkeypatch.setattr(checkpoint, "failpoint", overtake)
    assert publish(slow, out, "slow", model_folder).attempt == "fast"
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.json", "fast"]


def test_what_a_dead_attempt_left_is_overwritten(model_folder: Path, tmp_path: Path) -> None:
    left = tmp_path / "v1" / "a1" / "weights"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    publish(trained(model_folder), tmp_path / "v1", "a1", model_folder)
    assert not (left / "half").exists()
    checkpoint.load(tmp_path / "v1")


@pytest.mark.parametrize("file", ["weights/model.safetensors", "optimizer.safetensors"])
def test_damage_is_found(file: str, model_folder: Path, tmp_path: Path) -> None:
    publish(trained(model_folder), tmp_path / "v1", "a1", model_folder)
    path = tmp_path / "v1" / "a1" / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "v1")


def test_an_unpublished_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was published there"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("attempt", ["", "../x", "a/b", ".hidden"])
def test_an_attempt_is_a_plain_name(attempt: str, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="attempt"):
        publish(trained(model_folder), tmp_path / "v1", attempt, model_folder)


def test_everything_is_on_disk_before_it_is_published(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "v1"
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def at_publication(name: str) -> None:
        if name == "trainer.before_publish":
            files = {str(path) for path in out.rglob("*")}
            assert files <= set(synced)
            assert not (out / "checkpoint.json").exists()
            synced.append("checked")

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(checkpoint, "failpoint", at_publication)
    publish(trained(model_folder), out, "a1", model_folder)
    assert "checked" in synced
    assert synced[-1] == str(out)


def test_the_probe_is_what_a_replica_would_say(model_folder: Path) -> None:
    model = make_model()
    found = probe(model)
    ids, logprobs = found["token_ids"], found["logprobs"]
    assert len(ids) == len(logprobs) + 1 == 16
    for at in range(1, len(ids)):
        prompt = torch.tensor(ids[:at])
        attention = PackedCausal([0, at])
        logits = model.logits(model(prompt, attention.positions(), attention))[-1].double()
        expected = logits[ids[at]] - logits.logsumexp(0)
        assert logprobs[at - 1] == pytest.approx(expected.item(), abs=1e-5)
    assert probe(make_model(seed=1))["token_ids"] == ids
    assert probe(make_model(seed=1))["logprobs"] != logprobs
