"""What is announced of a prompt with which step, and how a rank's pushes end; two pools in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headwater.connector.config import ConnectorConfig
from headwater.connector.orders import FlushOrder, PushOrder, StepReport
from headwater.connector.push_desk import PushDesk
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.tracker import Scheduled
from headwater.connector.transfers import TransferParams, parse_transfer
from headwater.errors import InvalidArgumentError
from headwater.kv.topology import Topology
from headwater.peers.address import PeerAddress
from headwater.peers.process import ReceiverChild, ReceiverSpec
from headwater.peers.receiver import Receiver
from headwater.peers.sender import PeerSender
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from peer_cases import CHUNK, open_space, prompt, save

from support import WAIT_S, temporary_url, wait_until

PUSH = TransferParams(id="0a", push_to="127.0.0.1:7")


@pytest.fixture
def space() -> Iterator[Space]:
    with open_pool("memory://?capacity=8MiB") as pool:
        yield open_space(pool)


def make_side(space: Space, num_ranks: int = 1, **options: object) -> SchedulerSide:
    config = ConnectorConfig(pool="memory://", min_load_tokens=4, **options)  # type: ignore[arg-type]
    return SchedulerSide(space, config, block_size=4, num_ranks=num_ranks, dummy_block=0)


def announced(side: SchedulerSide, name: str, num_computed: int, num_scheduled: int) -> list[int]:
    """The tokens of the chunks that go with one step."""
    orders = side.order([Scheduled(name, num_computed, num_scheduled, [*range(1, 30)])])
    return [chunk.num_tokens for push in orders.pushes for chunk in push.chunks]


def test_chunks_are_announced_with_the_first_step_that_computes_them(space: Space) -> None:
    """Also the one that a step leaves incomplete; the tail only as what it is. Each of them once."""
    side, tokens = make_side(space), [*range(3 * CHUNK + 6)]
    side.add("a", tokens, len(tokens), transfer=PUSH)
    assert announced(side, "a", 0, 8) == [CHUNK]
    assert announced(side, "a", 8, 8) == []
    assert announced(side, "a", 16, 20) == [CHUNK, CHUNK]
    side.preempted("a")
    assert announced(side, "a", 0, 36) == []
    assert announced(side, "a", 36, 18) == [6]
    assert side.pushes.num_tokens("a") == len(tokens)
    assert announced(side, "a", 54, 1) == []


@pytest.mark.parametrize(("tail", "num_chunks"), [(0, 1), (3, 1), (4, 2)])
def test_a_tail_is_announced_if_it_is_worth_loading(space: Space, tail: int, num_chunks: int) -> None:
    side, tokens = make_side(space), [*range(CHUNK + tail)]
    side.add("a", tokens, len(tokens), transfer=PUSH)
    assert len(announced(side, "a", 0, len(tokens))) == num_chunks


def test_nothing_is_announced_that_is_not_saved(space: Space) -> None:
    side = make_side(space, role="consumer")
    side.add("a", [*range(2 * CHUNK)], 2 * CHUNK, transfer=PUSH)
    assert announced(side, "a", 0, 2 * CHUNK) == []
    assert not side.pushes.finish("a", is_wanted=True)


def test_the_shortest_rank_decides_how_much_was_sent(space: Space) -> None:
    side = make_side(space, num_ranks=2)
    side.add("a", [*range(2 * CHUNK)], 2 * CHUNK, transfer=PUSH)
    announced(side, "a", 0, 2 * CHUNK)
    assert side.pushes.finish("a", is_wanted=True)
    ((name, _, deadline_s),) = side.order([]).flushes
    assert (name, deadline_s > 0) == ("a", True)
    assert [*side.pushes.handle_report(StepReport(pushed={"a": (2 * CHUNK,)}))] == []
    assert [*side.pushes.handle_report(StepReport(pushed={"a": (CHUNK,), "nobody": (1,)}))] == [("a", CHUNK)]


def test_two_requests_of_one_transfer_are_told_apart(space: Space) -> None:
    side = make_side(space)
    for name, first in (("a", 1), ("b", 2)):
        side.add(name, [first, *range(CHUNK)], CHUNK, transfer=PUSH)
    names = {push.transfer for n in "ab" for push in side.order([Scheduled(n, 0, CHUNK, [*range(1, 9)])]).pushes}
    assert len(names) == 2
    assert PUSH.id in names


def test_a_request_that_is_gone_is_dropped(space: Space) -> None:
    side = make_side(space)
    side.add("a", [*range(CHUNK)], CHUNK, transfer=PUSH)
    announced(side, "a", 0, CHUNK)
    assert not side.pushes.finish("a", is_wanted=False)
    assert side.pushes.has_orders
    assert [flush.deadline_s for flush in side.order([]).flushes] == [0.0]
    assert not side.pushes.has_orders


@pytest.mark.parametrize("address", ["nowhere", "host:99999999", ":80", "a b"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="push_to"):
        parse_transfer({"headwater": {"push_to": address, "transfer": "0a"}})


# ---- a rank -------------------------------------------------------------------------------------------------------


class Rank:
    """A desk with a pool of its own, and a receiver with another."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        urls = [stack.enter_context(temporary_url("shm", tmp_path, "capacity=8MiB")) for _ in range(2)]
        self.own, self.other = [stack.enter_context(open_pool(url)) for url in urls]
        self.space = open_space(self.own)
        self.shard = Topology(tp=1).shard(self.space.spec, tp_rank=0)
        self.receiver = Receiver(self.other, PeerAddress("127.0.0.1", 0))
        self.receiver.start()
        stack.callback(self.receiver.close)
        self.ends: queue.Queue[tuple[str, int]] = queue.Queue()
        self.desk = PushDesk(lambda: PeerSender(self.space, self.shard), lambda *end: self.ends.put(end))
        stack.callback(self.desk.close)
        self.chunks = prompt(self.space, 3)

    def push(self) -> None:
        self.desk.push(PushOrder("a", "0a", str(self.receiver.address), tuple(self.chunks)))

    def pending_bytes(self, pool: Pool) -> int:
        return pool.stats().store.pending_bytes


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with ExitStack() as stack:
        yield Rank(stack, tmp_path)


def test_a_flush_is_over_when_all_is_with_the_peer(rank: Rank) -> None:
    rank.push()
    assert rank.desk.wants(rank.chunks[2:])
    assert not rank.desk.wants(prompt(rank.space, 1, seed=9))
    rank.desk.flush(FlushOrder("a", "0a", WAIT_S))
    save(rank.space, rank.chunks, rank.shard)
    rank.desk.noted(rank.chunks, rank.shard.layers)
    assert rank.ends.get(timeout=WAIT_S) == ("a", 3 * CHUNK)
    assert rank.desk.stats()["chunks_sent"] == 3
    assert rank.pending_bytes(rank.other) == 0


def test_a_flush_finds_what_somebody_else_has_saved(rank: Rank) -> None:
    """Nobody notes it: another process of this host brings it into the pool, after the flush has begun."""
    rank.push()
    rank.desk.flush(FlushOrder("a", "0a", WAIT_S))
    wait_until(lambda: rank.desk.stats()["connected"] == 1 and rank.pending_bytes(rank.other) > 0, WAIT_S)
    wait_until(lambda: rank.receiver.stats().get("chunks_begun") == 3, WAIT_S)
    save(rank.space, rank.chunks, rank.shard)
    assert rank.ends.get(timeout=WAIT_S) == ("a", 3 * CHUNK)


def test_a_flush_ends_by_its_deadline_with_what_there_is(rank: Rank) -> None:
    rank.push()
    save(rank.space, rank.chunks[:1], rank.shard)
    rank.desk.noted(rank.chunks[:1], rank.shard.layers)
    wait_until(lambda: rank.desk.stats()["chunks_sent"] == 1, WAIT_S)
    rank.desk.flush(FlushOrder("a", "0a", 0.2))
    assert rank.ends.get(timeout=WAIT_S) == ("a", CHUNK)
    wait_until(lambda: rank.pending_bytes(rank.other) == 0, WAIT_S)


def test_what_is_lost_ends_a_flush_at_once(rank: Rank) -> None:
    rank.push()
    rank.desk.flush(FlushOrder("a", "0a", 1000.0))
    rank.desk.lost(rank.chunks)
    assert rank.ends.get(timeout=WAIT_S) == ("a", 0)


def test_a_push_that_is_cancelled_leaves_nothing(rank: Rank) -> None:
    rank.push()
    wait_until(lambda: rank.pending_bytes(rank.other) > 0, WAIT_S)
    rank.desk.flush(FlushOrder("a", "0a", 0.0))
    wait_until(lambda: rank.pending_bytes(rank.other) == 0, WAIT_S)
    assert rank.ends.empty()
    assert not rank.desk.wants(rank.chunks)


def test_a_desk_that_pushes_nothing_has_no_threads_and_says_so(space: Space) -> None:
    before = threading.active_count()
    ends: list[tuple[str, int]] = []
    shard = Topology(tp=1).shard(space.spec, tp_rank=0)
    desk = PushDesk(lambda: PeerSender(space, shard), lambda *end: ends.append(end))
    desk.flush(FlushOrder("a", "0a", 5.0))
    assert ends == [("a", 0)]
    assert threading.active_count() == before
    desk.close()


# ---- the receiver's process ---------------------------------------------------------------------------------------


def test_a_receiver_that_dies_is_back_on_its_port_and_ends_with_its_parent(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        child = ReceiverChild(ReceiverSpec(url, "127.0.0.1:0"))
        child.start(WAIT_S)
        try:
            address, process = child.address, child._process
            assert process is not None
            assert url.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            process.kill()
            wait_until(lambda: child.num_restarts == 1 and child.pid != process.pid, WAIT_S)
            last = child.pid
            wait_until(lambda: child.address == address and child.stats.get("connections") == 0, WAIT_S)
        finally:
            child.close()
        assert not Path(f"/proc/{last}").exists()


def test_a_receiver_that_cannot_listen_says_why(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url:
        child = ReceiverChild(ReceiverSpec(url, "0.0.0.0:0"))
        with pytest.raises(Exception, match="secret"):
            child.start(WAIT_S)
