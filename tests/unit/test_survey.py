"""The survey of a store: the same prefixes and sums that a slow walk over all chunks finds, and hits as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kv.topology import whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.embedded import EmbeddedStore
from headwater.stores.embedded.survey import Surveyor
from headwater.stores.stats import ChunkInfo, PrefixInfo

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=1, heads=1, dim=4)
SHARD = whole_shard(SPEC)
BIG = gqa(layers=2, heads=4, dim=64)  # 16 KiB a chunk of 8 tokens


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with temporary_url("shm", tmp_path, "capacity=8MiB") as url, open_pool(url) as opened:
        yield opened


def space_of(pool: Pool, tag: int = 0) -> Space:
    return pool.space(identity(tag), SPEC, chunk_tokens=4)


def write(space: Space, tokens: list[int], tenant: bytes = b"") -> None:
    chunks = space.keys(tokens, tenant=tenant).chunks()
    space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])


def use(space: Space, tokens: list[int], tenant: bytes = b"") -> None:
    space.lease(space.match(space.keys(tokens, tenant=tenant)), f"r{time.monotonic_ns()}")


def surveyor(pool: Pool) -> Surveyor:
    store = pool.first_tier
    assert isinstance(store, EmbeddedStore)
    made = store.surveyor()
    made.refresh()
    return made


def test_a_shared_beginning_and_what_continues_it(pool: Pool) -> None:
    space = space_of(pool)
    shared = [1] * 12
    for last in (2, 3):
        write(space, [*shared, *[last] * 8, 9])  # 3 chunks shared, 2 of its own, and a tail
    use(space, [*shared, *[2] * 8, 9])
    use(space, shared)
    first, *others = surveyor(pool).prefixes(10)
    assert (first.num_tokens, first.num_chunks, first.branches, first.hits) == (12, 3, 2, 2)
    assert {(p.first_token, p.num_tokens, p.num_chunks, p.branches) for p in others} == {(12, 21, 3, 0)}
    assert sorted(p.hits for p in others) == [0, 1]
    tail = space.keys([*shared, *[2] * 8, 9]).chunks()[-1].key
    assert [p.hits for p in others if p.key == tail] == [1]


def test_hits_are_told_once_and_by_whom(pool: Pool) -> None:
    space = space_of(pool)
    write(space, [1] * 8, b"acme")
    use(space, [1] * 8, b"acme")
    seen = surveyor(pool)
    assert seen.hits(10) == []  # it was before anybody looked
    use(space, [1] * 8, b"acme")
    use(space, [1] * 8, b"acme")
    (hit,) = seen.hits(10)
    assert (hit.num_tokens, hit.num_requests) == (8, 2)
    assert hit.root["tenant"]
    assert hit.key == space.keys([1] * 8, tenant=b"acme").chunks()[-1].key
    assert seen.hits(10) == []
    write(space, [2] * 8)
    use(space, [2] * 8)
    seen.refresh()
    assert [hit.num_tokens for hit in seen.hits(10)] == [8]  # also of what is new


def test_hits_that_an_evicted_chunk_leaves_behind_are_no_news(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=1536KiB") as url, open_pool(url) as pool:
        space = pool.space(identity(), BIG, chunk_tokens=8)
        prompt, number = list(range(24)), 1000

        def put(tokens: list[int]) -> None:
            chunks = space.keys(tokens).chunks()
            space.write(chunks, whole_shard(BIG), [local_tiles(BIG, c, whole_shard(BIG)) for c in chunks])

        put(prompt)
        for _ in range(5):
            space.lease(space.match(space.keys(prompt)), "r").release()
        seen = surveyor(pool)
        while len(space.match(space.keys(prompt)).chunks) == 3:
            put([number] * 8)
            number += 1
        assert sum(chunk.hits for chunk in pool.scan()) == 5
        assert seen.hits(5) == []
        seen.refresh()
        assert seen.hits(5) == []


def test_an_empty_store_and_one_that_is_cleared(pool: Pool) -> None:
    seen = surveyor(pool)
    assert (seen.prefixes(5), seen.holders(5), seen.hits(5), seen.num_chunks) == ([], [], [], 0)
    space = space_of(pool)
    write(space, [1] * 8)
    use(space, [1] * 8)
    seen.refresh()
    pool.clear()
    assert seen.prefixes(5) == seen.hits(5) == []  # the records that were seen are gone
    seen.refresh()
    assert (seen.prefixes(5), seen.holders(5), seen.num_chunks) == ([], [], 0)


def test_noise_over_the_index_is_survived(pool: Pool) -> None:
    space, rng = space_of(pool), np.random.default_rng(7)
    for number in range(40):
        write(space, [number] * 12)
    index = pool.first_tier._core.index  # type: ignore[attr-defined]
    seen = surveyor(pool)
    cells = np.flatnonzero(np.array([index.entry(cell) is not None for cell in range(index.geometry.num_cells)]))
    for _ in range(30):
        start = int(rng.choice(cells)) * 64
        index.heap_bytes[start + 8 : start + 56] = rng.integers(0, 256, 48, np.uint8)  # mutable, magic apart
        index.heap_bytes[start + 64 + 32 : start + 192] = rng.integers(0, 256, 96, np.uint8)
        seen.refresh()
        seen.hits(5)
        seen.holders(5)
        assert all(len(prefix.key) == 32 for prefix in seen.prefixes(5))


def test_records_that_name_each_other_as_parent_are_no_end_of_the_world(pool: Pool) -> None:
    """Three in a circle, which no writer makes: whoever follows parents would never come to a root."""
    space = space_of(pool)
    write(space, [7] * 8)
    for number in range(3):
        write(space, [number] * 8)
    index = pool.first_tier._core.index  # type: ignore[attr-defined]
    entries = [index.find(space.keys([number] * 8).chunks()[1].key) for number in range(3)]
    for entry, parent in zip(entries, [*entries[1:], entries[0]], strict=True):
        words = index.state_words[entry.cell * 8 + 8 : entry.cell * 8 + 24]
        words[5] = parent.record.id
        words[11] = words[11] >> 32 << 32 | parent.cell
    seen = surveyor(pool)
    assert seen.num_chunks == 8 - 3
    assert {prefix.num_tokens for prefix in seen.prefixes(10)} == {4, 8}


# ---- against a slow walk ----------------------------------------------------------------------------------------
def reference(chunks: list[ChunkInfo], parents: dict[bytes, bytes]) -> set[tuple[object, ...]]:
    """The same stretches, by going through all chunks one by one."""
    by_key = {chunk.key: chunk for chunk in chunks}
    children: dict[bytes, list[ChunkInfo]] = {}
    for chunk in chunks:
        children.setdefault(parents[chunk.key], []).append(chunk)

    def begins(chunk: ChunkInfo) -> bool:
        if parents[chunk.key] not in by_key:
            return True
        return not chunk.is_tail and sum(not c.is_tail for c in children[parents[chunk.key]]) != 1

    def below(chunk: ChunkInfo) -> list[ChunkInfo]:
        return [chunk, *(deeper for child in children.get(chunk.key, ()) for deeper in below(child))]

    def members(chunk: ChunkInfo) -> list[ChunkInfo]:
        inside = [c for c in children.get(chunk.key, ()) if not begins(c)]
        return [chunk, *(deeper for child in inside for deeper in members(child))]

    found: set[tuple[object, ...]] = set()
    for head in filter(begins, chunks):
        own, all_below = members(head), below(head)
        end = max(chunk.number * 4 + chunk.num_tokens for chunk in own)
        num_bytes, hits = sum(c.num_bytes for c in own), sum(c.hits for c in all_below)
        branches = sum(begins(c) for o in own for c in children.get(o.key, ()))
        last = max(c.last_used_ns for c in all_below)
        found.add((head.number * 4, end, len(own), num_bytes, branches, hits, last))
    return found


def as_row(p: PrefixInfo) -> tuple[object, ...]:
    return (p.first_token, p.num_tokens, p.num_chunks, p.num_bytes, p.branches, p.hits, p.last_used_ns)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=18), st.integers(0, 3)), min_size=1, max_size=8)
)
def test_the_same_as_a_slow_walk(prompts: list[tuple[list[int], int]]) -> None:
    with open_pool("memory://?capacity=8MiB") as pool:
        space, parents = space_of(pool), dict[bytes, bytes]()
        for tokens, uses in prompts:
            write(space, tokens)
            parents |= {chunk.key: chunk.parent for chunk in space.keys(tokens).chunks()}
            for _ in range(uses):
                use(space, tokens)
        seen, chunks = surveyor(pool), list(pool.scan())
        assert {as_row(prefix) for prefix in seen.prefixes(1000)} == reference(chunks, parents)
        (holder,) = seen.holders(5)
        assert holder.num_chunks == len(chunks) == seen.num_chunks
        assert holder.num_bytes == sum(chunk.num_bytes for chunk in chunks)
        assert holder.hits == sum(uses for _, uses in prompts)
