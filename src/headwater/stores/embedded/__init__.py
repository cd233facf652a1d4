"""Opening embedded stores: finding or making the files, joining as a member, sharing one core per process and store.

    DIR/index               header, directory, maps and records (see `layout`), mapped by every process
    DIR/members             slots and locks of the processes that have the store open (see `members`)
    DIR/data-GEN-0000 …     segments of bytes; GEN is the index's generation
    DIR/figures-TOKEN       what a process publishes about itself (see `stores.figures`)

`shm:///NAME` lives in /dev/shm/NAME, `file:///DIR` in DIR, `memory://` in private memory of the same shape.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from headwater.errors import (
    CapacityError,
    DeadlineError,
    FormatVersionError,
    InvalidArgumentError,
    SettingsMismatchError,
    StoreDamagedError,
    StoreError,
    StorePermissionError,
    UrlError,
)
from headwater.locks import ForkSafeLock
from headwater.stores.embedded.core import Core
from headwater.stores.embedded.data import DataArea, FileData, MappedData
from headwater.stores.embedded.index import Index
from headwater.stores.embedded.journal import CURSOR_PREFIX, EVENTS_FILE
from headwater.stores.embedded.layout import (
    HEADER_BYTES,
    INDEX_VERSION,
    MAGIC,
    MEMBERS_BYTES,
    PAGE,
    Geometry,
    Word,
    choose_geometry,
    decode_header,
    index_size,
    segment_size,
)
from headwater.stores.embedded.members import LocalMembers, Members, SharedMembers, new_group
from headwater.stores.embedded.store import DEFAULT_DEADLINE_S, EmbeddedStore
from headwater.stores.embedded.units import ABSENT_UNIT
from headwater.stores.figures import is_figures_file
from headwater.stores.host import boot_id, memory_bytes
from headwater.stores.policy import POLICIES, create_policy
from headwater.stores.private import allocate, open_private, why_no_file, why_shared
from headwater.stores.url import StoreUrl, format_size

SHM_ROOT = "/dev/shm"
MAX_DEFAULT_BYTES = {"memory": 2 << 30, "shm": 8 << 30, "file": 64 << 30}
"""The most that a store gets whose URL names no capacity."""
_OPEN_DEADLINE_S = 10.0
_DOCKER_HINT = "; in Docker, start the container with a larger --shm-size"


@dataclass
class _Shared:
    core: Core
    uses: int


_cores: dict[tuple[int, int, int], _Shared] = {}
_local_cores: list[Core] = []
_registry_lock = ForkSafeLock()


def open_embedded(url: StoreUrl, group: int | None = None, *, create: bool = True) -> EmbeddedStore:
    """Open the store, and make it where there is none. `group` names the server this process belongs to.

    With `create` False nothing is made and nothing replaced: a store that is missing or unreadable is an error, and one
    that exists is taken as it is, whatever sizes and policy the URL asks for.
    """
    if group is not None and not 0 < group < 1 << 63:
        raise InvalidArgumentError(f"group is {group}; expected a number from 1 to 2**63 - 1")
    deadline_s = url.seconds("deadline", DEFAULT_DEADLINE_S)
    create_policy(url.options.get("policy", "lru"))
    if url.scheme == "memory":
        if not create:
            raise UrlError(f"{url} is private to the process that made it; only shm:// and file:// can be looked at")
        core = _memory_core(url, group or new_group())
        with _registry_lock:
            _local_cores.append(core)

        def release() -> None:
            with _registry_lock, contextlib.suppress(ValueError):
                _local_cores.remove(core)
            core.close()

        return EmbeddedStore(core, url, deadline_s, release)
    with _system_errors(url), _registry_lock:
        if not create:
            _require_index(url)
        return _open_shared(url, group, deadline_s, is_given=not create)


def store_directory(url: StoreUrl) -> str:
    """Where the files of a `shm://` or `file://` store are."""
    return os.path.join(SHM_ROOT, url.path.lstrip("/")) if url.scheme == "shm" else url.path


def destroy(url: StoreUrl) -> None:
    """Delete a store's files. Raises StoreError while any process has it open, and where there are files of such names
    that are no store."""
    directory = store_directory(url)
    with _system_errors(url):
        if not os.path.isdir(directory):
            return
        _check_ours(url, directory)
        members = SharedMembers(os.path.join(directory, "members"), 0)
        try:
            # Whoever opens the store waits for this lock, and then finds nothing or has been counted.
            with members.creating(time.monotonic() + _OPEN_DEADLINE_S) as held:
                count = members.count()
                if not held or count:
                    users = f"{count} process{'es' * (count != 1)}" if count else "a process that is opening it"
                    raise StoreError(f"{url} is in use by {users}; end {'them' if count > 1 else 'it'} first")
                _remove_files(directory)
                os.unlink(os.path.join(directory, "members"))
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        finally:
            members.close()


def default_capacity(url: StoreUrl) -> int:
    """What a store gets when its URL says nothing, whoever opens it first.

    For shm:// the least of 8 GiB, a quarter of the memory that this process may use, and 80 % of what /dev/shm has
    free. Raises CapacityError where there is no /dev/shm.
    """
    most, part = MAX_DEFAULT_BYTES[url.scheme], memory_bytes() // 4
    if url.scheme == "memory":
        return min(most, part)
    if url.scheme == "shm" and not os.path.isdir(SHM_ROOT):
        raise CapacityError(f"there is no {SHM_ROOT} here")
    room = min(most, shutil.disk_usage(_existing(store_directory(url))).free * 8 // 10)
    return min(room, part) if url.scheme == "shm" else room


def _existing(directory: str) -> str:
    """The directory, or the nearest one above it that exists."""
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    return directory


# ---- private memory ---------------------------------------------------------------------------------------------
def _memory_core(url: StoreUrl, group: int) -> Core:
    geometry = _new_geometry(url)
    mapping = mmap.mmap(-1, geometry.index_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    index = Index(mapping, geometry)
    index.units.fill(0, geometry.num_units, ABSENT_UNIT)
    data = MappedData(geometry, None)
    return Core(str(url), geometry, index, LocalMembers(group), data, create_policy(geometry.policy))


# ---- files ------------------------------------------------------------------------------------------------------
def _open_shared(url: StoreUrl, group: int | None, deadline_s: float, *, is_given: bool) -> EmbeddedStore:
    directory = store_directory(url)
    if not os.path.exists(os.path.join(directory, "index")):
        _check_room(url, _existing(directory), _new_geometry(url))  # before anything is made that must be undone
    os.makedirs(directory, mode=0o700, exist_ok=True)
    _check_owner(url, directory)
    _check_ours(url, directory)
    path = os.path.join(directory, "members")
    for key, shared in _cores.items():
        with contextlib.suppress(FileNotFoundError):
            at = os.stat(path)
            if key[:2] == (at.st_dev, at.st_ino) and group in (None, shared.core.members.group):
                if not is_given:
                    _check_settings(url, shared.core.geometry)
                shared.uses += 1
                return EmbeddedStore(shared.core, url, deadline_s, partial(_release, key))
    members = SharedMembers(path, group or new_group())
    try:
        with members.creating(time.monotonic() + _OPEN_DEADLINE_S) as held:
            if not held:
                raise DeadlineError(f"{url}: another process has been opening it for {_OPEN_DEADLINE_S:.0f} s")
            core = _open_files(url, directory, members, is_given=is_given)
    except BaseException:
        members.close()
        raise
    at = os.stat(path)
    key = (at.st_dev, at.st_ino, core.members.group)
    _cores[key] = _Shared(core, 1)
    return EmbeddedStore(core, url, deadline_s, partial(_release, key))


def _require_index(url: StoreUrl) -> None:
    """Raise unless there is an index, and one that can be read."""
    path = os.path.join(store_directory(url), "index")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"there is no pool at {url} (no index in {os.path.dirname(path)})") from error
    if _read_geometry(url, path) is None:
        raise StoreDamagedError(
            f"{url}: the index is unreadable; a server that opens it makes a new one, "
            f"and `headwater pool clear --remove {StoreUrl(url.scheme, url.path)}` deletes it"
        )


def _open_files(url: StoreUrl, directory: str, members: SharedMembers, *, is_given: bool) -> Core:
    path = os.path.join(directory, "index")
    geometry = _read_geometry(url, path)
    if geometry is None and os.path.exists(path) and members.count():
        raise StoreDamagedError(
            f"{url}: the index is unreadable and other processes use the store; stop them, then open it again"
        )
    fresh = geometry is None
    if geometry is None:
        geometry = _create_index(url, directory, path)
    elif not is_given:
        _check_settings(url, geometry)
    members.join()
    fd = open_private(path, os.O_RDWR)
    try:
        allocate(fd, geometry.index_bytes)
        mapping = mmap.mmap(fd, geometry.index_bytes)
    finally:
        os.close(fd)
    index = Index(mapping, geometry)
    data: DataArea = MappedData(geometry, directory) if url.scheme == "shm" else FileData(geometry, directory)
    core = Core(str(url), geometry, index, members, data, create_policy(geometry.policy), directory)
    if not fresh:
        _settle(core)
    return core


def _settle(core: Core) -> None:
    """On opening what others left: rebuild if they died writing or the machine went down, free what the dead held.

    A process stopped inside the lock must not keep us out: then this waits for the next writer.
    """
    words, boot = core.index.words, boot_id()
    if words[Word.BOOT] != boot:
        words[Word.DIRTY] = 1

    def work() -> None:
        core.janitor.sweep()
        words[Word.BOOT] = boot

    with contextlib.suppress(DeadlineError):
        core.transact(work, time.monotonic() + DEFAULT_DEADLINE_S)


def _read_geometry(url: StoreUrl, path: str) -> Geometry | None:
    """The geometry of an existing index; None where there is none that can be read."""
    try:
        with open(open_private(path, os.O_RDONLY), "rb") as file:
            first = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - PAGE))
            last = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    for raw in (first, last):
        geometry = decode_header(raw)
        if isinstance(geometry, Geometry) and geometry.policy not in POLICIES:
            raise FormatVersionError(
                f"{url} evicts by {geometry.policy!r}, which this Headwater does not know; upgrade"
            )
        if isinstance(geometry, int):
            raise FormatVersionError(
                f"{url} was written by a newer Headwater (index version {geometry}, this one knows {INDEX_VERSION}); "
                "upgrade, or use another path"
            )
        if geometry is not None and geometry.index_bytes == size:
            return geometry
    return None


def _create_index(url: StoreUrl, directory: str, path: str) -> Geometry:
    """Make a new index beside nothing, or in place of an unreadable one whose segments go with it."""
    geometry = _new_geometry(url)
    _check_room(url, directory, geometry)
    _remove_files(directory)
    temporary = path + ".new"
    fd = open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        allocate(fd, geometry.index_bytes)
        header = geometry.encode()
        os.pwrite(fd, header, 0)
        os.pwrite(fd, header, geometry.index_bytes - PAGE)
        os.pwrite(fd, bytes((ABSENT_UNIT,)) * geometry.num_units, geometry.unit_map_offset)
        os.pwrite(fd, boot_id().to_bytes(8, "little"), Word.offset(Word.BOOT))
    except BaseException:
        os.close(fd)
        os.unlink(temporary)
        raise
    os.close(fd)
    os.rename(temporary, path)
    return geometry


def _new_geometry(url: StoreUrl) -> Geometry:
    capacity = url.size("capacity") or default_capacity(url)
    policy = url.options.get("policy", "lru")
    index, segment = url.size("index"), url.size("segment")
    return choose_geometry(capacity, index, segment, policy, secrets.token_bytes(16), time.time_ns())


def _check_settings(url: StoreUrl, geometry: Geometry) -> None:
    """What the URL says must be what the store is. What it does not say is as it is."""
    capacity, index, segment = (url.size(name) for name in ("capacity", "index", "segment"))
    data, unit, bare = geometry.data_space, geometry.unit_bytes, StoreUrl(url.scheme, url.path)
    for name, asked, actual in (
        ("capacity", capacity, geometry.capacity),
        ("index", index and index_size(geometry.capacity, index), geometry.index_bytes),
        (
            "segment",
            segment and segment_size(data, unit, segment),
            geometry.segment_bytes,
        ),
    ):
        if asked is not None and asked != actual:
            raise SettingsMismatchError(
                f"{url}: the store exists with {name}={format_size(actual)}; leave the option out, "
                f"or remove the store first (headwater pool clear --remove {bare})"
            )
    if url.options.get("policy", geometry.policy) != geometry.policy:
        raise SettingsMismatchError(
            f"{url}: the store exists with policy={geometry.policy}; leave the option out, "
            f"or remove the store first (headwater pool clear --remove {bare})"
        )


def _check_owner(url: StoreUrl, directory: str) -> None:
    """Raise unless only this user (or root) can put files there, or write to those that are there."""
    found = os.lstat(directory)
    if stat.S_ISLNK(found.st_mode) and url.scheme == "file":
        found = os.stat(directory)  # a symbolic link to one's own directory is fine, but not in /dev/shm
    if not stat.S_ISDIR(found.st_mode):
        raise StorePermissionError(f"{url}: {directory} is not a directory of your own; use another name")
    reason = why_shared(directory, found, root_may_own=url.scheme == "file")
    for entry in () if reason else os.scandir(directory):
        if _is_ours(entry.name) or entry.name == "members":
            with contextlib.suppress(FileNotFoundError):
                reason = reason or why_no_file(entry.path, entry.stat(follow_symlinks=False))
    if reason:
        raise StorePermissionError(f"{url}: {reason}")


def _check_ours(url: StoreUrl, directory: str) -> None:
    """Raise where files of the names that are replaced and deleted here are somebody else's. A store with noise in its
    files is one: its `members` has the right size, or its segments are there."""
    found = sorted(name for name in os.listdir(directory) if name == "members" or _is_ours(name))
    if not found or any(map(_is_segment, found)):
        return
    with contextlib.suppress(FileNotFoundError), open(_open_to_read(directory, "members"), "rb") as file:
        if os.fstat(file.fileno()).st_size == MEMBERS_BYTES or not any(file.read(PAGE)):
            return  # the first page stays empty, also in a store that is just being made
    with contextlib.suppress(FileNotFoundError), open(_open_to_read(directory, "index"), "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return
    for path in (os.path.join(directory, name) for name in found):
        if os.path.lexists(path):  # else somebody has just deleted the store
            raise StoreError(f"{url}: {path} was not made by Headwater; use another directory")


def _open_to_read(directory: str, name: str) -> int:
    return open_private(os.path.join(directory, name), os.O_RDONLY)


def _check_room(url: StoreUrl, directory: str, geometry: Geometry) -> None:
    usage = shutil.disk_usage(directory)
    if geometry.capacity <= usage.free:
        return
    hint = _DOCKER_HINT if url.scheme == "shm" else ""
    raise CapacityError(
        f"{url}: a capacity of {format_size(geometry.capacity)} does not fit, "
        f"{directory} has {format_size(usage.free)} free of {format_size(usage.total)}{hint}"
    )


def _remove_files(directory: str) -> None:
    """Delete index and segments, and nothing that is not ours."""
    for name in filter(_is_ours, os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


def _is_ours(name: str) -> bool:
    """Whether Headwater makes files of that name. (`members` is apart: it holds the locks, and goes last.)"""
    is_known = name in ("index", "index.new", EVENTS_FILE) or name.startswith(CURSOR_PREFIX)
    return is_known or _is_segment(name) or is_figures_file(name)


def _is_segment(name: str) -> bool:
    return re.fullmatch(r"data-[0-9a-f]{32}-\d{4,}", name) is not None


@contextlib.contextmanager
def _system_errors(url: StoreUrl) -> Iterator[None]:
    """The operating system's errors on opening, as ours."""
    try:
        yield
    except PermissionError as error:
        # Those of `stores.private` say what is wrong; the operating system's only where.
        reason = error.strerror if error.filename is None else f"no permission for {error.filename}"
        raise StorePermissionError(f"{url}: {reason}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise StoreError(f"{url}: {error.filename or url.path} is not a directory") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = (
                "in Docker, start the container with a larger --shm-size" if url.scheme == "shm" else "free some first"
            )
            raise CapacityError(f"{url}: no space left on the device; {hint}") from error
        raise StoreError(f"{url}: {error.strerror or error}") from error


# ---- sharing and forking ----------------------------------------------------------------------------------------
def _release(key: tuple[int, int, int]) -> None:
    with _registry_lock:
        shared = _cores.get(key)
        if shared is not None:
            shared.uses -= 1
            if not shared.uses:
                del _cores[key]
                shared.core.close()


def _after_fork_in_child() -> None:
    for core in [*_local_cores, *(shared.core for shared in _cores.values())]:
        core.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["EmbeddedStore", "Members", "default_capacity", "destroy", "open_embedded", "store_directory"]
