"""Chunks that leave the cache in several groups of layers, while others want the same chunks or take them away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.errors import StoreError
from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology, whole_shard
from headwater.pool import Space, open_pool
from headwater.stores.base import Reservation, Status
from headwater.transfer import aborts, save
from headwater.transfer.save import Saver
from transfer_layer_cases import held_up
from transfer_pool_cases import BLOCKS, EXTENT, SPEC, make_cache, open_space

from support import identity, temporary_url, wait_until
from transfer_cases import ORDERS, cache_view

WHOLE = whole_shard(SPEC)
LAYERS = range(SPEC.num_layers)
RANKS = [Topology(tp=2).shard(SPEC, tp_rank=rank) for rank in range(2)]
REQUEST = np.arange(BLOCKS, dtype=np.int32)
"""Its blocks."""


@contextmanager
def one_saver(kind: str, space: Space, shard: Shard = WHOLE, room: int = 64, group_bytes: int = 1) -> Iterator[Saver]:
    """A saver with room for so many chunks, which passes on every layer by itself."""
    view, _ = make_cache(shard, "cpu")
    staging = room * EXTENT * shard.num_tiles // SPEC.num_tiles
    saver = Saver(space, view, shard, staging_bytes=staging, deadline_s=10.0, group_bytes=group_bytes, mover=kind)
    try:
        yield saver
    finally:
        saver.close()


def begin(saver: Saver, chunks: list[ChunkRef]) -> None:
    saver.begin("r", chunks, REQUEST)


kinds = pytest.mark.parametrize("kind", ["cpu", "cuda"])
schemes = pytest.mark.parametrize("scheme", ["shm", "file"])


@kinds
@schemes
def test_requests_of_one_step_that_begin_alike_are_both_saved(kind: str, scheme: str, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=8MiB") as url, open_space(url) as (pool, space, chunks):
        other = space.keys([*range(64), *range(900, 932)]).refs(3)
        assert other[1].key == chunks[1].key != other[2].key
        with one_saver(kind, space) as saver:
            begin(saver, other)  # other groups of layers than the longer one's, if it were alone
            begin(saver, chunks[:1])
            begin(saver, chunks)
            for layer in LAYERS:
                saver.layer_done(layer)
            assert saver.drain(30)
        assert all(space.exists([*chunks, *other])), saver.statuses
        assert saver.statuses == {Status.OK: len(chunks) + 1}, "something was taken twice"
        assert pool.stats().store.pending_bytes == 0
        assert pool.stats().store.aborted == saver.num_dropped == 0
        assert pool.verify().clean


@kinds
@schemes
@pytest.mark.parametrize("again", [False, True], ids=["cleared", "cleared and begun by another rank"])
def test_what_was_cleared_between_layers_is_not_begun_anew(kind: str, scheme: str, again: bool, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=8MiB") as url, open_space(url) as (pool, space, chunks):
        with one_saver(kind, space, RANKS[0]) as saver, one_saver(kind, space, RANKS[1]) as peer:
            begin(saver, chunks)
            saver.layer_done(0)
            wait_until(lambda: pool.stats().store.pending_bytes > 0, 10, "the first layer is stored")
            if scheme == "file":
                wait_until(lambda: saver.num_bytes > 0, 10, "the first layer is stored")
            pool.clear()
            if again:
                begin(peer, chunks)
                peer.layer_done(0)
                wait_until(lambda: pool.stats().store.pending_bytes > 0, 10, "the other rank's first layer is stored")
            for layer in LAYERS[1:]:
                saver.layer_done(layer)
            assert saver.drain(30)
            assert saver.num_dropped == len(chunks)
            assert not any(status.stored for status in saver.statuses.elements())
            if again:
                for layer in LAYERS[1:]:
                    peer.layer_done(layer)
                assert peer.drain(30)
                assert peer.num_dropped == len(chunks), "it waits for what never comes"
        assert not any(space.exists(chunks))
        assert pool.stats().store.pending_bytes == 0
        assert pool.verify().clean


@kinds
def test_a_rank_does_not_bring_back_what_its_peer_gave_up(kind: str) -> None:
    with open_space("memory://?capacity=16MiB&packing=off") as (pool, space, chunks):
        with one_saver(kind, space, RANKS[0]) as roomy, one_saver("cpu", space, RANKS[1], room=2) as short:
            begin(roomy, chunks[:6])
            roomy.layer_done(0)
            wait_until(lambda: pool.stats().store.pending_bytes == 6 * EXTENT, 10, "all are reserved")
            with held_up(space, "reserve"):  # the ring stays full
                begin(short, chunks[:6])
                for layer in LAYERS:
                    short.layer_done(layer)  # after the last one, four chunks are aborted for both
            wait_until(lambda: pool.stats().store.aborted >= 4, 10, "the others are aborted")
            for layer in LAYERS[1:]:
                roomy.layer_done(layer)
            assert roomy.drain(30)
            assert short.drain(30)
        assert space.exists(chunks[:6]) == [True] * 2 + [False] * 4
        assert pool.stats().store.pending_bytes == 0
        assert (short.num_dropped, roomy.num_dropped) == (4, 4)


@kinds
@pytest.mark.parametrize("group_bytes", [1, 1 << 30], ids=["every layer", "all at the end"])
def test_what_was_given_up_may_be_saved_again_at_once(
    kind: str, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "RETRY_S", 0.01)
    with (
        open_space("memory://?capacity=16MiB") as (_, space, chunks),
        one_saver(kind, space, RANKS[0], group_bytes=group_bytes) as one,
        one_saver(kind, space, RANKS[1], group_bytes=group_bytes) as two,
    ):
        for saver in (one, two):
            begin(saver, chunks)
            saver.layer_done(0)
            saver.discard()  # the step failed: all is given up, and owed to the other
            assert saver.drain(30)
        assert not any(space.exists(chunks))
        for saver in (one, two):
            begin(saver, chunks)
        for saver in (one, two):  # on a busy machine an abort may be under way that was begun before
            wait_until(lambda saver=saver: not saver._sender._aborts.is_owing, 30, "aborts are repeated no more")
        for layer in LAYERS:
            for saver in (one, two):
                saver.layer_done(layer)
            time.sleep(0.1)  # a computation, in which nothing is to be saved
        for saver in (one, two):
            assert saver.drain(30)
        assert all(space.exists(chunks)), (one.statuses, two.statuses)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_ranks_that_hold_the_same_heads_give_up_for_each_other(num_kv_heads: int) -> None:
    spec = KVSpec.gqa(num_layers=4, num_kv_heads=num_kv_heads, head_dim=16, dtype="bfloat16")
    with open_pool("memory://?capacity=16MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=32)
        chunks = space.keys(range(32 * 6)).refs(6)
        savers = list[Saver]()
        for rank, room in ((0, 2), (1, 64)):
            shard = Topology(tp=2).shard(spec, tp_rank=rank)
            view, _ = cache_view(spec, shard, num_blocks=24, block_size=8, order=ORDERS[0])
            layers, heads, tile = shard.local_shape(spec, 0, 32)
            saver = Saver(space, view, shard, staging_bytes=room * layers * heads * tile, deadline_s=10.0)
            savers.append(saver)
            saver.save("r", chunks, np.arange(24, dtype=np.int32))
            assert saver.drain(10)
        wait_until(lambda: pool.stats().store.pending_bytes == 0, 10, "what nobody completes is given up")
        assert space.exists(chunks) == [True] * 2 + [False] * 4
        for saver in savers:
            saver.close()


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_a_pool_that_fails_is_counted_and_given_up(
    by_layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/pool?capacity=16MiB"
    with open_space(url) as (pool, space, chunks), one_saver("cpu", space) as saver:
        written, real = list[range](), space.write

        def write(*args: object, **settings: object) -> list[Status]:
            shard = args[1]
            assert isinstance(shard, Shard)
            written.append(shard.layers)
            if len(written) == (2 if by_layer else 1):
                raise StoreError("no")
            return real(*args, **settings)  # type: ignore[arg-type]

        monkeypatch.setattr(space, "write", write)
        if by_layer:
            begin(saver, chunks)
            for layer in LAYERS:
                saver.layer_done(layer)
        else:
            saver.save("r", chunks, REQUEST)
        assert saver.drain(10)
        assert written == ([range(1), range(1, 2)] if by_layer else [range(4)])
        assert saver.num_dropped == len(chunks)
        assert pool.stats().store.pending_bytes == 0


def test_what_the_store_refuses_is_counted() -> None:
    with open_space("memory://?capacity=16MiB") as (_, space, chunks), one_saver("cpu", space) as saver:
        saver.save("r", chunks[1:], REQUEST)
        assert saver.drain(10)
        assert saver.statuses == {Status.NO_PARENT: len(chunks) - 1}
        assert saver.num_dropped == len(chunks) - 1


@schemes
def test_a_piece_that_continues_another_needs_its_record(scheme: str, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path, "capacity=8MiB") as url, open_space(url) as (pool, space, chunks):
        first, rest = replace(WHOLE, layers=LAYERS[:1]), replace(WHOLE, layers=LAYERS[1:])
        tiles = [[np.zeros(shard.local_shape(SPEC, 0, 32), np.uint8)] for shard in (first, rest)]
        one = chunks[:1]
        assert space.write(one, rest, tiles[1], before=first.layers) == [Status.LOST]
        assert pool.stats().store.pending_bytes == 0
        assert space.write(one, first, tiles[0]) == [Status.OK]
        pool.clear()
        assert space.write(one, rest, tiles[1], before=first.layers) == [Status.LOST]
        # A record of somebody else in this server, which has other layers.
        assert space.write(one, replace(WHOLE, layers=LAYERS[3:]), [tiles[1][0][:1]]) == [Status.OK]
        two = replace(WHOLE, layers=LAYERS[1:3])
        assert space.write(one, two, [tiles[1][0][:2]], before=first.layers) == [Status.LOST]
        assert space.write(one, first, tiles[0]) == [Status.OK]
        assert space.write(one, two, [tiles[1][0][:2]], before=first.layers) == [Status.OK]
        assert space.exists(one) == [True]
        assert space.write(one, two, [tiles[1][0][:2]], before=first.layers) == [Status.EXISTS]


@kinds
def test_what_a_step_did_not_finish_is_counted_once(kind: str) -> None:
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks), one_saver(kind, space) as saver:
        begin(saver, chunks[1:4])  # refused, for want of a parent
        saver.layer_done(0)
        wait_until(lambda: saver.statuses[Status.NO_PARENT] == 3, 10, "the first layer is refused")
        saver.discard()
        assert saver.drain(10)
        wait_until(lambda: saver.num_dropped == 3, 10, "all are counted")
        begin(saver, chunks[:4])
        saver.layer_done(0)
        saver.layer_done(0)  # another step, without a word about this one
        assert not saver.has_open
        assert saver.drain(10)
        wait_until(lambda: saver.num_dropped == 7, 10, "all are counted")
        assert not any(space.exists(chunks))
        assert pool.stats().store.pending_bytes == 0


@kinds
def test_what_was_refused_is_owed_to_a_rank_that_is_behind(kind: str) -> None:
    with (
        open_space("memory://?capacity=16MiB") as (pool, space, chunks),
        one_saver(kind, space, RANKS[0]) as first,
        one_saver(kind, space, RANKS[1]) as behind,
    ):
        begin(first, chunks[1:4])  # refused, for want of a parent
        for layer in LAYERS:
            first.layer_done(layer)
        assert first.drain(10)
        for saver in (first, behind):
            saver.save("r", chunks[:1], REQUEST)
            assert saver.drain(10)
        behind.save("r", chunks[1:4], REQUEST)
        assert behind.drain(10)
        wait_until(lambda: pool.stats().store.pending_bytes == 0, 10, "what the first was refused is given up")
        assert space.exists(chunks[:4]) == [True, False, False, False]


@pytest.mark.parametrize("how", ["late", "no room"])
def test_a_request_that_is_refused_takes_nothing_from_another(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 64 if how == "late" else 4
    with (
        open_space("memory://?capacity=16MiB") as (pool, space, chunks),
        one_saver("cuda", space, WHOLE, room) as s,
    ):
        real, calls, go = space.reserve, list[int](), threading.Event()

        def reserve(wanted: list[ChunkRef], shard: Shard, **settings: float) -> list[Reservation]:
            calls.append(len(wanted))
            assert go.wait(10)
            extents = real(wanted, shard, **settings)
            if how == "late" and len(calls) == 2:
                for extent in extents:
                    extent.close()
                    extent.status = Status.TIMEOUT
            return extents

        monkeypatch.setattr(space, "reserve", reserve)
        for _ in range(2):  # the same prompt twice, the second time while the first is on its way
            s.save("r", chunks[:4], REQUEST)
        go.set()
        assert s.drain(10)
        assert sum(calls) == (8 if how == "late" else 4)
        assert all(space.exists(chunks[:4])), s.statuses
        assert s.num_dropped == (0 if how == "late" else 4)
        assert pool.stats().store.pending_bytes == 0


@kinds
def test_a_rank_that_is_never_idle_pays_what_it_owes(kind: str) -> None:
    with (
        open_space("memory://?capacity=16MiB") as (pool, space, chunks),
        one_saver(kind, space, RANKS[0]) as busy,
        one_saver(kind, space, RANKS[1]) as behind,
    ):
        begin(busy, chunks[:4])
        busy.layer_done(0)
        busy.discard()
        end = time.monotonic() + 1.5
        for number in count():
            busy.save("r", chunks[:1], REQUEST)
            if number == 3:
                behind.save("r", chunks[1:4], REQUEST)
                assert behind.drain(10)
            elif number > 3 and pool.stats().store.pending_bytes <= EXTENT:
                break
            assert time.monotonic() < end, "what was given up is pending"
            time.sleep(0.02)


def test_a_gather_that_was_not_launched_is_given_up_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        open_space("memory://?capacity=16MiB") as (pool, space, chunks),
        one_saver("cpu", space, RANKS[0]) as first,
        one_saver("cpu", space, RANKS[1]) as other,
    ):
        other.save("r", chunks[:4], REQUEST)
        assert other.drain(10)

        def gather(*args: object, **settings: object) -> None:
            raise RuntimeError("no launch")

        monkeypatch.setattr(save, "gather", gather)
        with pytest.raises(RuntimeError, match="no launch"):
            first.save("r", chunks[:4], REQUEST)
        assert first.drain(10)
        assert first.num_dropped == 4
        wait_until(lambda: pool.stats().store.pending_bytes == 0, 10, "what nobody completes is given up")


@pytest.mark.parametrize("group_bytes", [1, 1 << 30], ids=["every layer", "all at the end"])
def test_one_tenants_failure_is_nobody_elses(group_bytes: int) -> None:
    with open_space("memory://?capacity=16MiB") as (pool, space, chunks):
        with one_saver("cpu", space, group_bytes=group_bytes) as saver:
            unknown = open_pool("memory://?capacity=4MiB").space(identity(), SPEC, chunk_tokens=32)
            begin(saver, unknown.keys(range(64), tenant=b"unknown here").refs(2))
            begin(saver, chunks)
            for layer in LAYERS:
                saver.layer_done(layer)
            assert saver.drain(10)
            assert all(space.exists(chunks))
            assert (saver.num_dropped, saver.statuses[Status.OK]) == (2, len(chunks))
        assert pool.stats().store.pending_bytes == 0
