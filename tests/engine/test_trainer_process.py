"""The trainer as its parent sees it: lines in, lines out, death at the worst moments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import checkpoint
from tests.engine.batches import Made, two_groups, write_model, write_step

ROOT = Path(__file__).parents[2]


class Client:
    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.training"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"event": "eof"}

    def send(self, **fields: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def call(self, **fields: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The answer, and the progress before it."""
        self.send(**fields)
        progress = []
        while (found := self.read())["event"] == "progress":
            progress.append(found)
        return found, progress

    def close(self) -> int:
        self.process.communicate(timeout=20)
        return self.process.returncode


@pytest.fixture(scope="module")
def trainer() -> Iterator[Client]:
    client = Client()
    assert client.read() == {"event": "ready"}
    yield client
    assert client.close() == 0


@pytest.fixture
def base(trainer: Client, tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    made, _ = trainer.call(op="init", model=str(model), out=str(tmp_path / "v0"), attempt="a1")
    assert made["event"] == "done"
    return tmp_path / "v0"


def test_init_then_steps_in_memory_and_reloaded_are_the_same_bytes(
    trainer: Client, base: Path, tmp_path: Path
) -> None:
    assert checkpoint.read(base).step == 0
    first = write_step(tmp_path / "m1", base)
    answer, progress = trainer.call(op="step", **first, out=str(tmp_path / "v1"), attempt="a1")
    assert answer["event"] == "done"
    assert answer["checkpoint"]["step"] == 1
    assert answer["checkpoint"]["model_sha256"] != checkpoint.read(base).model_sha256
    assert set(answer["spans"]) == {"load", "logprobs", "forward_backward", "optimizer", "save"}
    assert [p["span"] for p in progress] == ["logprobs"] + ["forward_backward"] * 4
    assert [(p["done"], p["total"]) for p in progress[1:]] == [(n, 4) for n in (1, 2, 3, 4)]
    # v1 is in memory now: a second step from it, and then the same from the disk.
    second = write_step(tmp_path / "m2", tmp_path / "v1", seed=11)
    held, _ = trainer.call(op="step", **second, out=str(tmp_path / "v2"), attempt="a1")
    again, _ = trainer.call(op="step", **second, out=str(tmp_path / "v2b"), attempt="a1")
    once_more, _ = trainer.call(op="step", **second, out=str(tmp_path / "v2"), attempt="a2")
    assert held["checkpoint"]["model_sha256"] == again["checkpoint"]["model_sha256"]
    assert held["checkpoint"]["optimizer_sha256"] == again["checkpoint"]["optimizer_sha256"]
    assert once_more["checkpoint"] == held["checkpoint"]
    assert held["checkpoint"]["step"] == 2


def test_an_empty_signal_is_said_and_nothing_written(
    trainer: Client, base: Path, tmp_path: Path
) -> None:
    equal = [Made("a", "s1", [(3, 2, 0.5)]), Made("a", "s2", [(3, 2, 0.5)])]
    fields = write_step(tmp_path / "m1", base, equal)
    answer, _ = trainer.call(op="step", **fields, out=str(tmp_path / "v1"), attempt="a1")
    assert answer["event"] == "empty_signal"
    assert "m1: every advantage is 0" in answer["reason"]
    untrained = [Made("a", "s1", [(3, 0, 0.5)]), Made("a", "s2", [(3, 0, 1.0)])]
    fields = write_step(tmp_path / "m2", base, untrained)
    answer, _ = trainer.call(op="step", **fields, out=str(tmp_path / "v1"), attempt="a1")
    assert answer["event"] == "empty_signal"
    assert "no token can be trained" in answer["reason"]
    assert not (tmp_path / "v1").exists()


def test_errors_are_answers_and_the_process_goes_on(
    trainer: Client, base: Path, tmp_path: Path
) -> None:
    fields = write_step(tmp_path / "m1", base)
    out = {"out": str(tmp_path / "v1"), "attempt": "a1"}
    wrong, _ = trainer.call(op="fly")
    assert (wrong["event"], wrong["retryable"]) == ("error", False)
    lost, _ = trainer.call(op="step", **(fields | {"manifest": str(tmp_path / "none")}), **out)
    assert (lost["type"], lost["retryable"]) == ("FileNotFoundError", True)
    other = write_step(tmp_path / "m2", base, two_groups()[:4])
    mixed, _ = trainer.call(op="step", **(fields | {"batch": other["batch"]}), **out)
    assert (mixed["type"], mixed["retryable"]) == ("ValueError", False)
    manifest = json.loads(Path(fields["manifest"]).read_text())
    Path(other["manifest"]).write_text(json.dumps(manifest | {"base_digest": "other"}))
    moved, _ = trainer.call(op="step", **(fields | {"manifest": other["manifest"]}), **out)
    assert "base_digest other is not" in moved["message"]
    assert not (tmp_path / "v1").exists()
    good, _ = trainer.call(op="step", **fields, **out)
    assert good["event"] == "done"


def test_death_at_every_commit_point_is_followed_by_the_same_step(
    trainer: Client, base: Path, tmp_path: Path
) -> None:
    fields = write_step(tmp_path / "m1", base)
    reference, _ = trainer.call(op="step", **fields, out=str(tmp_path / "ref"), attempt="a1")
    out = tmp_path / "v1"
    published = []
    for at, point in enumerate(("mid_step", "before_publish", "after_publish")):
        dying = Client(ARCHON_FAILPOINTS=f"trainer.{point}=kill")
        assert dying.read() == {"event": "ready"}
        answer, _ = dying.call(op="step", **fields, out=str(out), attempt=f"a{at}")
        assert answer == {"event": "eof"}
        assert dying.close() == -signal.SIGKILL
        published.append((out / "checkpoint.json").exists())
    assert published == [False, False, True]
    after, _ = trainer.call(op="step", **fields, out=str(out), attempt="a9")
    assert after["checkpoint"]["attempt"] == "a2"
    assert after["checkpoint"]["tensor_hashes"] == reference["checkpoint"]["tensor_hashes"]
    assert after["checkpoint"]["model_sha256"] == reference["checkpoint"]["model_sha256"]


def test_it_ends_with_its_parent_even_in_the_middle_of_a_step(base: Path, tmp_path: Path) -> None:
    fields = write_step(tmp_path / "m1", base) | {"out": str(tmp_path / "v1"), "attempt": "a1"}
    script = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'engine.training'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        f"child.stdin.write(json.dumps({dict(op='step', **fields)!r}) + '\\n')\n"
        "child.stdin.flush()\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ARCHON_FAILPOINTS": "trainer.mid_step=sleep:60"},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, f"trainer {pid} outlived its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_more_than_one_rank_is_refused_by_name() -> None:
    client = Client(WORLD_SIZE="2")
    _, errors = client.process.communicate(timeout=60)
    assert client.process.returncode == 2
    assert "WORLD_SIZE 2" in errors
