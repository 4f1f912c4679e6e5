"""Between conversations and token ids: render, extend and parse by a model's own chat template."""

from archon.codec.answer import Delta, ParsedAnswer
from archon.codec.codec import Codec
from archon.codec.errors import CodecError
from archon.codec.meaning import messages_digest, normalise_messages, prefix_digests
from archon.codec.stream import StreamParser

__all__ = [
    "Codec",
    "CodecError",
    "Delta",
    "ParsedAnswer",
    "StreamParser",
    "messages_digest",
    "normalise_messages",
    "prefix_digests",
]
