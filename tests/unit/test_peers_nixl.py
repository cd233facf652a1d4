"""One-sided writes: what is fenced, for how long, and what ends it. Over NIXL itself, within this process."""

from __future__ import annotations

import contextlib
import gc
import os
import ssl
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headwater.errors import InvalidArgumentError, PeerError, PeerGoneError, PeerRefusedError, WireError
from headwater.kv.topology import whole_shard
from headwater.peers.caller import LinkSettings, PeerCaller, check_carrier
from headwater.peers.carriers import nixl
from headwater.peers.carriers.tcp import Connection
from headwater.peers.exposing import MAX_EXPOSED, Targets, decode_written, encode_written
from headwater.peers.hello import CarrierBit, PeerRole, describe_space, scope_of
from headwater.peers.push_session import PushSession
from headwater.peers.receiver import Receiver
from headwater.peers.wire import Data, Header, Put, Type, encode_frame
from headwater.pool.pool import Pool
from headwater.pool.space import Space
from peer_cases import CHUNK, check_arrived, nothing_pending, open_space, prompt, receiving, save, sending, transfer_id
from peer_cases import two_pools as pools_of

from support import wait_until

needs_nixl = pytest.mark.skipif(nixl.why_not() is not None, reason=str(nixl.why_not()))
NUM_CHUNKS = 3


class RawSender:
    """A sender that does what a test says, frame by frame."""

    def __init__(self, receiver: Receiver, space: Space, carriers: int = CarrierBit.NIXL) -> None:
        self.space, self.shard = space, whole_shard(space.spec)
        caller = PeerCaller(PeerRole.PUSH, 5, 0, scope_of(space), describe_space(space))
        self.connection: Connection
        self.connection, self.welcome = caller.call(receiver.address, b"s" * 16, LinkSettings(), carriers=carriers)
        self._number = 0

    def ask(self, kind: Type, meta: bytes) -> bytes:
        """The answer to a frame. REFUSE and the end are PeerErrors."""
        self._number += 1
        self.connection.send(encode_frame(kind, meta, number=self._number), time.monotonic() + 10)
        header, body = self.connection.receive(time.monotonic() + 10)
        assert header.number == self._number
        return body

    def put(self, seed: int = 0) -> bytes:
        chunks = tuple(prompt(self.space, NUM_CHUNKS, seed))
        root = self.space.describe(chunks[0].root)
        return self.ask(Type.PUT, Put(1, bytes(16), chunks, self.shard, root).encode())

    def write(self, layers: range) -> tuple[int, Targets]:
        """Ask where layers go. Their checksums are those of zeros."""
        num_sums = NUM_CHUNKS * len(layers) * self.space.spec.num_kv_heads
        data = Data(1, layers, range(NUM_CHUNKS), np.ones(num_sums, np.uint64))
        body = self.ask(Type.WRITE, data.encode())
        return self._number, Targets.decode(body, NUM_CHUNKS)


@contextlib.contextmanager
def raw_sender(other: Pool, here: Space, **settings: Any) -> Iterator[tuple[Receiver, RawSender]]:
    with receiving(other, carrier="nixl", **settings) as receiver:
        sender = RawSender(receiver, here)
        try:
            yield receiver, sender
        finally:
            sender.connection.close()


# ---- the carrier ------------------------------------------------------------------------------------------------
def memory(value: int, size: int = 1 << 16) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(size, value, np.uint8)


def rows(*regions: tuple[int, int]) -> nixl.Regions:
    return np.array([(address, size, 0) for address, size in regions], np.uint64)


def await_write(write: nixl.Write, *helped: nixl.Agent) -> None:
    def is_done() -> bool:
        for agent in helped:
            agent.progress()
        return write.is_done()

    wait_until(is_done, 20.0, "the write is done")


@needs_nixl
def test_a_write_lands_where_it_should_and_nowhere_else() -> None:
    one, other = nixl.Agent(), nixl.Agent()
    source, target = memory(7), memory(0)
    assert one.register(source)
    assert other.register(target)
    assert not other.register(target)
    peer = one.meet(other.metadata())
    base, into = source.ctypes.data, target.ctypes.data
    await_write(one.write(peer, rows((base, 100), (base + 100, 50)), rows((into + 10, 100), (into + 500, 50))), other)
    assert int(target.sum()) == 7 * 150
    assert (target[10:110] == 7).all()
    assert (target[500:550] == 7).all()
    more = memory(0)
    assert other.register(more)
    assert one.meet(other.metadata()) == peer, "what is registered later is told later"
    await_write(one.write(peer, rows((base, 64)), rows((more.ctypes.data, 64))), other)
    assert int(more.sum()) == 7 * 64
    for agent in (one, other):
        agent.close()
        agent.close()


@needs_nixl
def test_an_agent_is_gone_when_it_is_closed_whatever_still_refers_to_its_errors() -> None:
    """A traceback keeps the variables of its frames. One with NIXL's agent in it would keep writes going."""
    agent, target = nixl.Agent(), memory(0)
    agent.register(target)
    errors: list[BaseException] = []
    gone = weakref.ref(agent._agent.agent)
    local = rows((target.ctypes.data, 64))
    for what in (lambda: agent.write("nobody", local, local), lambda: agent.meet(b"noise"), lambda: agent.state(9)):
        with pytest.raises(PeerGoneError, match="NIXL") as caught:
            what()
        errors.append(caught.value)
    gc.disable()
    try:
        agent.close()
        assert gone() is None
    finally:
        gc.enable()
    assert len(errors) == 3
    with pytest.raises(PeerGoneError, match="closed"):
        agent.progress()


@needs_nixl
def test_nixl_says_nothing_on_stdout() -> None:
    """There is our JSON."""
    code = "from headwater.peers.carriers import nixl; nixl.Agent().close(); print('end')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert ran.stdout == "end\n"


# ---- the fence --------------------------------------------------------------------------------------------------
@needs_nixl
def test_extents_of_a_sender_that_is_silent_are_not_reused_by_any_time() -> None:
    """It may be stopped, with its write half done: its chunks are given up, its extents are not."""
    with pools_of("capacity=2MiB") as (one, other):
        here, there = open_space(one), open_space(other)
        with raw_sender(other, here, silence_s=0.3) as (receiver, sender):
            assert sender.put() == bytes(NUM_CHUNKS)
            _, targets = sender.write(range(2))
            assert all(targets.addresses)
            agent, source = nixl.Agent(), memory(0xEE)
            agent.register(source)
            peer = agent.meet(targets.metadata)
            wait_until(lambda: receiver.landing.counts["writes_unsettled"] == 1, 10.0, "the sender is given up")
            assert there.exists(prompt(there, NUM_CHUNKS)) == [False] * NUM_CHUNKS
            held = receiver.landing.pending_bytes
            assert held == NUM_CHUNKS * here.spec.extent_bytes(CHUNK)
            for seed in range(1, 120):  # as much as the pool has room for, several times
                chunks = prompt(there, NUM_CHUNKS, seed)
                save(there, chunks, whole_shard(there.spec))
                # Late, by a process of this host: NIXL may let it land, or refuse it.
                with contextlib.suppress(PeerGoneError):
                    where = rows(*((address, 512) for address in targets.addresses))
                    agent.write(peer, rows(*([(source.ctypes.data, 512)] * NUM_CHUNKS)), where).is_done()
                check_arrived(there, chunks)
            assert receiver.landing.pending_bytes == held
            agent.close()
            sender.connection.close()
            wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0, "its end gives them back")
            nothing_pending(other)


@needs_nixl
def test_a_sender_that_ends_in_a_write_leaves_nothing() -> None:
    with pools_of() as (one, other):
        here = open_space(one)
        with raw_sender(other, here) as (receiver, sender):
            sender.put()
            sender.write(range(2))
            sender.connection.close()
            wait_until(lambda: receiver.stats()["connections"] == 0, 10.0)
            wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)
            nothing_pending(other)


@needs_nixl
def test_what_was_never_written_is_a_miss_and_not_garbage() -> None:
    """A sender that says WRITTEN and has written nothing: the checksums do not fit."""
    with pools_of() as (one, other):
        here, there = open_space(one), open_space(other)
        with raw_sender(other, here) as (_, sender):
            sender.put()
            number, _ = sender.write(range(here.spec.num_layers))
            assert sender.ask(Type.WRITTEN, encode_written(number)) == bytes(NUM_CHUNKS)
            chunks, shard = prompt(there, NUM_CHUNKS), whole_shard(there.spec)
            out = [there.empty(chunk, shard) for chunk in chunks]
            assert not any(status.value == 0 for status in there.read(chunks, shard, out, deadline_s=10.0))


@needs_nixl
def test_a_write_is_asked_for_while_the_one_before_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer at a time: the peer hears of the next one before it hears that this one is over, and of each once."""
    heard: list[Type] = []
    handle = PushSession.handle

    def listen(session: PushSession, connection: Connection, header: Header, meta: bytes, deadline: float) -> None:
        heard.append(header.type)
        handle(session, connection, header, meta, deadline)

    monkeypatch.setattr(PushSession, "handle", listen)
    monkeypatch.setattr("headwater.peers.link._WRITE_BYTES", 1)
    with pools_of() as (one, other), receiving(other, carrier="nixl") as receiver:
        here, there = open_space(one), open_space(other)
        chunks = prompt(here, NUM_CHUNKS)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, carrier="nixl") as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 20.0) == NUM_CHUNKS * CHUNK
            assert sender.counts["written_bytes"] == here.spec.extent_bytes(NUM_CHUNKS * CHUNK)
        check_arrived(there, chunks)
    writes = [kind for kind in heard if kind in (Type.WRITE, Type.WRITTEN)]
    count = here.spec.num_layers * NUM_CHUNKS
    assert writes == [Type.WRITE, *[Type.WRITE, Type.WRITTEN] * (count - 1), Type.WRITTEN]


# ---- out of order -----------------------------------------------------------------------------------------------
@needs_nixl
def test_writes_out_of_order_end_the_connection() -> None:
    with pools_of() as (one, other):
        here = open_space(one)
        with raw_sender(other, here) as (receiver, sender):
            sender.put()
            with pytest.raises(PeerRefusedError, match="was not begun"):
                sender.ask(Type.WRITTEN, encode_written(77))
            wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)
        with raw_sender(other, here) as (receiver, sender):
            sender.put(1)
            sender.write(range(2))
            with pytest.raises(PeerRefusedError, match="sent twice"):
                sender.write(range(1, 3))
            sender.connection.close()
            wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)
            nothing_pending(other)
        with raw_sender(other, here) as (receiver, sender), pytest.raises(PeerRefusedError, match="not put"):
            sender.write(range(2))


@needs_nixl
def test_a_session_may_not_have_any_number_of_writes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_EXPOSED >= 16
    monkeypatch.setattr("headwater.peers.exposing.MAX_EXPOSED", 2)
    with pools_of() as (one, other):
        here = open_space(one)
        with raw_sender(other, here) as (receiver, sender):
            sender.put()
            for layer in range(2):
                sender.write(range(layer, layer + 1))
            with pytest.raises(PeerRefusedError, match="writes are open"):
                sender.write(range(2, 3))
            sender.connection.close()
            wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)


def test_a_write_without_a_carrier_is_refused() -> None:
    with pools_of() as (one, other), receiving(other) as receiver:
        sender = RawSender(receiver, open_space(one))
        assert sender.welcome.carrier == 0
        sender.put()
        with pytest.raises(PeerRefusedError, match="without a carrier"):
            sender.write(range(2))
        sender.connection.close()
        wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)


@pytest.mark.parametrize("body", [b"", b"\2\0\0\0" + bytes(24), b"\3\0\0\0" + bytes(23)])
def test_answers_that_do_not_fit_their_write_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="does not fit"):
        Targets.decode(body, 3)
    assert Targets.decode(Targets([1, 0, 1 << 63], b"meta").encode(), 3) == Targets([1, 0, 1 << 63], b"meta")
    with pytest.raises(WireError, match="wrong size"):
        decode_written(b"123")


# ---- choosing ---------------------------------------------------------------------------------------------------
def test_carriers_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_carrier("tcp", ssl.create_default_context())
    with pytest.raises(InvalidArgumentError, match="expected tcp or nixl"):
        check_carrier("rdma", None)
    with pytest.raises(InvalidArgumentError, match="does not encrypt"):
        check_carrier("nixl", ssl.create_default_context())
    monkeypatch.setattr(nixl, "_api", lambda: "NIXL cannot be imported: no such module")
    with pytest.raises(InvalidArgumentError, match="cannot be imported"):
        check_carrier("nixl", None)
    with pytest.raises(PeerError, match="cannot be imported"):
        nixl.Agent()


def test_a_sender_whose_carrier_does_not_start_pushes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_api", lambda: "NIXL cannot be imported: no such module")
    with pools_of() as (one, other), receiving(other) as receiver:
        here = open_space(one)
        chunks = prompt(here, NUM_CHUNKS)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, carrier="nixl") as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == NUM_CHUNKS * CHUNK
            assert "written_bytes" not in sender.counts
        check_arrived(open_space(other), chunks)


@needs_nixl
def test_a_peer_that_does_not_say_who_it_is_costs_a_push_and_no_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.Agent, "metadata", lambda self: b"")
    with pools_of() as (one, other), receiving(other, carrier="nixl") as receiver:
        here = open_space(one)
        chunks = prompt(here, NUM_CHUNKS)
        save(here, chunks, whole_shard(here.spec))
        with sending(here, carrier="nixl") as (sender,):
            transfer = transfer_id()
            assert sender.push(transfer, str(receiver.address), chunks)
            assert sender.flush(transfer, 10.0) == 0
            assert sender.counts["failures"] == 1
        wait_until(lambda: receiver.landing.pending_bytes == 0, 10.0)
        one.clear()
        assert one.stats().store.used_bytes == 0, "a loan is left"
