"""The engine as a process: how it starts, what it refuses, how it ends."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from archon.inference import EngineClient, EngineUnavailable, GenerateRequest, SamplingParams
from engine.serving.__main__ import parse
from tests.engine.serving.kit import save


def test_it_listens_beyond_loopback_only_with_a_token(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parse(["--host", "0.0.0.0"])
    with pytest.raises(SystemExit):
        parse(["--max-batch", "0"])
    token = tmp_path / "token"
    token.write_text("\n")
    with pytest.raises(SystemExit):
        parse(["--control-token-file", str(token)])
    token.write_text("secret\n")
    assert parse(["--host", "0.0.0.0", "--control-token-file", str(token)]).token == "secret"
    assert parse(["--host", "::1", "--max-model-len", "64"]).max_model_len == 64


async def test_a_process_starts_serves_and_ends(tmp_path: Path) -> None:
    save(tmp_path / "v1", 1)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.serving", "--max-model-len", "32"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = re.search(r"port (\d+)", process.stderr.readline())
        assert found is not None
        async with EngineClient(f"http://127.0.0.1:{found.group(1)}") as client:
            await client.health()
            assert time.monotonic() - started < 30  # seconds on an idle machine
            update = await client.update(1, str(tmp_path / "v1"))
            assert update.changed and update.seconds < 5
            request = GenerateRequest("r", (3, 17, 4), SamplingParams(100, seed=1))
            assert len((await client.complete(request)).token_ids) == 29
            await client.pause()
            held = asyncio.create_task(client.complete(request))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(EngineUnavailable):  # nothing had been answered yet
                await held
        assert process.wait(10) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


def test_the_front_does_not_import_torch() -> None:
    """What a test of the wire needs starts at once."""
    code = "import sys, engine.serving.wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
