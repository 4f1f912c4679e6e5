"""What is in memory is used when, and only when, it is what the step starts from."""

from pathlib import Path

import pytest

from engine import checkpoint
from engine.training import trainer as module
from engine.training.step import NonFiniteGradientError
from engine.training.trainer import Trainer
from tests.engine.batches import quiet, write_model, write_step


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were loaded from."""
    found: list[str] = []
    load = checkpoint.load

    def counted(folder: str) -> object:
        found.append(Path(folder).name)
        return load(folder)

    monkeypatch.setattr(checkpoint, "load", counted)
    return found


def test_memory_is_used_only_for_the_checkpoint_that_it_equals(
    tmp_path: Path, loads: list[str]
) -> None:
    trainer = Trainer()
    v0, v1, v2 = (tmp_path / name for name in ("v0", "v1", "v2"))
    trainer.init(str(write_model(tmp_path / "model")), str(v0), "a1")
    trainer.step(**write_step(tmp_path / "m1", v0), out=str(v1), attempt="a1", progress=quiet)
    trainer.step(**write_step(tmp_path / "m2", v1), out=str(v2), attempt="a1", progress=quiet)
    assert loads == []
    again = write_step(tmp_path / "m3", v1, seed=12)
    trainer.step(**again, out=str(tmp_path / "v3"), attempt="a1", progress=quiet)
    assert loads == ["v1"]


def test_a_step_that_failed_half_way_leaves_nothing_to_start_from(
    tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    v0 = tmp_path / "v0"
    trainer.init(str(write_model(tmp_path / "model")), str(v0), "a1")
    fields = write_step(tmp_path / "m1", v0)
    reference = trainer.step(**fields, out=str(tmp_path / "ref"), attempt="a1", progress=quiet)
    step = module.train_step

    def fail_late(*arguments: object) -> None:
        step(*arguments)  # type: ignore[arg-type]
        raise NonFiniteGradientError("half way")

    monkeypatch.setattr(module, "train_step", fail_late)
    with pytest.raises(NonFiniteGradientError):
        trainer.step(**fields, out=str(tmp_path / "v1"), attempt="a1", progress=quiet)
    monkeypatch.setattr(module, "train_step", step)
    loads.clear()
    made = trainer.step(**fields, out=str(tmp_path / "v1"), attempt="a2", progress=quiet)
    assert loads == ["v0"]
    assert made["checkpoint"]["model_sha256"] == reference["checkpoint"]["model_sha256"]
