"""OpenAI's requests: what their bodies may hold, and what of it this server does.

Fields nobody knows are ignored, as clients send many. Known fields that would change the output but are not supported
are refused, unless they ask for what happens anyway. Answers are in `replies`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from headwater.engine.params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from headwater.errors import RequestError

MAX_STOP_CHARS = 1000
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat goes on until the context is full."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prompt_logprobs": (0, False),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Field → values that ask for nothing (null never does). Any other value is refused."""


class StreamOptions(msgspec.Struct):
    """What a stream shall bring besides its text."""

    include_usage: bool = False


class TextPart(msgspec.Struct):
    """A part of a message's content; only text is known."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None


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


class ChatRequest(_Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(_Common, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
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

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine must generate."""
        return self.num_choices * max(1, len(self.prompts))

    def params_of(self, choice: int) -> SamplingParams:
        """Choice i of a seeded request has the seed + i: the choices differ, and do so in the same way every time."""
        if self.params.seed is None or choice == 0:
            return self.params
        return replace(self.params, seed=self.params.seed + choice)


def parse_chat(body: bytes) -> Call:
    """A chat request. Raises RequestError, naming the parameter, for what is wrong or not supported."""
    request = _parse(body, ChatRequest)
    if not request.messages:
        raise RequestError("messages is empty; expected at least one", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    most = request.max_completion_tokens
    return _call(
        request,
        is_chat=True,
        messages=[_turn(index, message) for index, message in enumerate(request.messages)],
        max_tokens=request.max_tokens if most is None else most,
        logprobs=_logprobs("top_logprobs", request.top_logprobs or 0) if request.logprobs else None,
    )


def parse_completion(body: bytes) -> Call:
    """A completion request. Raises RequestError, naming the parameter, for what is wrong or not supported."""
    request = _parse(body, CompletionRequest)
    return _call(
        request,
        is_chat=False,
        prompts=_prompts(request.prompt),
        max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=None if request.logprobs is None else _logprobs("logprobs", request.logprobs),
    )


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


def _parse(body: bytes, kind: type[_Request]) -> _Request:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the body is not a JSON object")
    for name, harmless in UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _as_request_error(str(error)) from error


def _as_request_error(text: str) -> RequestError:
    """msgspec says "Expected `int`, got `str` - at `$.n`" and "Object missing required field `messages`"."""
    place = re.search(r" - at `\$\.?(.*)`$", text)
    if missing := re.search(r"missing required field `(\w+)`", text):
        path = f"{place[1]}.{missing[1]}" if place and place[1] else missing[1]
        return RequestError(f"{path} is missing", param=path)
    what = text[: place.start()] if place else text
    path = place[1] if place else ""
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}" if path else what, param=path or None)


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
    return Call(
        **({"messages": [], "prompts": []} | rest),
        is_chat=is_chat,
        model=request.model,
        params=SamplingParams(**{name: value for name, value in given.items() if value is not None}),
        num_choices=num_choices,
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
    )


def _turn(index: int, message: ChatMessage) -> dict[str, str]:
    """A message as chat templates take it: role and plain text."""
    where = f"messages[{index}]"
    if message.tool_calls:
        raise RequestError("tool calls are not supported by this server", param=f"{where}.tool_calls")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                text = f"content parts of type {part.type!r} are not supported; this model reads text"
                raise RequestError(text, param=f"{where}.content")
        content = "\n".join(part.text or "" for part in content)
    return {"role": message.role, "content": content or ""}


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_id(item) for item in prompt):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if prompt and all(isinstance(item, list) and item and all(_is_id(number) for number in item) for item in prompt):
        return list(prompt)
    text = "prompt: expected a string, a list of strings, a list of token ids or a list of such lists, none empty"
    raise RequestError(text, param="prompt")


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise RequestError(f"stop: expected strings of at most {MAX_STOP_CHARS} characters", param="stop")
    return stops


def _logprobs(name: str, count: int) -> int:
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"{name} is {count}; expected 0 to {MAX_LOGPROBS}", param=name)
    return count
