"""The ring between a cache and the pool, and the copies between it and extents: nothing overlaps, nothing is missed."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the transfer needs torch")

from headwater.kernels.extent import SUM_BYTES  # noqa: E402
from headwater.kv.topology import Shard  # noqa: E402
from headwater.transfer.extents import ExtentPiece, copy_extents  # noqa: E402
from headwater.transfer.ring import Room, StagingRing, sums_bytes  # noqa: E402

CPU = torch.device("cpu")


@given(
    st.integers(2, 9),
    st.integers(1, 2800),
    st.lists(st.tuples(st.booleans(), st.integers(1, 3600), st.integers(1, 12), st.integers(1, 12)), max_size=40),
)
def test_what_is_taken_is_nobody_elses(count: int, slot: int, steps: list[tuple[bool, int, int, int]]) -> None:
    ring = StagingRing(slot, count * slot, CPU)
    assert ring.take(slot, 0) is None
    size = len(ring._memory)
    held: deque[tuple[range, int]] = deque()
    for takes, unit, wanted, least in steps:
        if takes:
            room = ring.take(unit, wanted, least=least)
            if room is None:
                assert held or unit > size, "of an empty ring there is always something"
                continue
            to_end = (size - room.start) // unit
            assert room.num_units >= min(least, wanted, to_end), "fewer only at the end of the ring"
            span = range(room.start, room.start + room.num_units * unit)
            assert 1 <= room.num_units <= wanted
            assert span.stop <= size
            assert span.start % SUM_BYTES == 0, "a gather's sums have their place beside it"
            assert all(span.stop <= other.start or other.stop <= span.start for other, _ in held)
            held.append((span, room.num_bytes))
        elif held:
            ring.give_back(held.popleft()[1])
    while held:
        ring.give_back(held.popleft()[1])
    assert ring.num_free == ring.count
    room = ring.take(slot, count)
    assert room is not None
    assert room.num_units == count, "an empty ring is whole again"


def test_what_does_not_fit_at_the_end_begins_anew() -> None:
    ring = StagingRing(1024, 4 * 1024, CPU)
    first, second = ring.take(1024, 2), ring.take(1024, 1)
    assert first is not None
    assert second is not None
    ring.give_back(first.num_bytes)
    room = ring.take(1200, 1)  # not in the last KiB
    assert room is not None
    assert (room.start, room.num_bytes) == (0, 1024 + 2048)
    assert ring.num_free == 0
    assert ring.take(1, 1) is None
    ring.give_back(second.num_bytes)
    ring.give_back(room.num_bytes)
    assert ring.num_free == 4


@given(st.data())
def test_copies_of_extents_move_exactly_the_pieces(data: st.DataObject) -> None:
    """Chunks in any order of places, in several registrations, both ways, against plain slices."""
    model = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))  # layers, heads
    tile = data.draw(st.integers(1, 5))
    step = data.draw(st.integers(1, 2))
    layers = range(data.draw(st.integers(0, model[0] - 1)), model[0], step)
    first_head = data.draw(st.integers(0, model[1] - 1))
    heads = range(first_head, data.draw(st.integers(first_head + 1, model[1])))
    count = data.draw(st.integers(1, 6))
    extent = model[0] * model[1] * tile
    store = np.random.default_rng(1).integers(0, 256, (8, extent), dtype=np.uint8)
    # In staging lie all layers from the first copied one on; of these every `step`-th is copied.
    num_staged = len(range(layers.start, model[0]))
    staging = np.random.default_rng(2).integers(0, 256, (8, num_staged, len(heads), tile), dtype=np.uint8)
    places, slots = (data.draw(st.permutations(range(8)))[:count] for _ in range(2))
    if data.draw(st.booleans()):
        places, slots = sorted(places), sorted(slots)
    want_store, want_staging = store.copy(), staging.copy()
    to_host = data.draw(st.booleans())
    for place, slot in zip(places, slots, strict=True):
        tiles = want_store[place].reshape(*model, tile)[layers.start :: step, heads.start : heads.stop]
        if to_host:
            tiles[...] = staging[slot, ::step]
        else:
            want_staging[slot, ::step] = tiles
    stored = [(place // 3, store[place].ctypes.data) for place in places]
    staged = [staging[slot].ctypes.data for slot in slots]
    copy_extents(ExtentPiece(Shard(layers, heads), tile, 0, step), stored, staged, model[1], CPU, to_host=to_host)
    assert np.array_equal(store, want_store)
    assert np.array_equal(staging, want_staging)


def test_sums_take_a_sixteenth_of_the_ring() -> None:
    assert sums_bytes(1 << 20) == 1 << 16
    assert StagingRing(1024, 4096, CPU, with_sums=True).sums(Room(0, 1, 1024)) is None, "nobody needs them on the host"


def test_a_ring_is_not_taken_piecemeal() -> None:
    ring = StagingRing(1024, 6 * 1024, CPU)
    first, second = ring.take(1024, 4, least=4), ring.take(1024, 4, least=4)
    assert first is not None
    assert second is not None
    assert second.num_units == 2, "up to the end"
    ring.give_back(1024)
    assert ring.take(1024, 2, least=2) is None, "only one is free"
    ring.give_back(1024)
    room = ring.take(1024, 2, least=2)
    assert room is not None
    assert (room.start, room.num_units) == (0, 2)
