"""Everything a person can get wrong when opening or using a store: one clear exception, and no damage."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import (
    CapacityError,
    FormatVersionError,
    HeadwaterError,
    InvalidArgumentError,
    SettingsMismatchError,
    SpecMismatchError,
    StoreClosedError,
    StoreError,
    StorePermissionError,
    TokenError,
    UrlError,
)
from headwater.kv.topology import whole_shard
from headwater.pool import open_pool
from headwater.stores.base import Status
from headwater.stores.embedded import destroy, layout, store_directory
from headwater.stores.embedded.data import MappedData
from headwater.stores.url import parse_url

from support import gqa, identity, local_tiles, temporary_url


def test_unknown_scheme_and_policy() -> None:
    with pytest.raises(UrlError, match="unknown store scheme 's3'"):
        open_pool("s3://bucket")
    with pytest.raises(UrlError, match="unknown eviction policy 'random'"):
        open_pool("memory://?policy=random")


def test_a_capacity_smaller_than_one_chunk() -> None:
    with pytest.raises(CapacityError, match="smallest store"):
        open_pool("memory://?capacity=1MiB")
    with open_pool("memory://?capacity=2MiB") as pool:
        big = gqa(layers=32, heads=8, dim=128)
        with pytest.raises(CapacityError, match=r"one chunk of 256 tokens takes 32\.0 MiB"):
            pool.space(identity(), big)
        assert pool.verify().clean


def test_a_spec_that_differs_from_the_stored_one(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path) as url, open_pool(url) as pool, open_pool(url, group=5) as other:
        spec, wrong = gqa(layers=3), gqa(layers=2)
        space = pool.space(identity(), spec, chunk_tokens=8)
        late = other.space(identity(), wrong, chunk_tokens=8)  # nothing is stored yet: nobody can know
        (chunk,) = space.keys(range(8)).chunks()
        space.write([chunk], whole_shard(spec), [local_tiles(spec, chunk, whole_shard(spec))])
        with pytest.raises(SpecMismatchError, match="another spec"):
            pool.space(identity(), wrong, chunk_tokens=8)
        (chunk,) = late.keys(range(8)).chunks()
        with pytest.raises(SpecMismatchError, match="another spec"):
            late.write([chunk], whole_shard(wrong), [local_tiles(wrong, chunk, whole_shard(wrong))])
        assert pool.stats().store.rebuilds == 0
        assert pool.verify().clean


def test_tokens_out_of_range_change_nothing() -> None:
    with open_pool("memory://?capacity=2MiB") as pool:
        keys = pool.space(identity(), gqa(), chunk_tokens=8).keys(range(10))
        for bad in ([-1], [2**32], [1.5], [[1, 2]], ["a"]):
            with pytest.raises(TokenError):
                keys.extend(bad)  # type: ignore[arg-type]
        assert keys.num_tokens == 10


def test_other_settings_than_the_store_has(tmp_path: Path) -> None:
    with temporary_url("file", tmp_path, "capacity=4MiB") as url:
        open_pool(url).close()
        bare = url.split("?")[0]
        for options, what in (("capacity=8MiB", "capacity"), ("policy=fifo", "policy"), ("segment=1MiB", "segment")):
            with pytest.raises(SettingsMismatchError, match=f"exists with {what}"):
                open_pool(f"{bare}?{options}")
        with open_pool(bare) as pool:
            assert pool.stats().store.capacity_bytes == 4 << 20
        with open_pool(url) as pool:
            assert pool.verify().clean


def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    with temporary_url("shm", tmp_path, "capacity=4MiB") as url:
        open_pool(url).close()
        path = Path(store_directory(parse_url(url))) / "index"
        geometry = layout.decode_header(path.read_bytes()[: layout.HEADER_BYTES])
        assert isinstance(geometry, layout.Geometry)
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(layout, "INDEX_VERSION", layout.INDEX_VERSION + 1)
            header = geometry.encode()
        before = path.stat()
        with path.open("r+b") as file:
            file.write(header)
        content = path.read_bytes()
        with pytest.raises(FormatVersionError, match="newer Headwater"):
            open_pool(url)
        assert path.stat().st_ino == before.st_ino
        assert path.read_bytes() == content, "a store of the future was touched"


def test_a_path_that_is_a_file_or_forbidden(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StoreError, match="not a directory"):
        open_pool(f"file://{tmp_path}/file?capacity=4MiB")
    with pytest.raises(StoreError, match="not a directory"):
        open_pool(f"file://{tmp_path}/file/below?capacity=4MiB")
    assert (tmp_path / "file").read_text() == "precious"
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chmod(tmp_path, 0o755)
                for parent in tmp_path.parents:
                    if parent.stat().st_uid == 0 and parent != Path("/"):
                        os.chmod(parent, parent.stat().st_mode | 0o011)
                os.setuid(65534)
            open_pool(f"file://{folder}?capacity=4MiB")
        except StorePermissionError as error:
            code = 0 if "no permission" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_capacity_that_does_not_fit_names_docker(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="--shm-size"):
        open_pool("shm:///hwtest-too-large?capacity=900TiB")
    with pytest.raises(CapacityError, match="does not fit") as caught:
        open_pool(f"file://{tmp_path}/large?capacity=900TiB")
    assert "shm-size" not in str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root to mount a small filesystem")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_under_the_store(small_disk: Path) -> None:
    """The pool lives on in the storage it has, and grows when there is room again."""
    spec = gqa(layers=4, heads=8, dim=32)
    shard = whole_shard(spec)
    with open_pool(f"file://{small_disk}/pool?capacity=6MiB&segment=1MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)

        def write(number: int) -> Status:
            (chunk,) = space.keys([number] * 16).chunks()
            return space.write([chunk], shard, [local_tiles(spec, chunk, shard)])[0]

        assert write(0) == Status.OK
        hog = small_disk / "hog"
        free = os.statvfs(small_disk)
        hog.write_bytes(bytes(free.f_bavail * free.f_frsize))
        statuses = {write(number) for number in range(1, 60)}
        assert statuses == {Status.OK}
        assert pool.stats().store.evicted > 0
        assert pool.verify().clean
        hog.unlink()
    with open_pool(f"file://{small_disk}/pool") as pool:
        space = pool.space(identity(), spec, chunk_tokens=16)
        before = pool.stats().store.evicted
        assert {write(number) for number in range(100, 130)} == {Status.OK}
        assert pool.stats().store.evicted == before, "it did not grow although there was room"
        assert pool.verify().clean


def test_a_disk_without_room_for_the_index(small_disk: Path) -> None:
    (small_disk / "hog").write_bytes(bytes((8 << 20) - (1 << 20)))
    with pytest.raises(CapacityError, match="does not fit"):
        open_pool(f"file://{small_disk}/pool?capacity=6MiB")
    (small_disk / "hog").unlink()
    with open_pool(f"file://{small_disk}/pool?capacity=6MiB") as pool:
        assert pool.verify().clean


def test_a_segment_without_storage_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MappedData, segment: int) -> None:
        raise OSError(28, "No space left on device")

    spec = gqa()
    with open_pool("memory://?capacity=2MiB") as pool:
        space = pool.space(identity(), spec, chunk_tokens=8)
        (chunk,) = space.keys(range(8)).chunks()
        monkeypatch.setattr(MappedData, "back", refuse)
        assert space.write([chunk], whole_shard(spec), [local_tiles(spec, chunk, whole_shard(spec))]) == [Status.FULL]
        assert pool.verify().clean


def test_used_after_close() -> None:
    pool = open_pool("memory://?capacity=2MiB")
    space = pool.space(identity(), gqa(), chunk_tokens=8)
    keys = space.keys(range(8))
    pool.close()
    pool.close()
    buffer = np.zeros(whole_shard(gqa()).local_shape(gqa(), 0, 8), np.uint8)
    for use in (
        lambda: space.match(keys),
        lambda: space.read(keys.chunks(), whole_shard(gqa()), [buffer]),
        lambda: space.write(keys.chunks(), whole_shard(gqa()), [buffer]),
        pool.stats,
        pool.verify,
        pool.clear,
        lambda: list(pool.scan()),
    ):
        with pytest.raises(StoreClosedError, match="closed"):
            use()


def test_no_library_exception_escapes_for_odd_urls(tmp_path: Path) -> None:
    for url in (
        "",
        "shm",
        "://",
        "shm://",
        "shm:///../etc",
        "shm:///a/b",
        "file://x",
        "file:///",
        "memory:///x",
        "shm:///x?capacity=",
        "shm:///x?capacity=-1",
        "shm:///x?capacity=0",
        "shm:///x?deadline=no",
        "shm:///x\0y",
        "shm:///x?index=9",
        "http://[::1",
        "x" * 5000,
    ):
        with pytest.raises(HeadwaterError):
            open_pool(url).close()
    assert not Path("/dev/shm/x").exists()


def test_a_store_that_somebody_else_could_write_to(tmp_path: Path) -> None:
    """Whoever can put files there can make up KV that verifies."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StorePermissionError, match="others may write"):
        open_pool(f"file://{folder}?capacity=4MiB")
    assert not list(folder.iterdir())
    link = Path("/dev/shm") / f"hwtest-link-{os.getpid()}"
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(StorePermissionError, match="not a directory of your own"):
            open_pool(f"shm:///{link.name}?capacity=4MiB")
    finally:
        link.unlink()


def test_a_directory_with_somebody_elses_index_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a table of contents")
    with pytest.raises(StoreError, match="not made by Headwater"):
        open_pool(f"file://{tmp_path}?capacity=4MiB")
    assert (tmp_path / "index").read_text() == "a table of contents"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "names", [["index", "members", "events"], ["members"], ["events"], ["copied-to"]], ids=lambda names: "+".join(names)
)
def test_files_of_the_same_names_that_headwater_did_not_make_are_left_alone(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text(f"{name} of somebody else")
    with pytest.raises(StoreError, match="not made by Headwater"):
        open_pool(f"file://{tmp_path}?capacity=4MiB")
    with pytest.raises(StoreError, match="not made by Headwater"):
        destroy(parse_url(f"file://{tmp_path}"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: f"{name} of somebody else" for name in names
    }


@pytest.mark.parametrize("kept", ["members", "data"])
def test_a_pool_whose_index_is_noise_is_still_one(tmp_path: Path, kept: str) -> None:
    def spoil() -> None:
        open_pool(f"file://{tmp_path}?capacity=4MiB").close()
        for path in tmp_path.iterdir():
            if not path.name.startswith(kept):
                path.write_bytes(os.urandom(9000))
        if kept == "data":
            (tmp_path / f"data-{'0' * 32}-0000").write_bytes(b"left")

    spoil()
    open_pool(f"file://{tmp_path}?capacity=4MiB").close()
    spoil()
    destroy(parse_url(f"file://{tmp_path}"))
    assert not tmp_path.exists()


def test_options_that_were_rounded_are_still_the_same_options(tmp_path: Path) -> None:
    with temporary_url("file", tmp_path, "capacity=64MiB&index=16000000&segment=60MiB") as url:
        open_pool(url).close()
        bare = url.split("?")[0]
        for options in ("capacity=64MiB&segment=60MiB", "index=16000000", "segment=60MiB"):
            open_pool(f"{bare}?{options}").close()
        with pytest.raises(SettingsMismatchError, match="capacity"):
            open_pool(f"{bare}?capacity=1MiB")


@pytest.mark.parametrize("group", [0, -1, 1 << 63, 1 << 70])
def test_a_group_that_is_no_group(group: int) -> None:
    with pytest.raises(InvalidArgumentError, match="group is"):
        open_pool("memory://?capacity=4MiB", group=group)


@pytest.mark.parametrize("scheme", ["memory", "shm", "file"])
def test_closing_under_readers_and_writers(scheme: str, tmp_path: Path) -> None:
    """They finish, or are told that it is closed; nobody crashes."""
    spec = gqa(layers=4, heads=8, dim=64)
    shard = whole_shard(spec)
    for _ in range(5):
        with temporary_url(scheme, tmp_path, "capacity=8MiB") as url:
            pool = open_pool(url)
            space = pool.space(identity(), spec, chunk_tokens=16)
            chunks = space.keys(range(64)).chunks()
            tiles = [local_tiles(spec, c, shard) for c in chunks]
            failures: list[BaseException] = []
            ended = threading.Barrier(4)

            def work(number: int, space=space, chunks=chunks, tiles=tiles, failures=failures, ended=ended) -> None:  # type: ignore[no-untyped-def]
                try:
                    while True:
                        space.write(chunks, shard, tiles)
                        space.read(chunks, shard, [space.empty(c, shard) for c in chunks])
                        space.lease(space.match(space.keys(range(64))), f"r{number}").release()
                except StoreClosedError:
                    ended.wait(10)
                except BaseException as error:
                    failures.append(error)
                    raise

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            pool.close()
            ended.wait(10)
            for thread in threads:
                thread.join()
            assert not failures
