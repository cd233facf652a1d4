"""Digests of files that have not changed since they were read, in one JSON file per user; losing it costs a reading.

Believing an entry takes trust in four things: that nobody else wrote the file (owner and mode are checked, of its
directory too), that the file system notes every change (see `KEEPS_TIMES`), that no other file has the same key, and
that no change went unnoted. Keys tell files apart by their ctime, if a running system set it: those of file system
images may have whole seconds, and are not believed. The last one is about mappings: Linux notes the first write to a
page through a shared mapping, and no further one until the page has gone to disk. So a file's pages are sent to disk
before it is read (`settle`), and every write after that is noted. There remains what root may do: set the clock
back, or write to the disk below the file system.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwater.kv.files import KEEPS_TIMES, FileState, file_system, list_mounts

CACHE_FORMAT = "headwater digests v2"
MAX_CACHE_ENTRIES = 4096
MAX_CACHE_BYTES = 4 << 20
RACY_NS = 2_000_000_000
"""A file younger than this can change again without its times changing (git calls it racily clean)."""

_HEX_256 = re.compile(r"[0-9a-f]{64}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class DigestCache:
    """SHA-256 of files by `FileState.cache_key`, newest last. Whatever goes wrong with it is a miss.

    Two processes that save at once lose one's entries, never the file: it is replaced whole.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._folder = _cache_folder() if enabled else None
        self._mounts = list_mounts() if enabled else []

    def settle(self, states: Sequence[FileState], now_ns: int) -> list[FileState]:
        """Those whose digest may be saved: their bytes are on disk now. Costs nothing for files that were there."""
        settled = []
        for state in states:
            if not self._keeps_times(state) or now_ns - max(state.mtime_ns, state.ctime_ns) < RACY_NS:
                continue
            with suppress(OSError):
                handle = os.open(state.real_path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
                settled.append(state)
        return settled

    def load(self, states: Sequence[FileState]) -> dict[str, str]:
        """What is known of these files, by cache key."""
        entries = self._read()
        found = {}
        for state in states:
            if state.cache_key in entries and self._keeps_times(state):
                found[state.cache_key] = entries[state.cache_key]
        return found

    def save(self, new: Mapping[str, str]) -> None:
        """Add entries. The caller has settled these files, read them since, and seen that they did not change."""
        if self._folder is None or not new:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(os.stat(self._folder)):
                return
            newest = dict(list((self._read() | dict(new)).items())[-MAX_CACHE_ENTRIES:])
            handle, temporary = tempfile.mkstemp(prefix=".digests-", dir=self._folder)
            try:
                with open(handle, "w", encoding="ascii") as file:
                    json.dump({"format": CACHE_FORMAT, "files": newest}, file, indent=0)
                os.replace(temporary, self._folder / "digests.json")
            except BaseException:
                os.unlink(temporary)
                raise

    def _read(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            text = _read_own_file(self._folder, "digests.json")
            data: Any = json.loads(text) if len(text) <= MAX_CACHE_BYTES else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or data.get("format") != CACHE_FORMAT or not isinstance(data.get("files"), dict):
            return {}
        return {k: v for k, v in data["files"].items() if isinstance(v, str) and _HEX_256.fullmatch(v)}

    def _keeps_times(self, state: FileState) -> bool:
        # A tool that makes images sets times in whole seconds, and two of its images may be mounted in one place.
        is_own = state.ctime_ns % 1_000_000_000 != 0
        return is_own and file_system(state.real_path, self._mounts) in KEEPS_TIMES


def _read_own_file(folder: Path, name: str) -> bytes:
    """A file of ours that nobody else can write or replace. Raises OSError for any other."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=place), "rb") as file:
            for info in (os.fstat(place), os.fstat(file.fileno())):
                if not _is_ours(info):
                    raise PermissionError(f"{str(folder / name)!r} can be written by others")
            return file.read(MAX_CACHE_BYTES + 1)
    finally:
        os.close(place)


def _is_ours(info: os.stat_result) -> bool:
    is_plain = stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)
    return is_plain and info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE


def _cache_folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # relative ones are to be ignored, says the XDG specification
        base = os.path.expanduser("~/.cache")
    return Path(base, "headwater") if os.path.isabs(base) else None
