"""The host that a process is on: which one it is, and how much memory the process may use there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def boot_id() -> int:
    """A number that differs between hosts, and on one host between two boots; 0 where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return int(file.read().replace("-", "")[:15], 16)
    except (OSError, ValueError):
        return 0


class MemoryLimit(NamedTuple):
    """A control group that this process is in, in bytes."""

    limit: int
    used: int
    """Without file cache that can be dropped."""


class _Cgroup(NamedTuple):
    """Where one version of control groups keeps its numbers."""

    controller: str
    mount: str
    limit: str
    usage: str
    reclaimable: str


_CGROUPS = (
    _Cgroup("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _Cgroup("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_bytes(*, root: Path = Path("/")) -> int:
    """The machine's memory, or what the process's control groups allow of it. `root` is where `proc` and `sys` are."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(group.limit for group in memory_limits(root=root))])


def memory_limits(*, root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """The control groups above this process that limit its memory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for group in _CGROUPS:
            if group.controller in controllers.split(","):
                for folder in _ancestors(root / group.mount, path):
                    limit, usage = _number(folder / group.limit), _number(folder / group.usage)
                    if limit is not None and usage is not None:
                        cache = read_field(folder / "memory.stat", group.reclaimable) or 0
                        yield MemoryLimit(limit, max(0, usage - cache))


def read_field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of `name number …` lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """From a process's group up to the mount. In a container the path may be the host's; then only the mount exists."""
    parts = [part for part in path.split("/") if part]
    if ".." not in parts:
        for length in range(len(parts), 0, -1):
            yield mount.joinpath(*parts[:length])
    yield mount


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
