"""A client's request as the proxy reads it: what the prompt is, and the bodies that servers get in its place.

Fields that the proxy does not know stay as the client wrote them, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from headwater.errors import RequestError

OURS = "headwater"
"""The key inside `kv_transfer_params` that is ours. Clients may not set it: it names hosts that KV is sent to."""
PARAMS = "kv_transfer_params"
ONE_TOKEN = msgspec.Raw(b"1")
FALSE = msgspec.Raw(b"false")
NOT_FOR_PREFILL = (
    "stream_options", "max_completion_tokens", "min_tokens", "best_of", "echo", "logprobs", "top_logprobs",
    "prompt_logprobs", "n", "stop", "response_format", "structured_outputs",
)  # fmt: skip
"""Fields that change an answer and not the KV of its prompt."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class CallBody:
    """The body of a request for a completion."""

    is_chat: bool
    fields: dict[str, msgspec.Raw]
    num_bytes: int

    @cached_property
    def streams(self) -> bool:
        """Whether the client wants server-sent events."""
        return bytes(self.fields.get("stream", FALSE)) == b"true"

    @cached_property
    def prompt(self) -> Any:
        """The messages, or the prompt of a completion; None where there is none, or it is not what it should be."""
        return self._value("messages" if self.is_chat else "prompt")

    @cached_property
    def cache_salt(self) -> str | None:
        """Whose KV the request may share."""
        value = self._value("cache_salt")
        return value if isinstance(value, str) else None

    @cached_property
    def context(self) -> bytes:
        """What else decides on the KV of a prompt: the model, its tools and template options."""
        names = ("model", "tools", "chat_template", "chat_template_kwargs", "cache_salt", "documents")
        return b"\0".join(bytes(self.fields.get(name, msgspec.Raw(b""))) for name in names)

    @property
    def is_single(self) -> bool:
        """Whether there is one prompt, and not a list of them."""
        prompt = self.prompt
        if self.is_chat:
            return isinstance(prompt, list)
        if isinstance(prompt, list):
            return bool(prompt) and isinstance(prompt[0], int)
        return isinstance(prompt, str)

    def for_prefill(self, push_to: str, transfer: str) -> bytes:
        """The prompt alone: one token, no stream, and where the KV goes."""
        fields = {name: value for name, value in self.fields.items() if name not in NOT_FOR_PREFILL}
        fields["max_tokens"], fields["stream"] = ONE_TOKEN, FALSE
        fields[PARAMS] = _raw({OURS: {"push_to": push_to, "transfer": transfer}})
        return msgspec.json.encode(fields)

    def for_decode(self, transfer: str | None, wait_s: float, start_s: float = 0.0) -> bytes:
        """The request itself; with a transfer, the server is told that KV may arrive, and how soon it should begin
        to."""
        fields = dict(self.fields)
        params = self._client_params()
        if transfer is not None:
            params[OURS] = _raw({"transfer": transfer, "wait_s": wait_s, "start_s": round(min(start_s, wait_s), 3)})
        if params:
            fields[PARAMS] = _raw(params)
        elif PARAMS in fields:
            del fields[PARAMS]
        return msgspec.json.encode(fields)

    def _client_params(self) -> dict[str, msgspec.Raw]:
        given = self.fields.get(PARAMS)
        if given is None or bytes(given) == b"null":
            return {}
        try:
            params = _fields.decode(given)
        except msgspec.MsgspecError:
            raise RequestError(f"{PARAMS} is not an object", param=PARAMS) from None
        params.pop(OURS, None)
        return params

    def _value(self, name: str) -> Any:
        given = self.fields.get(name)
        if given is None:
            return None
        try:
            return msgspec.json.decode(given)
        except (msgspec.MsgspecError, RecursionError):
            return None


def parse_call(body: bytes, *, is_chat: bool) -> CallBody:
    """Raises RequestError for what is no JSON object. Everything else is the servers' to judge."""
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not a JSON object: {error}", code="invalid_json") from None
    call = CallBody(is_chat, fields, len(body))
    call._client_params()  # refused here, before anything is sent
    return call


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
