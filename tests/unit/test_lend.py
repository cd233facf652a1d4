"""Lending: every tile whose checksum is in can be seen where it lies, also in a chunk that is not complete yet, and
nothing that is lent is reused before the loan ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.kv.format import checksum
from headwater.kv.hashing import ChunkRef
from headwater.kv.topology import Shard, Split, Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Filled, Loan, Reservation, Status
from headwater.stores.embedded import janitor
from headwater.stores.embedded.members import _MAX_HAZARDS

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=4, heads=4, dim=16)
WHOLE = whole_shard(SPEC)
A, B = Shard(range(4), range(2)), Shard(range(4), range(2, 4))
CHUNK = 16
SERVER, READER = 11, 22
"""Two servers: groups of their own."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as made:
        yield made


@pytest.fixture
def server(url: str) -> Iterator[Pool]:
    with open_pool(url, group=SERVER) as pool:
        yield pool


@pytest.fixture
def reader(url: str) -> Iterator[Pool]:
    with open_pool(url, group=READER) as pool:
        yield pool


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=CHUNK)


def core_of(pool: Pool) -> Any:
    return pool._store._core  # type: ignore[attr-defined]


def chunks_of(space: Space, count: int, first: int = 0) -> list[ChunkRef]:
    return space.keys(range(first, first + CHUNK * count)).refs(count)


def reserve(space: Space, chunks: list[ChunkRef], split: Split = Split()) -> list[Reservation]:  # noqa: B008 - frozen
    extents = space.reserve(chunks, Shard(range(4), range(4), split), deadline_s=30)
    assert {extent.status for extent in extents} == {Status.OK}
    return extents


def put(space: Space, chunks: list[ChunkRef], extents: list[Reservation], shard: Shard) -> list[Status]:
    """Fill this shard's tiles and commit them."""
    filled = []
    for chunk, extent in zip(chunks, extents, strict=True):
        tiles, mine = extent.tiles, local_tiles(SPEC, chunk, shard)
        assert tiles is not None
        tiles[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop] = mine
        sums = np.array([checksum(tile) for layer in mine for tile in layer], np.uint64)
        filled.append(Filled(extent, shard.layers, shard.heads, shard.part, sums))
    return space.commit(filled, deadline_s=30)


def lent(loan: Loan, chunks: list[ChunkRef], shard: Shard) -> list[bool]:
    """Which chunks are there. Every lent tile is copied and verified, as a reader does; wrong ones fail."""
    for i, (chunk, place) in enumerate(zip(chunks, loan.places, strict=True)):
        if place is None:
            continue
        length = SPEC.extent_bytes(chunk.num_tokens)
        extent = place.segment[place.offset : place.offset + length].reshape(4, 4, -1)
        copy = extent[shard.layers.start : shard.layers.stop, shard.heads.start : shard.heads.stop].copy()
        assert np.array_equal(copy, local_tiles(SPEC, chunk, shard))
        sums = [[checksum(tile) for tile in layer] for layer in copy]
        assert loan.sums[i].tolist() == sums
    return [place is not None for place in loan.places]


def show(space: Space, chunks: list[ChunkRef], shard: Shard) -> list[bool]:
    loan = space.lend(chunks, shard)
    try:
        return lent(loan, chunks, shard)
    finally:
        loan.release()


def fill_up(space: Space, count: int = 400) -> None:
    """Write more than the store holds, so that every free byte is used."""
    for number in range(count):
        chunks = chunks_of(space, 1, 100_000 + 1000 * number)
        space.write(chunks, WHOLE, [local_tiles(SPEC, chunk, WHOLE) for chunk in chunks])
    assert space._store.stats().evicted > 0


def test_a_rank_that_has_committed_is_lent_before_its_peers_have(server: Pool, reader: Pool) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 5)
    extents = reserve(writing, chunks)
    assert show(reading, chunks, A) == [False] * 5
    assert put(writing, chunks[:3], extents[:3], A) == [Status.OK] * 3
    assert show(reading, chunks, A) == [True, True, True, False, False]
    assert show(reading, chunks, B) == show(reading, chunks, WHOLE) == [False] * 5
    assert show(reading, chunks, Shard(range(1, 3), range(1, 2))) == [True, True, True, False, False]
    assert put(writing, chunks, extents, B) == [Status.OK] * 5
    assert show(reading, chunks, B) == [True] * 5
    assert show(reading, chunks, WHOLE) == [True, True, True, False, False], "the last two lack what A has not brought"
    assert reading.exists(chunks) == [True, True, True, False, False]
    assert put(writing, chunks[3:], extents[3:], A) == [Status.OK] * 2
    assert show(reading, chunks, WHOLE) == [True] * 5
    assert all(reading.exists(chunks))
    writing.close_all(extents)
    assert core_of(reader).members.published() == set(), "every loan has ended"
    assert reader.verify().clean


def test_a_chunk_that_is_written_layer_by_layer_is_lent_layer_by_layer(server: Pool, reader: Pool) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 3)
    extents = reserve(writing, chunks)
    layers = [Shard(range(layer, layer + 1), range(4)) for layer in range(4)]
    for number, group in enumerate(layers):
        assert [show(reading, chunks, layer)[0] for layer in layers] == [i < number for i in range(4)]
        assert put(writing, chunks, extents, group) == [Status.OK] * 3
        assert show(reading, chunks, group) == [True] * 3
        assert show(reading, chunks, Shard(range(number + 1), range(4))) == [True] * 3
    writing.close_all(extents)
    assert show(reading, chunks, WHOLE) == [True] * 3


def test_an_aborted_chunk_is_not_lent_and_not_reused_while_a_loan_is_held(server: Pool, reader: Pool) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 3)
    extents = reserve(writing, chunks)
    assert put(writing, chunks, extents, A) == [Status.OK] * 3
    loan = reading.lend(chunks, A)
    assert lent(loan, chunks, A) == [True] * 3
    for extent in extents:
        extent.abort()
    assert show(reading, chunks, A) == [False] * 3
    fill_up(writing)
    limbo = 3 * SPEC.extent_bytes(CHUNK)
    assert held_back(reader) == limbo
    assert lent(loan, chunks, A) == [True] * 3, "not a byte of it has changed"
    loan.release()
    loan.release()
    fill_up(writing, 100)
    assert held_back(reader) == 0
    assert reader.verify().clean


def held_back(pool: Pool) -> int:
    unit = core_of(pool).geometry.unit_bytes
    return pool.stats().store.used_bytes - sum(-(-info.num_bytes // unit) * unit for info in pool.scan())


def test_a_complete_chunk_before_a_pending_one_is_held_whatever_becomes_of_that_one(server: Pool, reader: Pool) -> None:
    """The lease on the deepest complete chunk does not hold it: when the chunk between goes, so does what is below."""
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 3)
    extents = reserve(writing, chunks)
    assert put(writing, [chunks[0], chunks[2]], [extents[0], extents[2]], WHOLE) == [Status.OK] * 2
    assert put(writing, chunks[1:2], extents[1:2], A) == [Status.OK]
    loan = reading.lend(chunks, A)
    assert lent(loan, chunks, A) == [True] * 3
    writing.close_all(extents)
    assert writing.abort(chunks[1:2]) == 1
    fill_up(writing)
    assert lent(loan, chunks, A) == [True] * 3, "not a byte of it has changed"
    assert reading.exists(chunks) == [True, False, False]
    loan.release()
    fill_up(writing, 100)
    assert reading.exists(chunks) == [False] * 3
    assert reader.verify().clean


@pytest.mark.parametrize("what", ["complete", "abort"])
def test_what_happens_while_a_chunk_is_published_is_noticed(
    server: Pool, reader: Pool, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 1)
    extents = reserve(writing, chunks)
    assert put(writing, chunks, extents, A) == [Status.OK]
    members = core_of(reader).members
    publish = members.publish

    def interfere(extent_id: int) -> bool:
        monkeypatch.undo()
        if what == "abort":
            extents[0].abort()
        else:
            assert put(writing, chunks, extents, B) == [Status.OK]
        return bool(publish(extent_id))

    monkeypatch.setattr(members, "publish", interfere)
    loan = reading.lend(chunks, A)
    assert lent(loan, chunks, A) == [what == "complete"]
    loan.release()
    assert members.published() <= {extents[0].entry.record.id}  # type: ignore[attr-defined]
    writing.close_all(extents)
    assert members.published() == set()


def test_readers_do_not_keep_a_reservation_alive(server: Pool, reader: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation expires when nothing was committed to it for long, however often its tiles are read."""
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 2)
    extents = reserve(writing, chunks)
    assert put(writing, chunks, extents, A) == [Status.OK] * 2
    index = core_of(reader).index
    cells = [index.find(chunk.key).cell for chunk in chunks]
    before = [index.age(cell) for cell in cells]
    for _ in range(3):
        assert show(reading, chunks, A) == [True] * 2
        reading._store.touch(chunks[0].key)
    assert [index.age(cell) for cell in cells] == before
    monkeypatch.setattr(janitor, "MAX_PENDING_NS", 0)
    loan = reading.lend(chunks, A)
    assert set(reading.write(chunks, WHOLE, [local_tiles(SPEC, chunk, WHOLE) for chunk in chunks])) == {Status.OK}
    assert lent(loan, chunks, A) == [True] * 2
    loan.release()
    writing.close_all(extents)


def test_parts_of_a_tile_are_not_lent(server: Pool, reader: Pool) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 1)
    shards = list(Topology(tp=8, dcp=2).shards(SPEC))
    extents = reserve(writing, chunks, shards[0].split)
    writing.close_all(extents)
    for shard in shards[:6]:
        assert writing.write(chunks, shard, [local_tiles(SPEC, chunks[0], shard)]) == [Status.OK]
    assert show(reading, chunks, Shard(range(4), range(1))) == [False]


def test_a_process_that_touches_too_much_is_lent_nothing(server: Pool, reader: Pool) -> None:
    writing, reading = space_of(server), space_of(reader)
    chunks = chunks_of(writing, 2)
    extents = reserve(writing, chunks)
    assert put(writing, chunks, extents, A) == [Status.OK] * 2
    members = core_of(reader).members
    taken = list(range(1, _MAX_HAZARDS))
    assert members.publish_all(taken) == len(taken)
    loan = reading.lend(chunks, A)
    assert lent(loan, chunks, A) == [True, False], "there was room for one"
    loan.release()
    members.retract_all(taken)
    assert show(reading, chunks, A) == [True, True]
    writing.close_all(extents)


def test_nothing_of_nothing_is_lent(reader: Pool) -> None:
    space = space_of(reader)
    loan = space.lend([], WHOLE)
    assert (loan.lease, loan.places, loan.sums.shape) == (None, [], (0, 4, 4))
    loan = space.lend(chunks_of(space, 3), WHOLE)
    assert (loan.lease, loan.places) == (None, [None] * 3)
