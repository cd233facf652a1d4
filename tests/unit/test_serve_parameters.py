"""Every parameter of OpenAI's API has its place in a table: nothing that a client asks for is ignored silently.

The names come from the `openai` package that is installed: a version of it that knows more makes a test fail here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("openai")

from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from headwater.errors import RequestError
from headwater.serve import parameters
from headwater.serve.openai import (
    ROLES,
    TOOL_ROLES,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
    parse_chat,
    parse_completion,
)
from headwater.serve.parameters import Accepted

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
HELLO = [{"role": "user", "content": "hello"}]
EXAMPLES = {str: "anything", dict: {"a": "b"}, bool: True}


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "hello", **fields}).encode())


def keys(typed: Any) -> frozenset[str]:
    """The fields of a TypedDict, those it inherits included."""
    return frozenset(typed.__required_keys__ | typed.__optional_keys__)


ENDPOINTS = [
    pytest.param(
        chat,
        ChatRequest,
        (parameters.CHAT_NO_EFFECT, parameters.CHAT_UNSUPPORTED),
        keys(chat_params.CompletionCreateParamsStreaming) | keys(chat_params.CompletionCreateParamsNonStreaming),
        id="chat",
    ),
    pytest.param(
        completion,
        CompletionRequest,
        (parameters.COMPLETION_NO_EFFECT, parameters.COMPLETION_UNSUPPORTED),
        keys(completion_params.CompletionCreateParamsStreaming)
        | keys(completion_params.CompletionCreateParamsNonStreaming),
        id="completions",
    ),
]
Ask = Callable[..., Any]
Tables = tuple[dict[str, Accepted], ...]


@pytest.mark.parametrize(("ask", "struct", "tables", "names"), ENDPOINTS)
def test_every_parameter_of_the_openai_package_is_in_exactly_one_table(
    ask: Ask, struct: Any, tables: Tables, names: frozenset[str]
) -> None:
    assert len(names) > 15, "the package's types have changed: this test tests nothing"
    places = [set(struct.__struct_fields__), *map(set, tables)]
    lost = {name for name in names if sum(name in place for place in places) != 1}
    assert not lost, "decide what becomes of them, in headwater.serve.parameters and in docs/serving.md"


def accepted_values(tables: Tables) -> Iterator[tuple[str, Any]]:
    for table in tables:
        for name, values in table.items():
            for value in (None, *values):
                yield name, EXAMPLES[value] if isinstance(value, type) else value


@pytest.mark.parametrize(("ask", "struct", "tables", "names"), ENDPOINTS)
def test_values_that_ask_for_nothing_change_nothing(
    ask: Ask, struct: Any, tables: Tables, names: frozenset[str]
) -> None:
    for name, value in accepted_values(tables):
        assert ask(**{name: value}) == ask(), name
    for name in set(struct.__struct_fields__) - {"messages", "prompt"}:
        assert ask(**{name: None}) == ask(), name


@pytest.mark.parametrize(("ask", "struct", "tables", "names"), ENDPOINTS)
def test_every_other_value_is_refused_by_name(ask: Ask, struct: Any, tables: Tables, names: frozenset[str]) -> None:
    for table in tables:
        for name, accepted in table.items():
            kinds = [item for item in accepted if isinstance(item, type)]
            for value in (7, 0.5, "no such", [1], {"type": "other"}, True, False, 0, 1):
                harmless = type(value) in kinds or any(type(value) is type(a) and value == a for a in accepted)
                if harmless:
                    continue
                with pytest.raises(RequestError) as caught:
                    ask(**{name: value})
                assert caught.value.param == name
                assert name in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"user": 5}, "user"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ],
    ids=str,
)
def test_what_openai_has_and_this_server_has_not(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(("ask", "name"), [(completion, "echo"), (completion, "suffix"), (completion, "best_of")])
def test_what_completions_have_and_this_server_has_not(ask: Ask, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        ask(**{name: {"echo": True, "suffix": "x", "best_of": 3}[name]})


def test_false_is_not_zero() -> None:
    with pytest.raises(RequestError):
        completion(echo=0)
    with pytest.raises(RequestError):
        completion(best_of=True)


def test_names_that_nobody_knows_are_refused_with_the_one_that_was_meant() -> None:
    for ask, name, hint in (
        (chat, "max_token", "did you mean max_tokens?"),
        (chat, "temprature", "did you mean temperature?"),
        (chat, "cachesalt", "did you mean cache_salt?"),
        (chat, "prompt", "a parameter of the other endpoint"),
        (completion, "messages", "a parameter of the other endpoint"),
        (completion, "qqqq", "qqqq is not a known parameter"),
    ):
        with pytest.raises(RequestError, match=re.escape(hint)) as caught:
            ask(**{name: 1})
        assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_a_huge_name_is_refused_at_once_and_not_echoed() -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{"x" * 5_000_000: 1})
    assert len(str(caught.value)) < 300
    assert caught.value.param is not None
    assert len(caught.value.param) < 100
    with pytest.raises(RequestError) as caught:
        chat(**{"a\nb": 1})
    assert "\n" not in str(caught.value)


# ---- messages -------------------------------------------------------------------------------------------------------
MESSAGES = [
    getattr(chat_types, name) for name in dir(chat_types) if re.fullmatch(r"ChatCompletion\w+MessageParam", name)
]
PARTS = [getattr(chat_types, name) for name in dir(chat_types) if re.fullmatch(r"ChatCompletionContentPart\w*", name)]


def test_every_field_of_a_message_is_known() -> None:
    assert len(MESSAGES) >= 6
    names = frozenset[str]().union(*map(keys, MESSAGES), chat_types.ChatCompletionMessage.model_fields)
    assert {"role", "content"} | parameters.MESSAGE_UNSUPPORTED.keys() == set(ChatMessage.__struct_fields__)
    assert not names - set(ChatMessage.__struct_fields__)
    roles = {role for message in MESSAGES for role in re.findall(r"'(\w+)'", str(message.__annotations__["role"]))}
    assert roles == {*ROLES, *TOOL_ROLES}


def test_every_field_of_a_part_and_of_the_stream_options_is_known() -> None:
    typed = [part for part in PARTS if hasattr(part, "__required_keys__")]
    assert len(typed) >= 4
    names = frozenset[str]().union(*map(keys, typed))
    known = {*TextPart.__struct_fields__, *parameters.PART_UNSUPPORTED}
    assert not names - known
    assert not keys(chat_types.ChatCompletionStreamOptionsParam) - set(StreamOptions.__struct_fields__)
    assert {"include_usage"} | parameters.STREAM_UNSUPPORTED.keys() == set(StreamOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "4", "tool_call_id": "x"}, "messages[1].role"),
        ({"role": "function", "content": "4", "name": "f"}, "messages[1].role"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "", "refusal": "no"}, "messages[1].refusal"),
        ({"role": "assistant", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "user", "content": "x", "name": "ann"}, "messages[1].name"),
        ({"role": "user", "content": "x", "contnet": "y"}, "messages[1].contnet"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[1].content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[1].input_audio",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "a", "txet": 1}]}, "messages[1].content[0].txet"),
        ({"role": "user", "content": [{"type": "refusal"}]}, "messages[1].content"),
    ],
    ids=str,
)
def test_messages_ask_for_nothing_that_is_ignored(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=[*HELLO, message])
    assert caught.value.param == param


def test_an_answer_of_the_package_can_be_sent_back() -> None:
    said = chat_types.ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert None in said.values(), "the package fills in what is not there"
    assert chat(messages=[*HELLO, said]).messages == [*HELLO, {"role": "assistant", "content": "hi"}]


def test_a_developer_is_who_templates_call_the_system() -> None:
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages == [{"role": "system", "content": "x"}]


def test_a_cache_breakpoint_asks_for_nothing() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert chat(messages=[{"role": "user", "content": [part]}]).messages == [{"role": "user", "content": "a"}]


# ---- cache_salt -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5, ["x"], {}])
def test_salts_that_vllm_refuses_are_refused(ask: Ask, salt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ask(cache_salt=salt)
    assert caught.value.param == "cache_salt"
    assert "a@b" not in str(caught.value), "a salt is a secret"


@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("salt", ["s", "x" * 128, "grüße 🙂", None])
def test_salts_arrive(ask: Ask, salt: Any) -> None:
    assert ask(cache_salt=salt).cache_salt == salt
    assert salt is None or repr(salt) not in repr(ask(cache_salt=salt)), "a salt is a secret"


# ---- documentation --------------------------------------------------------------------------------------------------
TABLES = [
    parameters.CHAT_NO_EFFECT,
    parameters.CHAT_UNSUPPORTED,
    parameters.COMPLETION_NO_EFFECT,
    parameters.COMPLETION_UNSUPPORTED,
    parameters.MESSAGE_UNSUPPORTED,
    parameters.PART_NO_EFFECT,
    parameters.PART_UNSUPPORTED,
    parameters.STREAM_UNSUPPORTED,
]


def test_docs_name_every_parameter() -> None:
    text = DOCS.read_text()
    names = {
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        *(name for table in TABLES for name in table),
    }
    assert not {name for name in names if not re.search(rf"`(\w+\.)?{name}`", text)}
