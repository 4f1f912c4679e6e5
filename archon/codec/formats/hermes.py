"""Qwen's and Hermes' tool calls: ``<tool_call>``, ``{"name": …, "arguments": {…}}``, close tag.

A tag inside a JSON string is text of that string. A call that is no JSON, or has no name, is
skipped: its text stays content, the other calls stand. The one line break that the template writes
before a call belongs to the call, as does white space between calls.
"""

import re
from collections.abc import Generator, Iterator

from archon.codec.formats.base import Call, Content, Piece, call_of, json_object, overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
Step = Generator[Piece, None, bool]


class Hermes:
    """``_held`` is what was not given out yet. In a call, ``_body`` is where its JSON begins and
    ``_seen`` how far close tags were looked for."""

    def __init__(self) -> None:
        self._held = ""
        self._body: int | None = None
        self._seen = 0
        self._after_call = False

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        yield from self._run(final=False)

    def finish(self, stopped: bool) -> Iterator[Piece]:
        yield from self._run(final=stopped)
        if self._body is None:
            yield from self._text(final=True)
            return
        whole = json_object(self._held, self._body)
        if whole and (call := call_of(whole[0], "arguments", {})):
            yield call
        else:
            yield Content(self._held)

    def _run(self, final: bool) -> Iterator[Piece]:
        going = True
        while going:
            going = yield from self._text(final) if self._body is None else self._call(final)

    def _text(self, final: bool) -> Step:
        """Content up to the next call. True when a call begins."""
        at = self._held.find(OPEN)
        last = final and at < 0
        end = at if at >= 0 else len(self._held) - (0 if last else overlap(self._held, OPEN))
        text = self._held[:end]
        if self._after_call and not text.strip():
            shown = 0
        else:
            shown = end if last else end - text.endswith("\n")
        if shown:
            self._after_call = False
            yield Content(text[:shown])
        self._held = "" if last else self._held[shown:]
        if at >= 0:
            self._body = self._seen = at - shown + len(OPEN)
        return at >= 0

    def _call(self, final: bool) -> Step:
        """One whole call, or one that never can be. False when more text is needed."""
        assert self._body is not None
        whole = None
        while (close := self._held.find(CLOSE, self._seen)) >= 0 or final:
            whole = whole or json_object(self._held, self._body)
            if whole and close >= 0 and close < whole[1]:
                self._seen = whole[1]
            elif whole:
                yield from self._take(*whole)
                return True
            elif final or not self._in_string(close):
                yield from self._skip(close)
                return True
            else:
                self._seen = close + len(CLOSE)
        self._seen = max(self._seen, len(self._held) - len(CLOSE) + 1)
        return False

    def _take(self, value: dict[str, object], end: int) -> Iterator[Piece]:
        rest = self._held[end:].lstrip()
        end = len(self._held) - len(rest) + len(CLOSE) if rest.startswith(CLOSE) else end
        call = call_of(value, "arguments", {})
        yield call or Content(self._held[:end])
        self._held, self._body = self._held[end:], None
        self._after_call = isinstance(call, Call)

    def _skip(self, close: int) -> Iterator[Piece]:
        """Leave a call that is none as content: to its close tag, or to the next call."""
        assert self._body is not None
        if self._in_string(close):
            close = self._held.find(CLOSE, self._body)
        following = self._held.find(OPEN, self._body)
        ends = [close + len(CLOSE)] if close >= 0 else []
        if following >= 0 and not self._in_string(following):
            ends.append(following)
        end = min(ends, default=len(self._held))
        yield Content(self._held[:end])
        self._held, self._body, self._after_call = self._held[end:], None, False

    def _in_string(self, at: int) -> bool:
        quotes = _QUOTE.findall(self._held[self._body : at])
        return quotes.count('"') % 2 == 1
