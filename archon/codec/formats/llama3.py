"""Llama 3's tool calls: the whole answer is ``{"name": …, "parameters": {…}}``.

Perhaps after ``<|python_tag|>``; perhaps several, with ``;`` between them. An answer that begins
otherwise is content. The template takes one call a message where it says so, and then the rest
stays content too.
"""

from collections.abc import Iterator

from archon.codec.formats.base import Call, Content, Piece, call_of, json_object

PYTHON_TAG = "<|python_tag|>"


class Llama3:
    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        begun = self._held.lstrip()
        if not (begun.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(begun)):
            self._is_text = True
        if self._is_text and self._held:
            text, self._held = self._held, ""
            yield Content(text)

    def finish(self, stopped: bool) -> Iterator[Piece]:
        start = self._held.find(PYTHON_TAG)
        end = start + len(PYTHON_TAG) if start >= 0 and not self._held[:start].strip() else 0
        calls: list[Call] = []
        while self._max_calls is None or len(calls) < self._max_calls:
            found = json_object(self._held, end)
            call = found and (call_of(found[0], "parameters") or call_of(found[0], "arguments"))
            if not found or not call:
                break
            calls.append(call)
            end = found[1]
            following = self._held[end:].lstrip(" \t\r\n;")
            if following.startswith("{"):
                end = len(self._held) - len(following)
        rest = self._held[end:] if calls else self._held
        if rest.strip(" \t\r\n;") or not calls:
            yield from [Content(rest)] if rest else []
        yield from calls
