"""The name of a checkpoint's weights: what `Identity.weights` holds.

It is made of the files' bytes and knows nothing of tensors, so it serves every format. Which files count is the
business of whoever loads them; the state they were in before they were loaded proves that these were the ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.errors import IdentityError, InvalidArgumentError, WeightsChangedError
from headwater.kv.digest_cache import DigestCache
from headwater.kv.file_hash import Progress, changed, hash_files
from headwater.kv.files import (
    FileState,
    NamedFile,
    first_change,
    list_weights,
    name_bytes,
    reading,
    retake_states,
    take_states,
)

__all__ = ["Progress", "checkpoint_label", "digest_checkpoint"]

_DOMAIN = b"headwater checkpoint v2\0"
_SHA_256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA_1 = re.compile(r"[0-9a-f]{40}")
MAX_GIT_BYTES = 64 << 20
"""The hub keeps larger files out of git, and names them by their SHA-256."""


def digest_checkpoint(
    path: str | os.PathLike[str],
    *,
    files: Collection[str] | None = None,
    before: Sequence[FileState] | None = None,
    sample: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    cache: bool = True,
) -> str:
    """Name the weights at `path`, a directory or one file, by their content: "sha256:" and 64 hex digits.

    Cost: every byte is read once, as fast as the disk goes or `threads` hash, one file each; a few system calls per
    file when nothing changed since. Failure: IdentityError when the path or its weights are missing, empty,
    unreadable, change while they are read, or are a blob of the Hugging Face cache that is not what its name says. The
    result does not depend on `threads` or `cache`.

    `files` are the names of those that are loaded, relative to the directory; without it all weight files and their
    indexes count, subdirectories included. Names count, since engines choose by name what they load; the name of a
    single file does not. Neither do other files: every tool writes another `config.json` beside the same weights, and
    what in it changes KV is in the spec, `run_dtype`, `rope` and `settings`, as it is *run*.

    `before` is what `take_states` said before the weights were loaded. If a file is in another state now, or was not
    among them, they may not be what was loaded: WeightsChangedError. It may hold further files, such as configs.

    `sample=True` reads only 16 spans of 1 MiB per file. It can miss a small change, hence the prefix "sampled-".
    `progress` is called in the calling thread, about once per 64 MiB.
    """
    if threads is not None and threads < 1:
        raise InvalidArgumentError(f"threads is {threads}; expected at least 1, or None for all CPUs")
    now_ns = time.time_ns()
    with _there(before):
        states = _states(path, files)
    check_unchanged(before, states)
    digests = DigestCache(enabled=cache and not sample)
    known = digests.load(states)
    settled = digests.settle([state for state in states if state.cache_key not in known], now_ns)
    if settled:
        states = retake_states(states)  # some file systems set the time of a write when it reaches the disk
        check_unchanged(before, states)
        known = digests.load(states)
    todo = [state for state in states if state.cache_key not in known]
    total_bytes = sum(state.size for state in states)
    hashes = hash_files(todo, sample=sample, threads=threads, progress=progress, total_bytes=total_bytes)
    known |= {state.cache_key: digest for state, digest in zip(todo, hashes, strict=True)}
    with _there(before or states):
        if where := first_change(states, _states(path, files)):
            raise changed(where)
        if before is not None:
            check_unchanged(before, retake_states(before))
    if not sample:
        for state in states:
            _check_blob(state, known[state.cache_key])
    digests.save({state.cache_key: known[state.cache_key] for state in todo if state in settled})

    combined = hashlib.sha256(_DOMAIN)
    for state in states:
        name = name_bytes(state.name)
        combined.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", state.size))
        combined.update(bytes.fromhex(known[state.cache_key]))
    return f"{'sampled-' if sample else ''}sha256:{combined.hexdigest()}"


def check_unchanged(before: Sequence[FileState] | None, now: Sequence[FileState]) -> None:
    """Raise WeightsChangedError if one of the files is not in the state that it was in before; None checks nothing."""
    if before is not None and (new := [state for state in now if state not in set(before)]):
        raise WeightsChangedError(
            f"{new[0].path!r} was replaced or changed while the server started, so the weights that run may differ "
            "from the files; restart the server to use the pool"
        )


def checkpoint_label(path: str | os.PathLike[str]) -> str:
    """A name for people: the Hugging Face repository's, else the last part of the path."""
    here = Path(path).absolute()
    for folder in (here, *here.parents):
        if folder.name.startswith("models--"):
            return _printable(folder.name.removeprefix("models--").replace("--", "/"))
    return _printable(here.name)


@contextmanager
def _there(before: Sequence[FileState] | None) -> Iterator[None]:
    """What was there before the weights were loaded, and cannot be read now, has changed."""
    try:
        yield
    except IdentityError as error:
        if not before or isinstance(error, WeightsChangedError):
            raise
        raise WeightsChangedError(f"{error}; it was there before, restart the server to use the pool") from error


def _states(path: str | os.PathLike[str], names: Collection[str] | None) -> tuple[FileState, ...]:
    if not os.path.lexists(path):
        raise IdentityError(
            f"{os.fspath(path)!r} does not exist; expected a local directory or file. Download a model of the Hugging "
            "Face hub first and pass the directory it is in"
        )
    root = Path(path)
    with reading(path):
        root.resolve(strict=True)
        files = list_weights(root) if names is None else [NamedFile(name, root / name) for name in sorted(names)]
    if not files:
        raise IdentityError(f"no file of {os.fspath(path)!r} is loaded, so there is nothing to name the weights by")
    return take_states(files)


def _check_blob(state: FileState, digest: str) -> None:
    """The cache of the Hugging Face hub names the blob of a large file by its SHA-256, and a small one as git does."""
    blob = Path(state.real_path)
    if blob.parent.name != "blobs":
        return
    if _GIT_SHA_1.fullmatch(blob.name) and state.size <= MAX_GIT_BYTES:
        with reading(blob):
            content = blob.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    elif not _SHA_256.fullmatch(blob.name):
        return
    if blob.name != digest:
        raise IdentityError(
            f"{state.path!r} leads to {str(blob)!r}, whose content has the digest {digest}: it is damaged or was "
            "edited. Delete it and download the model again"
        )


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()
