"""Look-ups in another process: the same answers as the space itself, whatever comes through the socket."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="look-ups in another process need pyzmq")

import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from headwater.connector.lookup import Lookup, LookupClient, LookupServer, base, client, server, wire  # noqa: E402
from headwater.connector.lookup.life import check_folder  # noqa: E402
from headwater.connector.lookup.wire import Frame, Op  # noqa: E402
from headwater.errors import InvalidArgumentError, StoreError, StorePermissionError  # noqa: E402
from headwater.kv.topology import whole_shard  # noqa: E402
from headwater.pool import Pool, Space, open_pool  # noqa: E402
from headwater.pool.space import Match  # noqa: E402

from support import gqa, identity, local_tiles, wait_until  # noqa: E402

SPEC = gqa(layers=1, heads=1)
CHUNK = 8
PROMPT = list(range(100))
SRC = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with open_pool("memory://?capacity=8MiB") as opened:
        yield opened


@pytest.fixture(scope="module")
def space(pool: Pool) -> Space:
    made = pool.space(identity(), SPEC, chunk_tokens=CHUNK)
    write(made, PROMPT[:45])
    write(made, PROMPT[:43])
    return made


@pytest.fixture(scope="module")
def lookup_server(space: Space) -> Iterator[LookupServer]:
    with LookupServer(space) as made:
        yield made


@pytest.fixture
def asks(lookup_server: LookupServer) -> Iterator[LookupClient]:
    with LookupClient(lookup_server.address, deadline_s=20.0) as made:
        yield made


def write(space: Space, tokens: list[int]) -> None:
    chunks, shard = space.keys(tokens).chunks(), whole_shard(SPEC)
    statuses = space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
    assert all(status.stored for status in statuses)


def leased(pool: Pool) -> set[bytes]:
    return {chunk.key for chunk in pool.scan() if chunk.leased}


def call_raw(address: str, *frames: bytes) -> list[bytes]:
    """What a stranger gets, who sends anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(frames)
        assert socket.poll(20_000), "no answer"
        answer: list[bytes] = socket.recv_multipart()
        return answer


# ---- the same answers -------------------------------------------------------------------------------------------
@given(st.integers(0, 60), st.integers(0, 70), st.none() | st.integers(0, 80))
@settings(max_examples=60)
def test_a_match_is_the_spaces_own(
    space: Space, lookup_server: LookupServer, same: int, length: int, max_tokens: int | None
) -> None:
    """Prompts that agree with what is stored up to some token."""
    with LookupClient(lookup_server.address, deadline_s=20.0) as asks:
        prompt = [*PROMPT[:same], *range(1000, 1100)][:length]
        mine, theirs = space.keys(prompt), asks.keys(prompt)
        assert theirs.chunks() == mine.chunks()
        assert asks.match(theirs, max_tokens=max_tokens) == space.match(mine, max_tokens=max_tokens)
        assert asks.exists(theirs.chunks()) == space.exists(mine.chunks())
        assert (asks.num_late, asks.num_errors, asks.num_skipped) == (0, 0, 0)


def test_a_client_is_what_the_scheduler_half_needs(space: Space, asks: LookupClient) -> None:
    from headwater.connector.config import ConnectorConfig
    from headwater.connector.scheduler import SchedulerHalf

    lookups: list[Lookup] = [space, asks]
    blocks = np.arange(20, dtype=np.int32)
    seen: list[Any] = []
    for lookup in lookups:
        half = SchedulerHalf(lookup, ConnectorConfig(pool="memory://"))  # type: ignore[arg-type]
        found = half.num_matched("r", PROMPT, len(PROMPT))
        load = half.start_load("r", 0, blocks, 0, 99)
        ended = half.finish_load("r", len(load.chunks))
        save = half.collect("r", PROMPT, len(PROMPT), blocks, ends=True)
        assert save is not None
        half.forget("r")
        seen.append((found, ended, load.chunks, save.chunks))
    assert seen[0] == seen[1]
    assert seen[0][0] == 45


def test_questions_longer_than_a_frame_are_split(asks: LookupClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_KEYS", 2)
    keys = asks.keys(PROMPT)
    assert asks.exists(keys.chunks()) == [True] * 5 + [False] * 8
    assert asks.match(keys).num_tokens == 16  # fewer than there are, never more


# ---- leases -----------------------------------------------------------------------------------------------------
def test_a_lease_holds_until_it_is_released(pool: Pool, asks: LookupClient) -> None:
    match = asks.match(asks.keys(PROMPT))
    last = match.chunks[-1].key
    assert asks.lease(match, "a").held
    assert asks.lease(match, "b").held
    asks.release("a")
    assert last in leased(pool)
    asks.release("b")
    asks.release("b")
    assert last not in leased(pool)
    assert not asks.lease(Match(()), "c").held


def test_a_lease_on_what_is_not_there_is_not_held(asks: LookupClient) -> None:
    chunk = asks.keys(range(500, 600)).chunks()[0]
    lease = asks.lease(Match((chunk,)), "x")
    assert not lease.held
    lease.release()


def test_clients_do_not_share_request_ids(pool: Pool, lookup_server: LookupServer, asks: LookupClient) -> None:
    match = asks.match(asks.keys(PROMPT))
    with LookupClient(lookup_server.address, deadline_s=20.0) as other:
        assert asks.lease(match, "same").held
        assert other.lease(match, "same").held
        other.release("same")
        assert match.chunks[-1].key in leased(pool)
    asks.release("same")
    assert match.chunks[-1].key not in leased(pool)


DIES = """
import sys, time
from headwater.connector.lookup import LookupClient
client = LookupClient(sys.argv[1], deadline_s=20.0)
match = client.match(client.keys(list(range(100))))
print(client.lease(match, "r").held, flush=True)
time.sleep(600)
"""


def test_a_client_that_is_killed_loses_its_leases(
    pool: Pool, lookup_server: LookupServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = os.environ | {"PYTHONPATH": SRC}
    command = [sys.executable, "-c", DIES, lookup_server.address]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            assert leased(pool)
            lookup_server._sweep()
            assert leased(pool), "it lives"
        finally:
            process.kill()
    wait_until(lambda: not leased(pool), what="the lease of the dead to be released")


def test_closing_a_client_ends_its_leases(pool: Pool, lookup_server: LookupServer) -> None:
    with LookupClient(lookup_server.address, deadline_s=20.0) as asks:
        assert asks.lease(asks.match(asks.keys(PROMPT)), "r").held
    asks.close()
    wait_until(lambda: not leased(pool), what="the lease to be released")


def test_a_stranger_without_a_lock_gets_no_lease(lookup_server: LookupServer, asks: LookupClient) -> None:
    key = asks.match(asks.keys(PROMPT)).chunks[-1].key
    question = wire.encode(Frame(Op.LEASE, bytes(16), 1, key + b"r"))
    answer = wire.decode(call_raw(lookup_server.address, question)[-1])
    assert answer.op == Op.ERROR
    assert b"lock" in answer.body


def test_leases_are_bounded(
    lookup_server: LookupServer, asks: LookupClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_LEASES", 2)
    match = asks.match(asks.keys(PROMPT))
    assert [asks.lease(match, name).held for name in "aba"] == [True] * 3
    assert not asks.lease(match, "c").held
    assert asks.num_errors == 1
    for name in "abc":
        asks.release(name)
    assert not leased(pool)


# ---- a server that is slow, or gone -----------------------------------------------------------------------------
def test_a_late_answer_is_nothing_and_the_next_one_is_right(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr(client, "RETRY_S", 0.0)

    class Slow:
        """A space whose look-ups take as long as a test wants."""

        def __getattr__(self, name: str) -> Any:
            return getattr(space, name)

        def run(self, root: bytes, keys: list[bytes]) -> Any:
            assert gate.wait(60)
            return space.run(root, keys)

    with LookupServer(Slow()) as slow, LookupClient(slow.address, deadline_s=20.0) as asks:  # type: ignore[arg-type]
        keys = asks.keys(PROMPT)
        gate.clear()
        asks._deadline_s = 0.05
        begin = time.monotonic()
        assert asks.match(keys).num_tokens == 0
        assert time.monotonic() - begin < 5
        assert asks.num_late == 1
        monkeypatch.setattr(client, "RETRY_S", 600.0)
        assert asks.match(keys).num_tokens == 0
        assert (asks.num_late, asks.num_skipped) == (2, 0)
        assert asks.match(keys).num_tokens == 0
        assert asks.exists(keys.chunks()) == [False] * 13
        assert (asks.num_late, asks.num_skipped) == (2, 2), "nobody waits again so soon"
        gate.set()
        asks._retry_at, asks._deadline_s = 0.0, 20.0
        assert asks.match(keys).num_tokens == 45
        assert asks.num_errors == 0


def test_a_release_that_was_not_heard_is_said_again(
    pool: Pool, lookup_server: LookupServer, asks: LookupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = asks.match(asks.keys(PROMPT))
    assert asks.lease(match, "r").held
    asks._retry_at = time.monotonic() + 600
    asks.release("r")
    assert leased(pool)
    asks._retry_at = 0.0
    asks.exists([])
    asks.match(asks.keys(PROMPT))
    assert not leased(pool)


def test_a_server_that_is_gone_is_one_that_has_nothing(space: Space) -> None:
    gone = LookupServer(space)
    with LookupClient(gone.address, deadline_s=20.0) as asks:
        gone.close()
        gone.close()
        asks._deadline_s = 0.05
        assert asks.match(asks.keys(PROMPT)).num_tokens == 0
        asks.release("r")
        assert asks.num_late == 1
    assert not Path(gone.address.removeprefix("ipc://")).parent.exists()
    with pytest.raises(StoreError, match="nobody answers"):
        LookupClient(gone.address)


# ---- nonsense ---------------------------------------------------------------------------------------------------
@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_refused_and_counted(lookup_server: LookupServer, data: bytes) -> None:
    before = lookup_server.num_refused
    answer = wire.decode(call_raw(lookup_server.address, data)[-1])
    assert answer.op == Op.ERROR
    assert lookup_server.num_refused == before + 1


@given(op=st.integers(0, 255), body=st.binary(max_size=300), number=st.integers(0, 2**64 - 1))
@settings(max_examples=150)
def test_any_body_gets_an_answer(lookup_server: LookupServer, op: int, body: bytes, number: int) -> None:
    frame = struct.pack("<4sBBH16sQ", b"HWLK", 1, op, 0, bytes(16), number) + body
    answer = wire.decode(call_raw(lookup_server.address, frame)[-1])
    assert answer.op in (op, Op.ERROR)
    assert len(answer.body) <= max(300, wire.MAX_TEXT_BYTES)


def test_many_frames_and_other_versions_are_refused(lookup_server: LookupServer, asks: LookupClient) -> None:
    hello = wire.encode(Frame(Op.HELLO, bytes(16), 7, b""))
    assert wire.decode(call_raw(lookup_server.address, hello)[-1]).number == 7
    assert wire.decode(call_raw(lookup_server.address, hello, hello)[-1]).op == Op.ERROR
    answer = wire.decode(call_raw(lookup_server.address, hello[:4] + b"\2" + hello[5:])[-1])
    assert b"version 2" in answer.body
    with pytest.raises(InvalidArgumentError):
        wire.encode(Frame(Op.RUN, bytes(16), 1, bytes(wire.MAX_FRAME_BYTES)))
    assert asks.match(asks.keys(PROMPT)).num_tokens == 45


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_server_that_answers_nonsense_has_nothing(bodies: list[bytes]) -> None:
    """The frame is right and the body is not: no exception, and never more than there was."""
    asks = object.__new__(LookupClient)
    asks._root, asks._chunk_tokens, asks.num_errors = bytes(32), CHUNK, 0
    asks._unreleased, answers = set(), iter([*bodies, *bodies])
    asks._ask = lambda *_: next(answers, None)  # type: ignore[method-assign]
    keys = asks.keys(PROMPT)
    assert asks.match(keys).num_tokens <= len(PROMPT)
    assert len(asks.exists(keys.chunks())) == 13


def test_a_frame_comes_back_as_it_went() -> None:
    for op in Op:
        frame = Frame(op, os.urandom(16), 2**64 - 1, b"body")
        assert wire.decode(wire.encode(frame)) == frame


# ---- places -----------------------------------------------------------------------------------------------------
def test_the_socket_is_private(lookup_server: LookupServer, tmp_path: Path) -> None:
    folder = Path(lookup_server.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    with pytest.raises(StorePermissionError, match="only this user"):
        check_folder(f"ipc://{tmp_path}/socket")
    with pytest.raises(InvalidArgumentError, match="no address"):
        LookupClient("tcp://127.0.0.1:5555")


def test_without_pyzmq_the_remedy_is_named(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(base, "import_module", missing)
    with pytest.raises(StoreError, match=r"pip install '/path/to/headwater\[lookup\]'"):
        LookupServer(space)
