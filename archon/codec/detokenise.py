"""Ids to text as they come, only whole characters.

Invariant: the pieces of ``push`` and ``finish``, joined, are the decoding of all ids at once,
however the ids were cut. Special tokens are shown: two answers that differ in one must not look
alike.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokeniser:
    """Decodes a window: a few ids already shown, for their context, and those not shown yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        if self._shown == len(self._window):
            return ""
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
