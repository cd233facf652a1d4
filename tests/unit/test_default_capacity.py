"""How large a store is whose URL names no capacity: one answer for everybody who opens it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import CapacityError
from headwater.stores import embedded
from headwater.stores.embedded import default_capacity
from headwater.stores.host import MemoryLimit, memory_bytes, memory_limits
from headwater.stores.url import parse_url

GIB = 1 << 30


def set_sizes(monkeypatch: pytest.MonkeyPatch, *, ram: int, free: int) -> None:
    monkeypatch.setattr(embedded, "memory_bytes", lambda: ram)
    usage: Any = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * free, free, free))


@pytest.mark.parametrize(
    ("url", "ram", "free", "expected"),
    [
        pytest.param("shm:///headwater", 512 * GIB, 256 * GIB, 8 * GIB, id="shm: 8 GiB"),
        pytest.param("shm:///headwater", 16 * GIB, 256 * GIB, 4 * GIB, id="shm: a quarter of RAM"),
        pytest.param("shm:///headwater", 512 * GIB, 5 * GIB, 4 * GIB, id="shm: 80 % of what is free"),
        pytest.param("memory://", 512 * GIB, GIB, 2 * GIB, id="memory: 2 GiB"),
        pytest.param("memory://", 4 * GIB, GIB, GIB, id="memory: a quarter of RAM"),
        pytest.param("file:///pool", 4 * GIB, 512 * GIB, 64 * GIB, id="file: 64 GiB"),
        pytest.param("file:///pool", 4 * GIB, 10 * GIB, 8 * GIB, id="file: 80 % of what is free"),
    ],
)
def test_the_least_of_all_limits_counts(
    url: str, ram: int, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, ram=ram, free=free)
    assert default_capacity(parse_url(url)) == expected


def test_no_shared_memory_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "SHM_ROOT", str(tmp_path / "shm"))
    with pytest.raises(CapacityError, match=f"there is no {tmp_path}/shm here"):
        default_capacity(parse_url("shm:///headwater"))


def test_a_containers_limit_is_its_memory(tmp_path: Path) -> None:
    """And not what the machine around it has."""
    machine = memory_bytes(root=tmp_path)
    for name, text in {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/a/memory.max": f"{256 << 20}\n",
        "sys/fs/cgroup/a/memory.current": f"{100 << 20}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {30 << 20}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_bytes(root=tmp_path) == 256 << 20 < machine
    assert list(memory_limits(root=tmp_path)) == [MemoryLimit(256 << 20, 70 << 20)]
