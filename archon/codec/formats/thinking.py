"""``<think>…</think>`` before the answer, as Qwen3 and the DeepSeek-R1 family write it.

The line breaks that the templates put around the block belong to the block. An answer that never
closes it is all reasoning; one that does not begin with it is all content, unless the prompt
itself has opened the block.
"""

from collections.abc import Iterator

from archon.codec.formats.base import Machine, Piece, Reasoning, overlap

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    def __init__(self, inner: Machine, opened_by_prompt: bool) -> None:
        self._inner = inner
        self._opened_by_prompt = opened_by_prompt
        self._state = self._start
        self._held = ""
        self._fresh = True

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        yield from self._state(False)

    def finish(self, stopped: bool) -> Iterator[Piece]:
        yield from self._state(True)
        yield from self._inner.finish(stopped)

    def _start(self, final: bool) -> Iterator[Piece]:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held = begun[len(OPEN) :]
            self._state = self._reason
        elif OPEN.startswith(begun) and not final:
            return
        else:
            self._state = self._reason if self._opened_by_prompt else self._answer
            self._fresh = self._opened_by_prompt
        yield from self._state(final)

    def _reason(self, final: bool) -> Iterator[Piece]:
        text, close, rest = self._held.partition(CLOSE)
        if self._fresh:
            text = text.lstrip("\n")
        whole = text if close or final else text[: len(text) - overlap(text, CLOSE)]
        shown = whole.rstrip("\n")
        if shown:
            self._fresh = False
            yield Reasoning(shown)
        self._held = text[len(shown) :]
        if close:
            self._state, self._held, self._fresh = self._answer, rest, True
            yield from self._answer(final)

    def _answer(self, final: bool) -> Iterator[Piece]:
        text, self._held = self._held, ""
        if self._fresh:
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            yield from self._inner.push(text)
