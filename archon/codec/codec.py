"""Messages to ids by a model's own template, and sampled ids back to an answer.

Invariant: a sampled id is never tokenised again. `extend` returns the parent's prompt and output
ids unchanged, followed only by ids of what the template writes after the answer, and only where
the template shows the conversation before and the answer as it did then.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from archon.codec.answer import ParsedAnswer
from archon.codec.conversation import Message, plain_messages, plain_tools
from archon.codec.errors import CodecError
from archon.codec.folder import ModelFolder, read_folder
from archon.codec.formats import choose
from archon.codec.meaning import messages_digest
from archon.codec.stream import StreamParser, random_call_id
from archon.codec.template import ChatTemplate
from archon.codec.turns import probe


class Codec:
    """One model's codec. Safe to use from several threads; holds no conversation."""

    digest: str
    max_len_hint: int | None
    stop_token_ids: tuple[int, ...]

    def __init__(self, folder: ModelFolder) -> None:
        self._tokenizer = folder.tokenizer
        self._template = ChatTemplate(folder.template, folder.special_tokens, folder.tool_template)
        turns = probe(self._template)
        self._closer = turns.closer
        self._format = choose(self._template.source, turns.opens_thinking, turns.many_calls)
        self._anchor = self._find_anchor()
        closing = self._encode_after(turns.closer) if turns.closer else []
        added = folder.tokenizer.get_added_tokens_decoder()
        ends = [i for i in closing[:1] if i in added or i in folder.stop_token_ids]
        self._closing = ends[0] if ends else None
        self.stop_token_ids = tuple(dict.fromkeys([*folder.stop_token_ids, *ends]))
        self._stops = frozenset(self.stop_token_ids)
        self.max_len_hint = folder.max_len
        self.vocab_size = folder.tokenizer.get_vocab_size()
        self.digest = self._digest(folder)

    @classmethod
    def load(cls, model_dir: str | Path) -> "Codec":
        """ValueError, naming the file, where the folder lacks a tokenizer or a template."""
        return cls(read_folder(model_dir))

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """CodecError for a conversation, or tools, that this model cannot be shown."""
        text = self._template.text(
            plain_messages(messages), self._tools(tools), add_generation_prompt, **template_kwargs
        )
        return self.encode(text)

    def extend(
        self,
        parent_prompt_ids: Sequence[int],
        parent_output_ids: Sequence[int],
        messages_through_answer: Sequence[Any],
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> list[int] | None:
        """The prompt for ``messages`` in which the parent's ids stand; None: render it anew.

        The parent's prompt must have been made with the same tools and arguments; that the
        messages up to the answer mean the same as then is checked here.
        """
        size = len(messages_through_answer)
        if self._closer is None or not parent_output_ids or not 1 < size < len(messages):
            return None
        if messages_digest(messages[:size]) != messages_digest(messages_through_answer):
            return None
        plain, seen_tools = plain_messages(messages), self._tools(tools)
        assert plain[size - 1]["role"] == "assistant", "the last message of the past is the answer"

        def text(count: int, prompt: bool) -> str:
            return self._template.text(plain[:count], seen_tools, prompt, **template_kwargs)

        tail = self._tail(text, size, len(plain), parent_output_ids)
        if tail is None:
            return None
        new = self._encode_after(self._closer + tail)
        if self._closing is not None and new[0] == self._closing == parent_output_ids[-1]:
            new = new[1:]
        return [*parent_prompt_ids, *parent_output_ids, *new]

    def _tail(
        self, text: Callable[[int, bool], str], size: int, total: int, output_ids: Sequence[int]
    ) -> str | None:
        """What the template writes after the answer and its closer; None if it does not show the
        conversation before, or the answer, as it did then."""
        assert self._closer is not None
        whole, before = text(total, True), text(size - 1, True)
        if not whole.startswith(before):
            return None
        said = before + self._said(output_ids) + self._closer
        if whole.startswith(said):
            return whole[len(said) :]
        through = text(size, False)
        if through.endswith(self._closer) and whole.startswith(through):
            return whole[len(through) :]
        return None

    def parse(
        self, output_ids: Sequence[int], finish_reason: str, tools: Sequence[Any] | None = None
    ) -> ParsedAnswer:
        stream = self.stream(tools)
        stream.push(output_ids)
        stream.finish(finish_reason)
        return stream.answer

    def stream(
        self, tools: Sequence[Any] | None = None, call_id: Callable[[], str] = random_call_id
    ) -> StreamParser:
        """Tool calls are looked for only where the request has tools."""
        return StreamParser(
            self._tokenizer, self._format.machine(bool(tools)), self._stops, call_id
        )

    def answer_message(self, parsed: ParsedAnswer) -> Message:
        """The assistant message as a client that keeps everything sends it back."""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        return message

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _tools(self, tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
        plain = plain_tools(tools)
        if plain and not self._template.takes_tools:
            raise CodecError("this model's chat template takes no tools", "tools")
        if plain and not self._format.with_tools:
            raise CodecError("this model's way to write tool calls cannot be read", "tools")
        return plain

    def _said(self, output_ids: Sequence[int]) -> str:
        stopped = output_ids[-1] in self._stops
        return self.decode(output_ids[: len(output_ids) - stopped])

    def _encode_after(self, text: str) -> list[int]:
        """Ids of text that stands after other text: some tokenizers treat a beginning apart."""
        return self.encode(self._anchor + text)[1:] if self._anchor else self.encode(text)

    def _find_anchor(self) -> str:
        """A special token to encode a text after; it takes nothing of that text."""
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if token.special and not token.rstrip and self.encode(token.content) == [token_id]:
                return token.content
        return ""

    def _digest(self, folder: ModelFolder) -> str:
        settings = [self._template.source, folder.special_tokens, self.stop_token_ids]
        settings += [self._format.name, folder.tool_template or ""]
        data = json.dumps(settings, sort_keys=True).encode()
        return hashlib.sha256(hashlib.sha256(folder.tokenizer_json).digest() + data).hexdigest()
