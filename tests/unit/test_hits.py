"""How often a chunk was hit: once a request, whoever looks, and never written into somebody else's record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Status
from headwater.stores.embedded.index import MAX_HITS

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=4, dim=64)  # 16 KiB a chunk of 8 tokens
SHARD = whole_shard(SPEC)
PROMPT = list(range(24))


@pytest.fixture(params=["memory", "shm", "file"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    options = "capacity=1536KiB&deadline=30"
    with temporary_url(request.param, tmp_path, options) as url, open_pool(url) as opened:
        yield opened


def space_of(pool: Pool) -> Space:
    return pool.space(identity(), SPEC, chunk_tokens=8)


def write(space: Space, tokens: list[int]) -> None:
    chunks = space.keys(tokens).chunks()
    assert set(space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])) <= {Status.OK, Status.EXISTS}


def use(space: Space, tokens: list[int], request_id: str = "r", **options: bool) -> None:
    match = space.match(space.keys(tokens))
    assert space.lease(match, request_id, **options).held
    space.release(request_id)


def hits(pool: Pool) -> dict[int, int]:
    """By the number of the chunk."""
    return {chunk.number: chunk.hits for chunk in sorted(pool.scan(), key=lambda chunk: chunk.number)}


def test_a_request_is_one_hit_of_the_deepest_chunk(pool: Pool) -> None:
    space = space_of(pool)
    write(space, PROMPT)
    assert hits(pool) == {0: 0, 1: 0, 2: 0}
    use(space, PROMPT)
    use(space, PROMPT[:17], "other")
    assert hits(pool) == {0: 0, 1: 1, 2: 1}
    assert pool.verify().clean


def test_a_lease_taken_twice_is_one_hit(pool: Pool) -> None:
    space = space_of(pool)
    write(space, PROMPT)
    match = space.match(space.keys(PROMPT))
    with space.lease(match, "r"), space.lease(match, "r"):
        assert hits(pool) == {0: 0, 1: 0, 2: 1}
    use(space, PROMPT)
    assert hits(pool) == {0: 0, 1: 0, 2: 2}


def test_what_is_no_load_is_no_hit(pool: Pool) -> None:
    """Looking, leasing for something else, and the ranks of a server that read their tiles."""
    space = space_of(pool)
    write(space, PROMPT)
    chunks = space.match(space.keys(PROMPT)).chunks
    use(space, PROMPT, is_hit=False)
    for rank in range(2):
        shard = Topology(tp=2).shard(SPEC, tp_rank=rank)
        space.read(chunks, shard, [space.empty(chunk, shard) for chunk in chunks])
        if space.mapped:
            space.lend(chunks, shard).release()
    assert hits(pool) == {0: 0, 1: 0, 2: 0}


def test_hits_of_an_evicted_chunk_are_its_parents(pool: Pool) -> None:
    space = space_of(pool)
    write(space, PROMPT)
    for _ in range(3):
        use(space, PROMPT)
    use(space, PROMPT[:8])
    number = 1000
    while len(space.match(space.keys(PROMPT)).chunks) == 3:
        write(space, [number] * 8)
        use(space, PROMPT[:8])  # the parent of it all stays young; so does nothing else
        number += 1
    kept = [chunk for chunk in pool.scan() if chunk.key in {c.key for c in space.keys(PROMPT).chunks()}]
    assert 0 < len(kept) < 3
    assert sum(chunk.hits for chunk in kept) == 3 + 1 + number - 1000


def test_hits_survive_a_rebuild_and_noise_is_bounded(pool: Pool) -> None:
    space = space_of(pool)
    write(space, PROMPT)
    use(space, PROMPT)
    core = pool._store._core  # type: ignore[attr-defined]
    first = core.index.find(space.keys(PROMPT).chunks()[0].key)
    core.index.state_words[first.cell * 8 + 5] = (1 << 64) - 7
    core.transact(core.janitor.rebuild, time.monotonic() + 60)
    use(space, PROMPT[:8])
    assert hits(pool) == {0: MAX_HITS, 1: 0, 2: 1}
    assert pool.verify().clean
