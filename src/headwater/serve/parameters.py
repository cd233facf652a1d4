"""What becomes of each parameter of OpenAI's API: supported, accepted because it changes nothing here, or refused.

Nothing is ignored silently. The parameters that do something are the fields of the request structs in `openai`; this
module has the tables of all others, of OpenAI's and of vLLM's extensions, and refuses names that nobody knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from headwater.errors import RequestError

NULL = msgspec.Raw(b"null")
"""What a struct's field holds that was not given."""
MAX_HARMLESS_BYTES = 100
MAX_NAME_CHARS = 64

Accepted = tuple[Any, ...]
"""Values that ask for nothing: JSON values, or `str`, `dict` or `bool` for every value of that kind. Null always is."""

NO_EFFECT: dict[str, Accepted] = {
    "user": (str,),
}
"""Both endpoints: accepted, because they do not change an answer."""
UNSUPPORTED: dict[str, Accepted] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Both endpoints: refused, but for the values that ask for what happens anyway."""
CHAT_NO_EFFECT: dict[str, Accepted] = NO_EFFECT | {
    "metadata": (dict,),
    "parallel_tool_calls": (bool,),
    "prompt_cache_key": (str,),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "24h"),
    "safety_identifier": (str,),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
CHAT_UNSUPPORTED: dict[str, Accepted] = UNSUPPORTED | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION_NO_EFFECT: dict[str, Accepted] = NO_EFFECT
COMPLETION_UNSUPPORTED: dict[str, Accepted] = UNSUPPORTED | {
    "add_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}

MESSAGE_UNSUPPORTED: dict[str, Accepted] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Fields of a message other than `role` and `content`. A client that sends an answer back brings many, with null."""
PART_UNSUPPORTED: dict[str, Accepted] = {
    "file": (),
    "image_url": (),
    "input_audio": (),
    "refusal": (),
    "video_url": (),
}
"""What makes a part of a message's content no text."""
PART_NO_EFFECT: dict[str, Accepted] = {"prompt_cache_breakpoint": (dict,)}
"""Every prefix is cached."""
STREAM_UNSUPPORTED: dict[str, Accepted] = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
"""Fields of `stream_options` other than `include_usage`."""

_FIRST_BYTES = {str: b'"', dict: b"{", bool: b"tf"}
_KINDS = {str: "a string", dict: "an object", bool: "true or false"}


def check_fields(
    fields: Mapping[str, msgspec.Raw],
    supported: Collection[str],
    *tables: Mapping[str, Accepted],
    elsewhere: Collection[str] = (),
    where: str = "",
) -> None:
    """Refuse every field that is in no table, and values that would ask for something. Raises RequestError.

    `elsewhere` are the names that the other endpoint has; `where` is the path of the object, for messages.
    """
    for name, raw in fields.items():
        if name in supported:
            continue
        for table in tables:
            if name in table:
                _check_value(where + name, raw, table[name])
                break
        else:
            raise unknown(name, [*supported, *(known for table in tables for known in table)], elsewhere, where)


def check_struct(item: msgspec.Struct, table: Mapping[str, Accepted], *, where: str) -> None:
    """Refuse what the fields of `item` that are in the table ask for. Raises RequestError."""
    for name, accepted in table.items():
        if (raw := getattr(item, name)) is not NULL:
            _check_value(where + name, raw, accepted)


def unknown(name: str, known: Collection[str], elsewhere: Collection[str] = (), where: str = "") -> RequestError:
    """The error for a name that is in no table, with the one that was probably meant."""
    short = name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."
    short = short if short.isprintable() else ascii(short)
    text = f"{where}{short} is not a known parameter"
    if name in elsewhere:
        text = f"{where}{short} is a parameter of the other endpoint (chat and completions differ)"
    elif close := get_close_matches(short, known, n=1):
        text += f"; did you mean {close[0]}?"
    return RequestError(text, param=where + short, code="unknown_parameter")


def _check_value(path: str, raw: msgspec.Raw, accepted: Accepted) -> None:
    if _is_accepted(raw, accepted):
        return
    kinds = [_KINDS[item] for item in accepted if isinstance(item, type)]
    if kinds:
        raise RequestError(f"{path}: expected {kinds[0]}", param=path)
    text = f"{path} is not supported by this server; leave it out"
    if accepted:
        text += f" (or give {' or '.join(msgspec.json.encode(value).decode() for value in accepted)})"
    raise RequestError(text, param=path, code="unsupported_parameter")


def _is_accepted(raw: msgspec.Raw, accepted: Accepted) -> bool:
    view = memoryview(raw)
    if any(isinstance(item, type) and view[:1].tobytes() in _FIRST_BYTES[item] for item in accepted):
        return True
    if view.nbytes > MAX_HARMLESS_BYTES:
        return False  # what asks for nothing is short; the rest need not be decoded
    value = msgspec.json.decode(raw)
    # By type too: 0 is not False, and 1 is not True.
    return value is None or any(type(value) is type(item) and value == item for item in accepted)
