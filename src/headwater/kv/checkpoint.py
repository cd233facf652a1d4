"""The digest of a checkpoint's weights: what `Identity.weights` holds.

It reads files and knows nothing of tensors, so it serves every format. Digests of files that have not changed since
they were last read come from a small per-user cache, which may be lost or deleted at any time.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from headwater.errors import IdentityError, InvalidArgumentError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
INDEX_SUFFIX = ".index.json"
SPAN_BYTES = 64 << 20  # part of the digest: another size gives other digests
SAMPLE_BYTES = 1 << 20  # so are these two, for sampled ones
SAMPLES_PER_FILE = 16
PIECE_BYTES = 1 << 20  # stays in a core's own cache between read and hash: twice as fast as 8 MiB
MAX_THREADS = 16

CACHE_FORMAT = "headwater digests v1"
MAX_CACHE_ENTRIES = 4096
MAX_CACHE_BYTES = 4 << 20
RACY_NS = 2_000_000_000

_HEX_128 = re.compile(r"[0-9a-f]{32}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT_ENTRY_POINTS = frozenset({"model.safetensors", "model.safetensors.index.json"})
_local = threading.local()


class WeightFile(NamedTuple):
    """One file as it was when it was listed; two listings are equal only if nothing changed between them."""

    name: str  # relative POSIX name in a directory, "" for a single file
    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    cache_key: str


class Span(NamedTuple):
    file: int  # index into the list of files
    offset: int
    length: int


def digest_checkpoint(
    path: str | os.PathLike[str],
    *,
    sample: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    cache: bool = True,
) -> str:
    """Name the weights at `path`, a directory or one file, by their content.

    Cost: every byte is read once, as fast as the disk or `threads` go; a stat per file when nothing changed since, and
    for a Hugging Face snapshot, which its commit names. Failure: IdentityError when the path or its weights are
    missing, empty, unreadable, or change while they are read. The result does not depend on `threads` or `cache`.

    In a directory, all weight files and their indexes count, subdirectories included, with their relative names,
    since engines choose by name what they load. The name of a single file does not count. Neither do other files:
    every tool writes another `config.json` beside the same weights, and what in it changes KV is in the spec,
    `run_dtype` and `rope`, as it is *run*. (Whoever overrides another number that changes activations, a norm's
    epsilon say, must put it into `Identity.rope` too.)

    `sample=True` reads only 16 spans of 1 MiB per file. It can miss a small change, hence the prefix "sampled-".
    `progress` is called in the calling thread, about once per 64 MiB.
    """
    if threads is None:
        threads = min(MAX_THREADS, _available_cpus())
    if threads < 1:
        raise InvalidArgumentError(f"threads is {threads}; expected at least 1, or None for all CPUs")
    if not os.path.lexists(path):
        raise IdentityError(
            f"{os.fspath(path)!r} does not exist; expected a local directory or file. Download a model of the Hugging "
            "Face hub first and pass the directory it is in"
        )
    started_ns = time.time_ns()
    with _reading(path):
        root = Path(path).resolve(strict=True)
        files = _list_files(root)
        if commit := _snapshot_commit(root, files):
            return f"hf-commit:{commit}"
    digests = _FileDigests(enabled=cache and not sample)
    known = digests.load()
    todo = [file for file in files if file.cache_key not in known]
    known |= _read(todo, _sample_spans if sample else _all_spans, threads, progress, sum(file.size for file in files))
    with _reading(path):
        changed = set(files) ^ set(_list_files(root))
    if changed:
        raise _changed(min(file.path for file in changed))
    # A file this young can change again without its times changing (git calls it racily clean).
    old = [file.cache_key for file in todo if started_ns - max(file.mtime_ns, file.ctime_ns) >= RACY_NS]
    digests.save({key: known[key] for key in old})

    combined = xxhash.xxh3_128(b"headwater checkpoint v1\0")
    for file in files:
        name = _name_bytes(file.name)
        combined.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", file.size))
        combined.update(bytes.fromhex(known[file.cache_key]))
    return f"{'sampled-' if sample else ''}xxh3-128:{combined.hexdigest()}"


def checkpoint_label(path: str | os.PathLike[str]) -> str:
    """A name for people: the Hugging Face repository's, else the last part of the path."""
    here = Path(path).absolute()
    for folder in (here, *here.parents):
        if folder.name.startswith("models--"):
            return _printable(folder.name.removeprefix("models--").replace("--", "/"))
    return _printable(here.name)


def _list_files(root: Path) -> list[WeightFile]:
    """What counts, sorted by name. Each directory is entered once, so loops of links end."""
    if not root.is_dir():
        if root.suffix == ".json":
            raise IdentityError(f"{str(root)!r} holds no weights; pass the directory that it lies in")
        return [_weight_file("", root)]
    files = []
    entered: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in entered:
            subfolders.clear()
            continue
        entered.add((here.st_dev, here.st_ino))
        subfolders.sort()
        for name in names:
            if name.lower().endswith((*WEIGHT_SUFFIXES, INDEX_SUFFIX)):
                path = Path(folder, name)
                files.append(_weight_file(path.relative_to(root).as_posix(), path))
    if all(file.name.lower().endswith(INDEX_SUFFIX) for file in files):
        raise IdentityError(f"{str(root)!r} holds no weight files; expected some of {', '.join(WEIGHT_SUFFIXES)}")
    return sorted(files, key=lambda file: _name_bytes(file.name))


def _weight_file(name: str, path: Path) -> WeightFile:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise IdentityError(f"{str(path)!r} is not a regular file, so its bytes cannot name the weights")
    if not info.st_size:
        raise IdentityError(f"the weight file {str(path)!r} is empty; is it still being downloaded?")
    # Device, inode, size and mtime, as usual, and two more: the ctime, since in images and package stores every mtime
    # is the same, and the real path, since some network mounts hand out inode numbers anew each time.
    place = xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))
    key = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}:{place}"
    return WeightFile(name, path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, key)


def _snapshot_commit(root: Path, files: list[WeightFile]) -> str | None:
    """The commit whose weights these certainly are, if `root` is a Hugging Face snapshot, else None.

    A blob that is newer than the link to it was edited through the link. And a commit may hold alternatives (one GGUF
    file per quantisation) of which each machine fetched another, so that the snapshot must hold the entry point
    that loaders take first. For the same reason a commit names no single file and no subdirectory.
    """
    repository = root.parent.parent
    if root.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return None
    if not _COMMIT.fullmatch(root.name):
        return None
    if _SNAPSHOT_ENTRY_POINTS.isdisjoint(file.name for file in files):
        return None
    for file in files:
        link = file.path.lstat()
        if not stat.S_ISLNK(link.st_mode) or file.path.resolve().parent != repository / "blobs":
            return None
        if file.mtime_ns > link.st_mtime_ns:
            return None
    return root.name


def _read(
    files: list[WeightFile],
    spans_of: Callable[[int, int], list[Span]],
    threads: int,
    progress: Progress | None,
    total_bytes: int,
) -> dict[str, str]:
    """Digest of each file, by cache key: XXH3-128 over those of its spans, in order."""
    spans = [span for i, file in enumerate(files) for span in spans_of(i, file.size)]
    to_read = sum(span.length for span in spans)
    report = progress or (lambda done, total: None)
    # What the cache or sampling spares counts as done from the start. Samples of a small file overlap, hence the max.
    done = total_bytes - to_read
    report(max(0, done), total_bytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="headwater-digest") as executor:
        futures = {executor.submit(_hash_span, files[span.file].path, span): span for span in spans}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future].length
                report(max(0, done), total_bytes)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)  # at most one span per thread is still read
            raise
    hashes = [xxhash.xxh3_128() for _ in files]
    for future, span in futures.items():  # in the order of the spans, not of their completion
        hashes[span.file].update(future.result())
    return {file.cache_key: file_hash.hexdigest() for file, file_hash in zip(files, hashes, strict=True)}


def _all_spans(file: int, size: int) -> list[Span]:
    return [Span(file, offset, min(SPAN_BYTES, size - offset)) for offset in range(0, size, SPAN_BYTES)]


def _sample_spans(file: int, size: int) -> list[Span]:
    """First, last, and evenly between them; a file of up to 16 MiB is covered whole."""
    length = min(SAMPLE_BYTES, size)
    count = min(SAMPLES_PER_FILE, -(-size // length))
    return [Span(file, i * (size - length) // max(1, count - 1), length) for i in range(count)]


def _hash_span(path: Path, span: Span) -> bytes:
    """XXH3-128 of one span. Raises IdentityError when the file cannot be read, or has become shorter."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(PIECE_BYTES))
    span_hash = xxhash.xxh3_128()
    with _reading(path), open(path, "rb", buffering=0) as file:
        file.seek(span.offset)
        left = span.length
        while left:
            count = file.readinto(buffer[: min(left, PIECE_BYTES)])
            if not count:
                raise _changed(path)
            span_hash.update(buffer[:count])
            left -= count
    return span_hash.digest()


class _FileDigests:
    """Digests of files by `cache_key`, newest last, in one JSON file. Whatever goes wrong with it is a cache miss.

    Two processes that save at once lose one's entries, never the file: it is replaced whole.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def load(self) -> dict[str, str]:
        path = self._path()
        if path is None:
            return {}
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_CACHE_BYTES + 1)
            data = json.loads(text) if len(text) <= MAX_CACHE_BYTES else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or data.get("format") != CACHE_FORMAT or not isinstance(data.get("files"), dict):
            return {}
        return {k: v for k, v in data["files"].items() if isinstance(v, str) and _HEX_128.fullmatch(v)}

    def save(self, new: dict[str, str]) -> None:
        path = self._path()
        if path is None or not new:
            return
        newest = dict(list((self.load() | new).items())[-MAX_CACHE_ENTRIES:])
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".digests-", dir=path.parent)
            try:
                with open(handle, "w", encoding="ascii") as file:
                    json.dump({"format": CACHE_FORMAT, "files": newest}, file, indent=0)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise

    def _path(self) -> Path | None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # relative ones are to be ignored, says the XDG specification
            base = os.path.expanduser("~/.cache")
        return Path(base, "headwater", "digests.json") if self._enabled and os.path.isabs(base) else None


def _available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, in Python before 3.13
        raise IdentityError(f"cannot read {os.fspath(path)!r}: {error}") from error


def _changed(path: Path) -> IdentityError:
    return IdentityError(
        f"{str(path)!r} changed while it was read; wait until nothing writes to the checkpoint and try again"
    )


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")  # names on disk are bytes, not always text


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


def _raise(error: OSError) -> None:
    raise error
