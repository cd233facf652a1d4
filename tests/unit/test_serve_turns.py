"""The event loop of the server is everybody's: what slow readers left waiting is sent in small parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headwater.engine.params import FinishReason, RequestOutput, TokenLogprobs
from headwater.serve import client as client_module
from headwater.serve.messages import Outputs
from headwater.serve.turns import TURN_VALUES, Turns
from serve_rig import Rig, call, with_rig

NUM_READERS = 4
NUM_WAITING = 2000
"""Tokens, for each of them."""
MANY = 200
"""Values; what takes some 10 ms. All that waits are 40 times as many."""


class Reader:
    """A client that reads nothing until its gate is opened."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.body = bytearray()
        self._gate = gate

    async def send(self, message: Any) -> None:
        await self._gate.wait()
        self.body += message.get("body", b"")

    @property
    def num_values(self) -> int:
        """Tokens and log-probabilities that it was sent, as far as they are whole."""
        return self.body.count(b'"text":') + self.body.count(b":-2.0")

    @property
    def text(self) -> str:
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line]
        assert lines.pop() == "[DONE]"
        return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def letter(number: int) -> int:
    return ord("a") + number % 26


async def fill(rig: Rig, request_ids: list[str], num_tokens: int, num_logprobs: int | None) -> None:
    """Let the engine say so many tokens to each request, which ends then."""
    top = None if num_logprobs is None else [(98 + i, -2.0) for i in range(num_logprobs)]
    for number in range(num_tokens):
        token_id = letter(number)
        reason = FinishReason.LENGTH if number == num_tokens - 1 else None
        logprobs = None if top is None else [TokenLogprobs(token_id, -1.0, top)]
        outputs = [RequestOutput(name, [token_id], logprobs, reason, 1, 0) for name in request_ids]
        await rig.wire.replies.put([Outputs(outputs)])
    await until(lambda: rig.client.num_in_flight == 0)


@pytest.mark.parametrize("num_logprobs", [None, 20])
def test_what_waits_for_slow_readers_is_sent_in_small_parts_in_turn_with_everything_else(
    num_logprobs: int | None,
) -> None:
    num_tokens = NUM_WAITING if num_logprobs is None else NUM_WAITING // 20
    fields = {"prompt": "x", "stream": True, "max_tokens": num_tokens, "logprobs": num_logprobs}

    async def test(rig: Rig) -> None:
        gate = asyncio.Event()
        readers = [Reader(gate) for _ in range(NUM_READERS)]
        posting = [asyncio.create_task(rig.post(fields, reader.send)) for reader in readers]
        await until(lambda: len(rig.wire.submitted()) == NUM_READERS)
        await fill(rig, [str(number) for number in range(NUM_READERS)], num_tokens, num_logprobs)
        gate.set()
        sizes, num_sent = [], 0
        while not all(task.done() for task in posting):
            await asyncio.sleep(0)
            num_before, num_sent = num_sent, sum(reader.num_values for reader in readers)
            sizes.append(num_sent - num_before)
        assert max(sizes) <= MANY, "of all readers together, between two turns of somebody else"
        text = "".join(chr(letter(number)) for number in range(num_tokens))
        assert [reader.text for reader in readers] == [text] * NUM_READERS

    with_rig(test, max_sequences=2 * NUM_READERS)


def test_a_stream_that_keeps_up_does_not_wait_for_the_end_of_what_others_have_left_waiting() -> None:
    async def test(rig: Rig) -> None:
        gate = asyncio.Event()
        readers = [Reader(gate) for _ in range(NUM_READERS)]
        fields = {"prompt": "x", "stream": True, "max_tokens": NUM_WAITING}
        posting = [asyncio.create_task(rig.post(fields, reader.send)) for reader in readers]
        await until(lambda: len(rig.wire.submitted()) == NUM_READERS)
        await fill(rig, [str(number) for number in range(NUM_READERS)], NUM_WAITING, None)
        with await rig.generator.begin(call(max_tokens=1)) as generation:
            reading = asyncio.create_task(generation.next())
            gate.set()
            await until(lambda: sum(reader.num_values for reader in readers) > 0)
            output = RequestOutput(str(NUM_READERS), [letter(0)], None, FinishReason.LENGTH, 1, 0)
            await rig.wire.replies.put([Outputs([output])])
            assert [delta.text for _, delta in await reading] == ["a"]
            assert sum(reader.num_values for reader in readers) < NUM_READERS * NUM_WAITING // 4
        await asyncio.gather(*posting)

    with_rig(test, max_sequences=2 * NUM_READERS)


@pytest.mark.parametrize("reads", [True, False])
def test_an_engine_faster_than_the_server_waits_for_it_and_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(client_module, "MAX_BACKLOG_ITEMS", 100)

    async def test(rig: Rig) -> None:
        gate = asyncio.Event()
        reader = Reader(gate)
        fields = {"prompt": "x", "stream": True, "max_tokens": NUM_WAITING}
        posting = asyncio.create_task(rig.post(fields, reader.send))
        await until(lambda: len(rig.wire.submitted()) == 1)
        if reads:
            gate.set()
        await fill(rig, ["0"], NUM_WAITING, None)
        gate.set()
        await posting
        if reads:
            assert reader.text == "".join(chr(letter(number)) for number in range(NUM_WAITING))
        else:
            assert b"client_too_slow" in reader.body
            assert reader.num_values < NUM_WAITING

    with_rig(test)


def test_a_stream_that_leaves_the_queue_holds_nobody_up() -> None:
    async def test() -> None:
        turns = Turns()
        leaving, staying = asyncio.create_task(turns.wait()), asyncio.create_task(turns.wait())
        turns.use(TURN_VALUES)
        await asyncio.sleep(0)
        leaving.cancel()
        async with asyncio.timeout(10):
            await staying
        assert leaving.cancelled()

    asyncio.run(test())
