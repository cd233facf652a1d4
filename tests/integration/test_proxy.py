"""`headwater proxy` as a process in front of servers that fail on time: no request with a live decode server fails.

Acceptance test 16 of prefill/decode disaggregation. The servers here are made of sockets, since a real one cannot be
made to fail between two bytes; test_proxy_serve.py has real ones.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
from fake_upstream import Asked, Behaviour, Exchange, answers

from proxy_process import chat_body
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 20.0


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def events_of(response: httpx.Response) -> list[Any]:
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [None if item == "[DONE]" else json.loads(item) for item in data]


def told(events: list[Any]) -> str:
    pieces = [event["choices"][0]["delta"]["content"] for event in events if event and event.get("choices")]
    return "".join(pieces)


async def dies_silently(exchange: Exchange) -> None:
    exchange.cut()


async def dies_after_head(exchange: Exchange) -> None:
    await exchange.start_stream()
    exchange.cut()


async def dies_in_the_middle(exchange: Exchange) -> None:
    await exchange.start_stream()
    await exchange.event({"choices": [{"index": 0, "delta": {"content": "x0"}}]})
    await asyncio.sleep(0.05)
    exchange.cut()


async def hangs(exchange: Exchange) -> None:
    await asyncio.Event().wait()


async def sends_noise(exchange: Exchange) -> None:
    await exchange.send(random.Random(5).randbytes(4096))
    exchange.cut()


async def sends_huge_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 999) for n in range(2000)))
    await exchange.send(b"\r\n")


async def sends_many_headers(exchange: Exchange) -> None:
    fields = b"".join(b"x-%d: y\r\n" % n for n in range(200))
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + fields + b"\r\n{}")


async def sends_no_json(exchange: Exchange) -> None:
    kind = b"text/html" if not exchange.asked.body.get("stream") else b"application/json"
    await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-type: " + kind + b"\r\n\r\n<ok>")


async def says_it_failed(exchange: Exchange) -> None:
    """vLLM's way: the status has gone out before the engine failed."""
    await exchange.start_stream()
    await exchange.event({"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}})
    await exchange.end_stream()


async def half_a_body(exchange: Exchange) -> None:
    await exchange.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"id":')
    await asyncio.sleep(0.02)
    exchange.cut()


def refuses(status: int) -> Behaviour:
    async def behave(exchange: Exchange) -> None:
        await exchange.json({"error": {"message": f"status {status}"}}, status)

    return behave


# ---- both legs --------------------------------------------------------------------------------------------------
def test_both_legs_are_sent_at_once_with_what_the_contract_says(upstream: Any, proxy: Any) -> None:
    decode, prefill = upstream(partial(answers, name="d", delay_s=2.0)), upstream(partial(answers, delay_s=2.0))
    front = proxy("proxy", "--prefill", prefill.url, "--decode", f"{decode.url},peer=10.0.0.7:7700")
    response = front.chat("hello", max_tokens=50, n=1, temperature=0, headers={"authorization": "Bearer k"})
    assert text_of(response) == "dddd"
    (to_prefill,), (to_decode,) = prefill.completions, decode.completions
    transfer = to_prefill.params["transfer"]
    assert to_prefill.params == {"push_to": "10.0.0.7:7700", "transfer": transfer}
    assert int(transfer, 16) >= 0
    assert to_decode.params == {"transfer": transfer, "wait_s": 30.0, "start_s": 2.0}
    assert to_prefill.body["max_tokens"] == 1
    assert to_prefill.body["stream"] is False
    assert to_prefill.body["messages"] == to_decode.body["messages"] == chat_body("hello")["messages"]
    assert to_decode.body["max_tokens"] == 50
    assert {to_prefill.headers["authorization"], to_decode.headers["authorization"]} == {"Bearer k"}
    assert abs(to_prefill.began_s - to_decode.began_s) < 2.0, "one after the other"


def test_decode_waits_for_what_is_queued_at_prefill(upstream: Any, proxy: Any) -> None:
    """Otherwise it would compute by itself what prefill has not begun."""
    released = threading.Event()

    async def held(exchange: Exchange) -> None:
        while not released.is_set():
            await asyncio.sleep(0.01)
        await answers(exchange, name="d")

    decode, prefill = upstream(held), upstream(held)
    front = proxy("proxy", "--prefill", prefill.url, "--decode", f"{decode.url},peer=10.0.0.7:7700")
    prompts = [f"{number} " + "word " * 4000 for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for number, text in enumerate(prompts):
            pool.submit(front.chat, text)
            is_sent = lambda: len(decode.completions) == len(prefill.completions) == number + 1  # noqa: B023, E731
            wait_until(is_sent, WAIT_S)
        released.set()
    starts = [asked.params["start_s"] for asked in decode.completions]
    assert starts[0] == 2.0
    assert starts[0] < starts[1] < starts[2] <= 30.0
    assert front.chat("9 " + "word " * 4000).status_code == 200
    assert decode.completions[-1].params["start_s"] == 2.0, "nothing is queued any more"


def test_a_prompt_of_less_than_a_chunk_stays_on_its_decode_server(upstream: Any, proxy: Any) -> None:
    decode, prefill = upstream(partial(answers, name="d")), upstream(answers)
    options = ("--prefill", prefill.url, "--decode", f"{decode.url},peer=10.0.0.7:7700")
    front = proxy("proxy", *options, "--min-prefill-tokens", "256")
    assert text_of(front.chat("hello", max_tokens=5)) == "dddd"
    assert decode.completions[-1].params in (None, {})
    assert not prefill.completions
    assert text_of(front.chat("hello " * 400, max_tokens=5)) == "dddd"
    wait_until(lambda: len(prefill.completions) == 1, what="a long prompt is prefilled elsewhere")


def test_a_peer_is_learnt_from_health_and_without_one_nothing_is_pushed(upstream: Any, proxy: Any) -> None:
    decode, prefill = upstream(peer="10.0.0.8:1"), upstream()
    front = proxy("proxy", "--prefill", prefill.url, "--decode", decode.url)
    front.chat("hello")
    assert prefill.completions[0].params["push_to"] == "10.0.0.8:1"
    decode.peer = None

    def is_plain() -> bool:
        front.chat("hello")
        return decode.completions[-1].params is None

    wait_until(is_plain, WAIT_S)


def test_clients_cannot_say_where_kv_is_sent_to(upstream: Any, proxy: Any) -> None:
    decode = upstream()
    front = proxy("router", decode.url)
    theirs = {"headwater": {"push_to": "evil:1"}, "do_remote_decode": True}
    front.chat("hello", kv_transfer_params=theirs)
    assert decode.completions[0].body["kv_transfer_params"] == {"do_remote_decode": True}
    front.chat("hello", kv_transfer_params={"headwater": {"push_to": "evil:1"}})
    assert "kv_transfer_params" not in decode.completions[1].body
    assert front.chat("hello", kv_transfer_params=7).status_code == 400


def test_a_prompt_whose_uncached_part_is_short_skips_prefill(upstream: Any, proxy: Any) -> None:
    decode, prefill = upstream(peer="h:1"), upstream()
    front = proxy("proxy", "--decode", decode.url, "--prefill", prefill.url)
    text = "All work and no play. " * 400
    front.chat(text)
    assert len(prefill.completions) == 1, "nothing of it is on the decode server"
    front.chat(text + "And another turn.")
    assert len(prefill.completions) == 1, "nearly all of it is"
    assert decode.completions[1].params is None
    front.chat(text[::-1] * 3)
    assert len(prefill.completions) == 2
    assert front.metric("headwater_proxy_prefill_total", decision="short") == 1
    assert front.metric("headwater_proxy_prefill_total", decision="remote") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_larger_count_of_cached_tokens(upstream: Any, proxy: Any, stream: bool) -> None:
    decode, prefill = (
        upstream(partial(answers, cached=7, delay_s=0.1), peer="h:1"),
        upstream(partial(answers, cached=64)),
    )
    front = proxy("proxy", "--decode", decode.url, "--prefill", prefill.url)
    if stream:
        with front.stream("hello") as response:
            events = events_of(response)
        assert told(events) == "x0x1x2x3"
        assert events[-1] is None
        usage = events[-2]["usage"]
    else:
        usage = front.chat("hello").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64
    assert usage["prompt_tokens"] == 100


# ---- failures ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [dies_silently, sends_noise, refuses(500), hangs])
def test_a_prefill_server_that_fails_costs_nothing(upstream: Any, proxy: Any, how: Behaviour) -> None:
    decode, prefill = upstream(partial(answers, name="d"), peer="h:1"), upstream(how)
    front = proxy("proxy", "--decode", decode.url, "--prefill", prefill.url)
    assert text_of(front.chat("hello")) == "dddd"
    with front.stream("hello " * 9999) as response:
        assert told(events_of(response)) == "d0d1d2d3"


def test_a_prefill_server_that_is_down_costs_nothing_and_another_one_takes_its_place(upstream: Any, proxy: Any) -> None:
    decode, first, second = upstream(partial(answers, delay_s=0.2), peer="h:1"), upstream(), upstream()
    front = proxy(
        "proxy", "--decode", decode.url, "--prefill", first.url, second.url, "--health-interval", "100"
    )  # fmt: skip
    first.stop()
    for number in range(4):
        assert text_of(front.chat(f"{number} hello")) == "xxxx"
    assert len(second.completions) == 4, "the one that lives got all"
    second.stop()
    assert text_of(front.chat("again")) == "xxxx"


@pytest.mark.parametrize(
    "how",
    [dies_silently, dies_after_head, sends_noise, sends_huge_headers, sends_many_headers, sends_no_json, says_it_failed,
     refuses(503), refuses(500), refuses(429), half_a_body],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_server_that_fails_before_its_first_byte_is_replaced(
    upstream: Any, proxy: Any, how: Behaviour, stream: bool
) -> None:
    good = upstream(partial(answers, name="g", delay_s=0.05), peer="good:1")  # later than prefill is asked
    bad, prefill = upstream(how, peer="bad:1"), upstream()
    front = proxy("proxy", "--decode", bad.url, good.url, "--prefill", prefill.url, "--health-interval", "100")
    if not stream and how in (dies_after_head, says_it_failed):
        pytest.skip("only streams fail so")
    for number in range(6):
        if stream:
            with front.stream(f"{number} hello") as response:
                assert told(events_of(response)) == "g0g1g2g3"
        else:
            assert text_of(front.chat(f"{number} hello")) == "gggg"
    assert bad.completions, "it was never tried"
    # A connection that was idle and is found closed is tried once more on a new one, which is no other server.
    assert 1 <= front.metric("headwater_proxy_retries_total") <= len(bad.completions)

    def num_pushed() -> int:
        return [asked.params["push_to"] for asked in prefill.completions].count("good:1")

    wait_until(lambda: num_pushed() >= 6, WAIT_S, "the push follows the request")


def test_a_decode_server_that_is_down_gets_nothing_and_comes_back(upstream: Any, proxy: Any) -> None:
    one, two = upstream(partial(answers, name="1")), upstream(partial(answers, name="2"))
    front = proxy("router", one.url, two.url, "--health-interval", "0.05")
    one.stop()
    assert [text_of(front.chat(f"{n} hello")) for n in range(6)] == ["2222"] * 6
    wait_until(lambda: front.metric("headwater_proxy_server_up", server=one.url) == 0, WAIT_S)
    one.start()
    wait_until(lambda: front.metric("headwater_proxy_server_up", server=one.url) == 1, WAIT_S)
    assert {text_of(front.chat(f"again {n}")) for n in range(8)} == {"1111", "2222"}


def test_a_decode_server_that_hangs_is_left_when_its_health_says_so(upstream: Any, proxy: Any) -> None:
    bad, good = upstream(hangs), upstream(partial(answers, name="g"))
    front = proxy("router", bad.url, good.url, "--health-interval", "0.05")
    answered: list[str] = []
    threads = [Thread(target=lambda n=n: answered.append(text_of(front.chat(f"{n} hello")))) for n in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(bad.completions), WAIT_S)
    bad.health_status = 503
    for thread in threads:
        thread.join(WAIT_S)
    assert answered == ["gggg"] * 4
    wait_until(lambda: all(asked.was_cut for asked in bad.completions), WAIT_S)


def test_a_stream_that_breaks_off_ends_with_an_error_event_and_not_with_done(upstream: Any, proxy: Any) -> None:
    front = proxy("router", upstream(dies_in_the_middle).url)
    with front.stream("hello") as response:
        events = events_of(response)
    assert told(events) == "x0"
    assert events[-1]["error"]["code"] == "no_server"
    assert None not in events


def test_when_nobody_answers_the_client_is_told_so(upstream: Any, proxy: Any) -> None:
    one, two = upstream(), upstream(refuses(429))
    front = proxy("router", one.url, two.url, "--health-interval", "100")
    one.stop()
    response = front.chat("hello")
    assert response.status_code == 429, "the server's own refusal says more than ours"
    two.stop()
    response = front.chat("hello")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_server"
    assert response.headers["retry-after"]
    one.start()
    assert front.chat("hello").status_code == 200, "a server that seems down is asked when there is no other"


def test_a_wrong_request_is_not_sent_to_another_server(upstream: Any, proxy: Any) -> None:
    one, two = upstream(refuses(400)), upstream(refuses(400))
    front = proxy("router", one.url, two.url)
    assert front.chat("hello").status_code == 400
    assert len(one.completions) + len(two.completions) == 1


def test_requests_that_fail_by_themselves_take_no_server_down(upstream: Any, proxy: Any) -> None:
    """A request that breaks whichever server gets it: the others' conversations stay where they are."""

    async def fragile(exchange: Exchange) -> None:
        if "poison" in json.dumps(exchange.asked.body):
            exchange.cut()
        else:
            await answers(exchange)

    servers = [upstream(fragile) for _ in range(3)]
    front = proxy("router", *(server.url for server in servers), "--health-interval", "100", "--max-attempts", "2")
    text = "All work and no play. " * 400
    front.chat(text)
    for _ in range(6):
        assert front.chat("poison").status_code == 503
    poisoned = sum("poison" in json.dumps(asked.body) for server in servers for asked in server.completions)
    assert poisoned <= 6 * 2 * 2, "two servers each, and a closed idle connection counts once more"
    assert front.metric("headwater_proxy_server_up") == 3
    before = front.metric("headwater_proxy_expected_cached_tokens_total")
    front.chat(text + "And then?")
    assert front.metric("headwater_proxy_expected_cached_tokens_total") > before, "its home was forgotten"


# ---- clients ----------------------------------------------------------------------------------------------------
def ended_within(asked: Asked, since_s: float, limit_s: float) -> bool:
    return asked.was_cut and asked.ended_s is not None and asked.ended_s - since_s < limit_s


@pytest.mark.parametrize("moment", ["before the first byte", "in the stream"])
def test_both_legs_end_when_the_client_leaves(upstream: Any, proxy: Any, moment: str) -> None:
    slow = hangs if moment == "before the first byte" else partial(answers, num_events=100_000, delay_s=0.01)
    decode, prefill = upstream(slow, peer="h:1"), upstream(hangs)
    front = proxy("proxy", "--decode", decode.url, "--prefill", prefill.url)
    body = json.dumps(chat_body("hello", stream=True)).encode()
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=WAIT_S) as sock:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: bool(decode.completions and prefill.completions), WAIT_S)
        if moment == "in the stream":
            assert b"200" in sock.recv(100)
    left_s = time.monotonic()
    legs = [decode.completions[0], prefill.completions[0]]
    wait_until(lambda: all(leg.ended_s is not None for leg in legs), WAIT_S)
    assert all(ended_within(leg, left_s, 1.0) for leg in legs)
    wait_until(lambda: front.metric("headwater_proxy_server_requests") == 0, WAIT_S)
    assert front.metric("headwater_proxy_server_queued_tokens") == 0


def test_a_slow_reader_holds_back_its_server_and_not_its_answer(upstream: Any, proxy: Any) -> None:
    sent = 0

    async def floods(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start_stream()
        for _ in range(4096):
            await exchange.event({"choices": [{"index": 0, "delta": {"content": "y" * (1 << 16)}}]})
            sent += 1 << 16
        await exchange.end_stream()

    decode = upstream(floods)
    front = proxy("router", decode.url)
    front.http.get("/health")
    before = front.rss_bytes()
    body = json.dumps(chat_body("hello", stream=True)).encode()
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=WAIT_S) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        sock.recv(1000)
        last = -1

        def stands_still() -> bool:
            nonlocal last
            was, last = last, sent
            return was == sent

        wait_until(lambda: _calm(stands_still), WAIT_S)
        assert sent < 64 << 20, "the whole answer was taken in"
        assert front.rss_bytes() - before < 32 << 20
        assert front.http.get("/health").status_code == 200, "others are served meanwhile"
    wait_until(lambda: decode.completions[0].was_cut, WAIT_S)


def _calm(stands_still: Callable[[], bool]) -> bool:
    """Whether nothing changes for a while."""
    stands_still()
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        if not stands_still():
            return False
        time.sleep(0.02)
    return True


def test_streams_hold_nothing_of_their_requests(upstream: Any, proxy: Any) -> None:
    decode, prefill = upstream(partial(answers, num_events=100_000, delay_s=0.05), peer="h:1"), upstream()
    front = proxy("proxy", "--decode", decode.url, "--prefill", prefill.url)
    text = "All work and no play. " * 100_000
    body = json.dumps(chat_body(text, stream=True)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    before = front.rss_bytes()
    with ExitStack() as stack:
        for _ in range(24):
            address = ("127.0.0.1", int(front.url.rpartition(":")[2]))
            sock = stack.enter_context(socket.create_connection(address, timeout=WAIT_S))
            sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert b"200" in sock.recv(100)
        assert len(body) > 2 << 20
        wait_until(lambda: front.rss_bytes() - before < 12 * len(body), WAIT_S)
        assert front.metric("headwater_proxy_server_requests") == 24


def test_a_hundred_mixed_streams_beside_servers_that_fail(upstream: Any, proxy: Any) -> None:
    """Every request has a live decode server, so every one is answered, whatever the others meet."""
    dice = random.Random(18)

    async def fickle(exchange: Exchange) -> None:
        kinds = [answers, dies_silently, sends_noise, refuses(503), half_a_body, partial(answers, delay_s=0.05)]
        await dice.choice(kinds)(exchange)

    good = upstream(partial(answers, num_events=20, delay_s=0.005), peer="h:1")
    bad, prefill = upstream(fickle, peer="h:2"), upstream(fickle)
    front = proxy(
        "proxy", "--decode", good.url, bad.url, "--prefill", prefill.url, "--health-interval", "0.05"
    )  # fmt: skip
    files = front.num_files()
    failed: list[str] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = chat_body(f"{number} " + "word " * (number * 37 % 500), stream=number % 3 > 0)
        if number % 10 == 9:  # a client that leaves
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.001))
            return
        response = await client.post("/v1/chat/completions", json=body)
        text = response.text
        is_whole = "[DONE]" in text if body["stream"] else "usage" in text
        if response.status_code != 200 or not is_whole:
            failed.append(f"{number}: {response.status_code} {text[-200:]}")

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=front.url, timeout=WAIT_S * 3, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(100)))

    asyncio.run(all_of_them())
    assert not failed
    wait_until(lambda: front.metric("headwater_proxy_server_requests") == 0, WAIT_S)
    assert front.metric("headwater_proxy_server_queued_tokens") == 0
    wait_until(lambda: front.num_files() <= files + 8, WAIT_S)
