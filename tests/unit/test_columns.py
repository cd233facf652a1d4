"""Many records at once: whatever is done column by column ends as it would one by one, and believes as little."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from headwater.kv.hashing import ChunkRef
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard
from headwater.pool import open_pool
from headwater.pool.pool import Pool
from headwater.pool.space import Space
from headwater.stores.base import Filled, Reservation, Status
from headwater.stores.embedded import destroy
from headwater.stores.embedded.layout import CELL, FIXED_OFFSET
from headwater.stores.url import parse_url

from support import identity

SPEC = KVSpec.gqa(num_layers=3, num_kv_heads=4, head_dim=2, dtype="float16")
MINE, OTHERS = Shard(range(3), range(1)), Shard(range(3), range(1, 4))
FIRST, LAST = Shard(range(1), range(4)), Shard(range(1, 3), range(4))
"""By heads, whose checksums lie apart, and by layers, whose lie together."""
COUNT = 12


@pytest.fixture
def pool() -> Iterator[Pool]:
    name = f"shm:///headwater-test-{os.getpid()}-{secrets.token_hex(4)}"
    with open_pool(f"{name}?capacity=8MiB") as opened:
        yield opened
    destroy(parse_url(name))


@pytest.fixture
def space(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def chunks_of(space: Space, first: int = 0) -> list[ChunkRef]:
    return space.keys(list(range(first, first + 8 * COUNT))).refs(COUNT)


def fill(space: Space, extents: list[Reservation], shard: Shard, seed: int) -> np.ndarray:
    """Write noise into extents; its checksums."""
    from headwater.kv.format import checksum

    rng, sums = np.random.default_rng(seed), []
    for extent in extents:
        whole = extent.tiles
        assert whole is not None
        tiles = whole[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop]
        tiles[...] = rng.integers(0, 256, tiles.shape, np.uint8)
        sums.append([[checksum(np.ascontiguousarray(tile)) for tile in layer] for layer in tiles])
    return np.array(sums, np.uint64)


def reserve(space: Space, chunks: list[ChunkRef], shard: Shard) -> list[Reservation]:
    return space.reserve(chunks, shard, deadline_s=30)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("shards", [(OTHERS, MINE), (LAST, FIRST)], ids=["heads", "layers"])
def test_two_ranks_make_chunks_visible(pool: Pool, space: Space, at_once: bool, shards: tuple[Shard, Shard]) -> None:
    chunks = chunks_of(space)
    for seed, shard in enumerate(shards):
        extents = reserve(space, chunks, shard)
        assert [extent.status for extent in extents] == [Status.OK] * COUNT
        assert space.noted(extents, shard) == [0] * COUNT
        sums = fill(space, extents, shard, seed)
        if at_once:
            outcome = space.commit_shard(extents, shard, sums, deadline_s=30)
        else:
            filled = [Filled(e, shard.layers, shard.heads, 0, row) for e, row in zip(extents, sums, strict=True)]
            outcome = space.commit(filled, deadline_s=30)
        assert outcome == [Status.OK] * COUNT
        assert space.noted(extents, shard) == [shard.num_tiles] * COUNT
        assert all(space.exists(chunks)) == (shard is shards[-1])
        space.close_all(extents)
    out = [space.empty(chunk, OTHERS) for chunk in chunks]
    assert set(space.read(chunks, OTHERS, out, deadline_s=30)) == {Status.OK}
    assert pool.stats().store.pending_bytes == 0
    assert pool.verify().clean


@pytest.mark.parametrize(("mine", "others"), [(MINE, OTHERS), (FIRST, LAST)], ids=["heads", "layers"])
def test_a_second_value_is_refused_and_the_first_may_come_again(
    pool: Pool, space: Space, mine: Shard, others: Shard
) -> None:
    chunks = chunks_of(space)
    extents = reserve(space, chunks, mine)
    sums = fill(space, extents, mine, 0)
    assert space.commit_shard(extents, mine, sums, deadline_s=30) == [Status.OK] * COUNT
    assert space.commit_shard(extents, mine, sums, deadline_s=30) == [Status.OK] * COUNT
    changed = sums.copy()
    changed[COUNT - 1, -1, 0] ^= np.uint64(1)
    outcome = space.commit_shard(extents, mine, changed, deadline_s=30)
    assert outcome == [Status.OK] * (COUNT - 1) + [Status.LOST]
    space.close_all(extents)
    again = reserve(space, chunks, others)
    assert space.commit_shard(again[:-1], others, fill(space, again[:-1], others, 1), deadline_s=30)[0] == Status.OK
    assert space.exists(chunks) == [True] * (COUNT - 1) + [False]
    for extent in again:
        extent.abort()
    assert pool.verify().clean


@pytest.mark.parametrize("mine", [MINE, FIRST], ids=["heads", "layers"])
def test_what_was_cleared_meanwhile_is_lost(pool: Pool, space: Space, mine: Shard) -> None:
    chunks = chunks_of(space)
    extents = reserve(space, chunks, mine)
    sums = fill(space, extents, mine, 0)
    pool.clear(space=space)
    newer = reserve(space, chunks, mine)
    assert space.commit_shard(extents, mine, sums, deadline_s=30) == [Status.LOST] * COUNT
    assert space.noted(newer, mine) == [0] * COUNT, "nothing may be noted in somebody else's record"
    space.close_all([*extents, *newer])


def records_of(space: Space, chunks: list[ChunkRef]) -> list[tuple[object, ...]]:
    """What matters of the chunks' records, and that each hangs under the one before; their extents must be apart."""
    index = space._store._core.index  # type: ignore[attr-defined]
    entries = [index.find(chunk.key) for chunk in chunks]
    parents = [index.find(chunk.parent) for chunk in chunks]
    extents = sorted((entry.record.offset, entry.record.length) for entry in entries)
    assert all(at + size <= after for (at, size), (after, _) in pairwise(extents))
    same = ("length", "num_tokens", "number", "num_sums", "payload_bytes", "parts", "kind", "chunk_tokens", "row_bytes")
    return [
        (entry.state, entry.tails, *(getattr(entry.record, name) for name in same), index.counts(entry.cell))
        for entry, parent in zip(entries, parents, strict=True)
        if (entry.record.parent_id, entry.record.parent_cell) == (parent.record.id, parent.cell)
    ]


def test_records_that_are_made_side_by_side_are_as_those_made_one_by_one(pool: Pool, space: Space) -> None:
    whole = Shard(range(3), range(4))
    keys = [space.keys([seed, *range(8 * COUNT + 2)]) for seed in (1, 2)]
    together, apart = ([*some.refs(COUNT), some.tail_ref(COUNT, 3)] for some in keys)
    extents = reserve(space, together, whole)
    others = [extent for chunk in apart for extent in reserve(space, [chunk], whole)]
    assert len(records_of(space, together)) == COUNT + 1
    assert records_of(space, together) == records_of(space, apart)
    assert pool._store.audit() == []  # type: ignore[attr-defined]
    for some in (extents, others):
        assert space.commit_shard(some[:-1], whole, fill(space, some[:-1], whole, 0)) == [Status.OK] * COUNT
        some[-1].abort()
        space.close_all(some)
    assert records_of(space, together[:-1]) == records_of(space, apart[:-1])
    assert pool._store.audit() == []  # type: ignore[attr-defined]
    assert pool.verify().clean


@pytest.mark.parametrize("short_of", ["pending", "records"])
def test_what_there_is_no_room_for_side_by_side_is_made_as_far_as_there_is_room(short_of: str) -> None:
    whole = Shard(range(3), range(4))
    name = f"shm:///headwater-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        index = {"pending": "1MiB", "records": "128KiB"}[short_of]
        with open_pool(f"{name}?capacity=4MiB&segment=8KiB&index={index}") as pool:  # a segment has room for ten
            space = pool.space(identity(), SPEC, chunk_tokens=7)  # no multiple of the pool's units
            chunks = space.keys(list(range(7 * 1200))).refs(1200)
            extents = reserve(space, chunks, whole)
            statuses = [extent.status for extent in extents]
            count = statuses.index(Status.FULL)
            assert statuses == [Status.OK] * count + [Status.FULL] + [Status.NO_PARENT] * (len(chunks) - count - 1)
            most = pool.max_pending_bytes // SPEC.extent_bytes(7)
            assert count == most if short_of == "pending" else 100 < count < most
            assert len(records_of(space, chunks[:count])) == count
            assert pool._store.audit() == []  # type: ignore[attr-defined]
            space.abort(chunks[3:count])
            space.close_all(extents)
            assert pool._store.audit() == []  # type: ignore[attr-defined]
            again = reserve(space, chunks[:count], whole)
            assert {extent.status for extent in again} == {Status.OK}, "the gaps are used again"
            assert pool._store.audit() == []  # type: ignore[attr-defined]
            space.close_all(again)
    finally:
        destroy(parse_url(name))


def test_another_server_is_busy(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = chunks_of(space)
    extents = reserve(space, chunks, MINE)
    core = space._store._core  # type: ignore[attr-defined]
    monkeypatch.setattr(core.members, "group", core.members.group ^ 2)
    assert {extent.status for extent in reserve(space, chunks, OTHERS)} <= {Status.BUSY, Status.NO_PARENT}
    monkeypatch.undo()
    space.close_all(extents)


def test_a_record_that_does_not_verify_is_not_found(space: Space) -> None:
    chunks = chunks_of(space)
    shards = (MINE, OTHERS)
    for shard in shards:
        extents = reserve(space, chunks, shard)
        space.commit_shard(extents, shard, fill(space, extents, shard, 0), deadline_s=30)
        space.close_all(extents)
    core = space._store._core  # type: ignore[attr-defined]
    keys = [chunk.key for chunk in chunks]
    found = core.columns.find(keys)
    assert found.good.all()
    assert [entry.record for entry in found.entries()] == [core.index.find(key).record for key in keys]
    for number in (3, 7):
        core.index.heap_bytes[int(found.cells[number]) * CELL + FIXED_OFFSET + 50 + number] ^= 4
    assert core.columns.find(keys).good.tolist() == [number not in (3, 7) for number in range(COUNT)]
    loan = space.lend(chunks, MINE)
    assert [place is None for place in loan.places] == [number in (3, 7) for number in range(COUNT)]
    loan.release()


def test_reservations_of_another_store_are_refused(space: Space) -> None:
    from headwater.errors import InvalidArgumentError

    with open_pool("memory://?capacity=8MiB") as other:
        theirs = other.space(identity(), SPEC, chunk_tokens=8)
        extents = reserve(theirs, chunks_of(theirs), MINE)
        for call in (space.close_all, space.places, lambda given: space.noted(given, MINE)):
            with pytest.raises(InvalidArgumentError):
                call(extents)
        with pytest.raises(InvalidArgumentError):
            theirs.commit_shard(extents, MINE, np.zeros((COUNT, 3, 2), np.uint64))
        theirs.close_all(extents)
