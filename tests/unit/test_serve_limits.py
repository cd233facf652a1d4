"""What one client can cost the others: slots, the event loop, entries that stay; and what starting waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headwater.engine.config import EngineConfig
from headwater.engine.params import RequestOutput, SamplingParams
from headwater.errors import EngineError, RequestError
from headwater.serve import app as app_module
from headwater.serve import local
from headwater.serve import sending as sending_module
from headwater.serve.client import GenerationJob
from headwater.serve.http import bound_socket
from headwater.serve.messages import Abort, Outputs
from headwater.serve.openai import LARGE_BODY_BYTES, Call, parse_completion
from headwater.serve.sending import ClientStalledError, impatient
from headwater.serve.server import _in_daemon_thread
from serve_rig import EOS, OWN_EOS, ByteTokenizer, Rig, call, with_rig


def test_a_reader_that_never_reads_gives_its_slots_back_when_its_sequences_end() -> None:
    async def test(rig: Rig) -> None:
        stalled = await rig.generator.begin(call(2))
        with stalled:
            with pytest.raises(RequestError) as caught:
                await rig.generator.begin(call())
            assert caught.value.code == "overloaded"
            await rig.wire.end("0")
            with await rig.generator.begin(call()), pytest.raises(RequestError):
                await rig.generator.begin(call())
            await rig.wire.end("1")
            with await rig.generator.begin(call(2)):
                pass
            # Nothing of it is lost for that.
            assert [delta.choice for delta in await stalled.next()] == [0, 1]

    with_rig(test)


def test_calls_that_are_being_tokenised_count() -> None:
    async def test(rig: Rig) -> None:
        gate = threading.Event()
        rig.tokenizer.encode = lambda text, **_: gate.wait(5) and [1]  # type: ignore[assignment, method-assign, return-value]
        begins = [asyncio.create_task(rig.generator.begin(call(num_body_bytes=LARGE_BODY_BYTES + 1))) for _ in range(3)]
        await asyncio.sleep(0.05)
        gate.set()
        results = await asyncio.gather(*begins, return_exceptions=True)
        assert [isinstance(result, RequestError) for result in results] == [False, False, True]
        assert rig.client.num_in_flight == 2

    with_rig(test)


@pytest.mark.parametrize("stalls_at", [0, 1])
def test_a_client_that_stalls_is_given_up_and_its_work_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stalls_at: int
) -> None:
    monkeypatch.setattr(sending_module, "SEND_TIMEOUT_S", 0.05)
    tried: list[Any] = []

    async def send(message: Any) -> None:
        tried.append(message)
        if len(tried) > stalls_at:
            await asyncio.Event().wait()

    async def test(rig: Rig) -> None:
        posting = asyncio.create_task(rig.post({"prompt": "x", "stream": True, "max_tokens": 9}, send))
        while not rig.wire.submitted():
            await asyncio.sleep(0.005)
        output = RequestOutput("0", [97], None, None, 1, 0)
        await rig.wire.replies.put([Outputs([output])])
        await posting
        assert len(tried) == stalls_at + 1, "nothing more is tried, no error event either"
        assert rig.client.num_in_flight == 0
        assert rig.wire.sent[-1] == Abort("0")

    with_rig(test)
    assert "request is aborted" in caplog.text


def test_a_large_body_is_sent_in_pieces_each_with_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr(sending_module, "SEND_BYTES", 10)
    sent: list[Any] = []

    async def slow(message: Any) -> None:
        await asyncio.sleep(0.25)
        sent.append(message)

    body = bytes(range(45))
    asyncio.run(_send_all(slow, body))
    assert [len(message["body"]) for message in sent] == [10, 10, 10, 10, 5]
    assert b"".join(message["body"] for message in sent) == body
    assert [message["more_body"] for message in sent] == [True] * 4 + [False]

    monkeypatch.setattr(sending_module, "SEND_TIMEOUT_S", 0.05)

    async def never(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClientStalledError):
        asyncio.run(_send_all(never, body))


async def _send_all(send: Any, body: bytes) -> None:
    await impatient(send)({"type": "http.response.body", "body": body, "more_body": False})


@pytest.mark.parametrize("field", ["prompt", "user"])
def test_a_large_request_keeps_the_event_loop_free_whichever_field_is_large(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    parsed_in: list[int] = []
    parse = parse_completion

    def noting(*args: Any) -> Call:
        parsed_in.append(threading.get_ident())
        return parse(*args)

    monkeypatch.setattr(app_module, "parse_completion", noting)

    async def ignore(message: Any) -> None:
        pass

    async def test(rig: Rig) -> None:
        for size in (10, LARGE_BODY_BYTES + 1):
            posting = asyncio.create_task(rig.post({"prompt": "x", "max_tokens": 9} | {field: "y" * size}, ignore))
            number = len(rig.wire.submitted())
            while len(rig.wire.submitted()) == number:
                await asyncio.sleep(0.005)
            await rig.wire.end(str(number))
            await posting

    with_rig(test)
    here = threading.get_ident()
    assert [thread == here for thread in parsed_in] == [True, False]


class Text(str):
    """A text of which can be told whether anybody still has it."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("stream", [True, False])
def test_the_text_of_a_prompt_is_gone_when_its_room_is_given_back(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    texts: list[weakref.ref[Text]] = []
    parse = parse_completion

    def noting(*args: Any) -> Call:
        call = parse(*args)
        prompts = [Text(prompt) for prompt in call.prompts]
        texts.extend(map(weakref.ref, prompts))
        return replace(call, prompts=[*prompts])

    monkeypatch.setattr(app_module, "parse_completion", noting)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def test(rig: Rig) -> None:
        for size in (10, LARGE_BODY_BYTES + 1):
            number = len(rig.wire.submitted())
            fields = {"prompt": ["y" * size, "z"], "max_tokens": 9, "stream": stream}
            posting = asyncio.create_task(rig.post(fields, send))
            async with asyncio.timeout(10):
                while len(rig.wire.submitted()) < number + 2 or any(text() is not None for text in texts):
                    await asyncio.sleep(0.005)
            assert not posting.done()
            for choice in range(2):
                await rig.wire.end(str(number + choice))
            await posting
        assert len(texts) == 4
        assert b"".join(message.get("body", b"") for message in sent).count(b'"index":1') == 2

    with_rig(test)


def test_tokenising_a_large_request_is_done_in_a_thread() -> None:
    async def test(rig: Rig) -> None:
        for size in (10, LARGE_BODY_BYTES + 1):
            with await rig.generator.begin(call(num_body_bytes=size)):
                pass
        here = threading.get_ident()
        assert [thread == here for thread in rig.tokenizer.threads] == [True, False]

    with_rig(test)


def test_a_job_that_cannot_be_sent_leaves_nothing_in_flight() -> None:
    async def test(rig: Rig) -> None:
        good, bad = GenerationJob([1], SamplingParams()), GenerationJob([2**70], SamplingParams())
        with pytest.raises(OverflowError):
            await rig.client.submit([good, bad, good])
        assert rig.client.num_in_flight == 0
        assert Abort("0") in rig.wire.sent

    with_rig(test)


def test_the_engine_is_told_of_an_end_id_that_only_the_tokenizer_names() -> None:
    async def test(rig: Rig) -> None:
        for params in ({}, {"stop_token_ids": (9,)}, {"ignore_eos": True}):
            with await rig.generator.begin(call(**params)):
                pass
        found = [message.params.stop_token_ids for message in rig.wire.submitted()]
        assert found == [(OWN_EOS,), (9, OWN_EOS), ()]

    with_rig(test)


# The terminal's model


class FakeEngine:
    """Gives "a" for ever; `error` is raised in the middle of the next step."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.placement = SimpleNamespace(reason="")
        self.params: dict[str, SamplingParams] = {}
        self.error: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.params)

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        assert request_id not in self.params, "still there"
        self.params[request_id] = params

    def abort(self, request_id: str) -> None:
        self.params.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        if (error := self.error) is not None:
            self.error = None
            raise error
        return [RequestOutput(request_id, [97], None, None, 1, 0) for request_id in self.params]

    def close(self) -> None:
        pass


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[local.LocalModel]:
    checkpoint = SimpleNamespace(
        load_tokenizer=ByteTokenizer, config=SimpleNamespace(eos_token_ids=(EOS,), vocab_size=300), label="m"
    )
    monkeypatch.setattr(local, "open_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr(local, "Engine", FakeEngine)
    with local.LocalModel(EngineConfig(model="m"), lambda done, total: None) as made:
        yield made


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("broken")], ids=repr)
def test_an_interrupted_answer_leaves_no_request_behind(model: local.LocalModel, error: BaseException) -> None:
    engine: Any = model._engine
    for _ in range(2):
        answer = model.answer([1], SamplingParams())
        assert next(answer).text == "a"
        engine.error = error
        with pytest.raises(type(error)):
            next(answer)
        assert not engine.has_work


def test_the_terminal_s_engine_is_told_of_an_end_id_that_only_the_tokenizer_names(model: local.LocalModel) -> None:
    engine: Any = model._engine
    with contextlib.closing(model.answer([1], SamplingParams())) as answer:  # type: ignore[type-var]
        next(answer)
        assert engine.params["local"].stop_token_ids == (OWN_EOS,)


# Starting


def test_a_port_that_is_taken_cannot_be_taken_again_before_it_is_served() -> None:
    with bound_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match="choose another"), bound_socket("127.0.0.1", port):
            pass
    with bound_socket("127.0.0.1", port):
        pass


def test_stopping_does_not_wait_for_the_tokenizer() -> None:
    release = threading.Event()

    async def start_and_stop() -> None:
        loading = asyncio.create_task(_in_daemon_thread(lambda: release.wait(30)))
        await asyncio.sleep(0.05)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    begin_s = time.monotonic()
    asyncio.run(start_and_stop())
    assert time.monotonic() - begin_s < 5
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "headwater-tokenizer"]
    assert thread.daemon
    release.set()
    thread.join(5)  # it ends quietly although the loop is gone
    assert not thread.is_alive()


def test_what_the_tokenizer_s_thread_returns_or_raises_arrives() -> None:
    assert asyncio.run(_in_daemon_thread(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_in_daemon_thread(lambda: 1 // 0))


def test_an_answer_that_is_not_streamed_has_a_bound_on_its_values() -> None:
    async def test(rig: Rig) -> None:
        def asking(num_choices: int, stream: bool, **params: Any) -> Call:
            return replace(call(num_choices, **params), stream=stream)

        with await rig.generator.begin(asking(8, False, max_tokens=4096, logprobs=5)):
            pass
        with await rig.generator.begin(asking(8, False)):  # a chat that may go on until the context is full
            pass
        with await rig.generator.begin(asking(64, True, max_tokens=4096, logprobs=20)):
            pass
        num_sent = len(rig.wire.submitted())
        with pytest.raises(RequestError) as caught:
            await rig.generator.begin(asking(64, False, max_tokens=4096, logprobs=20))
        assert str(caught.value).startswith(
            "the answer may have 64 sequences x 4096 tokens x (1 + 20 log-probabilities) = 5505024 values; "
            "expected at most 1048576. Lower n, max_tokens or logprobs, send fewer prompts, or set stream to true"
        )
        assert caught.value.param == "max_tokens"
        assert (len(rig.wire.submitted()), rig.client.num_in_flight) == (num_sent, 0)

    with_rig(test, max_sequences=128)


@pytest.mark.parametrize(("places", "share"), [(10, 5), (3, 2), (2, 2), (1, 1)])
def test_one_call_cannot_take_every_place_but_fill_a_step(places: int, share: int) -> None:
    """A step has two sequences."""

    async def test(rig: Rig) -> None:
        with pytest.raises(RequestError, match=rf"asks for {share + 1} sequences .* at most {share} ") as caught:
            await rig.generator.begin(call(share + 1))
        assert (caught.value.param, caught.value.code) == ("n", None)
        assert rig.generator.limits.max_prompts == share
        with await rig.generator.begin(call(share)):
            assert rig.client.num_in_flight == share

    with_rig(test, max_sequences=places)
