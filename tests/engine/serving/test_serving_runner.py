"""Log-probs and tokens of the batched, cached path against one pass over the whole sequence."""

from pathlib import Path

import pytest
import torch
import transformers

from engine.models import PackedCausal, hf
from engine.serving import runner as runner_module
from engine.serving.fused import FusedDecoder
from tests.engine.serving.kit import (
    CONFIGS,
    QWEN3,
    Batch,
    answer,
    decoder,
    request,
    save,
    teacher_forced,
)

PROMPTS = [[3, 17, 4, 9], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [31, 0, 31], [8, 8], [11, 29], [6], [7]]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_forward_equals_the_decoder(family: str, dtype: torch.dtype) -> None:
    model = decoder(CONFIGS[family]).to(dtype)
    ids, positions = torch.arange(20) % 32, torch.arange(20)
    fused = FusedDecoder(model, 64)
    rows = torch.tensor([19, 4])
    with torch.inference_mode():
        attention = PackedCausal([0, 20])
        expected = model(ids, positions, attention)
        every = fused.hidden(ids, positions, attention, None)
        assert (every - expected).abs().max() < 1e-5
        some = fused.hidden(ids, positions, attention, rows)
        assert (some - expected[rows]).abs().max() < 1e-5
        assert torch.equal(fused.logits(expected), model.logits(expected))


def test_fused_forward_in_bfloat16_is_near() -> None:
    model = decoder().to(torch.bfloat16)
    ids, positions = torch.arange(20) % 32, torch.arange(20)
    with torch.inference_mode():
        hidden = FusedDecoder(model, 64).hidden(ids, positions, PackedCausal([0, 20]), None)
        expected = decoder()(ids, positions, PackedCausal([0, 20]))
    assert hidden.dtype == torch.bfloat16
    assert (hidden - expected).abs().max() < 0.15


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_teacher_forcing(family: str, temperature: float) -> None:
    model = decoder(CONFIGS[family])
    requests = [
        request(p, 5 + 3 * i, seed=i, temperature=temperature) for i, p in enumerate(PROMPTS)
    ]
    for row, r in zip(Batch(model).run(*requests), requests, strict=True):
        assert len(answer(row)) == r.max_tokens
        expected = teacher_forced(model, row.ids, temperature)[row.prompt_length - 1 :]
        assert row.logprobs == pytest.approx(expected, abs=1e-5)


def test_greedy_logprobs_equal_transformers(tmp_path: Path) -> None:
    model = save(tmp_path, 3)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (row,) = Batch(model).run(request([3, 17, 4], 12, temperature=0.0))
    with torch.no_grad():
        logp = torch.log_softmax(oracle(torch.tensor([row.ids])).logits[0], dim=-1)
    assert answer(row) == logp[2:-1].argmax(dim=-1).tolist()
    expected = [float(logp[2 + i, token]) for i, token in enumerate(answer(row))]
    assert row.logprobs == pytest.approx(expected, abs=1e-5)


def test_prompts_read_in_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 5 tokens end inside prompts, between rows, and beside rows that decode."""
    requests = [request(p * 3, 6, seed=i) for i, p in enumerate(PROMPTS)]
    whole = Batch(decoder()).run(*requests)
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 5)
    pieces = Batch(decoder()).run(*requests)
    for a, b in zip(whole, pieces, strict=True):
        assert answer(a) == answer(b)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_sample_does_not_depend_on_the_batch() -> None:
    requests = [request(p, 4 + 2 * i, seed=40 + i) for i, p in enumerate(PROMPTS)]
    together = Batch(decoder()).run(*requests)
    alone = [Batch(decoder()).run(r)[0] for r in requests]
    assert [answer(a) for a in together] == [answer(b) for b in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_rows_that_come_and_go_keep_their_own_cache() -> None:
    """Short answers end at the front, in the middle and at the end of the batch, others enter."""
    model, batch = decoder(), Batch(decoder())
    lengths = [2, 9, 1, 14, 3, 1, 7, 12]
    rows = []
    for i, length in enumerate(lengths):
        rows.append(batch.add(request(PROMPTS[i], length, seed=i)))
        batch.step()
    while batch.rows.rows:
        batch.step()
    assert [len(answer(row)) for row in rows] == lengths
    for row in rows:
        expected = teacher_forced(model, row.ids)[row.prompt_length - 1 :]
        assert row.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_removed_row_leaves_the_others_whole(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 8)
    model, batch = decoder(), Batch(decoder())
    rows = [batch.add(request(PROMPTS[i], 8, seed=i)) for i in (0, 1)]
    batch.step()
    rows += [batch.add(request(PROMPTS[2] * 2, 8, seed=2)), batch.add(request([4], 8, seed=3))]
    batch.step()
    assert batch.rows.ready == 2, "the third is still being read"
    batch.rows.remove(victim, batch.runner.cache)
    while batch.rows.rows:
        batch.step()
    for row in batch.finished:
        assert row is not rows[victim]
        expected = teacher_forced(model, row.ids)[row.prompt_length - 1 :]
        assert row.logprobs == pytest.approx(expected, abs=1e-5)
    assert len(batch.finished) == 3


def test_a_swap_recomputes_what_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, log-probs are those of the new weights over the whole prefix."""
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 16)
    old, new = decoder(seed=1), decoder(seed=2)
    batch = Batch(old)
    rows = [batch.add(request(PROMPTS[i], 12, seed=i)) for i in range(4)]
    for _ in range(6):
        batch.step()
    counts = [len(answer(row)) for row in rows]
    batch.swap(new, 2)
    while batch.rows.rows:
        batch.step()
    for row, count in zip(rows, counts, strict=True):
        assert row.versions == [1] * count + [2] * (12 - count)
        before = teacher_forced(old, row.ids)[row.prompt_length - 1 :][:count]
        after = teacher_forced(new, row.ids)[row.prompt_length - 1 :][count:]
        assert row.logprobs == pytest.approx(before + after, abs=1e-5)


def test_prompt_logprobs_equal_teacher_forcing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces, beside other rows, and once more after a swap in the middle."""
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 4)
    old, new, prompt = decoder(seed=1), decoder(seed=2), PROMPTS[2]
    batch = Batch(old)
    batch.add(request([1, 2], 30, seed=9))
    batch.step()
    row = batch.add(request(prompt, 1, prompt_logprobs=True))
    batch.step()
    assert 0 < len(row.prompt_logprobs) < len(prompt) - 1
    batch.swap(new, 2)
    while row not in batch.finished:
        batch.step()
    assert row.versions == [2]
    assert row.prompt_logprobs == pytest.approx(teacher_forced(new, prompt), abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 8])
def test_the_last_tokens_after_a_prompt_read_in_pieces_are_right(
    monkeypatch: pytest.MonkeyPatch, piece: int, max_tokens: int
) -> None:
    """However few tokens follow, the last piece of a prompt must see its own keys."""
    monkeypatch.setattr(runner_module, "STEP_TOKENS", piece)
    model = decoder()
    requests = [request(p, max_tokens, seed=i) for i, p in enumerate(PROMPTS)]
    asked = [request(p, max_tokens, prompt_logprobs=True) for p in PROMPTS]
    for row in Batch(model).run(*requests, *asked):
        expected = teacher_forced(model, row.ids)
        assert row.logprobs == pytest.approx(expected[row.prompt_length - 1 :], abs=1e-5)
        if row.request.prompt_logprobs:
            assert row.prompt_logprobs == pytest.approx(expected[: row.prompt_length - 1], abs=1e-5)


def test_top_k_one_is_certain() -> None:
    (row,) = Batch(decoder()).run(request([3, 17, 4], 6, top_k=1))
    (best,) = Batch(decoder()).run(request([3, 17, 4], 6, temperature=0.0))
    assert answer(row) == answer(best)
    assert row.logprobs == pytest.approx([0.0] * 6)


def test_stop_token_is_the_last_id() -> None:
    (free,) = Batch(decoder()).run(request([3, 17, 4], 12))
    stop = answer(free)[5]
    (row,) = Batch(decoder()).run(request([3, 17, 4], 12, stop=frozenset([stop])))
    assert answer(row) == answer(free)[: answer(free).index(stop) + 1]


def test_the_folder_is_the_whole_state(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (saved,) = Batch(hf.load(tmp_path, torch.float32)).run(request([3, 17], 8))
    (direct,) = Batch(decoder(QWEN3, 5)).run(request([3, 17], 8))
    assert (answer(saved), saved.logprobs) == (answer(direct), direct.logprobs)
