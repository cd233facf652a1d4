"""Many records at once: whatever is done column by column ends as it would one by one, and believes as little."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

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
        tiles = whole[:, shard.heads.start : shard.heads.stop]
        tiles[...] = rng.integers(0, 256, tiles.shape, np.uint8)
        sums.append([[checksum(np.ascontiguousarray(tile)) for tile in layer] for layer in tiles])
    return np.array(sums, np.uint64)


def reserve(space: Space, chunks: list[ChunkRef], shard: Shard) -> list[Reservation]:
    return space.reserve(chunks, shard, deadline_s=30)


@pytest.mark.parametrize("at_once", [True, False])
def test_two_ranks_make_chunks_visible(pool: Pool, space: Space, at_once: bool) -> None:
    chunks = chunks_of(space)
    for seed, shard in enumerate((OTHERS, MINE)):
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
        assert all(space.exists(chunks)) == (shard is MINE)
        space.close_all(extents)
    out = [space.empty(chunk, OTHERS) for chunk in chunks]
    assert set(space.read(chunks, OTHERS, out, deadline_s=30)) == {Status.OK}
    assert pool.stats().store.pending_bytes == 0
    assert pool.verify().clean


def test_a_second_value_is_refused_and_the_first_may_come_again(pool: Pool, space: Space) -> None:
    chunks = chunks_of(space)
    extents = reserve(space, chunks, MINE)
    sums = fill(space, extents, MINE, 0)
    assert space.commit_shard(extents, MINE, sums, deadline_s=30) == [Status.OK] * COUNT
    assert space.commit_shard(extents, MINE, sums, deadline_s=30) == [Status.OK] * COUNT
    changed = sums.copy()
    changed[COUNT - 1, 1, 0] ^= np.uint64(1)
    outcome = space.commit_shard(extents, MINE, changed, deadline_s=30)
    assert outcome == [Status.OK] * (COUNT - 1) + [Status.LOST]
    space.close_all(extents)
    again = reserve(space, chunks, OTHERS)
    assert space.commit_shard(again[:-1], OTHERS, fill(space, again[:-1], OTHERS, 1), deadline_s=30)[0] == Status.OK
    assert space.exists(chunks) == [True] * (COUNT - 1) + [False]
    for extent in again:
        extent.abort()
    assert pool.verify().clean


def test_what_was_cleared_meanwhile_is_lost(pool: Pool, space: Space) -> None:
    chunks = chunks_of(space)
    extents = reserve(space, chunks, MINE)
    sums = fill(space, extents, MINE, 0)
    pool.clear(space=space)
    newer = reserve(space, chunks, MINE)
    assert space.commit_shard(extents, MINE, sums, deadline_s=30) == [Status.LOST] * COUNT
    assert space.noted(newer, MINE) == [0] * COUNT, "nothing may be noted in somebody else's record"
    space.close_all([*extents, *newer])


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
