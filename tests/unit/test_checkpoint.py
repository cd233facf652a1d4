"""Digest of weight files: nothing that changes them may go unnoticed, and nothing else may change it."""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import IdentityError, InvalidArgumentError, WeightsChangedError
from headwater.kv import digest_cache, file_hash, files
from headwater.kv.checkpoint import checkpoint_label, digest_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
real_time_ns = time.time_ns


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = files.file_system(str(tmp_path.resolve()), files.list_mounts())
    monkeypatch.setattr(
        digest_cache, "KEEPS_TIMES", files.KEEPS_TIMES | {here}
    )  # the directory of tests may be a tmpfs
    return tmp_path / "cache" / "headwater" / "digests.json"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash ten seconds after the files were written, so that their digests may be cached."""
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + 10_000_000_000)


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "SPAN_BYTES", 1000)
    monkeypatch.setattr(file_hash, "PIECE_BYTES", 300)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []
    original = file_hash._hash_file

    def spy(state: files.FileState, *rest: Any) -> str:
        names.append(Path(state.path).name)
        return original(state, *rest)

    monkeypatch.setattr(file_hash, "_hash_file", spy)
    return names


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(
        tmp_path / "model",
        {
            "model-00001-of-00002.safetensors": bytes(range(256)) * 20,
            "model-00002-of-00002.safetensors": b"second" * 700,
            "model.safetensors.index.json": b'{"weight_map": {}}',
            "config.json": b"{}",
            "tokenizer.json": b"{}",
        },
    )


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def reference(files: dict[str, bytes]) -> str:
    """The documented encoding, written down a second time."""
    data = b"headwater checkpoint v2\0"
    for name in sorted(files, key=str.encode):
        digest = hashlib.sha256(files[name]).digest()
        data += struct.pack("<I", len(name.encode())) + name.encode() + struct.pack("<Q", len(files[name])) + digest
    return "sha256:" + hashlib.sha256(data).hexdigest()


# -- what the digest is ---------------------------------------------------------------------------------------------


def test_digest_is_the_documented_encoding_and_never_changes(tmp_path: Path) -> None:
    files = {"b.bin": b"abc", "a/é.safetensors": bytes(1000), "model.safetensors.index.json": b"{}"}
    folder = write(tmp_path / "m", files)
    write(folder, {"config.json": b"{}", "README.md": b"hi"})
    # A change here gives every checkpoint of every user another name.
    whole = "sha256:e326d3e9c824575d92029dd2944bd2ed1e544235e18734170f4aeed93d7069e8"
    single = "sha256:3669f9e69fb7997822ef366805ddeee5658162e04a508e455d6b2a5dd1ee1f6a"
    assert digest_checkpoint(folder) == reference(files) == whole
    assert digest_checkpoint(folder / "b.bin") == reference({"": b"abc"}) == single


def test_a_file_is_named_by_the_sha_256_that_everybody_computes(model: Path, own_cache: Path) -> None:
    """XXH3 has second preimages for the price of a few chosen bytes; a tool that is not ours must agree."""
    path = model / "model-00001-of-00002.safetensors"
    said = subprocess.run(["sha256sum", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]
    name = b"headwater checkpoint v2\0" + struct.pack("<IQ", 0, path.stat().st_size) + bytes.fromhex(said)
    assert digest_checkpoint(path) == "sha256:" + hashlib.sha256(name).hexdigest()


@pytest.mark.usefixtures("small_spans")
def test_digest_does_not_depend_on_threads_order_or_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    expected = reference({name: (model / name).read_bytes() for name in names})
    for threads in (None, 1, 2, 7, 64):
        assert digest_checkpoint(model, threads=threads, cache=False) == expected
    monkeypatch.setattr(file_hash, "PIECE_BYTES", 7)
    assert digest_checkpoint(model, cache=False) == expected


@pytest.mark.usefixtures("small_spans")
def test_files_are_read_side_by_side(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=10)
    original = file_hash._hash_file

    def meet(*args: Any) -> str:
        together.wait()  # raises unless three files are under way at once
        return original(*args)

    monkeypatch.setattr(file_hash, "_hash_file", meet)
    digest_checkpoint(model, threads=3, cache=False)


def test_only_files_that_are_loaded_count(model: Path) -> None:
    one = "model-00001-of-00002.safetensors"
    before = digest_checkpoint(model, files=[one])
    assert before == reference({one: (model / one).read_bytes()})
    write(model, {"pytorch_model.bin": b"other weights"})
    assert digest_checkpoint(model, files=[one]) == before
    assert digest_checkpoint(model, files=["pytorch_model.bin"]) == reference({"pytorch_model.bin": b"other weights"})
    with pytest.raises(IdentityError, match="nothing to name"):
        digest_checkpoint(model, files=[])
    with pytest.raises(IdentityError, match="cannot read"):
        digest_checkpoint(model, files=["gone.bin"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 5000))
def test_one_flipped_bit_anywhere_changes_it(tmp_path: Path, data: st.DataObject, size: int) -> None:
    position = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 7))
    content = bytearray(i * 37 % 251 for i in range(size))
    path = tmp_path / "m.safetensors"
    with mock.patch.object(file_hash, "SPAN_BYTES", 1000), mock.patch.object(file_hash, "PIECE_BYTES", 300):
        path.write_bytes(content)
        before = digest_checkpoint(path, cache=False)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        assert digest_checkpoint(path, cache=False) != before
        content[position] ^= 1 << bit
        path.write_bytes(content)
        assert digest_checkpoint(path, cache=False) == before


def test_appending_a_zero_changes_it(tmp_path: Path) -> None:
    digests = set()
    for size in range(1, 20):
        (tmp_path / "m.bin").write_bytes(bytes(size))
        digests.add(digest_checkpoint(tmp_path / "m.bin", cache=False))
    assert len(digests) == 19


def test_names_count_in_a_directory_and_not_for_one_file(model: Path) -> None:
    before = digest_checkpoint(model)
    one = model / "model-00001-of-00002.safetensors"
    single = digest_checkpoint(one)
    renamed = one.rename(model / "consolidated.safetensors")
    assert digest_checkpoint(renamed) == single
    assert digest_checkpoint(model) != before


def test_swapping_two_files_changes_it(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"a.bin": b"x", "b.bin": b"y"})
    two = write(tmp_path / "two", {"a.bin": b"y", "b.bin": b"x"})
    assert digest_checkpoint(one) != digest_checkpoint(two)


def test_where_the_directory_lies_does_not_count(model: Path, tmp_path: Path) -> None:
    before = digest_checkpoint(model)
    moved = model.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(moved)
    assert digest_checkpoint(moved) == digest_checkpoint(tmp_path / "link") == digest_checkpoint(str(moved)) == before


def test_other_files_do_not_count_but_indexes_do(model: Path) -> None:
    before = digest_checkpoint(model)
    (model / "config.json").write_bytes(b'{"transformers_version": "9"}')
    (model / "README.md").write_bytes(b"new")
    assert digest_checkpoint(model) == before
    (model / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "b"}}')
    assert digest_checkpoint(model) != before


@pytest.mark.parametrize("suffix", [*files.WEIGHT_SUFFIXES, ".SAFETENSORS"])
def test_every_weight_format_counts_in_subdirectories_too(model: Path, suffix: str) -> None:
    before = digest_checkpoint(model)
    write(model, {f"deep/er/extra{suffix}": b"x"})
    assert digest_checkpoint(model) != before


def test_loops_of_links_end(model: Path) -> None:
    before = digest_checkpoint(model)
    (model / "again").symlink_to(model)
    (model / "up").symlink_to(model.parent)
    (model / "config").mkdir()
    (model / "config" / "back").symlink_to("..")
    # `up` leads to what lies beside the model, but never into the model a second time.
    assert digest_checkpoint(model) == before


def test_a_linked_directory_counts(model: Path, tmp_path: Path) -> None:
    before = digest_checkpoint(model)
    (model / "extra").symlink_to(write(tmp_path / "other", {"x.bin": b"x"}))
    linked = digest_checkpoint(model)
    (model / "extra").unlink()
    write(model / "extra", {"x.bin": b"x"})
    assert before != linked == digest_checkpoint(model)


def test_names_that_are_not_text_are_hashed_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"a.bin": b"x"})
    before = digest_checkpoint(folder)
    try:
        os.rename(folder / "a.bin", os.fsencode(folder) + b"/\xff.bin")
    except OSError:
        pytest.skip("this file system takes only names that are text")
    assert digest_checkpoint(folder) != before


# -- sampling -----------------------------------------------------------------------------------------------------


def test_sampling_is_another_scheme_and_sees_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "SAMPLE_BYTES", 10)
    path = tmp_path / "m.safetensors"
    content = bytearray(range(250)) * 4

    def sampled(position: int) -> str:
        path.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        return digest_checkpoint(path, sample=True)

    path.write_bytes(content)
    before = digest_checkpoint(path, sample=True)
    assert before.startswith("sampled-sha256:")
    assert before.removeprefix("sampled-") != digest_checkpoint(path)
    assert sampled(0) != before
    assert sampled(9) != before
    assert sampled(66) != before  # (1000 - 10) / 15: the second sample
    assert sampled(999) != before
    assert sampled(30) == before  # what the prefix warns of
    path.write_bytes(content + b"\0")
    assert digest_checkpoint(path, sample=True) != before


@given(st.integers(1, 100_000))
def test_samples_lie_inside_and_cover_small_files(size: int) -> None:
    with mock.patch.object(file_hash, "SAMPLE_BYTES", 1000):
        spans = file_hash.sample_spans(size)
    assert spans[0].offset == 0
    assert spans[-1].offset + spans[-1].length == size
    assert len(set(spans)) == len(spans) <= file_hash.SAMPLES_PER_FILE
    if size <= 16_000:
        assert all(b.offset <= a.offset + a.length for a, b in itertools.pairwise(spans))


@pytest.mark.usefixtures("settled")
def test_a_sampled_digest_is_never_cached_as_a_full_one(model: Path, own_cache: Path) -> None:
    sampled = digest_checkpoint(model, sample=True)
    assert not own_cache.exists()
    full = digest_checkpoint(model)
    assert digest_checkpoint(model) == full
    assert digest_checkpoint(model, sample=True) == sampled != full


# -- cache --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("settled")
def test_what_did_not_change_is_not_read_again(model: Path, reads: list[str]) -> None:
    first = digest_checkpoint(model)
    assert len(reads) == 3
    reads.clear()
    assert digest_checkpoint(model) == first
    assert reads == []
    assert digest_checkpoint(model, cache=False) == first
    assert len(reads) == 3


@pytest.mark.usefixtures("settled")
def test_only_the_changed_file_is_read_again(model: Path, reads: list[str]) -> None:
    first = digest_checkpoint(model)
    reads.clear()
    path = model / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes().replace(b"second", b"SECOND"))
    assert digest_checkpoint(model) != first
    assert reads == [path.name]


@pytest.mark.usefixtures("settled")
def test_a_new_mtime_alone_makes_it_read_again(model: Path, reads: list[str]) -> None:
    first = digest_checkpoint(model)
    reads.clear()
    path = model / "model-00001-of-00002.safetensors"
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert digest_checkpoint(model) == first
    assert reads == [path.name]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("ctime_ns", [1_700_000_000_000_000_000, 1_700_000_000_000_000_001])
def test_a_file_of_another_image_in_the_same_place_is_read(
    tmp_path: Path, ctime_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mke2fs -d` numbers inodes in the order of copying and keeps whole seconds of times: two images, mounted one
    after the other, have files of equal device, inode, size and times. Elsewhere a ctime has a fraction of its own."""
    take = files._take_state
    monkeypatch.setattr(files, "_take_state", lambda file: take(file)._replace(mtime_ns=10**18, ctime_ns=ctime_ns))
    path = tmp_path / "m.bin"
    path.write_bytes(b"one")
    first = digest_checkpoint(path)
    path.write_bytes(b"two")
    is_read = digest_checkpoint(path) != first
    assert is_read == (ctime_ns % 10**9 == 0)


@pytest.mark.usefixtures("settled")
def test_an_edit_that_puts_size_and_mtime_back_is_seen(tmp_path: Path) -> None:
    """As `rsync -t`, image layers and package stores do."""
    path = tmp_path / "m.bin"
    path.write_bytes(b"one")
    os.utime(path, ns=(1, 1))
    first = digest_checkpoint(path)
    before = path.stat()

    def edited_later() -> bool:
        path.write_bytes(b"two")
        os.utime(path, ns=(1, 1))
        return path.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(edited_later)  # the clock of a file system may be coarse
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert digest_checkpoint(path) != first


def test_a_file_written_just_now_is_not_cached(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"one")
    with mock.patch.object(time, "time_ns", return_value=path.stat().st_mtime_ns + 1_999_999_999):
        digest_checkpoint(path)
    os.utime(path, ns=(1, 1))  # as a copy that keeps the times of its source
    with mock.patch.object(time, "time_ns", return_value=path.stat().st_ctime_ns + 1_999_999_999):
        digest_checkpoint(path)
    assert not own_cache.exists()
    with mock.patch.object(time, "time_ns", return_value=path.stat().st_ctime_ns + 2_000_000_000):
        digest_checkpoint(path)
    assert len(entries(own_cache)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": "headwater digests v2", "files": []}',
        b'{"format": "headwater digests v0", "files": {}}',
    ],
)
@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_is_a_miss_and_is_repaired(
    model: Path, own_cache: Path, reads: list[str], damage: bytes
) -> None:
    first = digest_checkpoint(model)
    own_cache.write_bytes(damage)
    assert digest_checkpoint(model) == first
    assert len(reads) == 6
    assert digest_checkpoint(model) == first
    assert len(reads) == 6


@pytest.mark.usefixtures("settled")
def test_a_cache_that_is_too_big_is_not_parsed(model: Path, own_cache: Path, reads: list[str]) -> None:
    first = digest_checkpoint(model)
    own_cache.write_bytes(own_cache.read_bytes() + b" " * digest_cache.MAX_CACHE_BYTES)
    assert digest_checkpoint(model) == first
    assert len(reads) == 6


@pytest.mark.parametrize("value", ["", "xyz", "A" * 64, "0" * 63, "0" * 32, 7, None])
@pytest.mark.usefixtures("settled")
def test_a_damaged_entry_is_a_miss(model: Path, own_cache: Path, reads: list[str], value: Any) -> None:
    first = digest_checkpoint(model)
    data = json.loads(own_cache.read_bytes())
    data["files"][next(iter(data["files"]))] = value
    own_cache.write_text(json.dumps(data))
    reads.clear()
    assert digest_checkpoint(model) == first
    assert len(reads) == 1


@pytest.mark.usefixtures("settled")
def test_an_older_format_of_the_same_entries_is_not_believed(model: Path, own_cache: Path, reads: list[str]) -> None:
    first = digest_checkpoint(model)
    data = json.loads(own_cache.read_bytes())
    own_cache.write_text(json.dumps({**data, "format": "headwater digests v0"}))
    assert digest_checkpoint(model) == first
    assert len(reads) == 6


@pytest.mark.usefixtures("settled")
def test_the_cache_keeps_the_newest(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MAX_CACHE_ENTRIES", 3)
    paths = [tmp_path / f"{i}.bin" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]))
        digest_checkpoint(path)
    inodes = [int(key.split(":")[1]) for key in entries(own_cache)]
    assert inodes == [path.stat().st_ino for path in paths[2:]]
    monkeypatch.setattr(digest_cache, "MAX_CACHE_ENTRIES", 4096)
    full = {f"{i}:" + "9" * 120: "0" * 64 for i in range(4096)}
    own_cache.write_text(json.dumps({"format": digest_cache.CACHE_FORMAT, "files": full}, indent=0))
    assert own_cache.stat().st_size < digest_cache.MAX_CACHE_BYTES


@pytest.mark.usefixtures("settled")
def test_a_cache_that_cannot_be_written_costs_only_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for base in (str(tmp_path / "file"), "/proc/nowhere", "relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("HOME", "/proc/nowhere")
        assert digest_checkpoint(model) == digest_checkpoint(model)
    assert len(reads) == 4 * 2 * 3


@pytest.mark.parametrize("base", ["", "relative/path"])
@pytest.mark.usefixtures("settled")
def test_without_an_absolute_xdg_cache_home_the_home_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    digest_checkpoint(model)
    assert len(entries(tmp_path / "home" / ".cache" / "headwater" / "digests.json")) == 3


@pytest.mark.usefixtures("settled")
def test_a_failed_save_leaves_no_rubbish_and_the_old_cache(model: Path, tmp_path: Path, own_cache: Path) -> None:
    digest_checkpoint(model)
    before = own_cache.read_bytes()
    (tmp_path / "new.bin").write_bytes(b"x")
    with mock.patch.object(os, "replace", side_effect=OSError("disk full")):
        digest_checkpoint(tmp_path / "new.bin")
    assert own_cache.read_bytes() == before
    assert [path.name for path in own_cache.parent.iterdir()] == [own_cache.name]


@pytest.mark.usefixtures("settled")
def test_many_at_once_agree_and_leave_a_whole_cache(tmp_path: Path, own_cache: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(8)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 100)
    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(digest_checkpoint, paths * 5))
    assert found == [reference({"": bytes([i]) * 100}) for i in range(8)] * 5
    assert set(entries(own_cache).values()) <= {hashlib.sha256(bytes([i]) * 100).hexdigest() for i in range(8)}
    assert [path.name for path in own_cache.parent.iterdir()] == [own_cache.name]


@pytest.mark.parametrize("mode", [0o622, 0o660, 0o602])
@pytest.mark.parametrize("what", ["file", "directory"])
@pytest.mark.usefixtures("settled")
def test_a_cache_that_others_can_write_is_not_believed(
    model: Path, own_cache: Path, reads: list[str], mode: int, what: str
) -> None:
    first = digest_checkpoint(model)
    forged = dict.fromkeys(entries(own_cache), "0" * 64)
    own_cache.write_text(json.dumps({"format": digest_cache.CACHE_FORMAT, "files": forged}))
    assert digest_checkpoint(model) != first, "the forged entries are found where nothing else is wrong"
    reads.clear()
    (own_cache if what == "file" else own_cache.parent).chmod(mode | 0o100)
    assert digest_checkpoint(model) == first
    assert len(reads) == 3


@pytest.mark.usefixtures("settled")
def test_a_cache_of_another_user_or_behind_a_link_is_not_believed(
    model: Path, own_cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest_checkpoint(model)
    reads.clear()
    owner = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        digest_checkpoint(model)
    assert len(reads) == 3
    reads.clear()
    own_cache.symlink_to(own_cache.rename(own_cache.with_name("elsewhere.json")))
    digest_checkpoint(model)
    assert len(reads) == 3


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs")
def test_files_on_a_tmpfs_are_read_every_time(
    model: Path, own_cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs notes no write through a mapping."""
    monkeypatch.setattr(digest_cache, "KEEPS_TIMES", files.KEEPS_TIMES)
    monkeypatch.setattr(digest_cache, "RACY_NS", -(10**12))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write(Path(folder), {"m.safetensors": b"weights"})
        one = digest_checkpoint(folder)
        with open(Path(folder, "m.safetensors"), "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:1] = b"W"
        assert digest_checkpoint(folder) != one
    assert len(reads) == 2
    assert not own_cache.exists()


def test_a_write_through_a_mapping_is_seen(
    tmp_path: Path, own_cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux changes a file's times at the first write to a page, and then not until the page has gone to disk."""
    if files.file_system(str(tmp_path.resolve()), files.list_mounts()) not in files.KEEPS_TIMES:
        pytest.skip("the directory of tests lies on a file system whose files are never cached")
    monkeypatch.setattr(digest_cache, "RACY_NS", -(10**12))
    path = write(tmp_path, {"m.safetensors": b"weights" * 1000}) / "m.safetensors"
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:1] = b"1"
        found = [digest_checkpoint(path)]
        before = path.stat().st_mtime_ns
        wait_until(lambda: time.time_ns() > before + 20_000_000)
        for content in (b"2", b"3"):
            mapped[:1] = content
            found.append(digest_checkpoint(path))
    assert len(set(found)) == 3
    assert len(reads) == 3
    assert digest_checkpoint(path) == found[-1]
    assert len(reads) == 3, "and what did not change is still not read again"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/a", "ext4"), ("/mnt/x y/z", "tmpfs"), ("/mnt/x y", "tmpfs"), ("/mnt/x yz", "xfs"), ("/home/me", "nfs4")],
)
def test_the_innermost_mount_decides(path: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw",
        "2 1 8:2 / /mnt rw - xfs /dev/sdb rw",
        "3 2 0:9 / /mnt/x\\040y rw - tmpfs none rw",
        "4 1 8:3 / /home rw - ext4 /dev/sdc rw",
        "5 1 0:7 / /home rw - nfs4 server:/ rw",
    ]
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "\n".join(lines))
    assert files.file_system(path, files.list_mounts()) == expected


# -- Hugging Face snapshots ---------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    repository = tmp_path / "hub" / "models--acme--tiny-llm"
    folder = repository / "snapshots" / COMMIT
    write(repository / "blobs", {"aa": b"weights", "bb": b"{}"})
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("../../blobs/aa")
    (folder / "config.json").symlink_to("../../blobs/bb")
    return folder


def test_a_snapshot_and_a_copy_of_it_have_one_name(snapshot: Path, tmp_path: Path) -> None:
    copy = write(tmp_path / "copy", {"model.safetensors": b"weights"})
    assert digest_checkpoint(snapshot) == digest_checkpoint(copy) == reference({"model.safetensors": b"weights"})


def link_blob(snapshot: Path, content: bytes, name: str) -> Path:
    blob = snapshot.parent.parent / "blobs" / name
    blob.write_bytes(content)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    return blob


@pytest.mark.usefixtures("settled")
def test_a_blob_that_is_not_what_its_name_says_is_refused(snapshot: Path, own_cache: Path) -> None:
    blob = link_blob(snapshot, b"weights", hashlib.sha256(b"weights").hexdigest())
    expected = reference({"model.safetensors": b"weights"})
    assert digest_checkpoint(snapshot) == digest_checkpoint(snapshot) == expected
    blob.write_bytes(b"Weights")
    with pytest.raises(IdentityError, match="damaged or was edited"):
        digest_checkpoint(snapshot)
    with pytest.raises(IdentityError, match="damaged or was edited"):
        digest_checkpoint(snapshot / "model.safetensors", cache=False)
    assert len(entries(own_cache)) == 1
    small = hashlib.sha1(b"blob 5\0small").hexdigest()  # as `git hash-object` does
    blob = link_blob(snapshot, b"small", small)
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"small"})
    blob.write_bytes(b"SMALL")
    with pytest.raises(IdentityError, match="damaged or was edited"):
        digest_checkpoint(snapshot)


def test_alternatives_in_one_commit_are_told_apart(snapshot: Path) -> None:
    """A GGUF repository holds every quantisation; which one a machine fetched is not in the commit."""
    (snapshot / "model.safetensors").rename(snapshot / "tiny-Q4.gguf")
    one = digest_checkpoint(snapshot)
    (snapshot / "tiny-Q4.gguf").unlink()
    (snapshot / "tiny-Q8.gguf").symlink_to("../../blobs/bb")
    assert digest_checkpoint(snapshot) != one
    assert digest_checkpoint(snapshot / "tiny-Q8.gguf") == reference({"": b"{}"})


def test_a_blob_that_is_missing_is_an_error(snapshot: Path) -> None:
    (snapshot.parent.parent / "blobs" / "aa").unlink()
    with pytest.raises(IdentityError, match=r"cannot read .*model\.safetensors"):
        digest_checkpoint(snapshot)


def test_labels_are_names_for_people(snapshot: Path) -> None:
    assert checkpoint_label(snapshot) == "acme/tiny-llm"
    assert checkpoint_label("/models/llama") == "llama"
    assert checkpoint_label(os.fsdecode(b"/models/\xff")) == "?"


# -- what was loaded ----------------------------------------------------------------------------------------------


def swap_link(model: Path) -> None:
    """As deployments do whose current version is a link."""
    (model.parent / "new").symlink_to(shutil.copytree(model.resolve(), model.parent / "v2"))
    os.replace(model.parent / "new", model)


def replace_file(model: Path) -> None:
    one = model / "model-00001-of-00002.safetensors"
    (model / "new").write_bytes(one.read_bytes())
    os.replace(model / "new", one)


def move_directory(model: Path) -> None:
    shutil.copytree(model.resolve(), model.parent / "v2", copy_function=os.link)
    for file in (model.parent / "v2").iterdir():
        shutil.copy2(file, str(file) + ".copy")
        os.replace(str(file) + ".copy", file)
    model.resolve().rename(model.parent / "old")
    (model.parent / "v2").rename(model.parent / "v1")


def write_in_place(model: Path) -> None:
    path = model / "model-00002-of-00002.safetensors"
    before = path.stat()

    def written_later() -> bool:
        path.write_bytes(b"SECOND" * 700)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(written_later)


def swap_link_and_back(model: Path) -> None:
    """What was loaded in between, nobody knows."""
    before = model.lstat()

    def swapped_later() -> bool:
        for target in (model.parent, model.parent / "v1"):
            (model.parent / "new").symlink_to(target)
            os.replace(model.parent / "new", model)
        return model.lstat().st_ctime_ns != before.st_ctime_ns

    wait_until(swapped_later)


def touch_config(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").write_bytes(b"{}")


@pytest.mark.parametrize(
    "deploy",
    [swap_link, swap_link_and_back, replace_file, move_directory, write_in_place, touch_config],
    ids=lambda f: f.__name__,
)
def test_weights_that_changed_since_they_were_loaded_have_no_name(
    model: Path, deploy: Callable[[Path], None], reads: list[str]
) -> None:
    current = model.parent / "current"
    model.rename(model.parent / "v1")
    current.symlink_to("v1")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    before = files.take_states(files.NamedFile(name, current / name) for name in (*names, "config.json"))
    expected = digest_checkpoint(current, files=names)
    assert digest_checkpoint(current, files=names, before=before) == expected
    with pytest.raises(WeightsChangedError, match=r"restart the server to use the pool"):
        digest_checkpoint(current, files=names, before=before[:-1])  # one that was not known before
    deploy(current)
    reads.clear()
    with pytest.raises(WeightsChangedError, match=r"replaced or changed while the server started"):
        digest_checkpoint(current, files=names, before=before)
    assert deploy is touch_config or not reads, "nothing is read for a name that cannot be given"
    digest_checkpoint(current, files=names)


# -- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_spans", "settled")
@pytest.mark.parametrize("sample", [False, True])
def test_progress_reaches_the_total_in_the_calling_thread(
    model: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hash, "SAMPLE_BYTES", 900)  # so that samples overlap
    total = sum(path.stat().st_size for path in model.iterdir() if path.name.startswith("model"))
    calls: list[tuple[int, int, int]] = []

    def note(done: int, of: int) -> None:
        calls.append((done, of, threading.get_ident()))

    digest_checkpoint(model, progress=note, threads=4, sample=sample)
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[0] >= 0
    assert done[-1] == total
    assert sample or (done[0] == 0 and len(done) == 1 + 6 + 5 + 1)  # at the start, and after each span
    assert {call[1:] for call in calls} == {(total, threading.get_ident())}
    if not sample:
        calls.clear()
        digest_checkpoint(model, progress=note)
        assert [call[:2] for call in calls] == [(total, total)]


@pytest.mark.usefixtures("small_spans")
def test_an_interrupted_reading_stops_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(bytes(2_000_000))
    reads: list[int] = []
    original = os.preadv

    def slow_disk(handle: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        threading.Event().wait(0.01)
        return original(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_disk)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digest_checkpoint(path, threads=2, progress=interrupt)
    assert 1 <= len(reads) < 1000  # of 8000


def test_an_error_of_the_callback_is_not_taken_for_ours(model: Path) -> None:
    def broken(done: int, total: int) -> None:
        raise BrokenPipeError("terminal went away")

    with pytest.raises(BrokenPipeError):
        digest_checkpoint(model, progress=broken)


# -- errors -------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="'meta-llama/Llama-3' does not exist; expected a local"):
        digest_checkpoint("meta-llama/Llama-3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IdentityError, match="holds no weight files; expected some of"):
        digest_checkpoint(tmp_path / "empty")
    write(tmp_path / "m", {"config.json": b"{}", "model.safetensors.index.json": b"{}"})
    with pytest.raises(IdentityError, match="holds no weight files"):
        digest_checkpoint(tmp_path / "m")
    with pytest.raises(IdentityError, match="pass the directory"):
        digest_checkpoint(tmp_path / "m" / "model.safetensors.index.json")
    with pytest.raises(InvalidArgumentError, match="threads is 0"):
        digest_checkpoint(tmp_path, threads=0)


def test_an_empty_file_is_refused(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(IdentityError, match=r"00001-of-00002\.safetensors' is empty"):
        digest_checkpoint(model)
    with pytest.raises(IdentityError, match="is empty"):
        digest_checkpoint(model / "model-00001-of-00002.safetensors")


def test_a_pipe_is_refused_and_not_waited_for(model: Path) -> None:
    os.mkfifo(model / "x.bin")
    with pytest.raises(IdentityError, match="not a regular file"):
        digest_checkpoint(model)


def test_loops_and_dangling_links_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(IdentityError, match=r"cannot read .*loop"):
        digest_checkpoint(tmp_path / "loop")
    (model / "x.bin").symlink_to("gone")
    with pytest.raises(IdentityError, match=r"cannot read .*x\.bin"):
        digest_checkpoint(model)


@pytest.fixture
def unreadable(model: Path) -> Iterator[Path]:
    path = model / "model-00001-of-00002.safetensors"
    path.chmod(0)
    yield path
    path.chmod(0o600)


def test_an_unreadable_file_is_refused(unreadable: Path) -> None:
    if os.access(unreadable, os.R_OK):  # root reads everything
        denied = mock.patch("os.open", side_effect=PermissionError(13, "Permission denied", str(unreadable)))
        with denied, pytest.raises(IdentityError, match=r"cannot read .*Permission denied"):
            digest_checkpoint(unreadable.parent, cache=False)
    else:
        with pytest.raises(IdentityError, match=r"cannot read .*00001-of-00002"):
            digest_checkpoint(unreadable.parent)


def test_an_unreadable_directory_is_not_skipped(model: Path) -> None:
    write(model, {"sub/x.bin": b"x"})
    original = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    with mock.patch.object(os, "scandir", scandir), pytest.raises(IdentityError, match=r"Permission denied.*sub"):
        digest_checkpoint(model)


def test_a_file_that_ends_early_stops_the_reading_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"short")
    (state,) = files.take_states([files.NamedFile("", tmp_path / "m.bin")])
    with pytest.raises(IdentityError, match="changed while it was read"):
        file_hash._hash_file(state, [file_hash.FileSpan(3, 100)], threading.Event(), lambda count: None)


@pytest.mark.parametrize("change", ["append", "touch", "truncate", "replace", "add", "remove"])
@pytest.mark.usefixtures("settled")
def test_weights_that_change_while_they_are_read_are_refused(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first = model / "model-00001-of-00002.safetensors"
    original = file_hash._hash_file

    def disturbed(state: files.FileState, *rest: Any) -> str:
        if Path(state.path) != first:
            return "" if change == "remove" else original(state, *rest)
        if change == "truncate":
            os.truncate(first, 100)
        digest = original(state, *rest)
        match change:
            case "append":
                with open(first, "ab") as file:
                    file.write(b"x")
            case "touch":
                os.utime(first, ns=(5, 5))
            case "replace":
                (model / "new").write_bytes(first.read_bytes())
                os.replace(model / "new", first)
            case "add":
                (model / "late.bin").write_bytes(b"x")
            case "remove":
                (model / "model.safetensors.index.json").unlink()
        return digest

    monkeypatch.setattr(file_hash, "_hash_file", disturbed)
    with pytest.raises(IdentityError, match=r"changed while|cannot read .*index\.json"):
        digest_checkpoint(model, threads=1)
    assert not own_cache.exists()


def entries(cache: Path) -> dict[str, str]:
    data = json.loads(cache.read_bytes())
    assert data["format"] == digest_cache.CACHE_FORMAT
    found: dict[str, str] = data["files"]
    return found


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
