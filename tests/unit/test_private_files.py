"""A pool's files belong to one user and have storage: anything else is refused at once, with a reason."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import StorePermissionError
from headwater.pool import open_pool
from headwater.stores.embedded.members import SharedMembers
from headwater.stores.private import open_private

SRC = Path(__file__).parents[2] / "src"
OTHER_USER = 65534


def make_pool(directory: Path) -> str:
    url = f"file://{directory}"
    with open_pool(f"{url}?capacity=4MiB") as pool:
        pool.follow()
    return url


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o2770, 0o1770, 0o702, 0o1777])
def test_a_directory_that_its_group_or_others_may_write_to(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StorePermissionError, match=rf"may write to {folder} \(mode 0?{mode:o}\).*chmod go-w {folder}"):
        open_pool(f"file://{folder}?capacity=4MiB")
    assert not list(folder.iterdir())
    folder.chmod(0o755)
    make_pool(folder)


def test_the_same_in_shared_memory() -> None:
    folder = Path("/dev/shm") / f"hwtest-group-{os.getpid()}"
    folder.mkdir()
    try:
        folder.chmod(0o770)
        with pytest.raises(StorePermissionError, match=r"its group .* may write to"):
            open_pool(f"shm:///{folder.name}?capacity=4MiB")
    finally:
        shutil.rmtree(folder)


def test_an_access_list_that_lets_somebody_else_write(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir(0o700)
    nobody, write = 0xFFFFFFFF, 0o7
    entries = [(1, 7, nobody), (2, write, OTHER_USER), (4, 0, nobody), (16, 7, nobody), (32, 0, nobody)]
    raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_access", raw)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    with pytest.raises(StorePermissionError, match="access list"):
        open_pool(f"file://{folder}?capacity=4MiB")


@pytest.mark.parametrize("name", ["index", "members", "events", "data-*"])
@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_file_of_a_pool_that_somebody_else_may_write_to(name: str, mode: int, tmp_path: Path) -> None:
    url = make_pool(tmp_path / "pool")
    (tmp_path / "pool" / ("data-" + "0" * 32 + "-0000")).touch(0o600)
    (file,) = (tmp_path / "pool").glob(name)
    file.chmod(mode)
    with pytest.raises(StorePermissionError, match=rf"may write to {file} .*chmod go-w"):
        open_pool(url)
    file.chmod(0o600)
    open_pool(url).close()


def test_what_belongs_to_another_user(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    url = make_pool(tmp_path / "pool")
    for path in (tmp_path / "pool" / "index", tmp_path / "pool"):
        os.chown(path, OTHER_USER, OTHER_USER)
        with pytest.raises(StorePermissionError, match=rf"{path} belongs to another user \(uid {OTHER_USER}\)"):
            open_pool(url)
        os.chown(path, 0, 0)


def test_a_directory_that_is_swapped_after_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the directory above can do that; so the files that were opened are checked, too."""
    url = make_pool(tmp_path / "pool")
    real = SharedMembers.join

    def swap(self: SharedMembers) -> None:
        (tmp_path / "pool" / "index").chmod(0o666)
        real(self)

    monkeypatch.setattr(SharedMembers, "join", swap)
    with pytest.raises(StorePermissionError, match="others may write to"):
        open_pool(url)


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link is a symbolic link, which is not followed"):
        open_private(str(tmp_path / "link"), os.O_RDWR)
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):  # the latter two wait for the other end, if one lets them
        with pytest.raises(PermissionError, match="not an ordinary file"):
            open_private(str(tmp_path / "pipe"), flags)


@pytest.mark.parametrize("name", ["index", "members"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_pool_with_a_link_or_a_pipe_among_its_files_is_refused_and_nobody_hangs(
    name: str, kind: str, tmp_path: Path
) -> None:
    url = make_pool(tmp_path / "pool")
    file = tmp_path / "pool" / name
    file.rename(tmp_path / "moved")
    os.mkfifo(file, 0o600) if kind == "pipe" else file.symlink_to(tmp_path / "moved")
    said = "is not an ordinary file" if kind == "pipe" else "is a symbolic link, which is not followed"
    for command in (["stats"], ["verify"]):
        ended = subprocess.run(
            [sys.executable, "-m", "headwater", "pool", *command, url],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,  # it hung
        )
        assert ended.returncode == 1
        assert f"{file} {said}" in ended.stdout + ended.stderr
        assert "chmod" not in ended.stderr


# ---- a full disk ------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "hwtest", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no filesystem can be mounted here (that takes root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Until the disk is full."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


@pytest.mark.parametrize("name", ["index", "members", "events"])
def test_a_sparse_copy_on_a_full_disk_is_an_error_and_no_sigbus(name: str, small_disk: Path, tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    copy = small_disk / "pool"
    shutil.copytree(tmp_path / "pool", copy)
    raw = (copy / name).read_bytes()
    with (copy / name).open("wb") as file:  # like `cp --sparse=always`
        file.truncate(len(raw))
        for at in range(0, len(raw), 4096):
            if any(page := raw[at : at + 4096]):
                file.seek(at)
                file.write(page)
    fill(small_disk / "filler")
    follow = "; pool.follow()" if name == "events" else ""
    code = f"from headwater.pool import open_pool; pool = open_pool('file://{copy}'){follow}; pool.clear()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, f"ended with {ended.returncode}: {ended.stderr}"
    said = (
        "its events cannot be stored: No space left" if name == "events" else "no space left on the device; free some"
    )
    assert re.search(rf"CapacityError: (file://)?{copy}: {said}", ended.stderr), ended.stderr
    (small_disk / "filler").unlink()
    with open_pool(f"file://{copy}") as pool:
        pool.follow()
        assert pool.verify().clean
