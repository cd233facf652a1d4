"""The store protocols: a store has the methods that it can carry out, and a space says clearly what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import InvalidArgumentError
from headwater.kv.topology import Shard, whole_shard
from headwater.pool import Space, open_pool
from headwater.stores.base import MappedStore, Status, Store
from headwater.stores.embedded.store import EmbeddedStore
from headwater.stores.remote.store import RemoteStore
from headwater.stores.tiers.store import TieredStore

from support import gqa, identity, local_tiles, temporary_url

SPEC = gqa(layers=2, heads=4)
SHARD = whole_shard(SPEC)


def methods(protocol: type) -> set[str]:
    return {name for name in dir(protocol) if not name.startswith("_") and callable(getattr(protocol, name))}


def space_of(url: str) -> Iterator[Space]:
    with open_pool(url) as pool:
        yield pool.space(identity(), SPEC, chunk_tokens=8)


@pytest.fixture
def file_space(tmp_path: Path) -> Iterator[Space]:
    with temporary_url("file", tmp_path) as url:
        yield from space_of(url)


def test_every_store_can_do_what_its_protocol_says() -> None:
    in_place = methods(MappedStore) - methods(Store)
    assert in_place == {
        "arrived",
        "forms",
        "segment",
        "reserve",
        "places",
        "noted",
        "commit",
        "commit_shard",
        "close_all",
        "lend",
        "borrow",
    }
    for kind in (EmbeddedStore, TieredStore):
        assert methods(MappedStore) <= methods(kind)
    assert methods(Store) <= methods(RemoteStore)
    assert in_place.isdisjoint(methods(RemoteStore) - {"forms"})  # which a source says of its own


@pytest.mark.parametrize(("scheme", "is_mapped"), [("memory", True), ("shm", True), ("file", False)])
def test_which_stores_are_mapped(scheme: str, is_mapped: bool, tmp_path: Path) -> None:
    with temporary_url(scheme, tmp_path) as url, temporary_url("file", tmp_path) as lower:
        for urls in (url, f"{url},{lower}"):
            for space in space_of(urls):
                assert space.mapped == is_mapped
                assert (space._store.mapped is space._store) == is_mapped


def test_what_needs_mapped_memory_is_refused_with_words(file_space: Space) -> None:
    space, (chunk,) = file_space, file_space.keys(range(8)).chunks()
    extents: Any = [None]
    calls: list[Callable[[], object]] = [
        lambda: space.reserve([chunk], SHARD),
        lambda: space.places(extents),
        lambda: space.noted(extents, SHARD),
        lambda: space.commit(extents),
        lambda: space.commit_shard(extents, SHARD, np.zeros((1, 2, 4), np.uint64)),
        lambda: space.close_all(extents),
        lambda: space.lend([chunk], SHARD),
        lambda: space.borrow(chunk, SHARD).__enter__(),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"not mapped; use (read|write)"):
            call()
    assert space.segment(0) is None


def test_chunks_of_a_file_are_aborted_as_well(file_space: Space) -> None:
    """A rank that cannot save its part aborts the chunk wherever its server writes."""
    chunks, first = file_space.keys(range(16)).chunks(), Shard(range(2), range(1))
    assert file_space.write(chunks, first, [local_tiles(SPEC, chunk, first) for chunk in chunks]) == [Status.OK] * 2
    assert file_space.abort(chunks) == 2
    assert file_space.abort(chunks) == 0
    assert file_space._store.stats().pending_bytes == 0
