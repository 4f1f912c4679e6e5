"""The prompt of a call, with the ids of what it continues standing in it.

Invariant: where a call has a ``prefix_parent``, its prompt begins with exactly that call's prompt
and output ids; only the ids after them are its own. Ids in memory are a hint: a process that lacks
them reads them from the rows.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from archon.storage.interactions import Standing, whole_ids
from gateway.catalog import Served
from gateway.request import ChatRequest
from gateway.rows import Rows

assert sys.byteorder == "little", "ids are stored as little-endian int32"
HELD_BYTES = 64 << 20

Whole = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``own`` are the ids after the prefix; ``kept`` how many messages the prefix stands for."""

    ids: list[int]
    own: bytes
    sha256: str
    prefix_parent: str | None
    kept: int


@dataclass
class History:
    """``_held`` maps an interaction to its whole prompt and its output."""

    rows: Rows
    limit: int = HELD_BYTES
    _held: OrderedDict[str, Whole] = field(default_factory=OrderedDict)
    _size: int = 0

    def remember(self, interaction_id: str, prompt: Prompt, output: bytes) -> None:
        whole = pack_ids(prompt.ids), output
        self._held[interaction_id] = whole
        self._size += len(whole[0]) + len(whole[1])
        while self._size > self.limit:
            _, (old, said) = self._held.popitem(last=False)
            self._size -= len(old) + len(said)

    async def ids_of(self, interaction_id: str) -> Whole | None:
        held = self._held.get(interaction_id)
        if held is not None:
            self._held.move_to_end(interaction_id)
            return held
        return await self.rows.statement(lambda c: whole_ids(c, interaction_id))

    async def parent_of(self, standing: Standing, served: Served) -> Whole | None:
        """The ids that a request may stand on: those of a call rendered by the same codec."""
        if standing.parent_id is None or standing.parent_codec != served.codec.digest:
            return None
        return await self.ids_of(standing.parent_id)


def render(
    request: ChatRequest, served: Served, parent_id: str | None, parent: Whole | None, kept: int
) -> Prompt:
    """``kept`` is the number of messages up to and including the parent's answer."""
    codec, messages = served.codec, request.messages
    if parent is not None:
        before, said = unpack_ids(parent[0]), unpack_ids(parent[1])
        ids = codec.extend(before, said, messages[:kept], messages, request.tools)
        if ids is not None:
            own = pack_ids(ids[len(before) + len(said) :])
            whole = hashlib.sha256(parent[0] + parent[1] + own).hexdigest()
            return Prompt(ids, own, whole, parent_id, kept)
    ids = codec.render(messages, request.tools)
    own = pack_ids(ids)
    return Prompt(ids, own, hashlib.sha256(own).hexdigest(), None, 0)


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()
