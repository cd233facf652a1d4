"""OpenAI's request bodies: what is taken, and what is refused with which parameter's name."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from typing import Any

import pytest

pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from headwater.engine.config import EngineConfig
from headwater.errors import EngineConfigError, EngineDeadError, RequestError
from headwater.serve.config import ServerConfig
from headwater.serve.errors import error_reply
from headwater.serve.openai import Limits, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "hello", **fields}).encode())


def test_defaults_are_openais() -> None:
    assert chat().params.max_tokens is None
    assert completion().params.max_tokens == 16
    assert chat().params.temperature == 1.0
    assert (chat().num_choices, chat().stream, chat().include_usage) == (1, False, False)


def test_null_means_not_given() -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "max_tokens",
        "logprobs",
        "stream",
        "tools",
        "response_format",
    )
    assert chat(**dict.fromkeys(names)) == chat()


def test_every_sampling_parameter_arrives() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    params = chat(**fields, stop_token_ids=[3], stop="x", max_completion_tokens=9, max_tokens=4).params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.stop_token_ids, params.stop, params.max_tokens) == ((3,), ("x",), 9)


def test_choices_of_a_seeded_request_have_seeds_of_their_own() -> None:
    call = chat(n=3, seed=10)
    assert [call.params_of(choice).seed for choice in range(3)] == [10, 11, 12]
    assert chat(n=2).params_of(1).seed is None


def test_logprobs_of_both_kinds() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params.logprobs == 5
    assert chat(logprobs=False).params.logprobs is None
    assert completion(logprobs=3).params.logprobs == 3


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse_chat(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert call.messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_of_all_four_kinds(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, "a"], [[1], 2], [1.5], [True], [-1], {}, 3, None])
def test_prompts_of_no_kind(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e400}, None),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**63 - 2, "n": 4}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 4097}, "messages"),
        ({"messages": [{"role": "x" * 9_000_000, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"min_tokens": 2**70}, "min_tokens"),
        ({"top_k": 2**70}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"seed": 2**70}, "seed"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    reply = error_reply(caught.value)
    assert reply.status == 400
    assert len(reply.body) < 500, "an error is not as long as what was wrong"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"model": "\xff"}', b"[" * 100_000])
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError, match=r"JSON|body"):
            parse(body)


AT = " - at `$"
"""How a message of msgspec goes on where it names the place."""
PART = {"type": "text"}


@pytest.mark.parametrize(
    "name", ["x", f"{AT}.n`", f"{AT}\n", f"y`{AT}", "missing required field `role`", "`", "", "é\n"]
)
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (lambda name: {"messages": [*HELLO, {"role": "user", name: 1}]}, "messages[1]."),
        (lambda name: {"messages": [{"role": "user", "content": [PART | {name: 1}]}]}, "messages[0].content[0]."),
        (lambda name: {"stream": True, "stream_options": {name: 1}}, "stream_options."),
    ],
    ids=["message", "part", "stream_options"],
)
def test_an_unknown_name_is_quoted_whatever_it_holds(fields: Any, path: str, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields(name))
    assert refused.value.param == path + (name if name.isprintable() else ascii(name))
    assert refused.value.code == "unknown_parameter"


def test_an_unknown_name_that_looks_like_many_places_is_read_in_linear_time() -> None:
    began_s = time.thread_time()
    with pytest.raises(RequestError) as refused:
        chat(messages=[{"role": "user", AT * 15_000 + "\n": 1}])
    assert refused.value.code == "unknown_parameter"
    assert time.thread_time() - began_s < 1.0, "a search that backtracks takes six"


@pytest.mark.parametrize("items", ['"prompt":[%s]', '"prompt":"x","user":[%s]', '"prompt":"x","tools":[%s]'])
def test_millions_of_little_lists_do_not_occupy_the_garbage_collector(items: str) -> None:
    num_collections = sum(stats["collections"] for stats in gc.get_stats())
    with contextlib.suppress(RequestError):
        parse_completion(f"{{{items % ('[1],' * 100_000 + '[1]')}}}".encode(), Limits(max_prompts=10))
    assert sum(stats["collections"] for stats in gc.get_stats()) - num_collections < 5


MANY = 300_000
LIMITS = Limits(max_prompts=100, max_model_len=1000, max_call_tokens=1000)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_completion, '{"prompt": "a",' + ",".join(f'"k{number}":1' for number in range(MANY)) + "}"),
        (parse_chat, '{"messages": [' + ",".join(['{"role":"user"}'] * MANY) + "]}"),
        (parse_completion, '{"prompt": "a", "stop": [' + ",".join(['"\\\\\\\\"'] * MANY) + "]}"),
        (parse_completion, '{"prompt": "a", "stop_token_ids": [' + ",".join(["1"] * 4 * MANY) + "]}"),
    ],
    ids=["names", "messages", "stops", "ids"],
)
def test_bodies_of_very_many_items_are_refused_before_they_are_decoded(parse: Any, body: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(body.encode(), LIMITS)
    assert refused.value.code == "request_too_large"


def test_quotes_in_a_text_are_no_items() -> None:
    text = 'she said "no\\", ' * MANY
    assert parse_completion(json.dumps({"prompt": text}).encode(), LIMITS).prompts == [text]


@pytest.mark.parametrize("body", ['{"prompt": "a", "n": 1, "n": 2}', '{"prompt": "a", "prompt": ["b\\""]}'])
def test_a_name_given_twice_is_refused(body: str) -> None:
    with pytest.raises(RequestError, match="twice"):
        parse_completion(body.encode())


def test_too_many_prompts_or_ids_are_refused_before_they_are_looked_at() -> None:
    limits = Limits(max_prompts=2, max_model_len=4)
    for prompt, text in (
        ([1, -1, "x", 4], "the prompt is 4 tokens"),
        ([[1], [1, -1, 3, 4]], "the prompt is 4 tokens"),
        (["a", "b", '"c",'], "more than 2 prompts"),
        ([[1], [2], [[]]], "more than 2 prompts"),
    ):
        with pytest.raises(RequestError, match=text) as caught:
            parse_completion(json.dumps({"prompt": prompt}).encode(), limits)
        assert caught.value.param == "prompt"
    assert parse_completion(b'{"prompt": [1, 2, 3]}', limits).prompts == [[1, 2, 3]]
    assert parse_completion(b'{"prompt": ["a", "b"]}', limits).prompts == ["a", "b"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["messages", "prompt", "n", "stop", "seed", "temperature", "logprobs", "top_logprobs", "stream", "tools"]
FIELDS += ["stream_options", "max_tokens", "min_tokens", "stop_token_ids", "model", "top_k"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5))
def test_any_object_is_a_call_or_a_request_error(fields: dict[str, Any]) -> None:
    for parse, needed in ((parse_chat, {"messages": HELLO}), (parse_completion, {"prompt": "x"})):
        try:
            call = parse(json.dumps(needed | fields).encode())
        except RequestError:
            continue
        assert call.num_sequences >= 1


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("x", param="n"), 400, "invalid_request_error", None),
        (RequestError("x", code="context_length_exceeded"), 400, "invalid_request_error", "context_length_exceeded"),
        (RequestError("x", code="model_not_found"), 404, "invalid_request_error", "model_not_found"),
        (RequestError("x", code="overloaded"), 429, "rate_limit_error", "overloaded"),
        (EngineDeadError("x"), 503, "service_unavailable_error", "engine_dead"),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error"),
    ],
    ids=str,
)
def test_errors_have_openais_shape(error: Exception, status: int, kind: str, code: str | None) -> None:
    reply = error_reply(error)
    body = json.loads(reply.body)["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert (reply.status, body["type"], body["code"]) == (status, kind, code)
    assert "secret" not in body["message"]
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_other_machines_are_served_only_with_a_key_or_on_demand() -> None:
    engine = EngineConfig(model="x")
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        with pytest.raises(EngineConfigError, match="--api-key"):
            ServerConfig(engine=engine, host=host)
        ServerConfig(engine=engine, host=host, api_key="k")
        ServerConfig(engine=engine, host=host, insecure=True)
    for host in ("127.0.0.1", "::1", "localhost", "127.5.5.5"):
        ServerConfig(engine=engine, host=host)
    with pytest.raises(EngineConfigError, match="API key"):
        ServerConfig(engine=engine, api_key="")
    assert "sesame" not in repr(ServerConfig(engine=engine, api_key="sesame"))
