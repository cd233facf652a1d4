"""OpenAI's requests: what their bodies may hold, and what of it this server does.

The fields of the structs are what is supported; what becomes of all others is in `parameters`. Answers are in
`replies`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from headwater.connector.transfers import PARAMETER, TransferParams, parse_transfer
from headwater.engine.params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from headwater.errors import InvalidArgumentError, RequestError
from headwater.serve.errors import shown
from headwater.serve.parameters import (
    CHAT_NO_EFFECT,
    CHAT_UNSUPPORTED,
    COMPLETION_NO_EFFECT,
    COMPLETION_UNSUPPORTED,
    MESSAGE_UNSUPPORTED,
    NULL,
    PART_NO_EFFECT,
    PART_UNSUPPORTED,
    STREAM_UNSUPPORTED,
    check_fields,
    check_struct,
    unknown,
)

LARGE_BODY_BYTES = 4096
"""Larger bodies are read, checked and tokenised in a thread: they would keep the event loop for milliseconds."""
MAX_MESSAGES = 4096
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role → how chat templates call it. OpenAI's newer models say developer where the older ones say system."""
TOOL_ROLES = ("tool", "function")
MAX_STRINGS = 1 << 17
"""Names and texts in one body, besides its prompts: decoding millions of them keeps every thread for seconds."""
MAX_STOP_CHARS = 1000
MAX_STOPS_BYTES = 1 << 20
"""Of `stop` and of `stop_token_ids` in the body."""
MAX_TRANSFER_BYTES = 1 << 16
"""Of `kv_transfer_params`: other connectors' keys may be in it, and are ignored."""
MAX_SALT_CHARS = 128
SALT_FORBIDS = "@/\\\0"
"""vLLM's server has the same rules, so a salt that one of them takes is good for both."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat goes on until the context is full."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream shall bring besides its text."""

    include_usage: bool | None = None
    include_obfuscation: msgspec.Raw = NULL
    continuous_usage_stats: msgspec.Raw = NULL


class TextPart(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A part of a message's content; only text is known."""

    type: str
    text: str | None = None
    prompt_cache_breakpoint: msgspec.Raw = NULL


class ChatMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One turn of a conversation. The fields after `content` are looked at only to refuse what they ask for."""

    role: str
    content: str | list[TextPart] | None = None
    annotations: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    name: msgspec.Raw = NULL
    reasoning: msgspec.Raw = NULL
    reasoning_content: msgspec.Raw = NULL
    refusal: msgspec.Raw = NULL
    tool_call_id: msgspec.Raw = NULL
    tool_calls: msgspec.Raw = NULL


class _Common(msgspec.Struct, kw_only=True):
    """What both kinds of request have. The defaults of sampling are SamplingParams': None means "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatRequest(_Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(_Common, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: msgspec.Raw
    """Items are counted before they are decoded: millions of them would take a GiB, and little lists would keep the
    garbage collector, and with it every thread, for seconds."""
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request: what to generate, and how the answer shall come."""

    is_chat: bool
    model: str | None
    messages: list[dict[str, str]]
    """A chat's turns; empty for a completion."""
    prompts: list[str | list[int]]
    """A completion's prompts; empty for a chat."""
    params: SamplingParams
    num_choices: int
    """Choices for each prompt."""
    stream: bool
    include_usage: bool
    cache_salt: str | None = field(default=None, repr=False)
    """Only requests of one salt share KV: whoever does not know it learns nothing of what was asked with it."""
    transfer: TransferParams | None = None
    """What `kv_transfer_params` says of KV that goes to another server, or comes from one."""
    num_body_bytes: int = field(default=0, compare=False)
    """How large the request was: a measure of the work that its text makes, whichever field that is in."""

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine must generate."""
        return self.num_choices * max(1, len(self.prompts))

    def params_of(self, choice: int) -> SamplingParams:
        """Choice i of a seeded request has the seed + i: the choices differ, and do so in the same way every time."""
        if self.params.seed is None or choice == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + choice)


class Limits(NamedTuple):
    """What one call may hold. Counted before the rest is looked at, so that refusing millions of items is cheap."""

    max_prompts: int = 1 << 31
    max_model_len: int = 1 << 31
    max_call_tokens: int = 1 << 31


NO_LIMITS = Limits()


def too_long(num_tokens: int, max_model_len: int, param: str) -> RequestError:
    """The error for a prompt that leaves no room for a token of output."""
    text = (
        f"the prompt is {num_tokens} tokens and the context of this server is {max_model_len}, "
        "which must also hold at least one token of output; shorten it"
    )
    return RequestError(text, param=param, code="context_length_exceeded")


def parse_chat(body: bytes, limits: Limits = NO_LIMITS) -> Call:
    """A chat request. Raises RequestError, naming the parameter, for what is wrong or not supported."""
    request = _parse(body, ChatRequest, limits)
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        text = f"there are {len(request.messages)} messages; expected 1 to {MAX_MESSAGES}"
        raise RequestError(text, param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    most = request.max_completion_tokens
    return _call(
        request,
        is_chat=True,
        num_body_bytes=len(body),
        messages=[_turn(index, message) for index, message in enumerate(request.messages)],
        max_tokens=request.max_tokens if most is None else most,
        logprobs=_logprobs("top_logprobs", request.top_logprobs or 0) if request.logprobs else None,
    )


def parse_completion(body: bytes, limits: Limits = NO_LIMITS) -> Call:
    """A completion request. Raises RequestError, naming the parameter, for what is wrong or not supported."""
    request = _parse(body, CompletionRequest, limits)
    return _call(
        request,
        is_chat=False,
        num_body_bytes=len(body),
        prompts=_prompts(request.prompt, limits),
        max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=None if request.logprobs is None else _logprobs("logprobs", request.logprobs),
    )


_TABLES = {
    ChatRequest: (ChatRequest.__struct_fields__, CHAT_NO_EFFECT, CHAT_UNSUPPORTED),
    CompletionRequest: (CompletionRequest.__struct_fields__, COMPLETION_NO_EFFECT, COMPLETION_UNSUPPORTED),
}
_ELSEWHERE = {
    ChatRequest: {name for table in _TABLES[CompletionRequest] for name in table},
    CompletionRequest: {name for table in _TABLES[ChatRequest] for name in table},
}
_Item = TypeVar("_Item")
_FIRST_ITEM = re.compile(rb"\[\s*(.)")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_PLACE = " - at `$"
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


def _parse(body: bytes, kind: type[_Request], limits: Limits) -> _Request:
    # A quote inside a string has a backslash before it; that the end of a string may have one, too, halves the count
    # at most.
    num_quotes = body.count(b'"')
    if num_quotes - body.count(b'\\"') > 2 * (MAX_STRINGS + limits.max_prompts):
        text = f"the body has more than {MAX_STRINGS} names and strings, which is the limit of this server"
        raise RequestError(text, code="request_too_large")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        check_fields(fields, *_TABLES[kind], elsewhere=_ELSEWHERE[kind])
        _check_sizes(fields)
        # Known names have two quotes, so what is left over belongs to a name that came before.
        if num_quotes != sum(2 + bytes(raw).count(b'"') for raw in fields.values()):
            raise RequestError("a parameter is given twice")
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _as_request_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _check_sizes(fields: dict[str, msgspec.Raw]) -> None:
    limits = {"stop": MAX_STOPS_BYTES, "stop_token_ids": MAX_STOPS_BYTES, PARAMETER: MAX_TRANSFER_BYTES}
    for name, limit in limits.items():
        if name in fields and memoryview(fields[name]).nbytes > limit:
            raise RequestError(f"{name} has more than {limit} bytes", param=name, code="request_too_large")


def _as_request_error(text: str) -> RequestError:
    """msgspec says "Expected `int`, got `str` - at `$.n`", "Object missing required field `messages`" and "Object
    contains unknown field `x` - at `$.messages[0]`".

    It quotes the unknown name as it is, which may be most of the body, and the place comes last. So both are cut out
    where they must be; a pattern could be led astray by the name, and for hours.
    """
    what, found, place = text.rpartition(_PLACE)
    if not found:
        what, place = text, "`"
    path = place.removeprefix(".").removesuffix("`")
    if what.startswith(_UNKNOWN):
        return _unknown_inside(path, what.removeprefix(_UNKNOWN).removesuffix("`"))
    if what.startswith(_MISSING):
        path = f"{path}." * bool(path) + what.removeprefix(_MISSING).removesuffix("`")
        return RequestError(f"{path} is missing", param=path)
    return RequestError(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", param=path or None)


def _unknown_inside(path: str, name: str) -> RequestError:
    """The error for a field that an object inside the body must not have."""
    if "content" in path and name in PART_UNSUPPORTED:
        text = f"content parts with {name} are not supported; this model reads text"
        return RequestError(text, param=f"{path}.{name}", code="unsupported_parameter")
    kind = TextPart if "content" in path else ChatMessage if path.startswith("messages") else StreamOptions
    return unknown(name, kind.__struct_fields__, where=f"{path}.")


def _call(request: _Common, *, is_chat: bool, max_tokens: int | None, logprobs: int | None, **rest: Any) -> Call:
    num_choices = 1 if request.n is None else request.n
    if num_choices < 1:
        raise RequestError(f"n is {num_choices}; expected at least 1", param="n")
    if request.seed is not None and not -MAX_SEED <= request.seed <= MAX_SEED - num_choices:
        raise RequestError(f"seed is {request.seed}; expected a 64-bit integer", param="seed")
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        # -1 is how other servers spell "keep all".
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop": _stops(request.stop),
        "stop_token_ids": None if request.stop_token_ids is None else tuple(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "logprobs": logprobs,
    }
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if options is not None:
        check_struct(options, STREAM_UNSUPPORTED, where="stream_options.")
    return Call(
        **({"messages": [], "prompts": []} | rest),
        is_chat=is_chat,
        model=request.model,
        params=SamplingParams(**{name: value for name, value in given.items() if value is not None}),
        num_choices=num_choices,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        cache_salt=_salt(request.cache_salt),
        transfer=_transfer(request.kv_transfer_params),
    )


def _turn(index: int, message: ChatMessage) -> dict[str, str]:
    """A message as chat templates take it: role and plain text."""
    where = f"messages[{index}]"
    if message.role in TOOL_ROLES:
        text = f"{where}.role is {message.role!r}, but tools are not supported by this server"
        raise RequestError(text, param=f"{where}.role", code="unsupported_parameter")
    if message.role not in ROLES:
        text = f"{where}.role is {shown(message.role)}; expected one of {', '.join(ROLES)}"
        raise RequestError(text, param=f"{where}.role")
    check_struct(message, MESSAGE_UNSUPPORTED, where=f"{where}.")
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text" or part.text is None:
                text = f"content parts of type {shown(part.type)} are not supported; this model reads text"
                raise RequestError(text, param=f"{where}.content", code="unsupported_parameter")
            check_struct(part, PART_NO_EFFECT, where=f"{where}.content[{number}].")
        content = "\n".join(part.text or "" for part in content)
    return {"role": ROLES[message.role], "content": content or ""}


def _prompts(raw: msgspec.Raw, limits: Limits) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    data = bytes(raw)
    if data.startswith(b'"'):
        return [_decode(raw, str)]
    num_commas = data.count(b",")
    first = _FIRST_ITEM.match(data)
    match first and first[1]:
        case b'"':
            num_prompts = sum(1 for _ in islice(_STRING.finditer(data), limits.max_prompts + 1))
            if num_prompts > limits.max_prompts:
                raise _too_many_prompts(limits)
            return [*_decode(raw, list[str])]
        case b"[":
            if num_commas > limits.max_call_tokens:
                text = f"the prompts have {num_commas + 1} items in total; expected at most {limits.max_call_tokens}"
                raise RequestError(text, param="prompt")
            if data.count(b"[") - 1 > limits.max_prompts:
                raise _too_many_prompts(limits)
            listed = _decode(raw, list[list[int]])
        case None | b"]":
            raise _no_prompt()
        case _:
            if num_commas + 1 >= limits.max_model_len:
                raise too_long(num_commas + 1, limits.max_model_len, "prompt")
            listed = [_decode(raw, list[int])]
    for ids in listed:
        if len(ids) >= limits.max_model_len:
            raise too_long(len(ids), limits.max_model_len, "prompt")
        if not ids or min(ids) < 0:
            raise _no_prompt()
    return [*listed]


def _decode(raw: msgspec.Raw, kind: type[_Item]) -> _Item:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_prompt() from error


def _too_many_prompts(limits: Limits) -> RequestError:
    text = f"the call has more than {limits.max_prompts} prompts, which is the limit for one call"
    return RequestError(text, param="prompt")


def _no_prompt() -> RequestError:
    text = "prompt: expected a string, a list of strings, a list of token ids or a list of such lists, none empty"
    return RequestError(text, param="prompt")


def _stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise RequestError(f"stop: expected strings of at most {MAX_STOP_CHARS} characters", param="stop")
    return stops


def _salt(salt: str | None) -> str | None:
    if salt is not None and not (0 < len(salt) <= MAX_SALT_CHARS and not set(salt) & set(SALT_FORBIDS)):
        text = f"cache_salt: expected 1 to {MAX_SALT_CHARS} characters, none of them @, /, \\ or NUL"
        raise RequestError(text, param="cache_salt")
    return salt


def _logprobs(name: str, count: int) -> int:
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"{name} is {count}; expected 0 to {MAX_LOGPROBS}", param=name)
    return count


def _transfer(params: dict[str, Any] | None) -> TransferParams | None:
    try:
        return parse_transfer(params)
    except InvalidArgumentError as error:
        raise RequestError(str(error), param=PARAMETER) from error
