"""Event sources of the router: a real pool's ring, and vLLM's messages over real ZMQ sockets.

The index must be what the source has, also after events were lost, the pool was replaced or the server was restarted,
and within a second of that.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import msgspec

from headwater.errors import BackendError
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.pool.space import Space
from headwater.proxy.calls import parse_call
from headwater.proxy.choice import Router
from headwater.proxy.config import ProxyConfig, ServerSpec
from headwater.proxy.fleet import FleetServer, ServerRole
from headwater.proxy.follow import EventSource, Feed, follow_servers
from headwater.proxy.keys import PromptKeys
from headwater.proxy.pool_events import PoolSource
from headwater.proxy.vllm_events import BlockNames, VllmSource, _Batch
from headwater.stores.events import NUM_SLOTS

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa()
SHARD = whole_shard(SPEC)
REPAIR_S = 1.0
WAIT_S = 10.0


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], limit_s: float = WAIT_S) -> float:
    """Seconds until it was true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "waited in vain"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


def servers(router: Router, count: int, options: str = "") -> list[FleetServer]:
    specs = tuple(ServerSpec.parse(f"http://h:{number + 1}{options}") for number in range(count))
    config = ProxyConfig(decode=specs)
    return [FleetServer(spec, ServerRole.DECODE, router, config) for spec in specs]


@asynccontextmanager
async def feeding(source: EventSource, router: Router, fed: list[FleetServer]) -> AsyncIterator[Feed]:
    feed = Feed(source, fed, router)
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def prompt(tokens: list[int], **fields: Any) -> PromptKeys:
    return PromptKeys(parse_call(json.dumps({"prompt": tokens, **fields}).encode(), is_chat=False), tokens)


def cached(router: Router, server: FleetServer, tokens: list[int], **fields: Any) -> int:
    return router.costs(prompt(tokens, **fields), [server])[0].cached_tokens


# ---- a pool -----------------------------------------------------------------------------------------------------
def write(space: Space, tokens: list[int], **names: Any) -> None:
    chunks = space.keys(tokens, **names).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, chunk, SHARD) for chunk in chunks])


PROMPT = list(range(1, 42))


@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_the_index_follows_a_pool(scheme: str, tmp_path: Path) -> None:
    async def test() -> None:
        with temporary_url(scheme, tmp_path) as url, open_pool(url) as pool:
            space = pool.space(identity(), SPEC, chunk_tokens=8)
            router = Router()
            one, two = servers(router, 2)
            source = PoolSource(url)
            async with feeding(source, router, [one, two]):
                await until(lambda: source._listed_s > 0)
                assert source.scheme is None, "an empty pool does not say how its chunks are named"
                write(space, PROMPT)
                await until(lambda: cached(router, one, PROMPT) == 40)
                assert cached(router, two, PROMPT) == 40, "both servers use this pool"
                assert cached(router, one, [*PROMPT[:17], 9999, 9998]) == 16
                assert cached(router, one, PROMPT, cache_salt="t") == 0
                write(space, PROMPT, tenant=b"t")
                await until(lambda: cached(router, one, PROMPT, cache_salt="t") == 40)
                pool.clear(space=space, tenant=b"t")
                await until(lambda: cached(router, one, PROMPT, cache_salt="t") == 0)
                assert cached(router, one, PROMPT) == 40
                pool.clear()
                await until(lambda: cached(router, one, PROMPT) == 0)
                assert not router.table.masks

    run(test())


def test_what_was_there_before_is_listed(tmp_path: Path) -> None:
    async def test() -> None:
        with temporary_url("shm", tmp_path) as url, open_pool(url) as pool:
            write(pool.space(identity(), SPEC, chunk_tokens=8), PROMPT)
            router = Router()
            (server,) = servers(router, 1)
            async with feeding(PoolSource(url), router, [server]):
                await until(lambda: cached(router, server, PROMPT) == 40)

    run(test())


def test_lost_events_are_repaired_within_a_second(tmp_path: Path) -> None:
    """More happens than the ring holds, while the router is held up. Afterwards the index is the pool's listing."""

    async def test() -> None:
        with temporary_url("shm", tmp_path, "capacity=16MiB") as url, open_pool(url) as pool:
            space = pool.space(identity(), SPEC, chunk_tokens=8)
            router = Router()
            (server,) = servers(router, 1)
            write(space, PROMPT)
            async with feeding(PoolSource(url), router, [server]) as feed:
                await until(lambda: cached(router, server, PROMPT) == 40)
                # No await: the router sees nothing of this.
                pool.clear()
                for number in range(NUM_SLOTS // 100 + 8):
                    write(space, list(range(number * 1000 + 100, number * 1000 + 900)))
                last = list(range(number * 1000 + 100, number * 1000 + 900))
                took_s = await until(lambda: cached(router, server, last) == 799)
                assert feed.num_repairs >= 1, "nothing was lost: the test is too small"
                await until(lambda: set(router.table.masks) == {chunk.key for chunk in pool.scan()})
                assert took_s < REPAIR_S
                assert cached(router, server, PROMPT) == 0

    run(test())


def test_a_pool_that_is_replaced_is_found_again_and_one_that_is_gone_is_not_believed(tmp_path: Path) -> None:
    async def test() -> None:
        with temporary_url("shm", tmp_path) as url:
            router = Router()
            (server,) = servers(router, 1)
            async with feeding(PoolSource(url), router, [server]):
                await asyncio.sleep(0)
                assert server.event_bits == 0, "there is no pool yet"
                with open_pool(url) as pool:
                    write(pool.space(identity(), SPEC, chunk_tokens=8), PROMPT)
                    await until(lambda: cached(router, server, PROMPT) == 40)
                directory = Path("/dev/shm") / url.partition("?")[0].removeprefix("shm:///")
                for path in sorted(directory.rglob("*"), reverse=True):
                    path.unlink()
                await until(lambda: server.event_bits == 0)
                directory.rmdir()
                other = list(range(500, 541))
                with open_pool(url) as pool:
                    write(pool.space(identity(), SPEC, chunk_tokens=8), other)
                    took_s = await until(lambda: cached(router, server, other) == 40)
                    assert took_s < REPAIR_S
                    assert cached(router, server, PROMPT) == 0

    run(test())


# ---- vLLM -------------------------------------------------------------------------------------------------------
class Publisher:
    """vLLM's `ZmqEventPublisher` on the wire: numbered batches on PUB, repeated on ROUTER."""

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        zmq = pytest.importorskip("zmq")
        asyncio_zmq = pytest.importorskip("zmq.asyncio")
        self.context = asyncio_zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        if ports is None:
            self.ports = tuple(sock.bind_to_random_port("tcp://127.0.0.1") for sock in (self.pub, self.router))
        else:
            self.ports = ports
            for sock, port in zip((self.pub, self.router), ports, strict=True):
                sock.bind(f"tcp://127.0.0.1:{port}")
        self.buffer: list[tuple[int, bytes]] = []
        self._replaying = asyncio.create_task(self._replay())

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def publish(self, *events: dict[str, Any], heard: bool = True) -> None:
        number = self.buffer[-1][0] + 1 if self.buffer else 0
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        if heard:
            await self.pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
        self.buffer.append((number, payload))

    async def _replay(self) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            for number, payload in self.buffer:
                if number >= int.from_bytes(first, "big"):
                    await self.router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self.context.destroy(linger=0)


BLOCK = 16


def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    """Names such as vLLM gives: nobody else can compute them."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [hashlib.sha256(repr((salt, tokens[:end], "seed of a process")).encode()).digest() for end in ends]


def stored(tokens: list[int], first: int = 0, salt: str = "", medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    names = hashes(tokens, salt)
    event = {
        "type": "BlockStored", "block_hashes": names[first:], "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK : len(names) * BLOCK], "block_size": BLOCK, "lora_id": None,
        "medium": medium, "lora_name": None,
    }  # fmt: skip
    if salt:
        event["extra_keys"] = [[salt] if first + n == 0 else None for n in range(len(names) - first)]
    return event | fields


def removed(tokens: list[int], first: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes(tokens)[first:], "medium": medium}


LONG = list(range(7, 7 + 10 * BLOCK + 5))
ALL = 10 * BLOCK


@pytest.mark.parametrize("with_replay", [True, False])
def test_the_index_follows_vllms_events(with_replay: bool) -> None:
    async def test() -> None:
        vllm = Publisher()
        router = Router()
        (server,) = servers(router, 1)
        source = VllmSource(vllm.address, vllm.replay if with_replay else None)
        try:
            async with feeding(source, router, [server]):
                await _joined(vllm, router)
                await vllm.publish(stored(LONG[: 4 * BLOCK]))
                await until(lambda: cached(router, server, LONG) == 4 * BLOCK)
                await vllm.publish(stored(LONG, 4), stored(LONG, 0, "salt"))
                await until(lambda: cached(router, server, LONG) == ALL)
                assert cached(router, server, LONG, cache_salt="salt") == ALL
                assert cached(router, server, LONG, cache_salt="other") == 0
                await vllm.publish(stored(LONG, 0, medium="CPU"), removed(LONG, 7))
                await until(lambda: len({*router.table.masks.values()}) > 1)
                assert cached(router, server, LONG) == ALL, "the CPU still has them"
                await vllm.publish(removed(LONG, 7, "CPU"))
                await until(lambda: cached(router, server, LONG) == 7 * BLOCK)
                await vllm.publish({"type": "AllBlocksCleared"})
                await until(lambda: cached(router, server, LONG) == 0)
                assert not router.table.masks
        finally:
            await vllm.close()

    run(test())


async def _joined(vllm: Publisher, router: Router) -> None:
    """Publish until the subscriber hears it: ZMQ says nothing of when that begins."""
    tokens = [1] * BLOCK
    while not router.table.masks:
        await vllm.publish({"type": "AllBlocksCleared"}, stored(tokens))
        await asyncio.sleep(0.02)


def test_a_message_that_was_missed_is_repeated_within_a_second() -> None:
    async def test() -> None:
        vllm = Publisher()
        router = Router()
        (server,) = servers(router, 1)
        try:
            async with feeding(VllmSource(vllm.address, vllm.replay), router, [server]):
                await _joined(vllm, router)
                await vllm.publish(stored(LONG), heard=False)
                assert await until(lambda: cached(router, server, LONG) == ALL) < REPAIR_S, "nothing else ever came"
                await vllm.publish(removed(LONG, 5), heard=False)
                await vllm.publish(stored([1] * BLOCK))
                assert await until(lambda: cached(router, server, LONG) == 5 * BLOCK) < REPAIR_S, "after a gap"
        finally:
            await vllm.close()

    run(test())


def test_without_a_replay_a_gap_drops_what_is_known() -> None:
    async def test() -> None:
        vllm = Publisher()
        router = Router()
        (server,) = servers(router, 1)
        other = [token + 1000 for token in LONG]
        try:
            async with feeding(VllmSource(vllm.address), router, [server]):
                await _joined(vllm, router)
                await vllm.publish(stored(LONG))
                await until(lambda: cached(router, server, LONG) == ALL)
                await vllm.publish(removed(LONG, 0), heard=False)
                await vllm.publish(stored(other))
                await until(lambda: cached(router, server, other) == ALL)
                assert cached(router, server, LONG) == 0, "they may be gone"
        finally:
            await vllm.close()

    run(test())


@pytest.mark.parametrize("with_replay", [True, False])
def test_a_restarted_server_begins_anew_within_a_second(with_replay: bool) -> None:
    async def test() -> None:
        vllm = Publisher()
        router = Router()
        (server,) = servers(router, 1)
        source = VllmSource(vllm.address, vllm.replay if with_replay else None)
        try:
            async with feeding(source, router, [server]):
                await _joined(vllm, router)
                await vllm.publish(stored(LONG))
                await until(lambda: cached(router, server, LONG) == ALL)
                ports = vllm.ports
                await vllm.close()
                vllm = Publisher(ports)
                if not with_replay:
                    source.restarted()  # as the health checks say
                assert await until(lambda: cached(router, server, LONG) == 0) < REPAIR_S
                other = [token + 1000 for token in LONG]
                began = time.monotonic()
                while cached(router, server, other) != ALL:
                    assert time.monotonic() - began < WAIT_S
                    await vllm.publish(stored(other))
                    await asyncio.sleep(0.02)
                assert time.monotonic() - began < REPAIR_S
        finally:
            await vllm.close()

    run(test())


def test_an_address_that_is_wrong_or_silent_leaves_the_history(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        pytest.importorskip("zmq")
        router = Router()
        (server,) = servers(router, 1)
        async with feeding(VllmSource("nonsense://x"), router, [server]):
            await until(lambda: "nonsense" in caplog.text)
            asked = prompt(LONG * 20)
            router.send(asked, router.choose(asked, [server])).end()
            assert router.choose(asked, [server]).cached_tokens > 0

    run(test())


def test_older_versions_send_events_as_lists() -> None:
    names = BlockNames()
    event = ["BlockStored", hashes(LONG), None, LONG[:ALL], BLOCK, None, "GPU"]
    (found,) = names.take(_Batch(0, msgspec.msgpack.encode([0.0, [event]])))
    assert len(found.keys) == 10
    assert names.scheme is not None
    assert list(found.keys) == list(prompt(LONG).of(names.scheme).keys)


def test_images_share_no_blocks_with_the_same_tokens() -> None:
    names = BlockNames()
    plain, image = stored(LONG), stored(LONG, 0, "", extra_keys=[None, [["image", 3]], *[None] * 8])
    image["block_hashes"] = [name[::-1] for name in image["block_hashes"]]
    first, second = names.take(_Batch(0, msgspec.msgpack.encode([0.0, [plain, image]])))
    assert first.keys[0] == second.keys[0]
    assert set(first.keys[1:]).isdisjoint(second.keys[1:])


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([0.0]), msgspec.msgpack.encode([0.0, [[]]]),
     msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]), msgspec.msgpack.encode(["x", []]),
     msgspec.msgpack.encode([0.0, [stored(LONG) | {"block_size": 0}]]),
     msgspec.msgpack.encode([0.0, [stored(LONG) | {"token_ids": [-1] * ALL}]]),
     msgspec.msgpack.encode([0.0, [stored(LONG) | {"token_ids": LONG[:20]}]])],
)  # fmt: skip
def test_a_message_that_is_no_batch_is_an_error_and_not_a_crash(payload: bytes) -> None:
    with pytest.raises(BackendError):
        BlockNames().take(_Batch(0, payload))


# ---- many servers -----------------------------------------------------------------------------------------------
def test_servers_with_one_pool_share_a_feed_and_events_need_tokens(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with open_pool("memory://?capacity=8MiB"):
            router = Router()
            made = servers(router, 2, ",pool=shm:///nowhere") + servers(router, 1, ",events=tcp://127.0.0.1:1")
            following = await follow_servers(made, router, has_tokens=True)
            assert [len(feed.servers) for feed in following.feeds] == [2, 1]
            await following.close()
            following = await follow_servers(made, router, has_tokens=False)
            assert not following.feeds
            assert "--tokenizer" in caplog.text

    run(test())
