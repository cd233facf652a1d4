"""OpenAI's answers: what a whole response and the chunks of a stream look like, for chats and for completions.

A whole response is kept as JSON while it grows: that takes a tenth of the memory that objects would, and no time at the
end, when the event loop would stand still for it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import msgspec

from headwater.engine.params import FinishReason
from headwater.serve.output import Delta, LogprobEntry

_encode = msgspec.json.Encoder().encode

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say, and for what is no number."""


def sayable(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB


class TokenNames(Protocol):
    """What an answer needs of the tokenizer."""

    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None: ...


class Usage(NamedTuple):
    """Tokens of one call, over all its prompts and choices."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int

    def as_json(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class NamedToken(NamedTuple):
    """A token for the reader of an answer, and its log-probability."""

    text: str
    data: bytes | None
    logprob: float


class NamedEntry(NamedTuple):
    """The log-probabilities of one token of the text."""

    chosen: NamedToken
    top: list[NamedToken]
    text_offset: int


@dataclass
class Choice:
    """A choice of a whole response, gathered from its deltas by `Reply.add`: JSON without its quotes and brackets."""

    text: bytearray = field(default_factory=bytearray)
    logprobs: dict[str, bytearray] = field(default_factory=dict)
    """Items of the lists in the `logprobs` object, by the list's name."""
    finish_reason: FinishReason | None = None


class Reply:
    """The answer to one call: constant fields, and the two shapes. Subclasses differ in the shape of a choice."""

    id_prefix = ""
    whole_object = ""
    chunk_object = ""
    bytes_prefix = ""
    """How the name of a token begins that is part of a character only."""

    def __init__(self, model: str, names: TokenNames, *, with_logprobs: bool, include_usage: bool) -> None:
        self._names = names
        self._begun: set[int] = set()
        """Choices whose text has begun."""
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def add(self, index: int, choice: Choice, delta: Delta) -> None:
        """Append to a choice what became certain of it."""
        choice.text += _encode(delta.text)[1:-1]
        choice.finish_reason = delta.finish_reason
        if not (self._with_logprobs and delta.logprobs):
            return
        for name, items in self._logprobs(self._named(index, delta.logprobs)).items():
            if items is not None:
                column = choice.logprobs.setdefault(name, bytearray())
                column += (b"," if column else b"") + _encode(items)[1:-1]

    def whole(self, choices: list[Choice], usage: Usage, transfer: dict[str, Any] | None = None) -> list[bytes]:
        """The body of a response that is not streamed, in parts. Leaves the choices empty, one after the other, so that
        the answer is never in memory twice. `transfer`: its `kv_transfer_params`, if it has any."""
        parts = [_encode({**self._head, "object": self.whole_object})[:-1] + b',"choices":[']
        for index, choice in enumerate(choices):
            logprobs = self._logprobs([]) | {name: _raw(b"[", column, b"]") for name, column in choice.logprobs.items()}
            content = self._message(_raw(b'"', choice.text, b'"'))
            finish_reason = choice.finish_reason
            choices[index] = choice = Choice()
            shape = self._choice(index, content, logprobs if self._with_logprobs else None, finish_reason)
            parts += [b"," if index else b"", _encode(shape)]
        sent = b"" if transfer is None else b',"kv_transfer_params":' + _encode(transfer)
        return [*parts, b'],"usage":' + _encode(usage.as_json()) + sent + b"}"]

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk that comes before a choice's first text, if there is one."""
        return None

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk of a stream."""
        logprobs = self._logprobs(self._named(index, delta.logprobs)) if self._with_logprobs else None
        return self._chunk([self._choice(index, self._piece(delta.text), logprobs, delta.finish_reason)])

    def closing(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, with the usage, if that was asked for."""
        return self._chunk([]) | {"usage": usage.as_json()} if self._include_usage else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish_reason.value if finish_reason else None,
        }

    def _message(self, text: str | msgspec.Raw) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, entries: list[NamedEntry]) -> dict[str, Any]:
        raise NotImplementedError

    def _named(self, index: int, entries: list[LogprobEntry]) -> list[NamedEntry]:
        named = []
        for (token_id, logprob, top), text_offset in entries:
            begins = index not in self._begun
            if begins and self._names.token_bytes(token_id):
                self._begun.add(index)
            best = [self._name(other_id, other, begins) for other_id, other in top]
            named.append(NamedEntry(self._name(token_id, logprob, begins), best, text_offset))
        return named

    def _name(self, token_id: int, logprob: float, begins_text: bool) -> NamedToken:
        data = self._names.token_bytes(token_id, begins_text=begins_text)
        return NamedToken(self._text_of(token_id, data), data, sayable(logprob))

    def _text_of(self, token_id: int, data: bytes | None) -> str:
        """A token for people: its text, or the bytes of one that is part of a character only, as OpenAI writes them."""
        if data is None:
            return self._names.token_text(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return self.bytes_prefix + "".join(f"\\x{byte:02x}" for byte in data)


class ChatReply(Reply):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk([choice])

    def _message(self, text: str | msgspec.Raw) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, entries: list[NamedEntry]) -> dict[str, Any]:
        content = [_token(chosen) | {"top_logprobs": [_token(other) for other in top]} for chosen, top, _ in entries]
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    """/v1/completions."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    bytes_prefix = "bytes:"

    def _message(self, text: str | msgspec.Raw) -> dict[str, Any]:
        return {"text": text}

    _piece = _message

    def _logprobs(self, entries: list[NamedEntry]) -> dict[str, Any]:
        return {
            "tokens": [entry.chosen.text for entry in entries],
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }


def _raw(*parts: bytes | bytearray) -> msgspec.Raw:
    return msgspec.Raw(b"".join(parts))


def _token(token: NamedToken) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def _top(entry: NamedEntry) -> dict[str, float]:
    """The best tokens by their text, the chosen one among them. Of tokens with the same text the best counts."""
    best: dict[str, float] = {}
    for token in (*entry.top, entry.chosen):
        best.setdefault(token.text, token.logprob)
    return best
