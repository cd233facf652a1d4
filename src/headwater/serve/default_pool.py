"""The pool that a server uses when nobody names one: in shared memory, or else in files, or else its own.

All servers of one user find the same one, and it outlives them: a server that was restarted is warm. Which one it is,
and why, is said at the start. Nothing here knows of engines.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwater.engine.sizing import free_memory
from headwater.errors import CapacityError, SettingsMismatchError, StoreError
from headwater.pool.pool import open_pool
from headwater.stores.embedded import default_capacity, store_directory
from headwater.stores.url import DEFAULT_URL, StoreUrl, format_size, parse_url

MIN_BYTES = 256 << 20
"""A smaller pool forgets a long prompt before anyone asks for it again."""
MAX_FILE_BYTES = 16 << 30
MAX_PRIVATE_BYTES = 2 << 30


class PoolChoice(NamedTuple):
    """A pool that is there and can be opened, or None; and what to tell people about it."""

    url: str | None
    note: str


def choose_pool(*, num_ranks: int = 1) -> PoolChoice:
    """Open the first place that works, making the pool where there is none. Never raises for a place that does not.

    A private pool is only for an engine of one rank: others would have one each, and find nothing.
    """
    refusals: list[str] = []
    for url, title in _places():
        try:
            capacity = _open(url)
        except (StoreError, OSError) as error:
            refusals.append(str(error))
        else:
            why = f" ({'; '.join(refusals)})" if refusals else ""
            return PoolChoice(str(url), f"{url}, {format_size(capacity)} in {title}{why}")
    why = "; ".join(refusals)
    private = min(MAX_PRIVATE_BYTES, free_memory("cpu") // 8)
    if num_ranks == 1 and private >= MIN_BYTES:
        note = f"memory://, {format_size(private)} for this server alone ({why})"
        return PoolChoice(f"memory://?capacity={private}", note)
    return PoolChoice(None, f"none ({why})")


def _places() -> Iterator[tuple[StoreUrl, str]]:
    """Where to look, the best first."""
    yield _shm_url(), "shared memory, for all servers of this user"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield parse_url((Path(cache) / "headwater" / "pool").as_uri()), "files, for all servers of this user"


def _shm_url() -> StoreUrl:
    """The usual name; with the user's number where another user has taken that, also after they have left again."""
    usual = parse_url(DEFAULT_URL)
    own = parse_url(f"{DEFAULT_URL}-{os.geteuid()}")
    if _is_ours(usual):
        return usual
    return own if _is_ours(own) or os.path.lexists(store_directory(usual)) else usual


def _is_ours(url: StoreUrl) -> bool:
    try:
        return os.lstat(store_directory(url)).st_uid == os.geteuid()
    except OSError:
        return False


def _open(url: StoreUrl) -> int:
    """Make sure that it can be opened; its capacity. Raises StoreError or OSError."""
    if not os.path.exists(os.path.join(store_directory(url), "index")):
        try:
            return _capacity(f"{url}?capacity={_room(url)}")
        except SettingsMismatchError:
            pass  # another server was faster, with a slightly different idea of what is free
    return _capacity(str(url))


def _capacity(url: str) -> int:
    with open_pool(url) as pool:
        return pool.stats().store.capacity_bytes


def _room(url: StoreUrl) -> int:
    """The capacity of a new pool: in shared memory what every pool there gets by default, whoever makes it; in a cache
    directory a fifth of what is free."""
    directory = Path(store_directory(url))
    if url.scheme == "shm":
        room = default_capacity(url)
    else:
        room = min(MAX_FILE_BYTES, _free(directory) // 5)
    if room < MIN_BYTES:
        raise CapacityError(
            f"{directory.parent} has {format_size(_free(directory))} free: a pool there would have "
            f"{format_size(room)}, less than {format_size(MIN_BYTES)}"
        )
    return room


def _free(directory: Path) -> int:
    """Bytes that are free where a directory is, or would be."""
    return shutil.disk_usage(next(folder for folder in (directory, *directory.parents) if folder.exists())).free
