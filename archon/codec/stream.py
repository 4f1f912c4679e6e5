"""An answer as it is sampled: ids in, deltas out.

Invariant: what comes out depends on the ids and not on how they were cut. Text is given out when
its characters are whole, a tool call when it is whole, the stop token never; it is a stop token
only at the end.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

from archon.codec.answer import Delta, ParsedAnswer, assemble
from archon.codec.detokenise import Detokeniser
from archon.codec.formats import Call, Content, Machine, Piece


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class StreamParser:
    """``answer`` is the whole, after ``finish``; tool calls keep the ids that were given out."""

    answer: ParsedAnswer

    def __init__(
        self,
        tokenizer: Tokenizer,
        machine: Machine,
        stop_token_ids: frozenset[int],
        call_id: Callable[[], str] = random_call_id,
    ) -> None:
        self._text = Detokeniser(tokenizer)
        self._machine = machine
        self._stop_token_ids = stop_token_ids
        self._call_id = call_id
        self._stop: list[int] = []
        self._calls = 0
        self._deltas: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        if not ids:
            return []
        ids = [*self._stop, *ids]
        self._stop = ids[-1:] if ids[-1] in self._stop_token_ids else []
        text = self._text.push(ids[: len(ids) - len(self._stop)])
        return self._deltas_of(self._machine.push(text)) if text else []

    def finish(self, finish_reason: str) -> list[Delta]:
        """The engine's reason: stop, length or abort."""
        text = self._text.finish()
        last = self._deltas_of(self._machine.push(text)) if text else []
        last += self._deltas_of(self._machine.finish(stopped=finish_reason == "stop"))
        self.answer = assemble(self._deltas, finish_reason)
        return last

    def _deltas_of(self, pieces: Iterable[Piece]) -> list[Delta]:
        deltas = [self._delta(piece) for piece in pieces]
        self._deltas += deltas
        return deltas

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, Content):
            return Delta(content=piece.text)
        if not isinstance(piece, Call):
            return Delta(reasoning=piece.text)
        function = {"name": piece.name, "arguments": piece.arguments}
        index, self._calls = self._calls, self._calls + 1
        call = {"index": index, "id": self._call_id(), "type": "function", "function": function}
        return Delta(tool_call=call)
