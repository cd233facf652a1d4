"""Digest of weight files: nothing that changes them may go unnoticed, and nothing else may change it."""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import IdentityError, InvalidArgumentError
from headwater.kv import checkpoint
from headwater.kv.checkpoint import checkpoint_label, digest_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
real_time_ns = time.time_ns


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headwater" / "digests.json"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash ten seconds after the files were written, so that their digests may be cached."""
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + 10_000_000_000)


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SPAN_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 300)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, once per span."""
    names: list[str] = []
    original = checkpoint._hash_span

    def spy(path: Path, span: checkpoint.Span) -> bytes:
        names.append(path.name)
        return original(path, span)

    monkeypatch.setattr(checkpoint, "_hash_span", spy)
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


def reference(files: dict[str, bytes], span_bytes: int = 64 << 20) -> str:
    """The documented encoding, written down a second time."""
    data = b"headwater checkpoint v1\0"
    for name in sorted(files, key=str.encode):
        content = files[name]
        spans = [content[i : i + span_bytes] for i in range(0, len(content), span_bytes)]
        digest = xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(span) for span in spans))
        data += struct.pack("<I", len(name.encode())) + name.encode() + struct.pack("<Q", len(content)) + digest
    return "xxh3-128:" + xxhash.xxh3_128_hexdigest(data)


# -- what the digest is ---------------------------------------------------------------------------------------------


def test_digest_is_the_documented_encoding_and_never_changes(tmp_path: Path) -> None:
    files = {"b.bin": b"abc", "a/é.safetensors": bytes(1000), "model.safetensors.index.json": b"{}"}
    folder = write(tmp_path / "m", files)
    write(folder, {"config.json": b"{}", "README.md": b"hi"})
    # A change here gives every checkpoint of every user another name.
    assert digest_checkpoint(folder) == reference(files) == "xxh3-128:31d84875655066afbd41fe6f98894713"
    assert digest_checkpoint(folder / "b.bin") == reference({"": b"abc"}) == "xxh3-128:ea9055f7c07cbc9ecd9534a9b714f866"
    assert checkpoint.SPAN_BYTES == 64 << 20


@pytest.mark.usefixtures("small_spans")
def test_digest_does_not_depend_on_threads_order_or_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    expected = reference({name: (model / name).read_bytes() for name in names}, span_bytes=1000)
    for threads in (None, 1, 2, 7, 64):
        assert digest_checkpoint(model, threads=threads, cache=False) == expected
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 7)
    assert digest_checkpoint(model, cache=False) == expected

    original = checkpoint._hash_span

    def last_first(path: Path, span: checkpoint.Span) -> bytes:
        """Spans of the first thousand bytes finish only after all the others of their file have begun."""
        if span.offset == 0:
            assert later.wait(10)
        elif span.offset >= 4000:
            later.set()
        return original(path, span)

    later = threading.Event()
    monkeypatch.setattr(checkpoint, "_hash_span", last_first)
    assert digest_checkpoint(model, threads=16, cache=False) == expected


@pytest.mark.usefixtures("small_spans")
def test_one_big_file_keeps_every_thread_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {"m.safetensors": bytes(4000)}) / "m.safetensors"
    together = threading.Barrier(4, timeout=10)
    original = checkpoint._hash_span

    def meet(path: Path, span: checkpoint.Span) -> bytes:
        together.wait()  # raises unless four spans are under way at once
        return original(path, span)

    monkeypatch.setattr(checkpoint, "_hash_span", meet)
    assert digest_checkpoint(path, threads=4, cache=False) == reference({"": bytes(4000)}, span_bytes=1000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 5000))
def test_one_flipped_bit_anywhere_changes_it(tmp_path: Path, data: st.DataObject, size: int) -> None:
    position = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 7))
    content = bytearray(i * 37 % 251 for i in range(size))
    path = tmp_path / "m.safetensors"
    with mock.patch.object(checkpoint, "SPAN_BYTES", 1000), mock.patch.object(checkpoint, "PIECE_BYTES", 300):
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


@pytest.mark.parametrize("suffix", [*checkpoint.WEIGHT_SUFFIXES, ".SAFETENSORS"])
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
    monkeypatch.setattr(checkpoint, "SAMPLE_BYTES", 10)
    path = tmp_path / "m.safetensors"
    content = bytearray(range(250)) * 4

    def sampled(position: int) -> str:
        path.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        return digest_checkpoint(path, sample=True)

    path.write_bytes(content)
    before = digest_checkpoint(path, sample=True)
    assert before.startswith("sampled-xxh3-128:")
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
    with mock.patch.object(checkpoint, "SAMPLE_BYTES", 1000):
        spans = checkpoint._sample_spans(0, size)
    assert spans[0].offset == 0
    assert spans[-1].offset + spans[-1].length == size
    assert len(set(spans)) == len(spans) <= checkpoint.SAMPLES_PER_FILE
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
        b'{"format": "headwater digests v1", "files": []}',
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
    own_cache.write_bytes(own_cache.read_bytes() + b" " * checkpoint.MAX_CACHE_BYTES)
    assert digest_checkpoint(model) == first
    assert len(reads) == 6


@pytest.mark.parametrize("value", ["", "xyz", "A" * 32, "0" * 31, 7, None])
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
    monkeypatch.setattr(checkpoint, "MAX_CACHE_ENTRIES", 3)
    paths = [tmp_path / f"{i}.bin" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]))
        digest_checkpoint(path)
    inodes = [int(key.split(":")[1]) for key in entries(own_cache)]
    assert inodes == [path.stat().st_ino for path in paths[2:]]
    monkeypatch.setattr(checkpoint, "MAX_CACHE_ENTRIES", 4096)
    full = {f"{i}:" + "9" * 120: "0" * 32 for i in range(4096)}
    own_cache.write_text(json.dumps({"format": checkpoint.CACHE_FORMAT, "files": full}, indent=0))
    assert own_cache.stat().st_size < checkpoint.MAX_CACHE_BYTES


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
    assert set(entries(own_cache).values()) <= {
        xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(bytes([i]) * 100)) for i in range(8)
    }
    assert [path.name for path in own_cache.parent.iterdir()] == [own_cache.name]


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


def test_a_snapshot_is_named_by_its_commit_without_reading(snapshot: Path, tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "link").symlink_to(snapshot)
    calls: list[tuple[int, int]] = []
    assert digest_checkpoint(snapshot, progress=lambda *call: calls.append(call)) == f"hf-commit:{COMMIT}"
    assert digest_checkpoint(tmp_path / "link", sample=True) == f"hf-commit:{COMMIT}"
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_bytes(b"edited: does not count")
    assert digest_checkpoint(snapshot) == f"hf-commit:{COMMIT}"
    assert reads == []
    assert calls == []


def test_a_sharded_snapshot_is_named_by_its_commit(snapshot: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00001.safetensors")
    assert digest_checkpoint(snapshot).startswith("xxh3-128:")  # not the entry point that a loader takes first
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/bb")
    assert digest_checkpoint(snapshot) == f"hf-commit:{COMMIT}"


def test_a_file_put_in_place_of_a_link_is_not_the_commit(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"weights")
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"weights"})


def test_an_added_weight_file_is_not_the_commit(snapshot: Path) -> None:
    write(snapshot, {"sub/extra.bin": b"x"})
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"weights", "sub/extra.bin": b"x"})


def test_a_weight_file_put_among_the_blobs_is_not_the_commit(snapshot: Path) -> None:
    (snapshot.parent.parent / "blobs" / "extra.bin").write_bytes(b"x")
    (snapshot / "sub").symlink_to("../../blobs")
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"weights", "sub/extra.bin": b"x"})


def test_a_blob_edited_through_its_link_is_not_the_commit(snapshot: Path) -> None:
    link = snapshot / "model.safetensors"
    linked_ns = link.lstat().st_mtime_ns

    def edited_later() -> bool:
        link.write_bytes(b"Weights")
        return link.stat().st_mtime_ns > linked_ns

    wait_until(edited_later)
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"Weights"})


@pytest.mark.parametrize("target", ["../../elsewhere/aa", "../../blobs/deep/aa", "../../blobs/out"])
def test_a_link_that_leaves_the_blobs_is_not_the_commit(snapshot: Path, target: str) -> None:
    repository = snapshot.parent.parent
    write(repository, {"elsewhere/aa": b"other", "blobs/deep/aa": b"other"})
    (repository / "blobs" / "out").symlink_to("../elsewhere/aa")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    assert digest_checkpoint(snapshot) == reference({"model.safetensors": b"other"})


def test_alternatives_in_one_commit_are_told_apart(snapshot: Path) -> None:
    """A GGUF repository holds every quantisation; which one a machine fetched is not in the commit."""
    (snapshot / "model.safetensors").rename(snapshot / "tiny-Q4.gguf")
    one = digest_checkpoint(snapshot)
    (snapshot / "tiny-Q4.gguf").unlink()
    (snapshot / "tiny-Q8.gguf").symlink_to("../../blobs/bb")
    assert COMMIT not in one
    assert digest_checkpoint(snapshot) != one
    assert digest_checkpoint(snapshot / "tiny-Q8.gguf") == reference({"": b"{}"})


@pytest.mark.parametrize(
    "place", ["models--acme--tiny-llm/other/" + COMMIT, "acme/snapshots/" + COMMIT, "models--a--b/snapshots/main"]
)
def test_only_the_layout_of_the_hub_counts_as_a_snapshot(snapshot: Path, place: str) -> None:
    folder = snapshot.parents[2] / "x" / place
    write(folder.parent.parent, {"blobs/aa": b"weights"})
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("../../blobs/aa")
    assert digest_checkpoint(folder) == reference({"model.safetensors": b"weights"})


def test_a_blob_that_is_missing_is_an_error(snapshot: Path) -> None:
    (snapshot.parent.parent / "blobs" / "aa").unlink()
    with pytest.raises(IdentityError, match=r"cannot read .*model\.safetensors"):
        digest_checkpoint(snapshot)


def test_labels_are_names_for_people(snapshot: Path) -> None:
    assert checkpoint_label(snapshot) == "acme/tiny-llm"
    assert checkpoint_label("/models/llama") == "llama"
    assert checkpoint_label(os.fsdecode(b"/models/\xff")) == "?"


# -- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_spans", "settled")
@pytest.mark.parametrize("sample", [False, True])
def test_progress_reaches_the_total_in_the_calling_thread(
    model: Path, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAMPLE_BYTES", 900)  # so that samples overlap
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

    def slow_disk(path: Path, span: checkpoint.Span) -> bytes:
        reads.append(span.offset)
        threading.Event().wait(0.01)
        return bytes(16)

    monkeypatch.setattr(checkpoint, "_hash_span", slow_disk)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digest_checkpoint(path, threads=2, progress=interrupt)
    assert 1 <= len(reads) < 1000  # of 2000


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
        denied = mock.patch("builtins.open", side_effect=PermissionError(13, "Permission denied", str(unreadable)))
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


def test_a_span_that_is_no_longer_there_stops_the_reading_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"short")
    with pytest.raises(IdentityError, match="changed while it was read"):
        checkpoint._hash_span(tmp_path / "m.bin", checkpoint.Span(0, 3, 100))


@pytest.mark.parametrize("change", ["append", "touch", "truncate", "replace", "add", "remove"])
@pytest.mark.usefixtures("settled")
def test_weights_that_change_while_they_are_read_are_refused(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first = model / "model-00001-of-00002.safetensors"
    original = checkpoint._hash_span

    def disturbed(path: Path, span: checkpoint.Span) -> bytes:
        if path != first:
            return b"" if change == "remove" else original(path, span)
        if change == "truncate":
            os.truncate(first, 100)
        digest = original(path, span)
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

    monkeypatch.setattr(checkpoint, "_hash_span", disturbed)
    with pytest.raises(IdentityError, match="changed while it was read"):
        digest_checkpoint(model, threads=1)
    assert not own_cache.exists()


def entries(cache: Path) -> dict[str, str]:
    data = json.loads(cache.read_bytes())
    assert data["format"] == checkpoint.CACHE_FORMAT
    found: dict[str, str] = data["files"]
    return found


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
