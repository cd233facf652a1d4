"""Noise, cuts and deletions: a read gives the right bytes or none, the process lives, and the pool heals.

Cutting a file that is mapped is a SIGBUS and not tested; see docs/format.md.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError
from headwater.kv.topology import Topology, whole_shard
from headwater.pool import Pool, Space, open_pool
from headwater.stores.base import Status
from headwater.stores.embedded import store_directory
from headwater.stores.url import parse_url

from support import empty_tiles, gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=2, dim=16, dtype="bfloat16")
SHARD = whole_shard(SPEC)
PROMPTS = 12


def fill(space: Space) -> None:
    topology = Topology(tp=4, dcp=2, interleave=3)
    for prompt in range(PROMPTS):
        chunks = space.keys([prompt] * 50).chunks()
        for shard in topology.shards(SPEC) if prompt % 3 == 0 else [SHARD]:
            statuses = space.write(chunks, shard, [local_tiles(SPEC, chunk, shard) for chunk in chunks])
            assert Status.TIMEOUT not in statuses, "nothing here takes long"


def a_url(scheme: str, folder: Path) -> AbstractContextManager[str]:
    """Of a new store. Chunks in files are packed, those in shared memory if that is wanted."""
    options = "capacity=2MiB&packing=on" if scheme == "packed" else "capacity=2MiB"
    return temporary_url("shm" if scheme == "packed" else scheme, folder, options)


@contextmanager
def open_space(url: str) -> Iterator[tuple[Pool, Space]]:
    with open_pool(url) as pool:
        yield pool, pool.space(identity(), SPEC, chunk_tokens=16)


def read_everything(space: Space) -> int:
    """Read all that matches; wrong bytes fail the test. Tokens that came back right."""
    good = 0
    for prompt in range(PROMPTS):
        match = space.match(space.keys([prompt] * 50))
        for chunk in match.chunks:
            buffer = empty_tiles(SPEC, chunk, SHARD)
            (status,) = space.read([chunk], SHARD, [buffer])
            if status == Status.OK:
                assert np.array_equal(buffer, local_tiles(SPEC, chunk, SHARD)), "wrong bytes"
                good += chunk.num_tokens
            else:
                assert status in (Status.MISS, Status.DAMAGED)
    return good


def heals(space: Space, pool: Pool) -> None:
    """After at most one look at everything, the pool is whole and takes and gives again."""
    pool.verify()
    fill(space)
    assert read_everything(space) == 50 * PROMPTS
    assert pool.verify().clean


def scribble(path: Path, rnd: random.Random, mode: str) -> None:
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        if mode == "all":
            file.write(rnd.randbytes(size))
        elif mode == "zeros":
            file.write(bytes(size))
        elif mode == "pages":
            for _ in range(rnd.randint(1, 12)):
                file.seek(rnd.randrange(0, size, 4096))
                file.write(rnd.randbytes(min(4096, size - file.tell())))
        else:
            for _ in range(rnd.randint(1, 60)):
                file.seek(rnd.randrange(max(1, size - 16)))
                file.write(rnd.randbytes(rnd.choice([1, 8, 16])))


MODES = ["all", "zeros", "pages", "bytes", "bytes"]
FILES = ["index", "data", "members"]


def pick(url: str, kind: str) -> list[Path]:
    folder = Path(store_directory(parse_url(url)))
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shm", "packed", "file"])
def test_damage_while_closed(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damage")

    @settings(max_examples=60)
    @example(seed=859884, kind="index", mode="bytes")  # a tail's length, which its parent keeps
    @given(seed=st.integers(0, 2**32), kind=st.sampled_from(FILES), mode=st.sampled_from([*MODES, "cut", "delete"]))
    def check(seed: int, kind: str, mode: str) -> None:
        rnd = random.Random(seed)
        with a_url(scheme, folder) as url:
            with open_space(url) as (pool, space):
                fill(space)
                assert read_everything(space) == 50 * PROMPTS
            for path in pick(url, kind):
                if mode == "delete":
                    path.unlink()
                elif mode == "cut":
                    os.truncate(path, rnd.randrange(path.stat().st_size))
                else:
                    scribble(path, rnd, mode)
            with open_space(url) as (pool, space):
                read_everything(space)
                heals(space, pool)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shm", "packed", "file"])
def test_damage_while_open(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damage")

    @settings(max_examples=80)
    @given(seed=st.integers(0, 2**32), kind=st.sampled_from(FILES), mode=st.sampled_from([*MODES, "delete"]))
    def check(seed: int, kind: str, mode: str) -> None:
        rnd = random.Random(seed)
        with a_url(scheme, folder) as url, open_space(url) as (pool, space):
            fill(space)
            for path in pick(url, kind):
                if mode == "delete":
                    path.unlink()
                else:
                    scribble(path, rnd, mode)
            read_everything(space)
            fill(space)
            read_everything(space)
            heals(space, pool)

    check()


def test_every_flipped_byte_of_the_data_is_noticed(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url, open_space(url) as (pool, space):
        (chunk,) = space.keys(range(16)).chunks()
        space.write([chunk], SHARD, [local_tiles(SPEC, chunk, SHARD)])
        (path,) = pick(url, "data")
        for offset in range(0, SPEC.extent_bytes(16), 97):
            with path.open("r+b", buffering=0) as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ (1 << offset % 8)]))
            buffer = empty_tiles(SPEC, chunk, SHARD)
            assert space.read([chunk], SHARD, [buffer]) == [Status.DAMAGED]
            assert space.match(space.keys(range(16))).num_tokens == 0
            space.write([chunk], SHARD, [local_tiles(SPEC, chunk, SHARD)])
            assert space.read([chunk], SHARD, [buffer]) == [Status.OK]
        assert pool.stats().store.damaged == len(range(0, SPEC.extent_bytes(16), 97))


def test_damage_takes_what_hangs_below_with_it(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url, open_space(url) as (pool, space):
        keys = space.keys(range(64))
        chunks = keys.chunks()
        space.write(chunks, SHARD, [local_tiles(SPEC, c, SHARD) for c in chunks])
        (path,) = pick(url, "data")
        with path.open("r+b", buffering=0) as file:  # the second chunk's extent comes second
            file.seek(SPEC.extent_bytes(16) + 5)
            file.write(b"\xff\x00\xff")
        buffers = [empty_tiles(SPEC, c, SHARD) for c in chunks]
        assert space.read(chunks, SHARD, buffers)[:2] == [Status.OK, Status.DAMAGED]
        assert space.match(keys).num_tokens == 16
        assert pool.stats().store.chunks == 1
        assert pool.verify().clean


def test_an_unreadable_index_in_use_by_others_is_not_replaced(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=2MiB") as url:
        with open_space(url) as (pool, space):
            fill(space)
            (path,) = pick(url, "index")
            with path.open("r+b", buffering=0) as file:
                file.write(bytes(path.stat().st_size))
            with pytest.raises(HeadwaterError, match="unreadable"):
                open_pool(url, group=77)
        with open_space(url) as (pool, space):
            heals(space, pool)
