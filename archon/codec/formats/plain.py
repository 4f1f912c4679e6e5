"""Everything is content."""

from collections.abc import Iterator

from archon.codec.formats.base import Content, Piece


class Plain:
    def push(self, text: str) -> Iterator[Piece]:
        if text:
            yield Content(text)

    def finish(self, stopped: bool) -> Iterator[Piece]:
        return iter(())
