"""Whatever topology wrote it, whatever topology reads it: the same bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BufferMismatchError, InvalidArgumentError
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import RawBuffer, open_pool
from headwater.stores.base import Status
from headwater.stores.embedded import known

from support import empty_tiles, gqa, identity, local_tiles, specs, temporary_url, topologies


@pytest.mark.parametrize(("scheme", "examples"), [("memory", 60), ("shm", 25), ("file", 25)])
def test_any_writer_any_reader(scheme: str, examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pool")

    @settings(max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spec = data.draw(specs())
        writer, reader = data.draw(topologies(spec)), data.draw(topologies(spec))
        chunk_tokens = data.draw(st.integers(1, 20))
        tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
        with temporary_url(scheme, folder, "capacity=4MiB") as url, open_pool(url) as pool:
            space = pool.space(identity(), spec, chunk_tokens=chunk_tokens)
            keys = space.keys(tokens)
            chunks = keys.chunks()
            shards = data.draw(st.permutations(list(writer.shards(spec))))
            assert space.match(keys).num_tokens == 0
            for shard in shards:
                statuses = space.write(chunks, shard, [local_tiles(spec, chunk, shard) for chunk in chunks])
                # EXISTS: this rank had nothing to add, or all were in before it came
                assert all(status.stored for status in statuses), statuses
            match = space.match(keys)
            assert match.num_tokens == len(tokens)
            for shard in reader.shards(spec):
                buffers = [empty_tiles(spec, chunk, shard) for chunk in match.chunks]
                assert space.read(match.chunks, shard, buffers) == [Status.OK] * len(chunks)
                for chunk, buffer in zip(match.chunks, buffers, strict=True):
                    assert np.array_equal(buffer, local_tiles(spec, chunk, shard))
            assert pool.verify().clean

    check()


def test_a_chunk_is_invisible_until_every_rank_has_written() -> None:
    spec = gqa()
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        keys = space.keys(range(24))
        shards = list(Topology(tp=4, pp=3).shards(spec))
        for shard in shards[:-1]:
            space.write(keys.chunks(), shard, [local_tiles(spec, c, shard) for c in keys.chunks()])
            assert space.match(keys).num_tokens == 0
            buffers = [empty_tiles(spec, c, whole_shard(spec)) for c in keys.chunks()]
            assert set(space.read(keys.chunks(), whole_shard(spec), buffers)) == {Status.MISS}
        space.write(keys.chunks(), shards[-1], [local_tiles(spec, c, shards[-1]) for c in keys.chunks()])
        assert space.match(keys).num_tokens == 24


def test_children_of_an_unfinished_parent_stay_invisible_and_appear_with_it() -> None:
    spec = gqa()
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        keys = space.keys(range(24))
        first, *rest = keys.chunks()
        one, two = Topology(tp=2).shards(spec)
        space.write(keys.chunks(), one, [local_tiles(spec, c, one) for c in keys.chunks()])
        space.write(rest, two, [local_tiles(spec, c, two) for c in rest])
        assert space.match(keys).num_tokens == 0
        space.write([first], two, [local_tiles(spec, first, two)])
        assert space.match(keys).num_tokens == 24


def test_tails_grow_with_a_conversation() -> None:
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        keys = space.keys(range(21))
        space.write(keys.chunks(), shard, [local_tiles(spec, c, shard) for c in keys.chunks()])
        grown = space.keys(range(30))
        assert space.match(grown).num_tokens == 21  # the tail of 5 tokens under the first chunk
        assert space.match(grown, max_tokens=20).num_tokens == 16
        assert space.match(space.keys(range(20))).num_tokens == 16
        short = space.keys([7, 8, 9])  # shorter than a chunk: shared through tails alone
        space.write(short.chunks(), shard, [local_tiles(spec, c, shard) for c in short.chunks()])
        assert space.match(space.keys([7, 8, 9, 10])).num_tokens == 3
        assert space.match(space.keys([7, 8])).num_tokens == 0


def test_only_the_newest_eight_tail_lengths_are_looked_for() -> None:
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=32)
        for length in range(1, 11):
            keys = space.keys(range(length))
            space.write(keys.chunks(), shard, [local_tiles(spec, c, shard) for c in keys.chunks()])
        assert [space.match(space.keys(range(n))).num_tokens for n in (1, 2, 3, 10, 31)] == [0, 0, 3, 10, 10]


def test_tenants_adapters_identities_and_chunk_sizes_share_nothing() -> None:
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        keys = space.keys(range(16))
        space.write(keys.chunks(), shard, [local_tiles(spec, c, shard) for c in keys.chunks()])
        others = [
            (space, space.keys(range(16), tenant=b"a")),
            (space, space.keys(range(16), adapter=b"lora")),
            (pool.space(identity(1), spec, chunk_tokens=8), None),
            (pool.space(identity(), spec, chunk_tokens=4), None),
        ]
        for other, mine in others:
            assert other.match(mine or other.keys(range(16))).num_tokens == 0
        assert pool.space(identity(), spec, chunk_tokens=8).match(keys).num_tokens == 16


def test_raw_addresses_and_strided_arrays() -> None:
    spec = gqa(layers=2, heads=3)
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=4MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        keys = space.keys(range(8))
        (chunk,) = keys.chunks()
        truth = local_tiles(spec, chunk, shard)
        size = truth.shape[2]
        padded = np.zeros((2, 4, size + 8), np.uint8)
        padded[:, :3, :size] = truth
        raw = RawBuffer(padded.ctypes.data, layer_stride=padded.strides[0], head_stride=padded.strides[1])
        assert space.write([chunk], shard, [raw]) == [Status.OK]
        back = np.zeros_like(padded)
        raw = RawBuffer(back.ctypes.data, layer_stride=back.strides[0], head_stride=back.strides[1])
        assert space.read([chunk], shard, [raw]) == [Status.OK]
        assert np.array_equal(back, padded)
        shaped = np.zeros((2, 3, 2, 8, 4), np.float16)
        assert space.read([chunk], shard, [shaped]) == [Status.OK]
        assert np.array_equal(shaped.reshape(2, 3, -1).view(np.uint8), truth)


def test_bad_buffers_and_foreign_chunks_are_refused() -> None:
    spec = gqa()
    shard = whole_shard(spec)
    with open_pool("memory://?capacity=4MiB") as pool:
        space, other = (pool.space(identity(i), spec, chunk_tokens=8) for i in range(2))
        (chunk,) = space.keys(range(8)).chunks()
        with pytest.raises(BufferMismatchError, match="bytes"):
            space.read([chunk], shard, [np.zeros(7, np.uint8)])
        with pytest.raises(BufferMismatchError, match="1 buffers were given for 2 chunks"):
            space.write([chunk, chunk], shard, [empty_tiles(spec, chunk, shard)])
        frozen = empty_tiles(spec, chunk, shard)
        frozen.setflags(write=False)
        with pytest.raises(BufferMismatchError, match="read-only"):
            space.read([chunk], shard, [frozen])
        with pytest.raises(InvalidArgumentError, match="another space"):
            other.write([chunk], shard, [empty_tiles(spec, chunk, shard)])
        assert pool.verify().clean


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_one_array_for_many_chunks(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = gqa()
    with temporary_url(scheme, tmp_path_factory.mktemp("pool"), "capacity=4MiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        chunks = space.keys(range(40)).chunks()
        written = list(Topology(tp=8, dcp=2, interleave=3).shards(spec))
        for shard in written:
            space.write(chunks[:2], shard, [local_tiles(spec, c, shard) for c in chunks[:2]])
        space.write(chunks, whole_shard(spec), [local_tiles(spec, c, whole_shard(spec)) for c in chunks])
        for topology in (Topology(), Topology(tp=2, pp=3), Topology(tp=8, dcp=2)):
            for shard in topology.shards(spec):
                shape = shard.local_shape(spec, 0, 8)
                out = np.zeros((len(chunks) + 1, shape[0], shape[1] + 1, shape[2]), np.uint8)[:-1, :, 1:]  # strided
                assert space.read(chunks, shard, out) == [Status.OK] * 5
                for chunk, tiles in zip(chunks, out, strict=True):
                    assert np.array_equal(tiles, local_tiles(spec, chunk, shard))
        missing = space.keys(range(100, 116)).chunks()
        out = np.zeros((2, *whole_shard(spec).local_shape(spec, 0, 8)), np.uint8)
        assert space.read([missing[0], chunks[0]], whole_shard(spec), out) == [Status.MISS, Status.OK]
        for wrong in (out[:, :2], out.view(np.uint16), np.zeros_like(out)[..., ::-1]):
            with pytest.raises(BufferMismatchError, match="one array for 2 chunks"):
                space.read(chunks[:2], whole_shard(spec), wrong)
        assert pool.stats().counts["read_miss"] == 1


def test_more_chunks_than_are_remembered_in_one_call_and_in_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was remembered of one chunk must never serve another: both its bytes and its checksums would be wrong."""
    monkeypatch.setattr(known, "_COLUMN_BYTES", 0)  # sixteen records
    spec = gqa(layers=1, heads=2)
    shard = whole_shard(spec)
    wrong: list[int] = []
    with open_pool("memory://?capacity=8MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=4)
        chunks = space.keys(range(4 * 100)).chunks()
        space.write(chunks, shard, [local_tiles(spec, c, shard) for c in chunks])
        truth = {c.key: local_tiles(spec, c, shard) for c in chunks}

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(60):
                mine = [chunks[i] for i in rng.integers(0, 100, rng.integers(1, 40))]
                out = np.zeros((len(mine), *shard.local_shape(spec, 0, 4)), np.uint8)
                assert space.read(mine, shard, out) == [Status.OK] * len(mine)
                wrong.extend(c.number for c, tiles in zip(mine, out, strict=True) if (tiles != truth[c.key]).any())

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
