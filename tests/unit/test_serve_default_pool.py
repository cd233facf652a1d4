"""The pool of a server that was told none: all servers of the user share it, somewhere else where that cannot be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from headwater.engine import sizing
from headwater.pool.pool import open_pool
from headwater.serve import default_pool
from headwater.serve.default_pool import choose_pool
from headwater.stores import embedded
from headwater.stores.embedded import default_capacity
from headwater.stores.url import parse_url


class Place(NamedTuple):
    shm: Path
    cache: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Shared memory and a cache directory of the test's own, with as much room as in the sizes below."""
    made = Place(tmp_path / "shm", tmp_path / "cache")
    made.shm.mkdir()
    made.cache.mkdir()
    monkeypatch.setattr(embedded, "SHM_ROOT", str(made.shm))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.setitem(embedded.MAX_DEFAULT_BYTES, "shm", 64 << 20)
    monkeypatch.setattr(default_pool, "MAX_FILE_BYTES", 32 << 20)
    monkeypatch.setattr(default_pool, "MIN_BYTES", 8 << 20)
    return made


SetFree = Callable[[Path, int], None]


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> SetFree:
    """Make a directory look as full as a test wants it."""
    real, sizes = shutil.disk_usage, {}

    def usage(path: str) -> object:
        for folder, free in sizes.items():
            if Path(path).is_relative_to(folder):
                return type(real(path))(free, 0, free)
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return sizes.__setitem__


def test_servers_of_one_user_share_a_pool_in_shared_memory(place: Place) -> None:
    first, second = choose_pool(), choose_pool(num_ranks=4)
    assert first == second
    assert first.url == "shm:///headwater"
    assert first.note == "shm:///headwater, 64.0 MiB in shared memory, for all servers of this user"
    assert (place.shm / "headwater").stat().st_mode & 0o777 == 0o700
    with open_pool(first.url) as one, open_pool(second.url) as other:
        assert one.stats().store.capacity_bytes == other.stats().store.capacity_bytes == 64 << 20


def test_a_pool_that_is_there_is_taken_as_it_is(place: Place) -> None:
    open_pool("shm:///headwater?capacity=16MiB").close()
    assert "16.0 MiB" in choose_pool().note


def test_two_servers_that_start_at_once_agree(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one makes the pool between our looking and our making, with another capacity."""
    room = default_pool._room

    def slow_room(url: object) -> int:
        open_pool("shm:///headwater?capacity=24MiB").close()
        return room(url)  # type: ignore[arg-type]

    monkeypatch.setattr(default_pool, "_room", slow_room)
    chosen = choose_pool()
    assert (chosen.url, "24.0 MiB" in chosen.note) == ("shm:///headwater", True)


@pytest.mark.parametrize("first", ["the library", "a server"])
def test_whoever_comes_first_makes_a_pool_of_the_same_size(
    place: Place, set_free: SetFree, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Also where little of the memory is free."""
    monkeypatch.setattr(sizing, "_available", lambda root: 64 << 20)
    set_free(place.shm, 60 << 20)
    if first == "the library":
        with open_pool() as pool:
            made = pool.stats().store.capacity_bytes
    else:
        assert choose_pool().url == "shm:///headwater"
        with open_pool(create=False) as pool:
            made = pool.stats().store.capacity_bytes
    assert made == default_capacity(parse_url("shm:///headwater")) == 48 << 20
    assert "48.0 MiB in shared memory" in choose_pool().note


def test_another_users_pool_is_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.shm / "headwater").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    own = f"shm:///headwater-{os.getuid() + 1}"
    assert str(default_pool._shm_url()) == own
    monkeypatch.undo()
    monkeypatch.setattr(embedded, "SHM_ROOT", str(place.shm))
    (place.shm / "headwater").rmdir()
    (place.shm / f"headwater-{os.geteuid()}").mkdir()
    # The other user's is gone, but servers of ours use this one.
    assert str(default_pool._shm_url()) == f"shm:///headwater-{os.geteuid()}"


def test_little_shared_memory_means_files_and_says_so(place: Place, set_free: SetFree) -> None:
    set_free(place.shm, 1 << 20)
    chosen = choose_pool()
    assert chosen.url == (place.cache / "headwater" / "pool").as_uri()
    assert "32.0 MiB in files, for all servers of this user" in chosen.note
    assert "1.0 MiB free" in chosen.note
    assert choose_pool().url == chosen.url


def test_no_shared_memory_and_no_room_for_files_means_a_private_pool_or_none(place: Place, set_free: SetFree) -> None:
    place.shm.rmdir()
    set_free(place.cache, 1 << 20)
    chosen = choose_pool()
    assert chosen.url is not None
    assert chosen.url.startswith("memory://?capacity=")
    assert f"there is no {place.shm} here" in chosen.note
    open_pool(chosen.url).close()
    alone = choose_pool(num_ranks=2)
    assert alone.url is None
    assert alone.note.startswith("none (there is no")


def test_a_broken_pool_in_shared_memory_is_not_the_end(place: Place) -> None:
    (place.shm / "headwater").write_text("not a directory")
    chosen = choose_pool()
    assert chosen.url is not None
    assert chosen.url.startswith("file://")
    assert "is not a directory" in chosen.note
