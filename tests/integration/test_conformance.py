"""`headwater serve` with a real model, used by the clients that people have: the `openai` package and LangChain.

One server on a pool of its own, with an API key, and a second one on that pool for what servers share.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("httpx")
pytest.importorskip("langchain_openai")

import httpx
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as LangChainOpenAI
from pydantic import BaseModel

from headwater.errors import ModelError
from headwater.models.catalog import find_in_catalog
from headwater.models.checkpoint import open_checkpoint
from headwater.models.tokenizer import Tokenizer
from headwater.pool import open_pool
from headwater.stores.embedded import destroy
from headwater.stores.url import parse_url

from pool_waits import spaces, wait_saved
from support import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRC = Path(__file__).parents[2] / "src"
KEY = "sesame"
MODEL = "smollm2"
QUESTION = "What is the capital of France?"
FRANCE: Any = [{"role": "user", "content": QUESTION}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 8}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MAX_SEQUENCES = 8
ENGINE = ["--device", "cpu", "--num-pages", "256", "--max-model-len", "2048", "--num-threads", "1"]
ENGINE += ["--max-num-seqs", str(MAX_SEQUENCES // 2), "--max-waiting", str(MAX_SEQUENCES // 2)]


class Capital(BaseModel):
    name: str


@contextmanager
def serve(pool: str) -> Iterator[str]:
    """A server on that pool; its address, as it prints it."""
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", "serve", "--port", "0", "--pool", pool, *ENGINE],
        env=os.environ | {"PYTHONPATH": str(SRC), "HEADWATER_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if found := re.search(r"ready\s+(http://\S+)/v1", line):
                    yield found[1]
                    break
            else:
                raise AssertionError(f"no server: {process.stderr.read()}")
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    try:
        find_in_catalog(MODEL)
    except ModelError as error:
        pytest.skip(str(error))
    url = f"shm:///headwater-test-{secrets.token_hex(6)}?capacity=256MiB&deadline=60"
    yield url
    destroy(parse_url(url))


@pytest.fixture(scope="module")
def url(pool: str) -> Iterator[str]:
    with serve(pool) as made:
        yield made


def options(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": KEY, "timeout": WAIT_S, "max_retries": 0}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**options(url)) as made:
        yield made


@asynccontextmanager
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(**options(url)) as made:
        yield made


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=WAIT_S).text
    (found,) = (line for line in page.splitlines() if line.startswith(f"headwater_{name} "))
    return float(found.split()[1])


# ---- the openai package: chats --------------------------------------------------------------------------------------
def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "headwater"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT)
    (choice,) = reply.choices
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.message.tool_calls is choice.message.refusal is None
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def test_the_packages_own_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT, n=2, seed=3, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert len(final.choices) == 2
    for choice in final.choices:
        assert choice.logprobs is not None
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
        assert joined.decode() == choice.message.content


def test_raw_responses_and_parts_of_text(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]},
    ]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    assert raw.headers["content-type"] == "application/json"
    said = raw.parse().choices[0].message
    # What was answered can be sent back as it is.
    more: Any = [*messages, said, {"role": "user", "content": "Again."}]
    client.chat.completions.create(model=MODEL, messages=more, max_tokens=2)


def test_parameters_without_effect_are_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**CHAT).choices[0].message.content
    same = client.chat.completions.create(
        **CHAT, user="me", metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k",
        response_format={"type": "text"}, modalities=["text"], logit_bias={}, parallel_tool_calls=True,
    )  # fmt: skip
    assert same.choices[0].message.content == plain


def test_seeds_choices_and_stops(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str | None]:
        reply = client.chat.completions.create(**{**CHAT, "temperature": 1.5}, seed=seed, n=n, top_p=0.95)
        return [choice.message.content for choice in reply.choices]

    both = ask(7, 2)
    assert both[0] != both[1]
    assert ask(7, 2) == both
    assert ask(8, 1) == both[1:]
    free = client.completions.create(**TEXT).choices[0].text
    stopped = client.completions.create(**TEXT, stop=[free[4:7]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(free[4:7])], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_wild_text_have_its_bytes(client: openai.OpenAI, stream: bool) -> None:
    """So hot that every token is drawn: characters are cut, and some never become whole."""
    fields: dict[str, Any] = {**CHAT, "temperature": 50, "max_tokens": 32, "seed": 5, "logprobs": True}
    fields["extra_body"] = {"ignore_eos": True}
    if stream:
        chunks = list(client.chat.completions.create(**fields, top_logprobs=3, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    else:
        choice = client.chat.completions.create(**fields, top_logprobs=3).choices[0]
        assert choice.logprobs is not None
        text, entries = choice.message.content or "", choice.logprobs.content or []
    assert len(entries) == 32
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace") == text
    assert any(entry.token.startswith("\\x") for entry in entries), "no character was cut: this test tested nothing"
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        for top in entry.top_logprobs:
            assert top.bytes is None or top.token.startswith("\\x") or bytes(top.bytes).decode() == top.token


# ---- the openai package: completions --------------------------------------------------------------------------------
def test_completions_and_their_stream(client: openai.OpenAI) -> None:
    reply = client.completions.create(**{**TEXT, "prompt": ["1, 2, 3, 4,", "The sky is"]}, n=2, logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.object == "text_completion"
    for choice in reply.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or ()) == choice.text
        assert logprobs.text_offset == [len("".join((logprobs.tokens or [])[:i])) for i in range(8)]
        assert all(len(best) == 2 for best in logprobs.top_logprobs or ())
    chunks = list(client.completions.create(**TEXT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == reply.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


@pytest.fixture(scope="module")
def tokenizer(pool: str) -> Tokenizer:
    return open_checkpoint(MODEL).load_tokenizer()


def test_prompts_of_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT["prompt"])
    texts = [client.completions.create(**{**TEXT, "prompt": prompt}).choices[0].text for prompt in (ids, [ids])]
    assert texts == [client.completions.create(**TEXT).choices[0].text] * 2


# ---- the openai package: errors, asyncio, clients that leave --------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"tools": [TOOL]}, openai.BadRequestError, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format",
         "unsupported_parameter"),
        ({"reasoning_effort": "high"}, openai.BadRequestError, "reasoning_effort", "unsupported_parameter"),
        ({"extra_body": {"max_new_tokens": 5}}, openai.BadRequestError, "max_new_tokens", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, openai.BadRequestError, "messages",
         "context_length_exceeded"),
        ({"n": MAX_SEQUENCES // 2 + 1}, openai.BadRequestError, "n", None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_packages_own(
    client: openai.OpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    code: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**CHAT | fields, stream=stream)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_structured_output_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.parse(**CHAT, response_format=Capital)
    assert caught.value.param == "response_format"


def test_a_wrong_key_and_a_full_server(client: openai.OpenAI, url: str) -> None:
    with (
        openai.OpenAI(**options(url) | {"api_key": "wrong"}) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    endless = {**CHAT, "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
    most = MAX_SEQUENCES // 2  # of one call, and of one step: a stream begins with its first token
    with client.chat.completions.create(**endless, n=most - 1), client.chat.completions.create(**endless, n=most):
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**CHAT, n=2)
        assert caught.value.response.headers["retry-after"]
    wait_until(
        lambda: metric(url, "requests_running") == metric(url, "requests_waiting") == metric(url, "kv_pages_used") == 0,
        what="all were aborted",
    )


def test_many_at_once_and_a_task_that_is_cancelled(url: str) -> None:
    async def run() -> None:
        async with async_client(url) as client:
            replies = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(4)))
            assert len({reply.choices[0].message.content for reply in replies}) == 1
            stream = await client.chat.completions.create(**CHAT, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == replies[0].choices[0].message.content
            endless = {**CHAT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(client.chat.completions.create(**endless))
            await asyncio.to_thread(wait_until, lambda: metric(url, "requests_running") == 1, what="it runs")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: metric(url, "kv_pages_used") == 0, what="it was aborted")

    asyncio.run(run())


def test_a_time_out_of_the_client(client: openai.OpenAI, url: str) -> None:
    endless = {**CHAT, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**endless, timeout=0.5)
    wait_until(lambda: metric(url, "requests_running") == metric(url, "kv_pages_used") == 0, what="it was aborted")


# ---- LangChain ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def chat_model(url: str) -> Iterator[ChatOpenAI]:
    with httpx.Client() as http:
        yield ChatOpenAI(model=MODEL, temperature=0, max_tokens=8, http_client=http, **options(url))


def test_langchain_chats(chat_model: ChatOpenAI) -> None:
    reply = chat_model.invoke(QUESTION)
    assert "Paris" in reply.content
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["total_tokens"] > reply.usage_metadata["input_tokens"] > 0
    assert reply.response_metadata["finish_reason"] in ("stop", "length")
    assert "".join(str(chunk.content) for chunk in chat_model.stream(QUESTION)) == reply.content
    turns = [SystemMessage("Be brief."), HumanMessage("Hello!"), reply, AIMessage("Well."), HumanMessage("And Italy?")]
    both = chat_model.batch([QUESTION, turns])
    assert both[0].content == reply.content
    assert chat_model.invoke(turns).content == both[1].content
    scored = chat_model.bind(logprobs=True, top_logprobs=2, stop=["zzz"], seed=1).invoke("Say hello.")
    entries = scored.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == scored.content


def test_langchain_with_asyncio(url: str) -> None:
    async def run() -> None:
        async with httpx.AsyncClient() as http:
            model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=8, http_async_client=http, **options(url))
            reply = await model.ainvoke(QUESTION)
            chunks = [chunk async for chunk in model.astream(QUESTION, stream_usage=True)]
            assert "".join(str(chunk.content) for chunk in chunks) == reply.content
            assert any(chunk.usage_metadata for chunk in chunks)
            assert [other.content for other in await model.abatch([QUESTION] * 2)] == [reply.content] * 2
            completions = LangChainOpenAI(
                model=MODEL, temperature=0, max_tokens=8, http_async_client=http, **options(url)
            )
            assert "5" in await completions.ainvoke("1, 2, 3, 4,")

    asyncio.run(run())


def test_langchain_completions(url: str) -> None:
    with httpx.Client() as http:
        model = LangChainOpenAI(model=MODEL, temperature=0, max_tokens=8, http_client=http, **options(url))
        text = model.invoke("1, 2, 3, 4,")
        assert "5" in text
        assert "".join(model.stream("1, 2, 3, 4,")) == text
        assert model.batch(["1, 2, 3, 4,", "1, 2, 3, 4,"]) == [text, text]


def test_langchain_is_told_what_is_not_supported(chat_model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        chat_model.bind_tools([TOOL]).invoke("hello")
    with pytest.raises(openai.BadRequestError, match="response_format is not supported"):
        chat_model.with_structured_output(Capital, method="json_schema").invoke("hello")


# ---- salts ----------------------------------------------------------------------------------------------------------
STORY = "Tell me about " + ", ".join(f"number {number}" for number in range(100))


def cached(client: openai.OpenAI, salt: str | None) -> int:
    """Tokens of the story that the server says it had."""
    extra = {"cache_salt": salt} if salt else {}
    reply = client.completions.create(model=MODEL, prompt=STORY, max_tokens=1, temperature=0, extra_body=extra)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_clients_share_within_a_salt_only_here_and_in_another_server(
    pool: str, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(STORY)
    assert len(tokens) > 300
    assert [cached(client, salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(client, salt) > 256 for salt in ("a", "b", None))
    for tenant in (b"a", b"b", b""):
        wait_saved(pool, [(tokens, 256)], tenant=tenant)
    with open_pool(pool, create=False) as opened:
        (space,) = spaces(opened)
        keys = [space.keys(tokens, tenant=tenant).full[0] for tenant in (b"a", b"b", b"")]
        assert len(set(keys)) == 3
        assert space.match(space.keys(tokens, tenant=b"c")).num_tokens == 0
    with serve(pool) as again, openai.OpenAI(**options(again)) as other:
        assert cached(other, "c") == 0
        assert [cached(other, salt) >= 256 for salt in ("a", "b", None)] == [True] * 3


def test_a_bad_salt_is_refused(client: openai.OpenAI) -> None:
    for salt in ("", "a/b", 5):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**CHAT, extra_body={"cache_salt": salt})
        assert caught.value.param == "cache_salt"
